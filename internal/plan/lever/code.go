package lever

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
)

// code are lines of a program that make a setting, for jobs without a file that says it.
var code = map[recipe.Setting]string{
	recipe.GradientCheckpointing: "model.gradient_checkpointing_enable()",
	recipe.Liger:                 "use_liger_kernel=True in TrainingArguments",
	recipe.BF16:                  `bf16=True in TrainingArguments, or torch.autocast("cuda", torch.bfloat16)`,
	recipe.FP16:                  `fp16=True in TrainingArguments, or torch.autocast("cuda", torch.float16) with GradScaler`,
	recipe.MicroBatch:            "per_device_train_batch_size=%v",
	recipe.Accumulation:          "gradient_accumulation_steps=%v",
	recipe.EvaluationBatch:       "per_device_eval_batch_size=%v",
	allocConf:                    "PYTORCH_CUDA_ALLOC_CONF=%v in the environment",
	hostStates:                   "plimsoll.torch.StateOffload(optimizer)",
	stateDisk:                    `plimsoll.torch.AdamW(..., tier=["%v"])`,
	activations:                  "activation_offloading=True in SFTConfig of TRL",
	adapterRank:                  "peft.LoraConfig(r=%v)",
	quantization:                 "BitsAndBytesConfig(load_in_4bit=True)",
	sequence:                     "max_length=%v",
	sharded:                      "torch.distributed.fsdp.fully_shard(block) for each block",
	recipe.FSDPOffload:           "offload_policy=CPUOffloadPolicy() of torch.distributed.fsdp in fully_shard",
	recipe.Stage:                 `"stage": %v in "zero_optimization" of DeepSpeed's configuration`,
	recipe.OptimizerDevice:       `"offload_optimizer": {"device": "%v"} in "zero_optimization"`,
	recipe.ParameterDevice:       `"offload_param": {"device": "%v"} in "zero_optimization"`,
}

// optimizerCode are lines for optimizers by their names.
var optimizerCode = map[any]string{
	trainerFused:     "torch.optim.AdamW(..., fused=True)",
	"adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit(...)",
}

// formatCode are arguments of plimsoll.torch.AdamW for its formats but the one that it has by itself.
var formatCode = map[string]string{
	"fp32": `, state="fp32"`, "bf16": `, moments="bf16"`, "int8": `, moments="int8"`,
	"split24": `, state="split24", moments="int8"`,
}

// codeOf returns the lines of settings. What is taken back has none: it was a setting of a rung before.
func codeOf(settings []amend.Setting) []string {
	lines := []string{}
	for _, s := range settings {
		line := code[s.Name]
		if s.Name == recipe.OptimizerName {
			line = optimizerCode[s.To]
		}
		if s.Name == hostUpdate && s.To != nil {
			_, format, _ := strings.Cut(fmt.Sprint(s.To), "/")
			line = "plimsoll.torch.AdamW(model.parameters(), ..." + formatCode[format] + ")"
		}
		if line == "" || s.To == nil || s.Name == recipe.Accumulation && s.To == 1 {
			continue
		}
		if strings.Contains(line, "%v") {
			line = fmt.Sprintf(line, s.To)
		}
		lines = append(lines, line)
	}
	return lines
}
