// Package bridge makes arguments of Megatron-LM of a model's config.json, as the programs do that load models of the
// Hugging Face hub into Megatron core: mcore-bridge of ms-swift, and mbridge and Megatron-Bridge of verl.
package bridge

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// sameShape are keys of a config.json for arguments of Megatron-LM (mcore_bridge/config/parser.py and mbridge/models of
// August 2026).
const sameShape = `num_hidden_layers=num_layers hidden_size=hidden_size intermediate_size=ffn_hidden_size
	num_attention_heads=num_attention_heads head_dim=kv_channels vocab_size=vocab_size
	moe_intermediate_size=moe_ffn_hidden_size shared_expert_intermediate_size=moe_shared_expert_intermediate_size
	num_experts_per_tok=moe_router_topk num_experts=num_experts n_routed_experts=num_experts
	q_lora_rank=q_lora_rank kv_lora_rank=kv_lora_rank qk_nope_head_dim=qk_head_dim
	qk_rope_head_dim=qk_pos_emb_head_dim v_head_dim=v_head_dim`

// shape is what a model_type says that its config.json leaves open.
type shape struct {
	qkvBias, qkNorm, sharedGate, latent bool
}

// shapes are the models whose layers are those of Megatron-LM.
var shapes = map[string]shape{
	"llama": {}, "qwen2": {qkvBias: true}, "qwen3": {qkNorm: true}, "qwen3_moe": {qkNorm: true},
	"qwen2_moe": {qkvBias: true, sharedGate: true}, "deepseek_v3": {qkNorm: true, latent: true},
}

// Planned names the types of models that are planned.
const Planned = "llama, qwen2, qwen2_moe, qwen3, qwen3_moe and deepseek_v3"

// Sizes gives the sizes of the model that a value names to arguments of Megatron-LM, and returns its config.json.
func Sizes(d *strict.Document, made, name *strict.Value) (*strict.Value, error) {
	config, err := model.Described(name.Text)
	if err != nil {
		return nil, d.Inputf(name.At, "model is %s: %v", name, err).
			WithHint("name a model of the catalog (plimsoll models), or the path of its config.json")
	}
	kind := config.Root.Member("model_type")
	if kind == nil {
		return nil, d.Inputf(name.At, "model is %s, whose config.json has no model_type", name)
	}
	of, is := shapes[kind.Value.Text]
	if !is {
		return nil, d.Inputf(name.At, "model is %s, of type %s, whose layers are not planned in Megatron core yet",
			name, kind.Value.Text).WithHint("plimsoll plans " + Planned)
	}
	of.sizes(made, config.Root, name.At)
	return config.Root, layers(d, made, config.Root, name.At)
}

// sizes gives the sizes of a config.json, and what its type has.
func (of shape) sizes(made, config *strict.Value, at int64) {
	give := func(argument string, is *strict.Value) { recipe.Give(made, argument, at, is) }
	for pair := range strings.FieldsSeq(sameShape) {
		key, argument, _ := strings.Cut(pair, "=")
		if v := config.Member(key); v != nil && v.Value.Kind == '0' {
			give(argument, strict.Bare(v.Value.Text, at))
		}
	}
	on := func(key string, usual bool) bool {
		if v := config.Member(key); v != nil && v.Value.Kind != 'n' {
			return recipe.On(v.Value)
		}
		return usual
	}
	for argument, is := range map[string]bool{"swiglu": true, "disable_bias_linear": !on("mlp_bias", false),
		"add_qkv_bias":                        on("attention_bias", on("qkv_bias", of.qkvBias)),
		"untie_embeddings_and_output_weights": !on("tie_word_embeddings", false), "qk_layernorm": of.qkNorm,
		"moe_shared_expert_gate": of.sharedGate, "multi_latent_attention": of.latent} {
		if is {
			give(argument, strict.Of(true))
		}
	}
	if groups := config.Member("num_key_value_heads"); groups != nil && !of.latent {
		give("group_query_attention", strict.Of(true))
		give("num_query_groups", strict.Bare(groups.Value.Text, at))
	}
	give("position_embedding_type", strict.Of("rope"))
	give("normalization", strict.Of("RMSNorm"))
	give("hidden_dropout", strict.Of(0))
	give("attention_dropout", strict.Of(0))
	give("make_vocab_size_divisible_by", strict.Of(1))
	if length := made.Member("seq_length"); length != nil {
		give("max_position_embeddings", length.Value) // of no rotary embedding's size
	}
}

// layers gives which layers are mixtures, and their shared experts.
func layers(d *strict.Document, made, config *strict.Value, at int64) error {
	number := func(key string, usual int64) int64 {
		if v := config.Member(key); v != nil && v.Value.Kind == '0' {
			if n, err := strconv.ParseInt(v.Value.Text, 10, 64); err == nil {
				return n
			}
		}
		return usual
	}
	v := config.Member("mlp_only_layers")
	if v != nil && len(v.Value.Elements) > 0 || number("decoder_sparse_step", 1) > 1 {
		return d.Inputf(at, "the model has dense layers among its mixtures by mlp_only_layers or decoder_sparse_step, "+
			"which bridges to Megatron core do not read").WithHint("they would make all layers mixtures")
	}
	if dense := number("first_k_dense_replace", 0); dense > 0 {
		recipe.Give(made, "moe_layer_freq", at, strict.Of(fmt.Sprintf("([0]*%d+[1]*%d)", dense,
			number("num_hidden_layers", 0)-dense)))
	}
	const width = "moe_shared_expert_intermediate_size"
	if shared := number("n_shared_experts", 0); shared > 0 && made.Member(width) == nil {
		recipe.Give(made, width, at, strict.Of(int(shared*number("moe_intermediate_size", 0))))
	}
	return nil
}
