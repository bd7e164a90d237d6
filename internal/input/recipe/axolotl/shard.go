package axolotl

import (
	"cmp"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// shard reads how the model is divided.
func (r *reader) shard() error {
	r.Pass("deepspeed", "deepspeed")
	r.parallel()
	config := r.Find("fsdp_config")
	if r.Find("fsdp") == nil && config == nil {
		return nil
	}
	r.Set("fsdp", "fsdp", "full_shard auto_wrap")
	r.Pass("fsdp", "fsdp")
	section := &strict.Value{Kind: '{'}
	if config != nil {
		section.At = config.At
		for _, m := range config.Members {
			switch name := strings.TrimPrefix(m.Name, "fsdp_"); name {
			case "offload_params":
				recipe.Give(section, "cpu_offload", m.At, m.Value)
			case "sharding_strategy", "final_state_dict_type", "mixed_precision_policy", "cpu_offload_pin_memory":
			default:
				recipe.Give(section, name, m.At, m.Value)
			}
		}
	}
	if v := cmp.Or(r.Find("fsdp_version"), valueOf(section.Member("version"))); v != nil {
		recipe.Give(section, "version", r.At("fsdp_version"), v)
	} else {
		recipe.Give(section, "version", r.At("fsdp_config"), strict.Of(1))
	}
	recipe.Give(r.Arguments, "fsdp_config", r.At("fsdp_config"), section)
	return nil
}

// parallel reads how ranks divide the work: setup_parallelism_envs in src/axolotl/utils/trainer.py.
func (r *reader) parallel() {
	size := func(keys ...string) int {
		most := 1
		for _, key := range keys {
			most = max(most, int(r.Integer(key)))
		}
		return most
	}
	p := recipe.Parallelism{Replicate: size("dp_replicate_size"), Shard: size("dp_shard_size"), Sequence: 1,
		Tensor: size("tensor_parallel_size"), Context: size("context_parallel_size", "sequence_parallel_degree")}
	if p.Ranks() > 1 {
		r.To.Parallelism = &p
	}
}

// valueOf returns the value of a member, or nil if there is none.
func valueOf(m *strict.Member) *strict.Value {
	if m == nil {
		return nil
	}
	return m.Value
}
