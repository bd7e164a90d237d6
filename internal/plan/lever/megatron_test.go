package lever

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// largeScript is a training that does not fit a GPU of 40 GB.
const largeScript = `#!/bin/bash
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 4
    --bf16 --vocab-size 32000 --tensor-model-parallel-size 2
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
`

// TestMegatronLevers: changes of a script are planned from its edited text, and free what the plan of that text lacks.
func TestMegatronLevers(t *testing.T) {
	script := filepath.Join(t.TempDir(), "train.sh")
	if err := os.WriteFile(script, []byte(largeScript), 0o600); err != nil {
		t.Fatal(err)
	}
	q := job.Request{GPU: "A100-40GB", GPUs: 8, MegatronArguments: job.MegatronArguments{Megatron: script}}
	changes := forMegatron(t, q)
	said := map[string]bool{}
	for _, c := range changes {
		if len(c.Flags) > 0 || c.Frees() <= 0 {
			t.Errorf("%v: flags %q, frees %v", &c, c.Flags, c.Frees())
		}
		for _, e := range c.Edits {
			said[e.Key] = true
		}
		edited := q
		edited.Texts = c.Texts
		if held, _ := planned(t, edited).Held(ledger.GPU, nil); held != c.After {
			t.Errorf("%v: %v are planned, and the edited script takes %v", &c, c.After, held)
		}
	}
	for _, key := range strings.Fields(`--micro-batch-size --global-batch-size --recompute-granularity
		--use-distributed-optimizer --offload-optimizer-states --optimizer-cpu-offload --sequence-parallel
		--tensor-model-parallel-size --pipeline-model-parallel-size`) {
		if !said[key] {
			t.Errorf("no change edits %s", key)
		}
	}
}

// TestMegatronLeversOfArguments: arguments that are typed get others behind them, which free as much.
func TestMegatronLeversOfArguments(t *testing.T) {
	_, typed, _ := strings.Cut(largeScript, "ARGS=(")
	typed, _, _ = strings.Cut(typed, ")")
	q := job.Request{GPU: "A100-40GB", GPUs: 8,
		MegatronArguments: job.MegatronArguments{Megatron: strings.Join(strings.Fields(typed), " ")}}
	changes := forMegatron(t, q)
	if len(changes) < 5 {
		t.Fatalf("only %d changes", len(changes))
	}
	for _, c := range changes {
		if len(c.Edits) > 0 || !strings.HasPrefix(c.Flags[0], added+"--") {
			t.Errorf("%v: edits %v, flags %q", &c, c.Edits, c.Flags)
		}
		if held, _ := planned(t, c.Request).Held(ledger.GPU, nil); held != c.After {
			t.Errorf("%v: %v are planned, and the request takes %v", &c, c.After, held)
		}
	}
}

func forMegatron(t *testing.T, q job.Request) []Change {
	t.Helper()
	p := planned(t, q)
	if need := NeedOf(p); need != GPUMemory {
		t.Fatalf("the job lacks %q: %+v", need, p.Verdict)
	}
	changes, err := For(Question{Need: GPUMemory, Request: q, Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	return changes
}
