package recipe

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// sameShape are keys of a config.json for arguments of Megatron-LM (mcore_bridge/config/parser.py and mbridge/models of
// August 2026, and CONFIG_MAPPING of Megatron-Bridge).
const sameShape = `num_hidden_layers=num_layers hidden_size=hidden_size intermediate_size=ffn_hidden_size
	num_attention_heads=num_attention_heads head_dim=kv_channels vocab_size=vocab_size
	moe_intermediate_size=moe_ffn_hidden_size shared_expert_intermediate_size=moe_shared_expert_intermediate_size
	num_experts_per_tok=moe_router_topk num_experts=num_experts n_routed_experts=num_experts
	num_local_experts=num_experts
	q_lora_rank=q_lora_rank kv_lora_rank=kv_lora_rank qk_nope_head_dim=qk_head_dim
	qk_rope_head_dim=qk_pos_emb_head_dim v_head_dim=v_head_dim`

// CoreShape is what a model_type says that its config.json leaves open.
type CoreShape struct {
	qkvBias, qkNorm, sharedGate, latent bool
}

// coreShapes are the models whose layers are those of Megatron-LM.
var coreShapes = map[string]CoreShape{
	"llama": {}, "mistral": {}, "mixtral": {}, "glm4_moe": {}, "qwen2": {qkvBias: true}, "qwen3": {qkNorm: true},
	"qwen2_moe": {qkvBias: true, sharedGate: true}, "qwen3_moe": {qkNorm: true},
	"deepseek_v2": {qkNorm: true, latent: true}, "deepseek_v3": {qkNorm: true, latent: true},
}

// CoreTypes are the types of models whose layers are planned in Megatron core, for messages.
const CoreTypes = "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v2, deepseek_v3 and " +
	"glm4_moe"

// CoreShapeOf returns the shape of a type of models whose layers are those of Megatron-LM.
func CoreShapeOf(modelType string) (CoreShape, bool) {
	of, is := coreShapes[modelType]
	return of, is
}

// Arguments gives an object of arguments the sizes of a config.json, and what its type has.
func (of CoreShape) Arguments(made, config *strict.Value, at int64) {
	give := func(argument string, is *strict.Value) { Give(made, argument, at, is) }
	for pair := range strings.FieldsSeq(sameShape) {
		key, argument, _ := strings.Cut(pair, "=")
		if v := config.Member(key); v != nil && v.Value.Kind == '0' {
			give(argument, strict.Bare(v.Value.Text, at))
		}
	}
	on := func(key string, usual bool) bool {
		if v := config.Member(key); v != nil && v.Value.Kind != 'n' {
			return On(v.Value)
		}
		return usual
	}
	for argument, is := range map[string]bool{"swiglu": true, "disable_bias_linear": !on("mlp_bias", false),
		"add_qkv_bias":                        on("attention_bias", on("qkv_bias", of.qkvBias)),
		"untie_embeddings_and_output_weights": !on("tie_word_embeddings", false),
		"qk_layernorm":                        on("use_qk_norm", of.qkNorm),
		"moe_shared_expert_gate":              of.sharedGate, "multi_latent_attention": of.latent} {
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
}

// CoreLayers gives an object of arguments which layers are mixtures, and their shared experts.
func CoreLayers(made, config *strict.Value, at int64) error {
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
		return errors.New("the model has dense layers among its mixtures by mlp_only_layers or decoder_sparse_step, " +
			"which bridges to Megatron core do not read")
	}
	if dense := number("first_k_dense_replace", 0); dense > 0 {
		Give(made, "moe_layer_freq", at, strict.Of(fmt.Sprintf("([0]*%d+[1]*%d)", dense,
			number("num_hidden_layers", 0)-dense)))
	}
	const width = "moe_shared_expert_intermediate_size"
	if shared := number("n_shared_experts", 0); shared > 0 && made.Member(width) == nil {
		Give(made, width, at, strict.Of(int(shared*number("moe_intermediate_size", 0))))
	}
	return nil
}
