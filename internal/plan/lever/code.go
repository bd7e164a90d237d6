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
	recipe.MicroBatch:            "per_device_train_batch_size=%v",
	recipe.Accumulation:          "gradient_accumulation_steps=%v",
	allocConf:                    "PYTORCH_CUDA_ALLOC_CONF=%v in the environment",
	hostStates:                   "plimsoll.torch.StateOffload(optimizer)",
	hostUpdate:                   "plimsoll.torch.AdamW(model.parameters(), ...)",
	activations:                  "activation_offloading=True in SFTConfig of TRL",
	adapterRank:                  "peft.LoraConfig(r=%v)",
	quantization:                 "BitsAndBytesConfig(load_in_4bit=True)",
	sequence:                     "max_length=%v",
	sharded:                      "torch.distributed.fsdp.fully_shard(block) for each block",
}

// optimizerCode are lines for optimizers by their names.
var optimizerCode = map[any]string{
	trainerFused:     "torch.optim.AdamW(..., fused=True)",
	"adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit(...)",
}

// codeOf returns the lines of settings.
func codeOf(settings []amend.Setting) []string {
	lines := []string{}
	for _, s := range settings {
		line := code[s.Name]
		if s.Name == recipe.OptimizerName {
			line = optimizerCode[s.To]
		}
		if line == "" || s.Name == recipe.Accumulation && s.To == 1 {
			continue
		}
		if strings.Contains(line, "%v") {
			line = fmt.Sprintf(line, s.To)
		}
		lines = append(lines, line)
	}
	return lines
}
