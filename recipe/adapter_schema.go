package recipe

import (
	"maps"
	"strings"
)

// adapterSchemas lists the keys of the adapter types that Plimsoll plans: the
// dataclasses in peft/tuners/*/config.py and peft/config.py of PEFT 0.20
// (commit 5d602fdb, August 2026). PEFT ignores unknown keys, because later
// versions add some.
var adapterSchemas = func() map[string]map[string]rule {
	modules := isText().or(isList(isText())).orNull()
	names := isList(isText()).orNull()
	free := isFree().orNull()
	common := map[string]rule{
		"peft_type":               isText(),
		"peft_version":            isText().orNull(),
		"auto_mapping":            free,
		"base_model_name_or_path": isText().orNull(),
		"revision":                isText().orNull(),
		"inference_mode":          isBoolean(),
		"task_type": isText(
			"SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION").orNull(),
		"modules_to_save": names,
	}
	targeted := with(common, map[string]rule{"target_modules": modules, "exclude_modules": modules})
	layered := map[string]rule{
		"layers_to_transform": isInteger().from(0).or(isList(isInteger().from(0))).orNull(),
		"layers_pattern":      modules,
	}
	lora := with(targeted, layered, map[string]rule{
		"r":                       isInteger().from(1).to(1 << 16),
		"lora_alpha":              isNumber(),
		"lora_dropout":            isNumber().from(0).to(1),
		"fan_in_fan_out":          isBoolean(),
		"bias":                    isText("none", "all", "lora_only"),
		"use_rslora":              isBoolean(),
		"use_dora":                isBoolean(),
		"lora_bias":               isBoolean(),
		"ensure_weight_tying":     isBoolean(),
		"init_lora_weights":       isBoolean().or(isText()),
		"rank_pattern":            isEach(isInteger().from(1).to(1 << 16)).orNull(),
		"alpha_pattern":           isEach(isNumber()).orNull(),
		"trainable_token_indices": isList(isInteger().from(0)).or(isEach(isList(isInteger().from(0)))).orNull(),
		"target_parameters":       names,
		"layer_replication":       isList(isList(isInteger().from(0)).ofLength(2)).orNull(),
		"megatron_config":         free,
		"megatron_core":           isText().orNull(),
		"runtime_config":          free,
		"loftq_config":            free,
		"eva_config":              free,
		"corda_config":            free,
		"lora_ga_config":          free,
		"velora_config":           free,
		"monteclora_config":       free,
		"arrow_config":            free,
		"kasa_config":             free,
		"use_bdlora":              free,
		"alora_invocation_tokens": isList(isInteger()).orNull(),
		"use_qalora":              isBoolean(),
		"qalora_group_size":       isInteger().from(1),
	})
	prompt := with(common, map[string]rule{
		"num_virtual_tokens":         isInteger().from(1).to(1 << 24).orNull(),
		"token_dim":                  isInteger().from(1).to(1 << 24).orNull(),
		"num_transformer_submodules": isInteger().from(1).to(2).orNull(),
		"num_attention_heads":        isInteger().from(1).orNull(),
		"num_layers":                 isInteger().from(1).orNull(),
	})
	width := map[string]rule{"encoder_hidden_size": isInteger().from(1).to(1 << 24).orNull()}
	return map[string]map[string]rule{
		"LORA": lora,
		"ADALORA": with(lora, map[string]rule{
			"target_r":        isInteger().from(1),
			"init_r":          isInteger().from(1).to(1 << 16),
			"tinit":           isInteger().from(0),
			"tfinal":          isInteger().from(0),
			"deltaT":          isInteger().from(1),
			"beta1":           isNumber(),
			"beta2":           isNumber(),
			"orth_reg_weight": isNumber().from(0),
			"total_step":      isInteger().from(1).orNull(),
			"rank_pattern":    free, // training writes it: the singular values that are left
		}),
		"IA3": with(targeted, map[string]rule{
			"feedforward_modules": modules,
			"fan_in_fan_out":      isBoolean(),
			"init_ia3_weights":    isBoolean(),
		}),
		"VERA": with(common, layered, map[string]rule{
			"target_modules":      modules,
			"r":                   isInteger().from(1).to(1 << 16),
			"projection_prng_key": isInteger(),
			"save_projection":     isBoolean(),
			"vera_dropout":        isNumber().from(0).to(1),
			"d_initial":           isNumber(),
			"fan_in_fan_out":      isBoolean(),
			"bias":                isText("none", "all", "vera_only"),
			"init_weights":        isBoolean(),
		}),
		"LN_TUNING": with(targeted, map[string]rule{"modules_to_save": modules}),
		"PROMPT_TUNING": with(prompt, map[string]rule{
			"prompt_tuning_init":      isText("TEXT", "SAMPLE_VOCAB", "RANDOM"),
			"prompt_tuning_init_text": isText().orNull(),
			"tokenizer_name_or_path":  isText().orNull(),
			"tokenizer_kwargs":        free,
		}),
		"PREFIX_TUNING": with(prompt, width,
			map[string]rule{"prefix_projection": isBoolean(), "init_weights": isText("zero").orNull()}),
		"P_TUNING": with(prompt, width, map[string]rule{
			"encoder_reparameterization_type": isText("MLP", "LSTM"),
			"encoder_num_layers":              isInteger().from(1).to(1 << 12),
			"encoder_dropout":                 isNumber().from(0).to(1),
		}),
	}
}()

// with returns the keys of all maps. Later maps override earlier ones.
func with(lists ...map[string]rule) map[string]rule {
	keys := map[string]rule{}
	for _, list := range lists {
		maps.Copy(keys, list)
	}
	return keys
}

// unplannedAdapters are the other members of PeftType.
var unplannedAdapters = strings.Fields(`MULTITASK_PROMPT_TUNING ADAMSS BOFT ADAPTION_PROMPT BEFT LILY LOHA LOKR OFT POLY FROD PVERA FOURIERFT
	GLORA XLORA HRA VBLORA UNILORA CPT BONE MISS RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA
	PSOFT PEANUT SUPERTUNING DEFT`)
