package plan

import (
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// heldBy returns the most that the first GPU of a script holds of each component, and the plan.
func heldBy(t *testing.T, command string) (map[ledger.Component]ledger.Bytes, *Plan) {
	t.Helper()
	q := job.Request{MegatronArguments: job.MegatronArguments{Megatron: "train.sh"}, GPU: "H100",
		Texts: files.Texts{"train.sh": []byte(command + "\n")}}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	held := map[ledger.Component]ledger.Bytes{}
	for _, phase := range p.Devices[0].Phases {
		for _, c := range phase.Components {
			held[c.Component] = max(held[c.Component], c.Bytes)
		}
	}
	return held, p
}

// TestAdaptersOfMegatron: with adapters only these have gradients and states, no second model is held for DPO, and a
// step saves less.
func TestAdaptersOfMegatron(t *testing.T) {
	const base = "NPROC_PER_NODE=2 megatron rlhf --rlhf_type dpo --model qwen2.5-0.5b --max_length 1024 " +
		"--tensor_model_parallel_size 2 --sequence_parallel true --recompute_granularity none "
	full, whole := heldBy(t, base)
	tuned, p := heldBy(t, base+"--tuner_type lora --lora_rank 16")
	trained := ledger.Bytes(p.Job.Megatron.Trained())
	if p.Trained != int64(trained) || p.Elements != whole.Elements || trained*100 > ledger.Bytes(p.Elements)*3 {
		t.Errorf("%d of %d parameters are trained", p.Trained, p.Elements)
	}
	// A rank has more than half of the adapters: one matrix of each is not divided. Buffers are padded.
	for component, size := range map[ledger.Component]ledger.Bytes{ledger.Gradients: 4, ledger.MasterWeights: 4,
		ledger.OptimizerStates: 8} {
		if is := tuned[component]; is < size*trained/2 || is > size*trained || is*20 > full[component] {
			t.Errorf("%v of %s for %d trained parameters, %v without adapters", is, component, trained, full[component])
		}
	}
	if more := tuned[ledger.Parameters] - full[ledger.Parameters]; more < trained || more > 2*trained {
		t.Errorf("%v of parameters, %v without adapters", tuned[ledger.Parameters], full[ledger.Parameters])
	}
	if tuned[ledger.ReferenceModel] != 0 || full[ledger.ReferenceModel] == 0 {
		t.Errorf("%v of a second model", tuned[ledger.ReferenceModel])
	}
	if tuned[ledger.AdapterActivations] == 0 || full[ledger.AdapterActivations] != 0 {
		t.Errorf("%v of activations of adapters", tuned[ledger.AdapterActivations])
	}
	// Attention alone: what feed-forward layers save for matrices of adapters is not held.
	_, attention := heldBy(t, base+"--tuner_type lora --target_modules linear_qkv")
	less, more := attention.Devices[0].Peak().PeakAllocated, p.Devices[0].Peak().PeakAllocated
	if less >= more || more >= whole.Devices[0].Peak().PeakAllocated {
		t.Errorf("peaks of %v with adapters on queries, keys and values, %v on all layers, %v of all parameters", less,
			more, whole.Devices[0].Peak().PeakAllocated)
	}
}
