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

// TestUnslothLoss tests that releases of Unsloth before 2024.11.8 make all logits, and that its attention is never that
// of an old transformers.
func TestUnslothLoss(t *testing.T) {
	for release, c := range map[string]struct {
		loss forward.LossKind
		says string
	}{
		"2024.1":    {forward.NarrowInPlaceLoss, "over the logits"},
		"2024.11.7": {forward.NarrowInPlaceLoss, "over the logits"},
		"2024.11.8": {forward.FusedLoss, "without whole logits"},
		"":          {forward.FusedLoss, "before 2024.11.8 make all logits"},
	} {
		q := Request{Torch: "2.1.0", Transformers: "4.34.0"}
		if release != "" {
			q.Releases = []string{"unsloth=" + release}
		}
		j, err := decideUnslothWith(t, q, "unsloth/Qwen2.5-0.5B-Instruct", ", max_seq_length=512")
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(j.Assumptions, "\n")
		if j.Loss != c.loss || j.Attention != forward.SDPA || !strings.Contains(said, c.says) {
			t.Errorf("Unsloth %q: loss %v and attention %s, with\n%s", release, j.Loss, j.Attention, said)
		}
	}
}
