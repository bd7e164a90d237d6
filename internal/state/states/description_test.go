//go:build linux

package states

import (
	"encoding/binary"
	"encoding/json"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checked"
)

func description(change ...func(*Description)) *Description {
	d := &Description{Recovery: true, GradientBytes: 100, SettingsBytes: 64, Chunks: []Chunk{
		{Bytes: 512, Tensors: []Tensor{
			{Name: "a", Key: "exp_avg", Type: dtype.F32, Shape: []int64{8, 4}},
			{Name: "a", Key: "exp_avg_sq", Type: dtype.BF16, Shape: []int64{8, 4}, Offset: 256},
		}, Scalars: []Scalar{{Name: "a", Key: "step", Type: dtype.F32}}},
		{Bytes: 256, Tensors: []Tensor{{Name: "b", Key: "exp_avg", Type: dtype.F32, Shape: []int64{64}}}},
	}}
	for _, c := range change {
		c(d)
	}
	return d
}

// TestWrongDescriptionsAreRefused has a row for each rule.
func TestWrongDescriptionsAreRefused(t *testing.T) {
	if err := description().Validate(); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		change func(*Description)
		want   string
	}{
		{func(d *Description) { d.Chunks = nil }, "there are no chunks"},
		{func(d *Description) { d.Chunks = make([]Chunk, 1<<20+1) }, "there are 1048577 chunks"},
		{func(d *Description) { d.Chunks = make([]Chunk, 2) }, "the chunks have no bytes"},
		{func(d *Description) { d.SettingsBytes = -1 }, "settings_bytes is -1"},
		{func(d *Description) { d.GradientBytes = -1 }, "gradient_bytes is -1"},
		{func(d *Description) { d.Recovery = false }, "recovery is false and gradient_bytes is 100"},
		{func(d *Description) { d.GradientBytes = 0 }, "recovery is true and gradient_bytes is 0"},
		{func(d *Description) { d.Chunks[0].Bytes = 100 }, "chunk 0: bytes is 100: expected a multiple of 256"},
		{func(d *Description) { d.Chunks[1].Bytes = MaximumBytes }, "the chunks have more than"},
		{func(d *Description) { d.Chunks[0].Tensors[1].Offset = 0 },
			"offset 0: expected a multiple of 256 from 128 on"},
		{func(d *Description) { d.Chunks[0].Tensors[1].Offset = 130 }, "offset 130"},
		{func(d *Description) { d.Chunks[0].Tensors[1].Offset = 512 }, "ends within the region of 512 bytes"},
		{func(d *Description) { d.Chunks[0].Tensors[0].Shape[0] = -1 }, "has the shape [-1 4]"},
		{func(d *Description) { d.Chunks[0].Tensors[0].Shape = []int64{1 << 40, 1 << 40} }, "expected at most"},
		{func(d *Description) { d.Chunks[0].Tensors[0].Type = dtype.Invalid }, "a.exp_avg has no dtype"},
		{func(d *Description) { d.Chunks[0].Scalars[0].Type = dtype.Invalid }, "a.step has no dtype"},
		{func(d *Description) { d.Chunks[0].Scalars[0].Key = "exp_avg" }, "a.exp_avg is listed twice"},
		{func(d *Description) { d.Chunks[1].Tensors[0].Name = "a" }, "chunk 1: a.exp_avg is listed twice"},
		{func(d *Description) { d.Chunks[1].Tensors[0].Name = "" }, "the name \"\" of a parameter or a state"},
	} {
		d := description(test.change)
		if err := d.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: want %q", err, test.want)
		}
	}
}

