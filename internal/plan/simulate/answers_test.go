package simulate

import (
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestAnswersAsMeasured compares what passes over answers hold beside the weights with real ones: TRL 1.9's trainers
// and LLaMA-Factory's functions of August 2026 on the CPU, whose allocations a dispatch mode counts (torch 2.15,
// transformers 5.23). Two samples of 256 tokens are a micro batch.
func TestAnswersAsMeasured(t *testing.T) {
	const (
		factory = "model_name_or_path: x\nfinetuning_type: full\ncutoff_len: 256\nper_device_train_batch_size: 2\n" +
			"disable_gradient_checkpointing: true\n"
		trl = "model_name_or_path: x\nmax_length: 256\nper_device_train_batch_size: 2\n" +
			"bf16: false\ngradient_checkpointing: "
		half = "dtype: bfloat16\n"
	)
	for name, c := range map[string]struct {
		text              string
		forward, backward int64 // at the peak
	}{
		"DPO of LLaMA-Factory": {factory + "stage: dpo\n", 613713848, 482099208},
		"KTO of LLaMA-Factory": {factory + "stage: kto\n", 372458482, 241115144},
		"SimPO of LLaMA-Factory in bf16": {factory + "stage: dpo\npref_loss: simpo\nbf16: true\npure_bf16: true\n",
			311641068, 441663496},
		"LLaMA-Factory's trainer v1": {"model: x\ntrain_dataset: y\nkernel_config: {name: auto}\ncutoff_len: 256\n" +
			"micro_batch_size: 2\nenable_activation_checkpointing: false\n", 306919404, 241111048},
		"KTO of TRL":            {trl + "false\nloss_type: kto\n", 290799204, 241372148},
		"ORPO of TRL in bf16":   {trl + "false\ncpo_alpha: 1.0\n" + half, 213465032, 213815300},
		"DFT of LLaMA-Factory":  {factory + "use_dft_loss: true\n", 176359936, 241879048},
		"EAFT of LLaMA-Factory": {factory + "use_eaft_loss: true\n", 241884732, 241879048},
		"EAFT of LLaMA-Factory in bf16": {factory + "use_eaft_loss: true\npure_bf16: true\n", 254402108,
			221628424},
		"ASFT of LLaMA-Factory":                {factory + "use_asft_loss: true\n", 764129782, 371677682},
		"ASFT of LLaMA-Factory under autocast": {factory + "use_asft_loss: true\nbf16: true\n", 772157942, 379705842},
		"ASFT of LLaMA-Factory in bf16": {factory + "use_asft_loss: true\npure_bf16: true\n", 645959158,
			318787058},
		"DPO of TRL":         {trl + "false\nbeta: 0.1\n", 532291616, 482607096},
		"DPO of TRL in bf16": {trl + "false\nbeta: 0.1\n" + half, 336198166, 180791300},
		// The real Actor of OpenRLHF 0.11.2, and the loss of verl's actor as its source of January 2026 has it;
		// transformers 5.24 and torch 2.15. There was no GPU: in place of flash-attn's kernel stands a function that
		// allocates what the source of that kernel does.
		"verl": {"actor_rollout_ref:\n  model: {path: x, enable_gradient_checkpointing: false}\n" +
			"  actor: {ppo_micro_batch_size_per_gpu: 1, ppo_mini_batch_size: 1}\n" +
			"  rollout: {name: vllm, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.3}\n" +
			"algorithm: {adv_estimator: grpo}\ntrainer: {n_gpus_per_node: 1}\n" +
			"data: {max_prompt_length: 256, max_response_length: 256}\n", 86726656, 184507400},
		"OpenRLHF": {"python -m openrlhf.cli.train_ppo_ray --pretrain x --actor_num_gpus_per_node 1 --max_len 256 " +
			"--micro_train_batch_size 2 --train_batch_size 2 --zero_stage 0 --vllm_num_engines 1 --init_kl_coef 0 " +
			"--advantage_estimator rloo --attn_implementation sdpa\n", 123398144, 188925960},
		"DPO of TRL with checkpoints": {trl + "true\nbeta: 0.1\n" + half, 290488854, 135081988},
	} {
		t.Run(name, func(t *testing.T) {
			file := filestest.InNewFolder(t)
			q := job.Request{Configs: []string{file("train.yaml", c.text)}, GPUs: 1, GPU: "H100-80GB",
				Recorded: job.Recorded{Releases: []string{"trl=1.9.0"}}, // what was measured, before 1.15 had tiles
				Model: file("llama.json", `{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
					"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
					"torch_dtype": "float32"}`)}
			j, err := q.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			classes, err := Run(j, Limit{})
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range classes[0].GPU.Phases {
				want := map[ledger.PhaseName]int64{ledger.Forward: c.forward, ledger.Backward: c.backward}[p.Name]
				if want == 0 || p.Iteration != ledger.First {
					continue
				}
				got := int64(0)
				for _, h := range p.Components {
					switch h.Component {
					case ledger.Parameters, ledger.ReferenceModel, ledger.Batch, ledger.MatmulWorkspaces,
						ledger.OptimizerStates, ledger.MasterWeights:
					default:
						got += int64(h.Bytes)
					}
				}
				if off := float64(got)/float64(want) - 1; math.Abs(off) > .005 {
					t.Errorf("%s: %d bytes at the peak, measured %d (%+.1f %%)", p.Name, got, want, 100*off)
				}
			}
		})
	}
}
