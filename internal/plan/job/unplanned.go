package job

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
)

// unplanned refuses settings of files that would change the plan by much. It
// notes other settings that the plan ignores.
func (r *resolver) unplanned() error {
	j := r.job
	if f := j.FSDP; f != nil && f.WrapPolicy == "size_based_wrap" {
		return fault.Inputf("auto_wrap_policy is SIZE_BASED_WRAP, which makes units of any modules that are large " +
			"enough, and is not planned yet").WithHint("use TRANSFORMER_BASED_WRAP: the units are the blocks")
	}
	for _, u := range slices.Concat(r.unplannedOfTraining(), r.unplannedOfLaunch(), r.unplannedOfEngines()) {
		if u.is {
			r.assume("not planned: %s", u.what)
		}
	}
	return nil
}

// unplannedKey is a setting that the plan ignores, if it is given.
type unplannedKey struct {
	is   bool
	what string
}

func (r *resolver) unplannedOfTraining() []unplannedKey {
	t := r.training
	if t == nil {
		return nil
	}
	return []unplannedKey{
		{t.AutoFindBatchSize, "auto_find_batch_size: the plan has the first micro batch that the Trainer tries"},
		{t.Evaluation.Enabled && !t.Evaluation.LossOnly && t.Evaluation.AccumulationSteps == 0,
			"evaluation: without eval_accumulation_steps the GPU holds the predictions for the full evaluation set"},
		{t.Evaluation.Enabled && t.Evaluation.MicroBatch > t.MicroBatch,
			fmt.Sprintf("evaluation, with batches of %d where training has %d", t.Evaluation.MicroBatch, t.MicroBatch)},
		{t.DataLoader.Workers > 0,
			fmt.Sprintf("the %d data loader processes of each rank and the batches that they prefetch",
				t.DataLoader.Workers)},
		{t.TorchEmptyCacheSteps > 0,
			fmt.Sprintf("torch_empty_cache_steps: every %d steps the allocator frees its cache",
				t.TorchEmptyCacheSteps)},
	}
}

func (r *resolver) unplannedOfLaunch() []unplannedKey {
	l, j := r.launch, r.job
	if l == nil {
		return nil
	}
	gathers := len(l.MoELayers) > 0 && j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x == nil || x.Fused() {
			gathers = false
		}
	}
	backend := strings.ToLower(l.CompileBackend)
	return []unplannedKey{
		{l.Precision == recipe.MixedFP8, "mixed_precision fp8 (" + l.FP8Backend + "): the job is planned in bf16"},
		{gathers, "deepspeed_moe_layer_cls_names: ZeRO-3 gathers all experts of a layer at once"},
		{backend != "" && backend != "inductor",
			"dynamo_backend " + backend + ": the plan is for the model without compilation"},
	}
}

func (r *resolver) unplannedOfEngines() []unplannedKey {
	j := r.job
	var list []unplannedKey
	if d := j.DeepSpeed; d != nil {
		list = append(list, unplannedKey{d.CheckpointActivationsOnCPU,
			"cpu_checkpointing, which affects only models that call DeepSpeed's own checkpointing"})
		for _, key := range d.Beside {
			list = append(list, unplannedKey{true, key})
		}
	}
	if f := j.FSDP; f != nil {
		block := blockClasses[j.Model.Type]
		named := len(f.WrapLayers) > 0 && (len(f.WrapLayers) > 1 || f.WrapLayers[0] != block)
		if j.Model.Type == "whisper" {
			both := []string{"WhisperDecoderLayer", "WhisperEncoderLayer"}
			block = strings.Join(both, " and ")
			named = len(f.WrapLayers) > 0 && !slices.Equal(slices.Sorted(slices.Values(f.WrapLayers)), both)
		}
		list = append(list, unplannedKey{named, fmt.Sprintf("FSDP units of %s: the plan takes the blocks of the "+
			"model as units (%s)",
			strings.Join(f.WrapLayers, ", "), block)})
	}
	if q := j.Quantization; q != nil && q.Bits == 4 && q.Method == "" && q.File != "" {
		list = append(list, unplannedKey{q.ComputeDType != j.ComputeType() && q.ComputeDType != j.AutocastType,
			fmt.Sprintf("bnb_4bit_compute_dtype %v: the plan has linear modules compute in %v",
				q.ComputeDType, j.ComputeType())})
	}
	return list
}

