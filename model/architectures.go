package model

import "slices"

// architecture describes the modules of a class of Hugging Face transformers.
// If its modules differ between releases, names and shapes are those of the
// checkpoints that the authors published. FuseExperts converts them to version
// 5.
type architecture struct {
	name      string
	modelType string // model_type in config.json; alone it means the first entry with it
	describe  func(s scope)
}

// Architectures returns the sorted names of the known classes.
func Architectures() []string {
	names := make([]string, len(architectures))
	for i, a := range architectures {
		names[i] = a.name
	}
	slices.Sort(names)
	return names
}

var architectures = withClassifiers([]architecture{
	{"BertForPreTraining", "bert", bert("bert", bertPreTraining)},
	{"BertForMaskedLM", "bert", bert("bert", bertMasked)},
	{"BertForSequenceClassification", "bert", bert("bert", bertClassification)},
	{"BertModel", "bert", bert("", bertBare)},
	{"BloomForCausalLM", "bloom", bloom},
	{"DeepseekV2ForCausalLM", "deepseek_v2", decoder(false, deepseekV2Block)},
	{"DeepseekV3ForCausalLM", "deepseek_v3", decoder(false, deepseekV3Block)},
	{"FalconForCausalLM", "falcon", falcon},
	{"Gemma2ForCausalLM", "gemma2", gemmaDecoder(true, gemma2Block)},
	{"GemmaForCausalLM", "gemma", gemmaDecoder(false, gemmaBlock)},
	{"GPT2LMHeadModel", "gpt2", gpt2},
	{"GPTNeoXForCausalLM", "gpt_neox", gptNeoX},
	{"LlamaForCausalLM", "llama", decoder(false, llamaBlock)},
	{"MistralForCausalLM", "mistral", decoder(false, mistralBlock)},
	{"MixtralForCausalLM", "mixtral", decoder(false, mixtralBlock)},
	{"OPTForCausalLM", "opt", opt},
	{"PhiForCausalLM", "phi", phi},
	{"Phi3ForCausalLM", "phi3", decoder(false, phi3Block)},
	{"Qwen2ForCausalLM", "qwen2", decoder(false, qwen2Block)},
	{"Qwen2MoeForCausalLM", "qwen2_moe", decoder(false, qwen2MoeBlock)},
	{"Qwen3ForCausalLM", "qwen3", decoder(false, qwen3Block)},
	{"Qwen3MoeForCausalLM", "qwen3_moe", decoder(false, qwen3MoeBlock)},
	{"Qwen3NextForCausalLM", "qwen3_next", qwen3Next(qwen3NextBlock)},
	{"T5ForConditionalGeneration", "t5", t5},
	{"ApertusForCausalLM", "apertus", apertus.describe},
	{"ArceeForCausalLM", "arcee", arcee.describe},
	{"Cohere2ForCausalLM", "cohere2", cohere2.describe},
	{"CohereForCausalLM", "cohere", cohere.describe},
	{"CwmForCausalLM", "cwm", cwm.describe},
	{"Ernie4_5ForCausalLM", "ernie4_5", ernie.describe},
	{"Exaone4ForCausalLM", "exaone4", exaone4.describe},
	{"Gemma3ForCausalLM", "gemma3_text", gemma3.describe},
	{"Glm4ForCausalLM", "glm4", glm4.describe},
	{"GlmForCausalLM", "glm", glm.describe},
	{"GraniteForCausalLM", "granite", granite.describe},
	{"HeliumForCausalLM", "helium", helium.describe},
	{"HyperCLOVAXForCausalLM", "hyperclovax", hyperCLOVAX.describe},
	{"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", hunyuan.describe},
	{"Jais2ForCausalLM", "jais2", jais2.describe},
	{"Ministral3ForCausalLM", "ministral3", ministral3.describe},
	{"MinistralForCausalLM", "ministral", ministral.describe},
	{"NemotronForCausalLM", "nemotron", nemotron.describe},
	{"Olmo2ForCausalLM", "olmo2", olmo2.describe},
	{"Olmo3ForCausalLM", "olmo3", olmo3.describe},
	{"OlmoForCausalLM", "olmo", olmo.describe},
	{"SeedOssForCausalLM", "seed_oss", seedOSS.describe},
	{"SmolLM3ForCausalLM", "smollm3", smolLM3.describe},
	{"StableLmForCausalLM", "stablelm", stableLM.describe},
	{"Starcoder2ForCausalLM", "starcoder2", starcoder2.describe},
	{"MambaForCausalLM", "mamba", mamba(true, mamba1)},
	{"FalconMambaForCausalLM", "falcon_mamba", mamba(true, mamba1)},
	{"Mamba2ForCausalLM", "mamba2", mamba(false, mamba2Own)},
	{"JambaForCausalLM", "jamba", hybrid("final_layernorm", false, jambaBlock)},
	{"BambaForCausalLM", "bamba", hybrid("final_layernorm", false, bambaBlock)},
	{"FalconH1ForCausalLM", "falcon_h1", hybrid("final_layernorm", false, falconH1Block)},
	{"GraniteMoeHybridForCausalLM", "granitemoehybrid", hybrid("norm", false, graniteHybridBlock)},
	{"NemotronHForCausalLM", "nemotron_h", nemotronH},
	{"RwkvForCausalLM", "rwkv", rwkv},
	{"Lfm2ForCausalLM", "lfm2", lfm2(lfm2Dense)},
	{"Lfm2MoeForCausalLM", "lfm2_moe", lfm2(lfm2Sparse)},
	{"DeepseekV32ForCausalLM", "deepseek_v32", hybrid("norm", false, deepseekV32Block)},
	{"PhimoeForCausalLM", "phimoe", phiMoE},
	{"PhiMoEForCausalLM", "phimoe", phiMoE},
	{"MiniMaxForCausalLM", "minimax", hybrid("norm", false, miniMaxBlock)},
	{"RecurrentGemmaForCausalLM", "recurrent_gemma", hybrid("final_norm", true, recurrentGemmaBlock)},
	{"Dots1ForCausalLM", "dots1", dots1.describe},
	{"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ernieMoE.describe},
	{"ExaoneMoeForCausalLM", "exaone_moe", exaoneMoE.describe},
	{"FlexOlmoForCausalLM", "flex_olmo", flexOlmo.describe},
	{"Glm4MoeLiteForCausalLM", "glm4_moe_lite", glm4MoELite.describe},
	{"Mistral4ForCausalLM", "mistral4", mistral4.describe},
	{"YoutuForCausalLM", "youtu", youtu.describe},
	{"Qwen3_5ForCausalLM", "qwen3_5_text", qwen3Next(qwen35Block)},
	{"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3Next(qwen35MoEBlock)},
	{"Llama4ForCausalLM", "llama4_text", decoder(false, llama4Block)},
	{"GPTJForCausalLM", "gptj", gptJ},
	{"MptForCausalLM", "mpt", mpt},
	{"DbrxForCausalLM", "dbrx", dbrx},
	{"Glm4MoeForCausalLM", "glm4_moe", glm4MoE.describe},
	{"GptOssForCausalLM", "gpt_oss", gptOSS.describe},
	{"GraniteMoeForCausalLM", "granitemoe", graniteMoE.describe},
	{"GraniteMoeSharedForCausalLM", "granitemoeshared", graniteMoEShared.describe},
	{"HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", hunyuanMoE.describe},
	{"MiniMaxM2ForCausalLM", "minimax_m2", miniMaxM2.describe},
	{"OlmoeForCausalLM", "olmoe", olmoe.describe},
	{"SolarOpenForCausalLM", "solar_open", solarOpen.describe},
	{"ModernBertForMaskedLM", "modernbert", modernBERT(modernBERTMasked)},
	{"ModernBertForSequenceClassification", "modernbert", modernBERT(modernBERTClassification)},
	{"ModernBertForTokenClassification", "modernbert", modernBERT(modernBERTTokens)},
	{"BertForTokenClassification", "bert", bert("bert", bertTokens)},
	{"RobertaForMaskedLM", "roberta", roberta.with("roberta", robertaMasked)},
	{"RobertaForSequenceClassification", "roberta", roberta.with("roberta", robertaClassification)},
	{"RobertaForTokenClassification", "roberta", roberta.with("roberta", bertTokens)},
	{"RobertaModel", "roberta", roberta.with("", bertBare)},
	{"XLMRobertaForMaskedLM", "xlm-roberta", xlmRoberta.with("roberta", robertaMasked)},
	{"XLMRobertaForSequenceClassification", "xlm-roberta", xlmRoberta.with("roberta", robertaClassification)},
	{"XLMRobertaForTokenClassification", "xlm-roberta", xlmRoberta.with("roberta", bertTokens)},
	{"XLMRobertaModel", "xlm-roberta", xlmRoberta.with("", bertBare)},
	{"CamembertForMaskedLM", "camembert", xlmRoberta.with("roberta", robertaMasked)},
	{"CamembertForSequenceClassification", "camembert", xlmRoberta.with("roberta", robertaClassification)},
	{"CamembertForTokenClassification", "camembert", xlmRoberta.with("roberta", bertTokens)},
	{"CamembertModel", "camembert", xlmRoberta.with("", bertBare)},
})
