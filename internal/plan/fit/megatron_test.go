package fit

import (
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// TestFitMegatron: the recipe of a script fits, and so does the edited script. Recipes that take less memory are those
// that cost more time.
func TestFitMegatron(t *testing.T) {
	const script = `#!/bin/bash
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 4 --global-batch-size 64
    --bf16 --vocab-size 32000 --use-distributed-optimizer
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
`
	file := filepath.Join(t.TempDir(), "train.sh")
	if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	q := job.Request{GPU: "A100-80GB", GPUs: 8, Configs: []string{file}}
	a, err := Search(Question{Request: q})
	if err != nil {
		t.Fatal(err)
	}
	if a.Fastest == nil || !a.Untimed || !a.Says || a.Longest != nil {
		t.Fatalf("%+v", a)
	}
	var peak, cost = a.Fastest.Peak() + 1, 0.
	for _, r := range a.Front {
		if r.Peak() >= peak || r.megatron.cost < cost || r.Plan.Verdict.Result != plan.Fits {
			t.Errorf("%s: %v behind %v, cost %v behind %v: %s", r.Name, r.Peak(), peak, r.megatron.cost, cost,
				r.Plan.Verdict.Result)
		}
		peak, cost = r.Peak(), r.megatron.cost
	}
	made, err := a.Amend(a.Fastest)
	if err != nil || len(made.Rest) > 0 {
		t.Fatalf("%v: %v", made.Rest, err)
	}
	edited := q
	edited.Texts = made.Texts
	for _, q := range []job.Request{edited, a.Fastest.Request(q)} {
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.New(j)
		if err != nil {
			t.Fatal(err)
		}
		if r := (&Recipe{Plan: p}); r.Peak() != a.Fastest.Peak() || j.MicroBatch != a.Fastest.Size.MicroBatch {
			t.Errorf("%v with micro batches of %d, expected %v and %d", r.Peak(), j.MicroBatch, a.Fastest.Peak(),
				a.Fastest.Size.MicroBatch)
		}
	}
}
