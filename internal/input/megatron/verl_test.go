package megatron

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

// verlText is a command of verl with Megatron core. Assignments are added behind it.
const verlText = "python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' algorithm.adv_estimator=grpo " +
	"data.max_prompt_length=512 data.max_response_length=1536 actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B " +
	"actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=4 " +
	"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.name=vllm " +
	"actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=2 " +
	"actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"

// ofVerl decides a command of verl. In further assignments A is for the actor, M for its Megatron core, and R for the
// rest of actor_rollout_ref.
func ofVerl(t *testing.T, more string) (*Job, error) {
	t.Helper()
	more = strings.NewReplacer("M.", "actor_rollout_ref.actor.megatron.", "A.", "actor_rollout_ref.actor.", "R.",
		"actor_rollout_ref.").Replace(more)
	return ofScript(t, verlText+" "+more+"\n")
}

// TestVerl holds what a command of verl with Megatron core means.
func TestVerl(t *testing.T) {
	batch := func(j *Job) string {
		return fmt.Sprintf("%d ranks, %d x %d tokens, %d micros, data %d, sequence parallel %t", j.Degrees.World(),
			j.MicroBatch, j.Sequence, j.Micros, j.Degrees.Data, j.SequenceSplit)
	}
	layers := func(j *Job) string {
		return fmt.Sprintf("%d experts, %s, grouped %t, recompute %q %q %d, chunks %d", j.Experts, j.Dispatcher,
			j.GroupedGEMM, j.Recompute, j.RecomputeMethod, j.RecomputeLayers, j.Degrees.Virtual)
	}
	optimizer := func(j *Job) string {
		return fmt.Sprintf("%v gradients, distributed %t, aware %t, on the host %t %g", j.GradientType, j.Distributed,
			j.PrecisionAware, j.CPUOffload, j.OffloadFraction)
	}
	engine := func(j *Job) string {
		e, p := j.Policy.Engine, j.Policy
		return fmt.Sprintf("sleep %d, backups %q, dropped %q, copies %d, frozen %t, on the host %t", e.Sleep, e.Backups,
			e.Dropped, e.Copies, p.Reference, e.HostReference)
	}
	for _, tt := range []struct {
		more string
		of   func(*Job) string
		want string
	}{
		{"", batch, "16 ranks, 2 x 2048 tokens, 8 micros, data 8, sequence parallel true"},
		{"A.use_dynamic_bsz=True A.ppo_max_token_len_per_gpu=6144", batch,
			"16 ranks, 1 x 6144 tokens, 6 micros, data 8, sequence parallel true"},
		{"A.use_dynamic_bsz=True A.ppo_max_token_len_per_gpu=6144 M.context_parallel_size=2", batch,
			"16 ranks, 1 x 12288 tokens, 6 micros, data 4, sequence parallel true"},
		{"M.tensor_model_parallel_size=1", batch,
			"16 ranks, 2 x 2048 tokens, 4 micros, data 16, sequence parallel false"},
		{"", layers, `128 experts, alltoall, grouped true, recompute "" "" 0, chunks 1`},
		{"+M.override_transformer_config.recompute_granularity=full " +
			"+M.override_transformer_config.recompute_method=uniform " +
			"+M.override_transformer_config.recompute_num_layers=1", layers,
			`128 experts, alltoall, grouped true, recompute "full" "uniform" 1, chunks 1`},
		{"M.pipeline_model_parallel_size=2 M.virtual_pipeline_model_parallel_size=null " +
			"M.expert_tensor_parallel_size=1", layers,
			`128 experts, alltoall, grouped true, recompute "" "" 0, chunks 1`},
		{"M.pipeline_model_parallel_size=2 M.virtual_pipeline_model_parallel_size=2 " +
			"M.expert_tensor_parallel_size=1", layers,
			`128 experts, alltoall, grouped true, recompute "" "" 0, chunks 2`},
		{"", optimizer, "fp32 gradients, distributed true, aware false, on the host false 1"},
		{"+M.override_ddp_config.grad_reduce_in_fp32=False", optimizer,
			"bf16 gradients, distributed true, aware false, on the host false 1"},
		{"+A.optim.override_optimizer_config.optimizer_cpu_offload=True " +
			"+A.optim.override_optimizer_config.use_precision_aware_optimizer=True " +
			"+A.optim.override_optimizer_config.optimizer_offload_fraction=0.5", optimizer,
			"fp32 gradients, distributed true, aware true, on the host true 0.5"},
		{"", engine, `sleep 2, backups "", dropped "", copies 0, frozen false, on the host false`},
		{"M.param_offload=True M.optimizer_offload=True A.use_kl_loss=True", engine,
			`sleep 2, backups "all", dropped "parameters+gradients", copies 1, frozen true, on the host true`},
		{"algorithm.use_kl_in_reward=True R.ref.megatron.param_offload=True", engine,
			`sleep 2, backups "", dropped "", copies 0, frozen true, on the host true`},
		{"A.use_kl_loss=True", engine, `sleep 2, backups "", dropped "", copies 0, frozen true, on the host false`},
	} {
		j, err := ofVerl(t, tt.more)
		if err != nil {
			t.Errorf("%s: %v", tt.more, err)
		} else if is := tt.of(j); is != tt.want {
			t.Errorf("%s: %s, want %s", tt.more, is, tt.want)
		}
	}
}

// TestVerlRefuses: what is not planned ends with a reason, and keys that only FSDP reads are noted.
func TestVerlRefuses(t *testing.T) {
	for more, why := range map[string]string{
		"algorithm.adv_estimator=gae":              "a critic is trained beside the actor",
		"reward_model.enable=True":                 "a model that rewards answers",
		"R.model.lora_rank=8":                      "adapters",
		"+R.model.lora.rank=8":                     "adapters",
		"A.strategy=fsdp2":                         "beside keys of Megatron core",
		"A.optim.optimizer=muon":                   "plimsoll plans adam",
		"R.model.path=Qwen/Qwen2.5-VL-7B-Instruct": "whose layers are not planned in Megatron core",
		"R.rollout.name=trtllm":                    "expected vllm or sglang",
		"R.hybrid_engine=False":                    "GPUs of its own",
		"M.qat.enable=True":                        "weights are quantized",
		"M.pipeline_model_parallel_size=4":         "the launcher starts 16 ranks, and these degrees need",
	} {
		if _, err := ofVerl(t, more); err == nil || !strings.Contains(err.Error(), why) &&
			!strings.Contains(hintOf(err), why) {
			t.Errorf("%s: %v, want %q", more, err, why)
		}
	}
	for more, note := range map[string]string{
		"R.model.enable_gradient_checkpointing=True":            "is read by FSDP alone",
		"+M.override_transformer_config.no_such_key=1":          "is no argument of Megatron-LM",
		"+A.optim.override_optimizer_config.no_such_key=1":      "no_such_key is planned as without it",
		"M.use_remove_padding=False":                            "samples are padded",
		"M.no_such_key=1":                                       "no_such_key",
		"+M.override_ddp_config.average_in_collective=True":     "average_in_collective is planned as without it",
		"A.use_dynamic_bsz=True A.ppo_max_token_len_per_gpu=64": "micro batches have as many samples as",
	} {
		j, err := ofVerl(t, more)
		if err != nil {
			t.Errorf("%s: %v", more, err)
		} else if !strings.Contains(strings.Join(j.Assumptions, "\n"), note) {
			t.Errorf("%s: no note says %q: %q", more, note, j.Assumptions)
		}
	}
}

func hintOf(err error) string {
	var wrong *fault.Input
	if errors.As(err, &wrong) {
		return wrong.Hint
	}
	return ""
}
