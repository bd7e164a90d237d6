package axolotl

import (
	"fmt"

	"plimsoll/internal/input/recipe"
)

// otherAttention says that layers have attention of another kind than the plan's.
const otherAttention = "has other kernels of attention for some layers, which may keep other tensors than planned"

// remarks notes keys that change memory in a way that the plan leaves out.
func (r *reader) remarks() {
	for _, n := range []struct{ key, says string }{
		{"use_kernels", "replaces modules by kernels of the hub, which may keep less than the plan says"},
		{"embeddings_skip_upcast", "leaves embeddings as they are loaded, which takes less than the plan says"},
		{"qlora_sharded_model_loading", "has ranks load parts of the model: the host takes less than the plan says"},
		{"gc_steps", "empties PyTorch's cache between steps: less may be reserved than the plan says"},
		{"gc_collect_steps", "empties PyTorch's cache between steps: less may be reserved than the plan says"},
		{"do_causal_lm_eval", "has evaluation generate, which is not planned"},
		{"do_bench_eval", "has evaluation run a benchmark, which is not planned"},
		{"eval_table_size", "has evaluation generate, which is not planned"},
		{"ple_cpu_offload", "keeps embeddings of the layers on the host, which takes less of the GPU than planned"},
		{"overrides_of_model_kwargs", "is deprecated, and may change how the model is loaded, which is not planned"},
		{"type_of_model", "is deprecated: use model_type"},
		{"image_size", "is the size of images: --image-size says that of the plan"},
		{"processor_kwargs", "may change the size of images: --image-size says that of the plan"},
		{"flash_attn_d512", otherAttention}, {"large_head_attention", otherAttention},
		{"gemma4_hybrid_attn_impl", otherAttention}, {"sdpa_varlen", otherAttention},
		{"fused_attn_kernel", "has kernels of attention that keep less for the backward pass than the plan says"},
		{"noisy_embedding_alpha", "is deprecated: use neftune_noise_alpha"},
		{"fp8_config", "is read only beside fp8"},
	} {
		if recipe.On(r.Find(n.key)) {
			r.Note(n.key, n.says)
		}
	}
	if n, has := r.Integer("eval_sequence_len"), r.Integer("sequence_len"); n > has {
		r.Note("eval_sequence_len", fmt.Sprintf("is %d where training has %d: evaluation is planned with the latter", n,
			has))
	}
	if v := r.Find("overrides_of_model_config"); v != nil {
		for _, m := range v.Members {
			if m.Name != "output_router_logits" {
				r.Note("overrides_of_model_config", fmt.Sprintf("has %s: the plan is for the model as its own "+
					"configuration says", m.Name))
			}
		}
	}
	r.kernelsOfLoRA()
}

// kernelsOfLoRA notes the kernels that axolotl uses by itself: check_auto_enable_lora_kernels in
// utils/schemas/config.py, in 0.12.2 and later, and not in 0.8.1.
func (r *reader) kernelsOfLoRA() {
	given := r.Gives("lora_mlp_kernel") || r.Gives("lora_qkv_kernel") || r.Gives("lora_o_kernel")
	eight := r.Truth("load_in_8bit") && r.Word("adapter") == "lora"
	if r.Word("adapter") != "" && r.Since(0, 12) && !given && !eight && !recipe.On(r.Find("rl")) &&
		!recipe.On(r.Find("trust_remote_code")) {
		r.Note("adapter", "is given: axolotl uses its kernels for LoRA where it can, which keep less for the backward "+
			"pass than the plan says")
	}
}

// placement refuses to spread the model over the GPUs of one process.
func (r *reader) placement() error {
	v := r.Find("device_map")
	if !recipe.On(v) || v.Kind == '"' && v.Text != "auto" && v.Text != "balanced" && v.Text != "sequential" ||
		v.Kind == '{' && len(v.Members) == 1 {
		return nil
	}
	return r.Fault("device_map", "spreads the model over the GPUs of one process, which is not planned",
		"remove it: each rank then has the model on its GPU")
}
