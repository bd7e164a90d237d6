package allocator

import (
	"encoding/json"
	"os"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host/hosttest"
)

// operation is ["a", name, bytes], ["a", name, bytes, stream] or ["f", name].
type operation struct {
	Kind, Name string
	Size       ledger.Bytes
	Stream     int
}

func (o *operation) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &[]any{&o.Kind, &o.Name, &o.Size, &o.Stream})
}

// TestVectors replays sequences whose outcome a second implementation, written
// in another language, has computed.
func TestVectors(t *testing.T) {
	text, err := os.ReadFile(hosttest.Shared(t, "data/allocator-vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name          string      `json:"name"`
		Operations    []operation `json:"ops"`
		Configuration struct {
			Expandable   bool         `json:"exp"`
			LargeSegment ledger.Bytes `json:"large"`
		} `json:"cfg"`
		Requested, Allocated, Reserved ledger.Bytes
		Segments                       int
	}
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 16 {
		t.Errorf("%d vectors, expected 16 or more", len(vectors))
	}
	for _, vector := range vectors {
		c := NewCUDA(
			Configuration{Expandable: vector.Configuration.Expandable, LargeSegment: vector.Configuration.LargeSegment},
			0,
		)
		names := map[string]Block{}
		for _, o := range vector.Operations {
			var err error
			if o.Kind == "a" {
				names[o.Name], err = c.Allocate(o.Size, o.Stream)
			} else {
				err = c.Free(names[o.Name])
			}
			if err != nil {
				t.Fatalf("%s: %v", vector.Name, err)
			}
		}
		s := c.Statistics()
		if s.Requested.Now != vector.Requested || s.Allocated.Now != vector.Allocated ||
			s.Reserved.Now != vector.Reserved ||
			s.Segments.Now != vector.Segments {
			t.Errorf("%s: requested %d, allocated %d, reserved %d in %d segments; want %d, %d, %d in %d", vector.Name,
				s.Requested.Now, s.Allocated.Now, s.Reserved.Now, s.Segments.Now,
				vector.Requested, vector.Allocated, vector.Reserved, vector.Segments)
		}
	}
}