// TestDifferencesAreNamed changes one thing after the other.
func TestDifferencesAreNamed(t *testing.T) {
	if err := description().Difference(description()); err != nil {
		t.Error(err)
	}
	for _, test := range []struct {
		change func(*Description)
		want   string
	}{
		{func(d *Description) { d.Chunks = d.Chunks[:1] }, "the number of chunks is 1, and was 2"},
		{func(d *Description) { d.Recovery = false }, "recovery is false, and was true"},
		{func(d *Description) { d.GradientBytes++ }, "gradient_bytes is 101, and was 100"},
		{func(d *Description) { d.SettingsBytes++ }, "settings_bytes is 65, and was 64"},
		{func(d *Description) { d.Chunks[0].Tensors[0].Type = dtype.BF16 },
			"chunk 0: tensor 0 is a.exp_avg, bf16 [8 4] at 0, and was a.exp_avg, fp32 [8 4] at 0"},
		{func(d *Description) { d.Chunks[1].Tensors = nil }, "chunk 1: the number of tensors is 0, and was 1"},
		{func(d *Description) { d.Chunks[0].Scalars[0].Key = "n" },
			"chunk 0: scalar 0 is a.n of fp32, and was a.step of fp32"},
		{func(d *Description) { d.Chunks[0].Scalars = nil }, "chunk 0: the number of scalars is 0, and was 1"},
		{func(d *Description) { d.Chunks[1].Bytes += 256 }, "chunk 1: bytes is 512, and was 256"},
	} {
		if err := description(test.change).Difference(description()); err == nil || err.Error() != test.want {
			t.Errorf("%v: want %q", err, test.want)
		}
	}
}

// TestControlIsAsDocumented writes every field and finds it at its place.
func TestControlIsAsDocumented(t *testing.T) {
	d := description()
	memory := make([]byte, d.ControlBytes())
	if len(memory) != 512+2*8+64 {
		t.Errorf("the control arena has %d bytes", len(memory))
	}
	c := NewControl(memory, d)
	c.Position.Store(5)
	c.GradientsOf.Store(6)
	c.SettingsLength.Store(7)
	c.Wanted.Store(8)
	c.Scalars(2)[0], c.Scalars(3)[0] = 9, 10
	for offset, want := range map[int]uint64{0: controlMagic, 8: 2, 64: checked.Seal(5), 128: checked.Seal(6),
		136: checked.Seal(7), 144: checked.Seal(0), 192: checked.Seal(NothingIsRead), 256: checked.Seal(8), 512: 9,
		520: 10} {
		if got := binary.LittleEndian.Uint64(memory[offset:]); got != want {
			t.Errorf("offset %d has %#x, want %#x", offset, got, want)
		}
	}
	c.Read.Store(3)
	again, err := AttachControl(memory, d)
	if err != nil || again.Read.Load() != NothingIsRead || again.Position.Load() != 5 {
		t.Errorf("%v: a save that was under way goes on", err)
	}
	memory[8] = 3
	if _, err := AttachControl(memory, d); err == nil {
		t.Error("a control arena of 3 chunks is taken for one of 2")
	}
	memory[0] = 0
	if _, err := AttachControl(memory, d); err == nil {
		t.Error("any memory is taken for a control arena")
	}
}

// FuzzDescription reads descriptions. One that is accepted has a layout without overflow, and no difference to itself.
func FuzzDescription(f *testing.F) {
	text, err := json.Marshal(description())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"chunks":[{"bytes":256,"tensors":[{"name":"a","key":"b","dtype":"fp32","shape":[0,99],"offset":0}]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d := &Description{}
		if json.Unmarshal(text, d) != nil || d.Validate() != nil {
			return
		}
		l := NewLayout(d.Chunks)
		if l.Bytes() <= 0 || l.Bytes() > 2*MaximumBytes || d.ControlBytes() < headBytes || d.Difference(d) != nil {
			t.Fatalf("%d bytes of states, %d of control", l.Bytes(), d.ControlBytes())
		}
		for i, c := range d.Chunks {
			for _, steps := range []int64{0, 1} {
				if begin := l.Offset(i, steps); begin < 0 || begin+c.Bytes > l.Bytes() {
					t.Fatalf("chunk %d is at %d of %d", i, begin, l.Bytes())
				}
			}
			for _, tensor := range c.Tensors {
				if tensor.Offset < 0 || tensor.Bytes() < 0 || tensor.Offset+tensor.Bytes() > c.Bytes {
					t.Fatalf("%v is beyond %d bytes", tensor, c.Bytes)
				}
			}
		}
	})
}