// blockClasses maps model_type to the class of transformers' blocks.
var blockClasses = map[string]string{
	"arcee": "ArceeDecoderLayer", "bert": "BertLayer", "bloom": "BloomBlock", "clip": "CLIPEncoderLayer",
	"cohere": "CohereDecoderLayer", "deit": "DeiTLayer", "dinov2": "Dinov2Layer", "siglip": "SiglipEncoderLayer",
	"vit":     "ViTLayer",
	"cohere2": "Cohere2DecoderLayer", "deepseek_v2": "DeepseekV2DecoderLayer",
	"deepseek_v3": "DeepseekV3DecoderLayer", "ernie4_5": "Ernie4_5DecoderLayer",
	"exaone4": "Exaone4DecoderLayer", "falcon": "FalconDecoderLayer", "gemma": "GemmaDecoderLayer",
	"gemma2": "Gemma2DecoderLayer", "gemma3_text": "Gemma3DecoderLayer", "glm": "GlmDecoderLayer",
	"glm4": "Glm4DecoderLayer", "gpt2": "GPT2Block", "gpt_neox": "GPTNeoXLayer", "granite": "GraniteDecoderLayer",
	"helium": "HeliumDecoderLayer", "hunyuan_v1_dense": "HunYuanDenseV1DecoderLayer", "jais2": "Jais2DecoderLayer",
	"llama": "LlamaDecoderLayer", "ministral": "MinistralDecoderLayer", "ministral3": "Ministral3DecoderLayer",
	"mistral": "MistralDecoderLayer", "mixtral": "MixtralDecoderLayer", "nemotron": "NemotronDecoderLayer",
	"olmo": "OlmoDecoderLayer", "olmo2": "Olmo2DecoderLayer", "olmo3": "Olmo3DecoderLayer",
	"opt": "OPTDecoderLayer", "phi": "PhiDecoderLayer", "phi3": "Phi3DecoderLayer", "qwen2": "Qwen2DecoderLayer",
	"qwen2_moe": "Qwen2MoeDecoderLayer", "qwen3": "Qwen3DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer",
	"qwen3_next": "Qwen3NextDecoderLayer", "seed_oss": "SeedOssDecoderLayer", "smollm3": "SmolLM3DecoderLayer",
	"stablelm": "StableLmDecoderLayer", "starcoder2": "Starcoder2DecoderLayer", "t5": "T5Block",
	"apertus": "ApertusDecoderLayer", "bamba": "BambaDecoderLayer", "cwm": "CwmDecoderLayer",
	"deepseek_v32": "DeepseekV32DecoderLayer", "electra": "ElectraLayer", "falcon_h1": "FalconH1DecoderLayer",
	"falcon_mamba": "FalconMambaBlock", "glm4_moe_lite": "Glm4MoeLiteDecoderLayer", "gptj": "GPTJBlock",
	"granitemoehybrid": "GraniteMoeHybridDecoderLayer", "hyperclovax": "HyperCLOVAXDecoderLayer",
	"lfm2": "Lfm2DecoderLayer", "lfm2_moe": "Lfm2MoeDecoderLayer", "llama4_text": "Llama4TextDecoderLayer",
	"mamba": "MambaBlock", "mamba2": "Mamba2Block", "minimax": "MiniMaxDecoderLayer",
	"mistral4": "Mistral4DecoderLayer", "mpt": "MptBlock", "mt5": "MT5Block", "nemotron_h": "NemotronHBlock",
	"phimoe": "PhimoeDecoderLayer", "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer", "qwen3_5_text": "Qwen3_5DecoderLayer",
	"recurrent_gemma": "RecurrentGemmaDecoderLayer", "rwkv": "RwkvBlock", "youtu": "YoutuDecoderLayer",
	"gpt_bigcode": "GPTBigCodeBlock", "gpt_neo": "GPTNeoBlock",
	"nanochat": "NanoChatDecoderLayer", "persimmon": "PersimmonDecoderLayer", "vaultgemma": "VaultGemmaDecoderLayer",
}
