package slime

import (
	_ "embed"
	"maps"
	"slices"
	"strings"
	"sync"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

//go:embed ignored.txt
var ignored string

//go:embed sglang_ignored.txt
var engineIgnored string

const fp8 = dtype.F8E4M3

// schema has the keys of slime 0.3.1 and miles 0.1.0 beside those of Megatron-LM, with slime's defaults.
var schema = strict.Schema{Program: "slime", Rule: strict.Object(
	rule.Ignored(ignored), rule.Anything.For(mark), rule.Anything.For(keysOf(refused)), rule.Anything.For(notedKeys()),
	rule.Counted.Default(1).For("actor_num_nodes rollout_num_gpus_per_engine n_samples_per_prompt micro_batch_size "+
		"update_weights_interval"),
	rule.Counted.For(`global_batch_size num_steps_per_rollout rollout_batch_size max_tokens_per_gpu
		rollout_max_context_len rollout_max_prompt_len rollout_max_response_len sglang_context_length
		vllm_max_model_len vllm_max_num_seqs vllm_max_num_batched_tokens vllm_pipeline_parallel_size
		vllm_data_parallel_size sglang_max_running_requests sglang_pp_size sglang_pipeline_parallel_size mtp_num_layers padded_vocab_size`),
	rule.Integer.Lax().OrNull().For("rollout_num_gpus log_probs_chunk_size sglang_chunked_prefill_size"),
	rule.Switched.For(switches),
	rule.Measured.For("kl_coef entropy_coef sglang_mem_fraction_static vllm_gpu_memory_utilization"),
	rule.Measured.Default(1.).For("rollout_temperature rollout_top_p"),
	rule.Worded.For("opd_type load_debug_rollout_data hf_checkpoint sglang_kv_cache_dtype vllm_kv_cache_dtype"),
	strict.Keys{
		"actor_num_gpus_per_node":   rule.Counted.Default(8),
		"data_pad_size_multiplier":  rule.Counted.Default(128),
		"update_weight_buffer_size": rule.Counted.Default(512 << 20),
		"loss_type":                 rule.Worded.Default("policy_loss"),
		"advantage_estimator":       rule.Worded.Default("grpo"),
	})}

// switches are keys that are on where they are given.
const switches = `colocate offload offload_train offload_rollout use_kl_loss keep_old_actor use_opd
	use_dynamic_batch_size debug_train_only use_rollout_logprobs get_mismatch_metrics use_routing_replay
	use_rollout_routing_replay disable_compute_advantages_and_returns disable_weights_backuper async_save
	no_save_optim sglang_disable_cuda_graph vllm_enforce_eager vllm_enable_sleep_mode`

// names are those of all keys.
var names = sync.OnceValue(func() strict.Names { return schema.Rule.Names() })

// unplanned are keys that change memory in ways that are not planned, and why. Usual are values that do not.
type unplanned struct{ keys, usual, why string }

var refused = []unplanned{
	{"advantage_estimator", "grpo gspo cispo reinforce_plus_plus reinforce_plus_plus_baseline on_policy_distillation",
		"a critic is trained beside the actor"},
	{"train_backend", "megatron", "FSDP trains in place of Megatron core"},
	{"loss_type", "policy_loss sft_loss", "a loss of the user's own is computed"},
	{"custom_model_provider_path megatron_config_path", "", "another file says the model or its arguments"},
	{"only_train_params_name_list freeze_params_name_list freeze_indexer", "", "it trains a part of the parameters"},
	{"use_stateless_adam debug_disable_optimizer", "", "the optimizer has no states"},
	{"multimodal_keys", "", "the trained model has an encoder of images"},
	{"allgather_cp", "", "it shares sequences among ranks in another way"},
	{"release_train debug_rollout_only", "", "no trainer waits while the engine generates"},
	{"update_weight_mode", "full", "the trainer keeps what it has sent"},
	{"megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers " +
		"megatron_deepgemm_moe_forward_modules", "", "other kernels run in layers"},
	{"lora_rank lora_adapter_path multi_lora_n_adapters multi_lora_adapter", "0", "it trains adapters"},
	{"offload_train_target", "cpu", "the trainer waits on a disk"},
	{"stream_optimizer_state_to_disk rematerialize_param_from_master_weight", "", "states take another road"},
	{"indep_dp", "", "replicas are trainings of their own"},
	{"extra_high_precision_layers_megatron", "", "some layers keep another type"},
	{"qkv_format", "thd", "samples are padded in place of packed"},
	{"offload_rollout_level", "", "the engine sleeps in part"},
	{"eval_num_gpus", "0", "an engine that evaluates has GPUs, too"},
	{"true_on_policy_mode", "", "other kernels run in layers"},
	{"prefill_num_servers vllm_config", "", "it divides the engine in another way"},
}

//go:embed noted.txt
var notedText string

// noted are keys that change memory in a way that the plan leaves out, with what the notes say.
var noted = func() map[string]string {
	list, says := map[string]string{}, ""
	for line := range strings.Lines(notedText) {
		line = strings.TrimSpace(line)
		if heading, is := strings.CutPrefix(line, "## "); is {
			says = heading
		} else if line != "" && !strings.HasPrefix(line, "#") {
			list[line] = says
		}
	}
	return list
}()

func keysOf(list []unplanned) string {
	var all []string
	for _, of := range list {
		for key := range strings.FieldsSeq(of.keys) {
			if key != "loss_type" && key != "advantage_estimator" { // they are read, too
				all = append(all, key)
			}
		}
	}
	return strings.Join(all, " ")
}

func notedKeys() string { return strings.Join(slices.Collect(maps.Keys(noted)), " ") }
