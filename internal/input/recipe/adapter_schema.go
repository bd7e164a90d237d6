package recipe

import (
	"strings"
	"sync"

	"plimsoll/internal/input/recipe/strict"
)

// adapterRules are the keys of the adapter types that Plimsoll knows: the
// dataclasses in peft/tuners/*/config.py and peft/config.py of PEFT 0.20
// (commit 5d602fdb, August 2026). PEFT ignores unknown keys, because later
// versions add some.
var adapterRules = sync.OnceValue(func() map[string]strict.Rule {
	common := strict.Merge(text.For("peft_type"), boolean.For("inference_mode"), free.OrNull().For("auto_mapping"),
		text.OrNull().For("peft_version base_model_name_or_path revision"), names.OrNull().For("modules_to_save"),
		oneOf("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION").OrNull().
			For("task_type"))
	targeted := strict.Merge(common, NameOrNames.For("target_modules exclude_modules"))
	layered := keys{"layers_to_transform": count.Or(list(count)).OrNull(), "layers_pattern": NameOrNames}
	rank := size.To(1 << 16)
	lora := strict.Merge(targeted, layered,
		boolean.For("fan_in_fan_out use_rslora use_dora lora_bias ensure_weight_tying use_qalora"),
		free.OrNull().For(`megatron_config runtime_config loftq_config eva_config corda_config lora_ga_config
			velora_config monteclora_config arrow_config kasa_config use_bdlora`),
		keys{
			"r":                       rank.Default(8),
			"lora_alpha":              number.Default(8.),
			"lora_dropout":            share,
			"bias":                    oneOf("none", "all", "lora_only").Default("none"),
			"init_lora_weights":       boolean.Or(text).Default(true),
			"rank_pattern":            strict.Map(rank).OrNull(),
			"alpha_pattern":           strict.Map(number).OrNull(),
			"trainable_token_indices": list(count).Or(strict.Map(list(count))).OrNull(),
			"target_parameters":       names.OrNull(),
			"layer_replication":       list(list(count).OfLength(2)).OrNull(),
			"megatron_core":           text.OrNull(),
			"alora_invocation_tokens": list(integer).OrNull(),
			"qalora_group_size":       size,
		})
	prompt := strict.Merge(common, size.To(1<<24).OrNull().For("num_virtual_tokens token_dim"),
		size.To(2).OrNull().For("num_transformer_submodules"), size.OrNull().For("num_attention_heads num_layers"))
	width := size.To(1 << 24).OrNull().For("encoder_hidden_size")
	rules := map[string]strict.Rule{
		"LORA": object(lora),
		"ADALORA": object(lora, size.For("target_r deltaT"), count.For("tinit tfinal"), number.For("beta1 beta2"), keys{
			"init_r":          rank.Default(12),
			"orth_reg_weight": amount,
			"total_step":      size.OrNull(),
			"rank_pattern":    free.OrNull(), // training writes it: the singular values that are left
		}),
		"IA3": object(targeted, boolean.For("fan_in_fan_out init_ia3_weights"), NameOrNames.For("feedforward_modules")),
		"VERA": object(common, layered, NameOrNames.For("target_modules"), boolean.For("fan_in_fan_out init_weights"),
			keys{
				"r":                   rank.Default(256),
				"projection_prng_key": integer,
				"save_projection":     boolean.Default(true),
				"vera_dropout":        share,
				"d_initial":           number,
				"bias":                oneOf("none", "all", "vera_only").Default("none"),
			}),
		"OFT": object(targeted, layered, boolean.For("fan_in_fan_out init_weights coft block_share"), keys{
			"r":                        count.Default(0),
			"oft_block_size":           count.Default(32),
			"module_dropout":           share,
			"bias":                     oneOf("none", "all", "oft_only").Default("none"),
			"eps":                      number,
			"use_cayley_neumann":       boolean.Default(true),
			"num_cayley_neumann_terms": size.To(64).Default(5),
		}),
		"LN_TUNING": object(targeted, NameOrNames.For("modules_to_save")),
		"PROMPT_TUNING": object(prompt, text.OrNull().For("prompt_tuning_init_text tokenizer_name_or_path"), keys{
			"prompt_tuning_init": oneOf("TEXT", "SAMPLE_VOCAB", "RANDOM"),
			"tokenizer_kwargs":   free.OrNull(),
		}),
		"PREFIX_TUNING": object(prompt, width,
			boolean.For("prefix_projection"), oneOf("zero").OrNull().For("init_weights")),
		"P_TUNING": object(prompt, width, keys{
			"encoder_reparameterization_type": oneOf("MLP", "LSTM"),
			"encoder_num_layers":              size.To(1 << 12),
			"encoder_dropout":                 share,
		}),
	}
	for name, rule := range rules {
		rules[name] = rule.NotingOthers()
	}
	return rules
})

// unplannedAdapters are the other members of PeftType.
var unplannedAdapters = strings.Fields(`MULTITASK_PROMPT_TUNING ADAMSS BOFT ADAPTION_PROMPT BEFT LILY LOHA LOKR POLY FROD PVERA FOURIERFT
	GLORA XLORA HRA VBLORA UNILORA CPT BONE MISS RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA
	PSOFT PEANUT SUPERTUNING DEFT`)
