package plan

import (
	"math"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// qwen3MoE are the arguments of Megatron-LM that slime's script run-qwen3-30B-A3B.sh has.
const qwen3MoE = `--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32
	--num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
	--normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
	--vocab-size 151936 --moe-ffn-hidden-size 768 --moe-router-topk 8 --num-experts 128 --moe-grouped-gemm
	--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --tensor-model-parallel-size 4
	--sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
	--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --seq-length 20480
	--max-position-embeddings 40960 --micro-batch-size 1 --global-batch-size 16 --train-iters 100 --optimizer adam
	--lr 1e-6 --bf16 --use-distributed-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
	--use-precision-aware-optimizer --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32
	--attention-backend flash --tokenizer-type HuggingFaceTokenizer`

// in returns a phase of the first device of a kind.
func in(t *testing.T, p *Plan, kind ledger.Kind, name ledger.PhaseName) *ledger.Phase {
	t.Helper()
	for i := range p.Devices {
		for k := range p.Devices[i].Phases {
			of := &p.Devices[i].Phases[k]
			if p.Devices[i].Kind == kind && of.Name == name && of.Iteration != ledger.First {
				return of
			}
		}
	}
	t.Fatalf("the %s has no phase %s", kind, name)
	return nil
}

// holds returns what a phase holds of a component.
func holds(p *ledger.Phase, c ledger.Component) (sum ledger.Bytes) {
	for _, h := range p.Components {
		if h.Component == c {
			sum += h.Bytes
		}
	}
	return sum
}

// TestKilledByRay plans a job of 8 H100 whose actors had grown to 102.5 GiB each when Ray killed them (THUDM/slime
// issue 1851): the optimizer on the host, backups of parameters and gradients, and the reference model.
func TestKilledByRay(t *testing.T) {
	p := planned(t, job.Request{MegatronArguments: job.MegatronArguments{Megatron: qwen3MoE}, GPUs: 8, GPU: "H100-80GB",
		HostMemory: 1007*ledger.GiB + ledger.GiB/2,
		Shorthand:  job.Shorthand{Rollout: "sglang:0.7,tp=8,sleep=2,backups,reference=host,ray,object-store"}})
	sync := in(t, p, ledger.Host, ledger.WeightSync)
	python := ledger.Bytes(2960 * 1000 * 1000)
	actor := (sync.PeakReserved-holds(sync, ledger.ObjectStore))/8 + python
	const measured = 102.5
	if off := float64(actor)/float64(ledger.GiB)/measured - 1; math.Abs(off) > .03 {
		t.Errorf("an actor is planned with %v, %+.1f %% off %v GiB", actor, 100*off, measured)
	}
	if v := p.Verdict; v.Result != DoesNotFit || v.Device != ledger.Host || v.Phase != ledger.WeightSync {
		t.Errorf("the verdict is %s on the %s in %s, want a host that lacks memory in the weight sync", v.Result,
			v.Device, v.Phase)
	}
	if want := ledger.Bytes(.95 * 1007.5 * float64(ledger.GiB)); p.Verdict.Capacity != want {
		t.Errorf("the host has %v, want %v, from which on Ray kills", p.Verdict.Capacity, want)
	}
	if updated := in(t, p, ledger.Host, ledger.Step); holds(updated, ledger.TrainerBackup) > 0 {
		t.Error("backups of the trainer are still on the host in the update")
	}
}

// ofRollout is a small job with an engine.
func ofRollout(text string) job.Request {
	return job.Request{Model: "qwen2.5-0.5b", GPUs: 2, GPU: "H100-80GB", FSDP: "2", Precision: "bf16", Sequence: 512,
		MicroBatch: 1, HostMemory: 512 * ledger.GiB, Shorthand: job.Shorthand{Rollout: text}}
}

// TestLevelsOfSleep holds what each level leaves of the engine on the GPU and on the host while the trainer works.
func TestLevelsOfSleep(t *testing.T) {
	for _, tt := range []struct {
		text                   string
		weights, cache, backup bool
	}{
		{"vllm:0.5", true, true, false},
		{"vllm:0.5,free-cache", true, false, false},
		{"vllm:0.5,sleep=1", false, false, true},
		{"vllm:0.5,sleep=2", false, false, false},
		{"sglang:0.5,sleep=1", false, false, true},
	} {
		p := planned(t, ofRollout(tt.text))
		update, awake := in(t, p, ledger.GPU, ledger.Backward), in(t, p, ledger.GPU, ledger.Rollout)
		if holds(awake, ledger.RolloutWeights) == 0 || holds(awake, ledger.RolloutCache) == 0 {
			t.Errorf("%s: the engine generates without weights or cache", tt.text)
		}
		if got := holds(update, ledger.RolloutWeights) > 0; got != tt.weights {
			t.Errorf("%s: weights on the GPU in the update: %t", tt.text, got)
		}
		if got := holds(update, ledger.RolloutCache) > 0; got != tt.cache {
			t.Errorf("%s: KV cache on the GPU in the update: %t", tt.text, got)
		}
		if got := holds(in(t, p, ledger.Host, ledger.Backward), ledger.RolloutBackup) > 0; got != tt.backup {
			t.Errorf("%s: weights on the host in the update: %t", tt.text, got)
		}
	}
}

// TestShareOfVLLM holds the engine in the phase in which it generates at its fraction of the GPU.
func TestShareOfVLLM(t *testing.T) {
	p := planned(t, ofRollout("vllm:0.5,sleep=2"))
	awake := in(t, p, ledger.GPU, ledger.Rollout)
	share := holds(awake, ledger.RolloutWeights) + holds(awake, ledger.RolloutCache) +
		holds(awake, ledger.RolloutActivations)
	half := p.Job.GPU.Memory / 2
	if off := share - half; off > ledger.MiB || off < -ledger.MiB {
		t.Errorf("the engine holds %v, want %v", share, half)
	}
}

// TestPeaksOfWaking holds the two peaks: the weights of both programs beside each other, and then the KV cache beside
// what the trainer leaves.
func TestPeaksOfWaking(t *testing.T) {
	stays := planned(t, ofRollout("vllm:0.5,sleep=2"))
	moves := planned(t, ofRollout("vllm:0.5,sleep=2,backups=parameters+optimizer"))
	sync := in(t, moves, ledger.GPU, ledger.WeightSync)
	if holds(sync, ledger.RolloutWeights) == 0 || holds(sync, ledger.Parameters) == 0 {
		t.Error("the weight sync does not have the weights of both")
	}
	if holds(sync, ledger.RolloutCache) > 0 || holds(sync, ledger.OptimizerStates) > 0 {
		t.Error("the weight sync has the KV cache, or states that were to wait on the host")
	}
	wake := in(t, moves, ledger.GPU, ledger.Wake)
	if holds(wake, ledger.Parameters) > 0 || holds(wake, ledger.RolloutCache) == 0 {
		t.Error("the trainer's parameters are beside the KV cache")
	}
	gone := holds(in(t, stays, ledger.GPU, ledger.Wake), ledger.OptimizerStates)
	if gone == 0 || holds(in(t, moves, ledger.Host, ledger.Wake), ledger.TrainerBackup) < 2*gone {
		t.Error("the host of two ranks does not have what left their GPUs")
	}
	if holds(in(t, moves, ledger.GPU, ledger.Step), ledger.OptimizerStates) != gone {
		t.Error("the states are not back for the update")
	}
}

// TestLogProbs holds the passes over answers: all logits or some at a time, and a frozen model that waits on the host.
func TestLogProbs(t *testing.T) {
	whole := in(t, planned(t, ofRollout("vllm:0.5,sleep=2,log-probs-batch=8")), ledger.GPU, ledger.LogProbs)
	chunked := in(t, planned(t, ofRollout("vllm:0.5,sleep=2,log-probs-batch=8,log-probs=chunked")), ledger.GPU,
		ledger.LogProbs)
	logits := ledger.Bytes(8 * 512 * 151936 * 4)
	if holds(whole, ledger.LogitsAndLoss) < logits || holds(chunked, ledger.LogitsAndLoss) > logits {
		t.Errorf("all logits take %v, some at a time %v", holds(whole, ledger.LogitsAndLoss),
			holds(chunked, ledger.LogitsAndLoss))
	}
	q := ofRollout("vllm:0.5,sleep=2,reference=host")
	q.Reference = q.Model
	p := planned(t, q)
	if holds(in(t, p, ledger.GPU, ledger.Backward), ledger.ReferenceModel) > 0 ||
		holds(in(t, p, ledger.Host, ledger.Backward), ledger.ReferenceModel) == 0 {
		t.Error("the frozen model does not wait on the host in the update")
	}
	if holds(in(t, p, ledger.GPU, ledger.LogProbs), ledger.ReferenceModel) == 0 {
		t.Error("the frozen model is not on the GPU for its pass")
	}
}

// TestServerHasGPUsOfItsOwn holds an engine elsewhere off the GPUs of the trainer.
func TestServerHasGPUsOfItsOwn(t *testing.T) {
	p := planned(t, ofRollout("vllm:0.9,server"))
	for i := range p.Devices[0].Phases {
		if f := &p.Devices[0].Phases[i]; f.Name == ledger.Rollout || holds(f, ledger.RolloutWeights) > 0 {
			t.Errorf("the engine is on the GPU in %s", f.Name)
		}
	}
	without := ofRollout("")
	if a, b := p.Devices[0].Outside, planned(t, without).Devices[0].Outside; len(a) != len(b) {
		t.Errorf("outside of the allocator the GPU holds %v with an engine elsewhere, and %v without", a, b)
	}
}

// ofSlime is a job of a script of slime with further arguments.
func ofSlime(t *testing.T, more string) job.Request {
	t.Helper()
	script := "ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate " +
		"--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 128000 --disable-bias-linear " +
		"--position-embedding-type rope --rollout-batch-size 16 --n-samples-per-prompt 8 --num-steps-per-rollout 2 " +
		"--use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-max-context-len 4096 --attention-dropout 0 " +
		"--hidden-dropout 0 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 " +
		"--untie-embeddings-and-output-weights --sglang-mem-fraction-static 0.6 " + more + "\n"
	return job.Request{MegatronArguments: job.MegatronArguments{Megatron: "slime.sh"}, GPU: "H100-80GB",
		HostMemory: 512 * ledger.GiB, Texts: files.Texts{"slime.sh": []byte(script)}}
}

// TestSlimeHost holds what waits on the host of a job of slime: a copy of the parameters for each tag, and of what
// leaves the GPU only what no copy brings back.
func TestSlimeHost(t *testing.T) {
	p := planned(t, ofSlime(t, "--use-kl-loss"))
	awake := in(t, p, ledger.Host, ledger.Rollout)
	parameters := ledger.Bytes(4 * 2 * p.Job.Model.Elements()) // of four ranks
	for _, c := range []ledger.Component{ledger.ParameterCopies, ledger.ReferenceModel} {
		if got := holds(awake, c); got != parameters {
			t.Errorf("%s is %v, want %v", c, got, parameters)
		}
	}
	gpu := in(t, p, ledger.GPU, ledger.Rollout)
	if holds(gpu, ledger.Parameters)+holds(gpu, ledger.Gradients)+holds(gpu, ledger.OptimizerStates) > 0 {
		t.Error("the trainer is on the GPU while the engine generates")
	}
	update := in(t, p, ledger.GPU, ledger.Step)
	gone := holds(update, ledger.OptimizerStates) + holds(update, ledger.MasterWeights)
	if got := holds(awake, ledger.TrainerBackup); gone == 0 || got < 4*gone || got > 4*gone+ledger.GiB {
		t.Errorf("the trainer's backup is %v, want the states of four ranks, %v", got, 4*gone)
	}
	q := ofSlime(t, "--use-kl-loss")
	q.Rollout = "backups=all"
	more := holds(in(t, planned(t, q), ledger.Host, ledger.Rollout), ledger.TrainerBackup) -
		holds(awake, ledger.TrainerBackup)
	if more < 3*parameters { // gradients are in fp32
		t.Errorf("with all backups the host holds %v more, want parameters and gradients, too", more)
	}
}

// TestSlimeLoss holds what the loss of a policy keeps of logits: in fp32, with their softmax, and what settings add.
func TestSlimeLoss(t *testing.T) {
	const logits = ledger.Bytes(4 * 4096 * 128000)
	of := func(more string, name ledger.PhaseName) ledger.Bytes {
		return in(t, planned(t, ofSlime(t, more)), ledger.GPU, name).PeakAllocated
	}
	forward, backward := of("", ledger.Forward), of("", ledger.Backward)
	for _, tt := range []struct {
		more     string
		forward  ledger.Bytes
		backward ledger.Bytes
	}{
		{"--rollout-temperature 0.7", logits, logits / 2}, // two gradients in fp32, in place of one and one in bf16
		{"--rollout-top-p 0.9", logits + logits/2, 0},
		{"--entropy-coef 0.01", 0, logits + logits/2}, // the logits and a gradient in fp32, not that in bf16
		{"--log-probs-chunk-size 512", 0, logits / 2}, // beside the gradient in fp32, not that in bf16
	} {
		for _, side := range []struct {
			name      ledger.PhaseName
			got, want ledger.Bytes
		}{{ledger.Forward, of(tt.more, ledger.Forward) - forward, tt.forward},
			{ledger.Backward, of(tt.more, ledger.Backward) - backward, tt.backward}} {
			if off := side.got - side.want; off < -ledger.MiB || off > ledger.MiB {
				t.Errorf("%s: the %s takes %v more, want %v", tt.more, side.name, side.got, side.want)
			}
		}
	}
	if last := of("", ledger.LogProbs); last > forward {
		t.Errorf("the pass without gradients takes %v, more than the update, %v", last, forward)
	}
}

// ofVerl is a job of verl with Megatron core and further assignments.
func ofVerl(more string) job.Request {
	script := "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm " +
		"actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.model.path=qwen2.5-0.5b trainer.nnodes=1 " +
		"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2 " +
		"data.max_prompt_length=512 data.max_response_length=1536 " + more + "\n"
	return job.Request{MegatronArguments: job.MegatronArguments{Megatron: "verl.sh"}, GPU: "H100-80GB",
		HostMemory: 512 * ledger.GiB, Texts: files.Texts{"verl.sh": []byte(script)}}
}

// TestVerlMegatron holds what leaves the GPUs, and when: the weight sync reads parameters on the GPU.
func TestVerlMegatron(t *testing.T) {
	const offload = "actor_rollout_ref.actor.megatron.param_offload=True " +
		"actor_rollout_ref.actor.megatron.optimizer_offload=True "
	p := planned(t, ofVerl(offload))
	for _, tt := range []struct {
		phase      ledger.PhaseName
		parameters bool
		states     bool
	}{{ledger.WeightSync, true, false}, {ledger.Rollout, false, false}, {ledger.Step, true, true}} {
		at := in(t, p, ledger.GPU, tt.phase)
		if got := holds(at, ledger.Parameters) > 0; got != tt.parameters {
			t.Errorf("%s: parameters on the GPU: %t", tt.phase, got)
		}
		if got := holds(at, ledger.OptimizerStates) > 0; got != tt.states {
			t.Errorf("%s: states on the GPU: %t", tt.phase, got)
		}
	}
	if copies := holds(in(t, p, ledger.Host, ledger.Step), ledger.ParameterCopies); copies == 0 {
		t.Error("the pinned copy of the parameters is gone in the update")
	}
	stays := planned(t, ofVerl(""))
	if holds(in(t, stays, ledger.GPU, ledger.Rollout), ledger.Parameters) == 0 {
		t.Error("without param_offload parameters leave the GPU")
	}
}

// TestVerlReference holds where the frozen model is.
func TestVerlReference(t *testing.T) {
	const loss = "actor_rollout_ref.actor.use_kl_loss=True "
	onGPU := planned(t, ofVerl(loss))
	size := ledger.Bytes(2 * onGPU.Job.Model.Elements())
	if got := holds(in(t, onGPU, ledger.GPU, ledger.Forward), ledger.ReferenceModel); got != size {
		t.Errorf("the frozen model takes %v of the GPU, want %v", got, size)
	}
	onHost := planned(t, ofVerl(loss+"actor_rollout_ref.ref.megatron.param_offload=True"))
	if got := holds(in(t, onHost, ledger.GPU, ledger.Forward), ledger.ReferenceModel); got != 0 {
		t.Errorf("the frozen model takes %v of the GPU in the update", got)
	}
	if got := holds(in(t, onHost, ledger.GPU, ledger.LogProbs), ledger.ReferenceModel); got != size {
		t.Errorf("the frozen model takes %v of the GPU while it judges, want %v", got, size)
	}
	if got := holds(in(t, onHost, ledger.Host, ledger.Rollout), ledger.ReferenceModel); got != 2*size {
		t.Errorf("the frozen model takes %v of the host, want that of two ranks, %v", got, 2*size)
	}
}

// TestVerlLoss holds what the loss keeps of logits: one copy in fp32, more for entropies, and none with fused kernels.
func TestVerlLoss(t *testing.T) {
	const tokens = 4 * 2048
	p := planned(t, ofVerl(""))
	logits := ledger.Bytes(4 * tokens * p.Job.Megatron.Vocabulary)
	peak := func(more string, name ledger.PhaseName) ledger.Bytes {
		return in(t, planned(t, ofVerl(more)), ledger.GPU, name).PeakAllocated
	}
	base := peak("", ledger.Forward)
	for _, tt := range []struct {
		more       string
		phase      ledger.PhaseName
		least, top ledger.Bytes
	}{
		{"actor_rollout_ref.actor.entropy_coeff=0.01", ledger.Forward, logits, 2 * logits},
		{"", ledger.Backward, logits / 4, logits}, // measured with verl's own functions: two copies, one in the forward
		{"actor_rollout_ref.model.use_fused_kernels=True", ledger.Forward, -2 * logits, -logits / 2},
		{"", ledger.LogProbs, -logits, 2 * logits},
	} {
		if more := peak(tt.more, tt.phase) - base; more < tt.least || more > tt.top {
			t.Errorf("%s: the %s takes %v more, want from %v to %v", tt.more, tt.phase, more, tt.least, tt.top)
		}
	}
}
