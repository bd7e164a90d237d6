package plan

import (
	"strings"
	"testing"

	"plimsoll/files/filestest"
	"plimsoll/job"
	"plimsoll/ledger"
)

// TestExpertsAreSharedOnce holds the parameters of a rank to the model's over the ranks, whatever the degree of expert
// parallelism: a rank has fewer experts, and shares them with fewer ranks.
func TestExpertsAreSharedOnce(t *testing.T) {
	for _, name := range []string{"qwen3-30b-a3b", "mixtral-8x7b"} {
		var alone ledger.Bytes
		for _, degree := range []int{1, 2, 4, 8} {
			p := planned(t, job.Request{Model: name, FSDP: "2", GPUs: 8, ExpertParallel: degree, Precision: "bf16",
				Sequence: 512})
			var bytes ledger.Bytes
			for _, c := range p.Devices[0].Peak().Components {
				if c.Component == ledger.Parameters {
					bytes += c.Bytes
				}
			}
			if alone == 0 {
				alone = bytes
			}
			if bytes < alone || bytes > alone+alone/1000 {
				t.Errorf("%s, experts in %d parts: a rank holds %v of parameters, without expert parallelism %v", name,
					degree, bytes, alone)
			}
		}
	}
}

func TestExpertsNeedRanksOfTheirOwn(t *testing.T) {
	zero3 := filestest.InNewFolder(t)("zero3.json", `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}`)
	for want, q := range map[string]job.Request{
		"flat tensor":   {FSDP: "1", GPUs: 8, ExpertParallel: 2},
		"deepspeed.moe": {DeepSpeed: zero3, GPUs: 8, ExpertParallel: 2},
		"groups of 16":  {FSDP: "2", GPUs: 16, TensorParallel: 2, ExpertParallel: 16},
	} {
		q.Model, q.Precision, q.Sequence = "qwen3-30b-a3b", "bf16", 512
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("expert parallelism of %d: %v, expected a refusal with %q", q.ExpertParallel, err, want)
		}
	}
}
