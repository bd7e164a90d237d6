package peft

import (
	"strings"
	"sync"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Rules are the keys of the adapter types that Plimsoll knows: the
// dataclasses in peft/tuners/*/config.py and peft/config.py of PEFT 0.20
// (commit 5d602fdb, August 2026). PEFT ignores unknown keys, because later
// versions add some.
var Rules = sync.OnceValue(func() map[string]strict.Rule {
	common := strict.Merge(rule.Text.For("peft_type"), rule.Boolean.For("inference_mode"),
		rule.Free.OrNull().For("auto_mapping"),
		rule.Text.OrNull().For("peft_version base_model_name_or_path revision"),
		rule.Names.OrNull().For("modules_to_save"),
		strict.Text("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION").OrNull().
			For("task_type"))
	targeted := strict.Merge(common, rule.NameOrNames.For("target_modules exclude_modules"))
	layered := strict.Keys{"layers_to_transform": rule.Count.Or(strict.List(rule.Count)).OrNull(),
		"layers_pattern": rule.NameOrNames}
	rank := rule.Size.To(1 << 16)
	lora := strict.Merge(targeted, layered,
		rule.Boolean.For("fan_in_fan_out use_rslora use_dora lora_bias ensure_weight_tying use_qalora"),
		rule.Free.OrNull().For(`megatron_config runtime_config loftq_config eva_config corda_config lora_ga_config
			velora_config monteclora_config arrow_config kasa_config use_bdlora`),
		strict.Keys{
			"r":                       rank.Default(8),
			"lora_alpha":              rule.Number.Default(8.),
			"lora_dropout":            rule.Share,
			"bias":                    strict.Text("none", "all", "lora_only").Default("none"),
			"init_lora_weights":       rule.Boolean.Or(rule.Text).Default(true),
			"rank_pattern":            strict.Map(rank).OrNull(),
			"alpha_pattern":           strict.Map(rule.Number).OrNull(),
			"trainable_token_indices": strict.List(rule.Count).Or(strict.Map(strict.List(rule.Count))).OrNull(),
			"target_parameters":       rule.Names.OrNull(),
			"layer_replication":       strict.List(strict.List(rule.Count).OfLength(2)).OrNull(),
			"megatron_core":           rule.Text.OrNull(),
			"alora_invocation_tokens": strict.List(rule.Integer).OrNull(),
			"qalora_group_size":       rule.Size,
		})
	lycoris := strict.Merge(targeted, layered, rule.Boolean.For("use_effective_conv2d"),
		rule.Share.For("rank_dropout module_dropout"), strict.Keys{
			"r":             rank.Default(8),
			"alpha":         rule.Number.Default(8.),
			"rank_pattern":  strict.Map(rank).OrNull(),
			"alpha_pattern": strict.Map(rule.Number).OrNull(),
		})
	prompt := strict.Merge(common, rule.Size.To(1<<24).OrNull().For("num_virtual_tokens token_dim"),
		rule.Size.To(2).OrNull().For("num_transformer_submodules"),
		rule.Size.OrNull().For("num_attention_heads num_layers"))
	width := rule.Size.To(1 << 24).OrNull().For("encoder_hidden_size")
	rules := map[string]strict.Rule{
		"LORA": strict.Object(lora),
		"ADALORA": strict.Object(lora, rule.Size.For("target_r deltaT"), rule.Count.For("tinit tfinal"),
			rule.Number.For("beta1 beta2"), strict.Keys{
				"init_r":          rank.Default(12),
				"orth_reg_weight": rule.Amount,
				"total_step":      rule.Size.OrNull(),
				"rank_pattern":    rule.Free.OrNull(), // training writes it: the singular values that are left
			}),
		"IA3": strict.Object(targeted, rule.Boolean.For("fan_in_fan_out init_ia3_weights"),
			rule.NameOrNames.For("feedforward_modules")),
		"VERA": strict.Object(common, layered, rule.NameOrNames.For("target_modules"),
			rule.Boolean.For("fan_in_fan_out init_weights"),
			strict.Keys{
				"r":                   rank.Default(256),
				"projection_prng_key": rule.Integer,
				"save_projection":     rule.Boolean.Default(true),
				"vera_dropout":        rule.Share,
				"d_initial":           rule.Number,
				"bias":                strict.Text("none", "all", "vera_only").Default("none"),
			}),
		"OFT": strict.Object(targeted, layered, rule.Boolean.For("fan_in_fan_out init_weights coft block_share"),
			strict.Keys{
				"r":                        rule.Count.Default(0),
				"oft_block_size":           rule.Count.Default(32),
				"module_dropout":           rule.Share,
				"bias":                     strict.Text("none", "all", "oft_only").Default("none"),
				"eps":                      rule.Number,
				"use_cayley_neumann":       rule.Boolean.Default(true),
				"num_cayley_neumann_terms": rule.Size.To(64).Default(5),
			}),
		"LN_TUNING": strict.Object(targeted, rule.NameOrNames.For("modules_to_save")),
		"LOHA":      strict.Object(lycoris, rule.Boolean.For("init_weights")),
		"LOKR": strict.Object(lycoris, rule.Boolean.For("decompose_both rank_dropout_scale"), strict.Keys{
			"decompose_factor": rule.Integer.Default(-1),
			"init_weights":     rule.Boolean.Or(strict.Text("lycoris")),
		}),
		"MISS": strict.Object(targeted, layered, strict.Keys{
			"r":            rank.Default(64),
			"mini_r":       rank.Default(1),
			"miss_dropout": rule.Share,
			"bias":         strict.Text("none", "all", "MiSS_only").Default("none"),
			"init_weights": rule.Boolean.Or(strict.Text("bat", "mini")).Default(true),
		}),
		"PROMPT_TUNING": strict.Object(prompt, rule.Text.OrNull().For("prompt_tuning_init_text tokenizer_name_or_path"),
			strict.Keys{
				"prompt_tuning_init": strict.Text("TEXT", "SAMPLE_VOCAB", "RANDOM"),
				"tokenizer_kwargs":   rule.Free.OrNull(),
			}),
		"PREFIX_TUNING": strict.Object(prompt, width,
			rule.Boolean.For("prefix_projection"), strict.Text("zero").OrNull().For("init_weights")),
		"P_TUNING": strict.Object(prompt, width, strict.Keys{
			"encoder_reparameterization_type": strict.Text("MLP", "LSTM").Default("MLP"),
			"encoder_num_layers":              rule.Size.To(1 << 12),
			"encoder_dropout":                 rule.Share,
		}),
	}
	for name, rule := range rules {
		rules[name] = rule.NotingOthers()
	}
	return rules
})

// unplannedAdapters are the other members of PeftType.
var unplannedAdapters = strings.Fields(`MULTITASK_PROMPT_TUNING ADAMSS BOFT ADAPTION_PROMPT BEFT LILY POLY FROD PVERA FOURIERFT
	GLORA XLORA HRA VBLORA UNILORA CPT BONE RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA
	PSOFT PEANUT SUPERTUNING DEFT`)
