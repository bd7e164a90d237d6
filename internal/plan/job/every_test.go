package job

import "testing"

// TestEveryBlock: a number from 2 on says which blocks are recomputed.
func TestEveryBlock(t *testing.T) {
	for way, want := range map[string]int{"every-2": 2, "every-12": 12, "every-1": 0, "every-0": 0, "every--3": 0,
		"every-": 0, "every-x": 0, "every": 0, "full": 0} {
		n, is := everyBlock(way)
		if is != (want > 0) || is && n != want {
			t.Errorf("%s: %d, %v", way, n, is)
		}
		j, err := Request{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 128, Recompute: way}.Resolve()
		if known := want > 0 || way == "full"; (err == nil) != known || want > 0 && j.RecomputeEvery != want {
			t.Errorf("%s: %v, %v", way, j, err)
		}
	}
}
