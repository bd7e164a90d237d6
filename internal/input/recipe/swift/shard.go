package swift

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// shard reads how the model is divided: _init_deepspeed and _init_fsdp in sft_args.py.
func (r *reader) shard() error {
	r.Pass("deepspeed", "deepspeed")
	if preset := presets[r.Word("deepspeed")]; preset != "" {
		d, err := strict.ParseJSON(r.File, []byte(preset))
		if err != nil {
			return err
		}
		if zero := d.Root.Find("zero_optimization"); r.Word("rlhf_type") == "grpo" && zero.Member(prefetched) != nil {
			recipe.Give(zero, prefetched, 0, strict.Of(0)) // GRPOConfig in swift/rlhf_trainers/arguments.py
		}
		recipe.Give(r.Arguments, "deepspeed", r.At("deepspeed"), d.Root)
	}
	r.Set("gradient_checkpointing", "gradient_checkpointing", r.Truth("gradient_checkpointing"))
	if err := r.fsdp(); err != nil {
		return err
	}
	kwargs := r.Arguments.Member("gradient_checkpointing_kwargs")
	if kwargs == nil || kwargs.Value.Kind != '{' || kwargs.Value.Member("use_reentrant") == nil {
		// _fix_gradient_checkpointing in swift/trainers/mixin.py
		reentrant := &strict.Value{Kind: '{'}
		shards := r.Gives("deepspeed") || r.Gives("fsdp")
		recipe.Give(reentrant, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(shards))
		recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("gradient_checkpointing"), reentrant)
	}
	return nil
}

// prefetched is the key of what ZeRO-3 gathers ahead.
const prefetched = "stage3_prefetch_bucket_size"

// fsdp reads the preset of FSDP2, or a file with the keys fsdp and fsdp_config.
func (r *reader) fsdp() error {
	v := r.Find("fsdp")
	if v == nil || v.IsEmpty() {
		return nil
	}
	section := &strict.Document{File: r.File, Root: &strict.Value{Kind: '{'}}
	switch {
	case v.Text == "fsdp2":
		d, err := strict.ParseJSON(r.File, []byte(`{"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2,
			"reshard_after_forward": true, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": true,
			"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": true}}`))
		if err != nil {
			return err
		}
		section = d
	case strings.HasSuffix(v.Text, ".json"):
		var err error
		if section, err = r.Companion("fsdp", recipe.FSDPKind); err != nil {
			return err
		}
	default:
		r.Pass("fsdp", "fsdp")
		return nil
	}
	for _, m := range section.Root.Members {
		if m.Name == "fsdp" || m.Name == "fsdp_config" {
			recipe.Give(r.Arguments, m.Name, r.At("fsdp"), m.Value)
		}
	}
	if v := section.Root.Find("fsdp_config.activation_checkpointing"); recipe.On(v) {
		r.Set("gradient_checkpointing", "fsdp", false) // _check_fsdp2_compatibility
	}
	return nil
}

// presets are the files in swift/config, without the keys that change no memory.
var presets = func() map[string]string {
	const text = `{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": %s,
		"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
		"train_micro_batch_size_per_gpu": "auto"}`
	const buckets = `"allgather_bucket_size": 2e8, "overlap_comm": false, "reduce_bucket_size": 2e8`
	const parameters = `"overlap_comm": false, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
		"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
		"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9`
	const offload = `"offload_optimizer": {"device": "cpu", "pin_memory": true}`
	return map[string]string{
		"zero0":         fmt.Sprintf(text, `{"stage": 0, `+buckets+`}`),
		"zero1":         fmt.Sprintf(text, `{"stage": 1, `+buckets+`}`),
		"zero2":         fmt.Sprintf(text, `{"stage": 2, `+buckets+`}`),
		"zero3":         fmt.Sprintf(text, `{"stage": 3, `+parameters+`}`),
		"zero2_offload": fmt.Sprintf(text, `{"stage": 2, `+offload+`, `+buckets+`}`),
		"zero3_offload": fmt.Sprintf(text, `{"stage": 3, `+offload+`, "offload_param": {"device": "cpu",
			"pin_memory": true}, `+parameters+`}`),
	}
}()
