package swift

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// sameShape are keys of a config.json for arguments of Megatron-LM (mcore_bridge/config/parser.py of August 2026).
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

// model gives the sizes of the model, which ms-swift reads in its config.json.
func (m *megatronReader) model() error {
	name := m.find("model")
	if name == nil {
		return m.Inputf(m.Root.At, "model is not given: its config.json says the sizes of the model").
			WithHint("add --model with a name of the catalog or the path of a config.json")
	}
	config, err := model.Described(name.Text)
	if err != nil {
		return m.Inputf(name.At, "model is %s: %v", name, err).
			WithHint("name a model of the catalog (plimsoll models), or the path of its config.json")
	}
	kind := config.Root.Member("model_type")
	if kind == nil {
		return m.Inputf(name.At, "model is %s, whose config.json has no model_type", name)
	}
	of, is := shapes[kind.Value.Text]
	if !is {
		return m.Inputf(name.At, "model is %s, of type %s, whose layers are not planned in Megatron core yet", name,
			kind.Value.Text).WithHint("plimsoll plans llama, qwen2, qwen2_moe, qwen3, qwen3_moe and deepseek_v3")
	}
	if of.sizes(m, config.Root, name.At); config.Root.Member("quantization_config") != nil {
		m.note(name.At, "the weights of %s are quantized, and are made 16 bits while they load", name.Text)
	}
	return m.layers(config.Root, name.At)
}

// sizes gives the sizes of a config.json, and what its type has.
func (of shape) sizes(m *megatronReader, config *strict.Value, at int64) {
	give := func(argument string, is *strict.Value) { recipe.Give(m.made, argument, at, is) }
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
	give("max_position_embeddings", m.made.Member("seq_length").Value) // of no rotary embedding's size
	m.types(config, at)
}

// types gives the type of the weights: what the command says, or the config.json.
func (m *megatronReader) types(config *strict.Value, at int64) {
	said := ""
	for _, key := range []string{"dtype", "torch_dtype"} {
		if v := config.Member(key); v != nil {
			said = v.Value.Text
		}
	}
	if v := m.find("torch_dtype"); v != nil {
		said = v.Text
	}
	is := "bf16"
	if said == "float16" || said == "float32" {
		is = "fp16"
	}
	if said == "" {
		m.note(at, "bf16 weights: neither torch_dtype nor the config.json says their type")
	}
	for _, key := range []string{"fp16", "bf16"} {
		if m.isOn(key) {
			is = key
		}
	}
	m.give(is, is, true)
}

// layers gives which layers are mixtures, and their shared experts.
func (m *megatronReader) layers(config *strict.Value, at int64) error {
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
		return m.Inputf(at, "the model has dense layers among its mixtures by mlp_only_layers or decoder_sparse_step, "+
			"which mcore-bridge does not read").WithHint("ms-swift would make all layers mixtures")
	}
	if dense := number("first_k_dense_replace", 0); dense > 0 {
		recipe.Give(m.made, "moe_layer_freq", at, strict.Of(fmt.Sprintf("([0]*%d+[1]*%d)", dense,
			number("num_hidden_layers", 0)-dense)))
	}
	const width = "moe_shared_expert_intermediate_size"
	if shared := number("n_shared_experts", 0); shared > 0 && m.made.Member(width) == nil {
		recipe.Give(m.made, width, at, strict.Of(int(shared*number("moe_intermediate_size", 0))))
	}
	return nil
}
