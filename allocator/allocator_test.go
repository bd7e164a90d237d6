package allocator

import (
	"encoding/json"
	"os"
	"testing"

	"plimsoll/host/hosttest"
	"plimsoll/ledger"
	"plimsoll/version"
)

func TestVectors(t *testing.T) {
	text, err := os.ReadFile(hosttest.Shared(t, "data/allocator-vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name string
		Ops  [][]any
		Cfg  struct {
			Exp   bool
			Large ledger.Bytes
		}
		Requested, Allocated, Reserved ledger.Bytes
		Segments                       int
	}
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		a := NewCUDA(Configuration{Expandable: v.Cfg.Exp, LargeSegment: v.Cfg.Large}, 0)
		blocks := map[any]*Block{}
		for _, op := range v.Ops {
			if op[0] == "f" {
				a.Free(blocks[op[1]])
				continue
			}
			stream := 0
			if len(op) > 3 {
				stream = int(op[3].(float64))
			}
			if blocks[op[1]], err = a.Allocate(ledger.Bytes(op[2].(float64)), stream); err != nil {
				t.Fatal(err)
			}
		}
		s := a.Statistics()
		if s.Requested != v.Requested || s.Allocated != v.Allocated || s.Reserved != v.Reserved || s.Segments != v.Segments {
			t.Errorf("%s: %+v, want %d %d %d in %d segments", v.Name, s, v.Requested, v.Allocated, v.Reserved, v.Segments)
		}
	}
}

var newest = version.Version{Major: 2, Minor: 13}
