package slime

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// engine reads SGLang, and what moves for it: args of slime_validate_args in utils/arguments.py, and actor.py. Without
// an engine the trainer is given its samples.
func (r *reader) engine() error {
	if r.Truth("debug_train_only") || r.Gives("load_debug_rollout_data") {
		return nil
	}
	e := rollout.New(rollout.SGLang)
	if r.vllm {
		var err error
		if e, err = r.engineOfVime(); err != nil {
			return err
		}
		return r.beside(&e)
	}
	e.Fraction = r.Number("sglang_mem_fraction_static")
	pipeline := max(1, r.Integer("sglang_pp_size"), r.Integer("sglang_pipeline_parallel_size"))
	if pipeline > 1 {
		return r.Fault("sglang_pp_size", "divides the layers of the engine, which is not planned yet", "set it to 1")
	}
	e.Tensor = r.Integer("rollout_num_gpus_per_engine")
	if n := r.Integer("sglang_chunked_prefill_size"); n > 0 {
		e.BatchTokens = n
	}
	if n := r.Integer("sglang_max_running_requests"); n > 0 {
		e.Sequences = n
	}
	e.Longest, e.Graphs = r.Integer("sglang_context_length"), !r.Truth("sglang_disable_cuda_graph")
	if strings.HasPrefix(r.Word("sglang_kv_cache_dtype"), "fp8") {
		if _, err := rollout.Parse("kv=fp8", &e); err == nil {
			e.CacheType = fp8
		}
	}
	return r.beside(&e)
}

// engineOfVime reads vLLM, as vime starts it (vime/backends/vllm_utils/vllm_engine.py).
func (r *reader) engineOfVime() (rollout.Engine, error) {
	e := rollout.New(rollout.VLLM)
	for _, key := range []string{"vllm_pipeline_parallel_size", "vllm_data_parallel_size"} {
		if r.Integer(key) > 1 {
			return e, r.Fault(key, "divides the engine in a way that is not planned yet", "set it to 1")
		}
	}
	if f := r.Number("vllm_gpu_memory_utilization"); f > 0 {
		e.Fraction = f
	}
	e.Tensor = r.Integer("rollout_num_gpus_per_engine")
	e.BatchTokens = cmp.Or(r.Integer("vllm_max_num_batched_tokens"), e.BatchTokens)
	e.Sequences = cmp.Or(r.Integer("vllm_max_num_seqs"), e.Sequences)
	e.Longest = cmp.Or(r.Integer("vllm_max_model_len"), r.Integer("rollout_max_context_len"))
	e.Graphs = !r.Truth("vllm_enforce_eager")
	if strings.HasPrefix(r.Word("vllm_kv_cache_dtype"), "fp8") {
		e.CacheType = fp8
	}
	return e, nil
}

// beside reads what an engine has beside its own arguments.
func (r *reader) beside(e *rollout.Engine) error {
	e.Sync = ledger.Bytes(r.Integer("update_weight_buffer_size"))
	e.RayThreshold = rollout.RayUsualThreshold
	e.LongestSample = r.unbounded()
	r.policy.Engine = e
	return r.places(e)
}

// unbounded returns the tokens that a sample may have where code of the user makes it of several turns, and nothing
// bounds it: the engine's context, if arguments say it. It returns 0 where samples are bounded.
func (r *reader) unbounded() int64 {
	if !r.Gives("custom_generate_function_path") || r.Integer("rollout_max_context_len") > 0 {
		return 0
	}
	if n := cmp.Or(r.Integer("sglang_context_length"), r.Integer("vllm_max_model_len")); n > 0 {
		return n
	}
	return rollout.NoContext
}

// lastFolder returns the last folder of a path, which names a model.
func lastFolder(name *strict.Value) *strict.Value {
	path := strings.TrimRight(name.Text, "/")
	return strict.Bare(path[strings.LastIndexByte(path, '/')+1:], name.At)
}

// places says whether the engine and the trainer share GPUs, and what leaves them.
func (r *reader) places(e *rollout.Engine) error {
	shares := r.Truth("colocate")
	e.Server = !shares
	offloads := func(key string) bool {
		switch {
		case r.Truth("offload"):
			return true
		case r.Gives(key):
			return r.Truth(key)
		}
		return shares
	}
	if actors := r.Integer("actor_num_nodes") * r.Integer("actor_num_gpus_per_node"); shares &&
		r.Gives("rollout_num_gpus") && r.Integer("rollout_num_gpus") != actors {
		r.Note("rollout_num_gpus", fmt.Sprintf("is not %d, the GPUs that train: the plan is of a GPU that has both",
			actors))
	}
	if !shares && r.Gives("rollout_num_gpus") {
		r.Note("rollout_num_gpus", "has GPUs for SGLang beside those that train: the plan is of those that train")
	}
	if offloads("offload_rollout") {
		e.Sleep = 2
		if r.vllm {
			e.Sleep = 1 // release_memory_occupation
		}
	}
	if !offloads("offload_train") {
		return nil
	}
	e.Earlier = true
	// All of the trainer leaves. Buffers of parameters and gradients have no copy: TensorBackuper has the parameters.
	e.Backups = rollout.Backups{Parameters: true, Gradients: true, Optimizer: true}
	e.Dropped = rollout.Backups{Parameters: true, Gradients: true}
	if !shares {
		e.Backups, e.Dropped = rollout.Backups{}, rollout.Backups{}
		r.Note("offload_train", "is on, and SGLang has GPUs of its own: the trainer's peak is that of its own passes")
		return nil
	}
	r.Note("colocate", "moves no parameters and no gradients to the host since slime 0.3.0 (May 2026): the interval "+
		"has room for earlier releases, which do while SGLang generates. --rollout backups=all plans them, and "+
		"release=current leaves them out")
	return nil
}

// ofEngine reads an argument of SGLang or vLLM that no key has.
func (r *reader) ofEngine(m strict.Member) {
	if slices.Contains(strings.Fields(rule.Uncommented(engineIgnored)), m.Name) ||
		strings.HasPrefix(m.Name, "router_") || strings.HasPrefix(m.Name, "sglang_router_") {
		return
	}
	name := "SGLang"
	if strings.HasPrefix(m.Name, "vllm_") {
		name = "vLLM"
	}
	r.Notes = append(r.Notes, recipe.Note{Where: r.Position(m.At), What: "--" + dashed(m.Name) + " is " + name +
		"'s: planned as without it, and it may change how the engine divides its share of the GPU"})
}
