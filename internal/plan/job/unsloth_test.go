package job

import (
	"strings"
	"testing"

	"plimsoll/internal/plan/forward"
)

// TestUnslothByRelease tests what releases of Unsloth and torch do with 8 bits and with the attention of Gemma 3.
func TestUnslothByRelease(t *testing.T) {
	for _, c := range []struct {
		release, torch string
		bits           int
		attention      forward.AttentionKind
		says           string
	}{
		{"2025.4.1", "2.6.0", 0, forward.Eager, "weights stay in 16 bits"},
		{"2025.9.9", "2.8.0", 0, forward.Eager, "weights stay in 16 bits"},
		{"2025.9.10", "2.8.0", 8, forward.Eager, "enable_gqa and a mask"},
		{"2025.9.10", "2.15.0", 8, forward.SDPA, ""},
		{"2026.10.9", "2.6.0", 8, forward.SDPA, ""},
		{"", "2.6.0", 8, forward.Eager, "before 2025.9.10"},
	} {
		q := Request{Torch: c.torch}
		if c.release != "" {
			q.Releases = []string{"unsloth=" + c.release}
		}
		j, err := decideUnslothWith(t, q, "google/gemma-3-12b-it", ", max_seq_length=512, load_in_4bit=False, "+
			"load_in_8bit=True")
		if err != nil {
			t.Fatal(err)
		}
		bits := 0
		if j.Quantization != nil {
			bits = j.Quantization.Bits
		}
		said := strings.Join(j.Assumptions, "\n")
		if bits != c.bits || j.Attention != c.attention || !strings.Contains(said, c.says) {
			t.Errorf("%+v: %d bits and attention %s, with\n%s", c, bits, j.Attention, said)
		}
		if j.Recompute == nil || !j.Recompute.Reentrant {
			t.Errorf("%+v: blocks are recomputed as %+v, which is not Unsloth's", c, j.Recompute)
		}
	}
}
