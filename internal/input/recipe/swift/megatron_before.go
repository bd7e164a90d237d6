package swift

import (
	_ "embed"
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// The releases 3 of ms-swift had other arguments of its megatron commands, which were those of Megatron-LM: --load for
// the folder that 'swift export --to_mcore' has made, --train_type, --save, and other defaults. A command with one of
// them is read as one of these releases.

//go:embed megatron_ignored_3.txt
var ignoredBefore string

// renamedBefore are the arguments that have another name now.
var renamedBefore = map[string]string{"train_type": "tuner_type", "load": "model", "adapter_load": "adapters",
	"ref_adapter_load": "ref_adapters", "ref_load": "ref_model", "extra_megatron_kwargs": "megatron_extra_kwargs",
	"ckpt_dir": "adapters", "seq_length": "packing_length"}

// passedBefore are arguments of Megatron-LM that have no other name now.
var passedBefore = strings.Fields(`num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
	microbatch_group_size_per_virtual_pipeline_stage no_gradient_accumulation_fusion no_bias_swiglu_fusion
	no_bias_dropout_fusion no_rope_fusion no_masked_softmax_fusion deterministic_mode transformer_impl`)

// shapedBefore are arguments that go before the sizes of the model's config.json.
var shapedBefore = strings.Fields(`activation_func_clamp_value add_qkv_bias attention_dropout disable_bias_linear
	ffn_hidden_size glu_linear_offset group_query_attention hidden_dropout hidden_size kv_channels kv_lora_rank
	layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
	linear_value_head_dim max_position_embeddings moe_apply_probs_on_input moe_ffn_hidden_size moe_layer_freq
	moe_router_bias_update_rate moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups
	moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_scaling_factor
	moe_shared_expert_intermediate_size mrope_interleaved mrope_section multi_latent_attention no_rope_freq
	norm_epsilon normalization num_attention_heads num_experts num_layers num_query_groups
	original_max_position_embeddings padded_vocab_size partial_rotary_factor position_embedding_type q_lora_rank
	qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quick_geglu rotary_base rotary_interleaved rotary_percent
	softmax_type swiglu untie_embeddings_and_output_weights use_shared_expert_gate window_attn_skip_freq window_size`)

// converted matches the end of the name of a folder with a model that was converted to Megatron core.
var converted = lazyregexp.New(`(?i)[-_]mcore/?$`)

// before reads a command of a release 3: it gives its arguments the names of today, and its defaults.
func (m *megatronReader) before() error {
	ignored := strings.Fields(rule.Uncommented(ignoredBefore))
	isBefore := func(name string) bool {
		return renamedBefore[name] != "" && name != "seq_length" && name != "ref_model" ||
			slices.Contains(ignored, name) || slices.Contains(passedBefore, name) || slices.Contains(shapedBefore, name)
	}
	i := slices.IndexFunc(m.Root.Members, func(member strict.Member) bool { return isBefore(member.Name) })
	if i < 0 {
		return nil
	}
	first := m.Root.Members[i]
	m.note(first.At, "%s is an argument of ms-swift's releases 3, and of no later one: the command is planned as one "+
		"of theirs", first.Name)
	m.release3 = true
	var kept []strict.Member
	for _, member := range m.Root.Members {
		switch now := renamedBefore[member.Name]; {
		case slices.Contains(shapedBefore, member.Name):
			return m.Inputf(member.At, "%s is %s: it goes before the config.json of the model, which is not planned "+
				"yet", member.Name, member.Value).WithHint("leave it out: ms-swift takes it from the model")
		case slices.Contains(passedBefore, member.Name):
			m.made.Members = append(m.made.Members, member)
		case member.Name == "load" && m.Root.Member("model") != nil, slices.Contains(ignored, member.Name):
		case now != "":
			member.Name = now
			if now == "model" && member.Value.Kind == '"' {
				folder := *member.Value
				folder.Text = converted.ReplaceAllString(folder.Text, "")
				member.Value = &folder
			}
			kept = append(kept, member)
		default:
			kept = append(kept, member)
		}
	}
	m.Root = &strict.Value{Kind: m.Root.Kind, At: m.Root.At, Members: kept}
	m.defaultsBefore(first)
	return nil
}

// defaultsBefore gives what was off by default in the releases 3. That of grouped products came on with 3.12, which
// loads and saves safetensors.
func (m *megatronReader) defaultsBefore(first strict.Member) {
	off := []string{"cross_entropy_loss_fusion"}
	if m.find("save_safetensors") == nil && first.Name != "load_safetensors" {
		off = append(off, "moe_grouped_gemm", "save_safetensors")
	}
	for _, key := range off {
		if m.find(key) == nil {
			is := strict.Of(false)
			is.At = m.Root.At
			m.Root.Members = append(m.Root.Members, strict.Member{Name: key, At: m.Root.At, Value: is})
		}
	}
}
