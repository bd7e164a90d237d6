package axolotl

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// attention reads the attention.
func (r *reader) attention() error {
	const key = "attn_implementation"
	casts := true // to the type of the other weights, after norms and embeddings have been converted to fp32
	switch name := r.Word(key); {
	case name == "xformers" || r.Truth("xformers_attention"):
		r.takenForSDPA("xformers' attention", "")
	case name == "flex_attention" || r.Truth("flex_attention"):
		r.takenForSDPA("flex attention", "; the mask of its blocks comes on top")
	case r.Gives(key):
		if err := r.ReadAttention(key); err != nil {
			return err
		}
		casts = name != "sdpa" && name != "eager"
	case r.Truth("flash_attention"):
		r.To.Attention = "flash"
	case r.Truth("sdp_attention"):
		r.To.Attention, casts = "sdpa", false
	case r.Truth("eager_attention"):
		r.To.Attention, casts = "eager", false
	default:
		casts = false
	}
	if casts || r.Gives("adapter") || r.To.Weights == "fp32" || r.Find("fsdp_config") != nil ||
		r.Find("deepspeed") != nil || recipe.On(r.Find("cut_cross_entropy")) || r.pluginNamed("CutCrossEntropyPlugin") {
		return nil
	}
	if r.Compute() == "" {
		return r.Fault("base_model", "is trained in full without flash attention and without autocast: axolotl then "+
			"keeps norms and embeddings in fp32, which its other weights cannot be multiplied with",
			"set bf16 to true, or add attn_implementation: flash_attention_2")
	}
	r.To.WidensNorms = true
	r.Note("base_model", "is trained in full without flash attention: axolotl keeps norms, embeddings and the head in "+
		"fp32")
	return nil
}

// takenForSDPA notes an attention that saves what SDPA saves.
func (r *reader) takenForSDPA(name, but string) {
	r.To.Attention = "sdpa"
	r.Notes = append(r.Notes, recipe.Note{Where: r.Place("base_model"),
		What: name + " is planned as sdpa, which saves the same for the backward pass" + but})
}

// checkpoint reads what the backward pass recomputes, and what waits for it on the host.
func (r *reader) checkpoint() error {
	const key, offloading = "gradient_checkpointing", "activation_offloading"
	v, mode, from := r.Find(key), r.Find(offloading), offloading
	if v != nil && strings.HasPrefix(v.Text, "offload") { // older words: schemas/validation.py
		mode, from = strict.Of(true), key
	}
	if recipe.On(mode) && !recipe.On(v) {
		return r.Fault(offloading, fmt.Sprintf("is %s, but axolotl needs gradient_checkpointing with it", mode),
			"add gradient_checkpointing: true")
	}
	kwargs := r.Find(key + "_kwargs")
	if kwargs == nil {
		kwargs = &strict.Value{Kind: '{'} // normalize_config in utils/config/__init__.py
		recipe.Give(kwargs, "use_reentrant", r.At(key), strict.Of(!recipe.On(r.Find("unfrozen_parameters")) &&
			!(recipe.On(mode) && mode.Text == "hidden_states")))
	}
	if recipe.On(mode) {
		if kwargs = r.offload(mode, kwargs); kwargs == nil {
			return r.Fault(from, fmt.Sprintf("is %s with reentrant checkpointing or torch.compile, which is not "+
				"planned yet", mode), "set use_reentrant to false, and torch_compile, too")
		}
	}
	r.Set(key, key, recipe.On(v) && (r.To.Offloading == nil || r.To.Offloading.InputsOnly || !r.Gives("adapter")))
	recipe.Give(r.Arguments, key+"_kwargs", r.At(key), kwargs)
	return nil
}

// offload reads how activations go to the host, and returns the arguments of checkpoints, nil if that is not
// planned: ActivationOffloadingMixin in core/trainers/mixins, and _configure_gradient_checkpointing in
// core/builders/base.py. An adapter's training recomputes nothing then, and other trainings wrap every block.
func (r *reader) offload(mode, kwargs *strict.Value) *strict.Value {
	r.To.Offloading = recipe.NewOffloading()
	r.To.Offloading.Weights = r.Gives("adapter") // get_lora_act_offloading_ctx_manager knows no parameters
	reentrant := kwargs.Find("use_reentrant")
	switch {
	case r.Truth("torch_compile"):
		return nil
	case mode.Text == "hidden_states":
		r.To.Offloading.InputsOnly, r.To.Offloading.Stash = true, 2
		if reentrant != nil && recipe.On(reentrant) {
			return nil
		}
	case mode.Text == "legacy":
		r.To.Offloading.Streams = false
	}
	kwargs = &strict.Value{Kind: '{'}
	recipe.Give(kwargs, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(false))
	return kwargs
}
