package job

import (
	"strings"
	"testing"
)

// TestDividedBackward refuses what PyTorch cannot run in a backward pass of two halves, with its reason. Each of these
// was tried with stage_backward_input and stage_backward_weight of PyTorch, and failed there.
func TestDividedBackward(t *testing.T) {
	asked := Request{Model: "llama-3-8b", GPUs: 8, FSDP: "2", PipelineParallel: 4, PipelineSchedule: "zbvzerobubble",
		Accumulation: 8, Sequence: 2048, Precision: "bf16"}
	for name, c := range map[string]struct {
		change  func(*Request)
		refused string
	}{
		"planned":   {func(*Request) {}, ""},
		"full":      {func(q *Request) { q.Recompute = "full" }, ""},
		"selective": {func(q *Request) { q.Recompute = "selective" }, "Trying to backward an extra time"},
		"compiled":  {func(q *Request) { q.Compile = true }, "compiled stages"},
		"DDP":       {func(q *Request) { q.FSDP = "" }, "DistributedDataParallel"},
		"few micro batches": {func(q *Request) { q.PipelineSchedule, q.Accumulation = "DualPipeV", 7 },
			"as many micro batches as stages, 8, and a step has 7"},
		"uneven rounds": {func(q *Request) { q.PipelineSchedule, q.Accumulation = "InterleavedZeroBubble", 9 },
			"9 micro batches into 2 rounds"},
	} {
		q := asked
		c.change(&q)
		j, err := q.Resolve()
		switch {
		case c.refused == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)):
			t.Errorf("%s: %v", name, err)
		case err == nil && !j.Pipeline.Table[0][1].Loss:
			t.Errorf("%s: the last stage of the V is not the first rank's: %+v", name, j.Pipeline.Table)
		}
	}
}
