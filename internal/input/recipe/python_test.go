package recipe

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

const (
	sourceOfLoRA = `import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig, TaskType
from trl import SFTConfig, SFTTrainer

NAME = "Qwen/Qwen3-8B"
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=bits, attn_implementation="sdpa", device_map="auto")
peft = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM)
args = SFTConfig(output_dir=f"out/{NAME}", per_device_train_batch_size=2, gradient_accumulation_steps=4,
                 max_length=2048, learning_rate=lr(), report_to="none")
trainer = SFTTrainer(model=model, args=args, train_dataset=load(), peft_config=peft)
trainer.train()
`
	sourceOfUnsloth = `from unsloth import FastLanguageModel, is_bfloat16_supported
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-8B-unsloth-bnb-4bit", max_seq_length=4096)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=32, loftq_config=None)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=d,
    args=SFTConfig(per_device_train_batch_size=2, bf16=is_bfloat16_supported(), optim="adamw_8bit"))
if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="lora_model")
`
	sourceOfVision = `from unsloth import FastVisionModel
model, processor = FastVisionModel.from_pretrained("unsloth/gemma-3-4b-pt", use_gradient_checkpointing="unsloth")
model = FastVisionModel.get_peft_model(model, finetune_vision_layers=True, r=8)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, train_dataset=d, args=SFTConfig(per_device_train_batch_size=1, max_length=2048))
`
	sourceOfTrainer = `from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype="bfloat16")
Trainer(model, TrainingArguments("out", per_device_train_batch_size=4, bf16=True)).train()
`
)

// TestSources reads what sources of Python say by literals: the model, its adapter, and the arguments of a trainer.
func TestSources(t *testing.T) {
	f, err := readAs(t, "train.py", sourceOfLoRA)
	if err != nil {
		t.Fatal(err)
	}
	if f.Program != "TRL" || f.Model != "Qwen/Qwen3-8B" || f.Sequence != 2048 || f.Training.MicroBatch != 2 ||
		f.Training.GradientAccumulation != 4 || f.Adapter == nil || f.Adapter.Rank != 8 || f.Quantization == nil ||
		f.Attention != "sdpa" {
		t.Errorf("got %+v", f)
	}
	uncut := strings.Replace(sourceOfLoRA, "max_length=2048", "max_length=None", 1)
	if f, err := readAs(t, "train.py", uncut); err != nil || f.Sequence != 0 ||
		!strings.Contains(fmt.Sprint(f.Notes), "max_length is null: no sequence is cut") {
		t.Errorf("without a length: %+v, %v", f, err)
	}
	// A trainer of preferences without a key of its own is no file of TrainingArguments.
	of := strings.NewReplacer("SFTConfig", "ORPOConfig", "SFTTrainer", "ORPOTrainer").Replace(sourceOfLoRA)
	if f, err := readAs(t, "train.py", of); err != nil || f.Program != "TRL" || f.Model != "Qwen/Qwen3-8B" {
		t.Errorf("ORPO: %+v, %v", f, err)
	}
	if place := f.Place(); place.Line != 6 {
		t.Errorf("the model is named at %v", place)
	}
	if f, err = readAs(t, "train.py", sourceOfUnsloth); err != nil {
		t.Fatal(err)
	}
	if f.Model != "unsloth/Qwen3-8B" || f.Sequence != 4096 || f.Adapter == nil || f.Adapter.Rank != 32 ||
		!f.Adapter.Targets("model.layers.0.mlp.gate_proj") || f.Adapter.Targets("lm_head") ||
		f.Quantization == nil || f.Offloading == nil || !f.FusedLoss {
		t.Errorf("got %+v", f)
	}
	if f, err = readAs(t, "train.py", sourceOfTrainer); err != nil {
		t.Fatal(err)
	}
	const patched = "Trainer(model, TrainingArguments(\"out\", "
	inPlace := strings.Replace(sourceOfTrainer, patched, "from peft import LoraConfig, get_peft_model\n"+
		"from liger_kernel.transformers import apply_liger_kernel_to_llama\napply_liger_kernel_to_llama()\n"+
		"adapted = get_peft_model(model, LoraConfig(r=4, target_modules=['c_attn']))\n"+patched, 1)
	if changed, err := readAs(t, "train.py", inPlace); err != nil || changed.Adapter == nil ||
		changed.Adapter.Rank != 4 || !changed.Training.UseLigerKernel {
		t.Errorf("a model that get_peft_model changes in place: %+v, error %v", changed, err)
	}
	if f.Program != "transformers" || f.Model != "gpt2" || f.Weights != "bf16" || f.Training.MicroBatch != 4 {
		t.Errorf("got %+v", f)
	}
}

// TestUnslothVision holds which modules Unsloth's loaders of models that read images adapt and quantize.
// get_peft_regex of unsloth_zoo 2026.10 with PEFT 0.21 trains 38,497,792 parameters of gemma-3-4b at rank 16, and
// 51,346,944 of qwen3-vl-8b.
func TestUnslothVision(t *testing.T) {
	const (
		vision    = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
		visionMLP = "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1"
		projector = "model.multi_modal_projector.linear"
		attention = "model.language_model.layers.3.self_attn.o_proj"
		mlp       = "model.language_model.layers.3.mlp.down_proj"
		text      = "model.layers.3.mlp.down_proj"
	)
	all := []string{vision, visionMLP, projector, attention, mlp, text, "lm_head"}
	for arguments, adapted := range map[string][]string{
		"r=8":                                {vision, visionMLP, attention, mlp, text},
		"r=8, finetune_mlp_modules=False":    {vision, attention},
		"r=8, finetune_vision_layers=False":  {attention, mlp, text},
		`r=8, target_modules=["q_proj"]`:     {vision},
		`r=8, target_modules="all-linear"`:   {vision, visionMLP, attention, mlp, text},
		"r=8, finetune_language_layers=None": {vision, visionMLP},
	} {
		source := strings.Replace(sourceOfVision, "finetune_vision_layers=True, r=8", arguments, 1)
		f, err := readAs(t, "train.py", source)
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		for _, module := range all {
			if is := f.Adapter.Targets(module); is != slices.Contains(adapted, module) {
				t.Errorf("%s: adapts %s: %v", arguments, module, is)
			}
		}
		if q := f.Quantization; q == nil || !slices.Contains(q.SkipModules, "vision_tower") || f.Offloading == nil {
			t.Errorf("%s: quantization %+v, offloading %+v", arguments, f.Quantization, f.Offloading)
		}
	}
}

// readAs reads a text as a file of a name.
func readAs(t *testing.T, file, text string) (*Framework, error) {
	t.Helper()
	return ParseFramework(file, []byte(text), Source{})
}

// TestSourcesRefused holds that nothing is planned by a value that only a run can tell, and that code that decides what
// a training holds is named.
func TestSourcesRefused(t *testing.T) {
	for _, change := range []struct{ in, old, new, says string }{
		{sourceOfLoRA, "per_device_train_batch_size=2", "per_device_train_batch_size=n",
			"is n, which only a run can tell"},
		{sourceOfLoRA, "r=8,", "r=f(),", "r of LoraConfig is f(...), which only a run"},
		{sourceOfLoRA, `NAME = "Qwen/Qwen3-8B"`, "NAME = sys.argv[1]", "name of from_pretrained is sys.argv[...], which"},
		{sourceOfLoRA, "load_in_4bit=True", "load_in_4bit=cli", "load_in_4bit of BitsAndBytesConfig is cli"},
		{sourceOfLoRA, "BitsAndBytesConfig(", "GPTQConfig(", "quantization_config is"},
		{sourceOfLoRA, "LoraConfig(", "IA3Config(", "the adapter is"},
		{sourceOfLoRA, "train_dataset=load(),", "optimizers=(o, None),", "code of the source decides"},
		{sourceOfLoRA, "args=args", "args=parser.parse_args()", "give a script with the line that starts it"},
		{sourceOfLoRA, "args = SFTConfig(", "class Own(SFTConfig):\n    packing: bool = True\nargs = Own(",
			"is __main__.Own(...), which only a run"},
		{sourceOfLoRA, "trainer.train()", "for p in model.parameters(): p.requires_grad = False",
			"which parameters are trained"},
		{sourceOfLoRA, "model=model", "model=FSDP(model)", "model is FSDP(...), which only a run can tell"},
		{sourceOfLoRA, "model=model", "model=prepare_model_for_kbit_training(model)", "not quantized fp32"},
		{sourceOfLoRA, "from peft import LoraConfig", "from own.peft import LoraConfig", "the adapter is"},
		{sourceOfLoRA, "trainer.train()", "type Size = int", "what they set is not known"},
		{sourceOfLoRA, "trainer.train()", "model.half()", "model.half is the type of the weights, set by code"},
		{sourceOfLoRA, "trainer.train()", "model.to(device, dtype=torch.bfloat16)",
			"model.to is the type of the weights"},
		{sourceOfLoRA, "trainer.train()", "model.model.layers = model.model.layers[:8]",
			"model.model.layers is a part of the model, set by code"},
		{sourceOfLoRA, "trainer.train()", "del model.model.layers[8:]", "is a part of the model, set by code"},
		{sourceOfLoRA, "trainer.train()", "model.lm_head = torch.nn.Linear(4, 8)",
			"model.lm_head is a part of the model"},
		{sourceOfLoRA, "trainer.train()", "[p.requires_grad_(False) for p in model.parameters()]",
			"which parameters are trained"},
		{sourceOfLoRA, "trainer.train()", "def freeze(m):\n    m.requires_grad_(False)\nmodel.apply(freeze)",
			"which parameters are trained"},
		{sourceOfLoRA, "trainer.train()", "for k, v in more.items():\n    setattr(args, k, v)",
			"arguments of SFTConfig that only a run can tell"},
		{sourceOfLoRA, "trainer.train()", "args.set_training(batch_size=9)",
			"args.set_training is a change of the settings"},
		{sourceOfLoRA, "trainer.train()", "trainer.optimizer = sgd", "trainer.optimizer is set by code"},
		{sourceOfLoRA, "trainer.train()", "model.compile()",
			"model.compile is that the model is compiled, set by code"},
		{sourceOfLoRA, "attn_implementation=", "tie_word_embeddings=False, attn_implementation=",
			"it makes another model"},
		{sourceOfLoRA, "trainer = ",
			"model.gradient_checkpointing_enable()\nmodel.gradient_checkpointing_disable()\ntrainer = ",
			"gradient_checkpointing is turned on and off by code"},
		{sourceOfTrainer, "Trainer(",
			"t = Trainer(model, TrainingArguments('o'))\nt.args.gradient_accumulation_steps = 4\n#",
			"trainer.args.gradient_accumulation_steps is set by code"},
		{sourceOfTrainer, "Trainer(", "from liger_kernel.transformers import apply_liger_kernel_to_gpt2 as liger\n" +
			"liger(rope=False)\nTrainer(", "use_liger_kernel is a choice of kernels"},
		{sourceOfLoRA, "args=args", "**kwargs", "arguments of SFTTrainer that only a run can tell"},
		{sourceOfLoRA, "max_length=2048", "max_length=2048, per_device_train_batchsize=1",
			"per_device_train_batchsize"},
		{sourceOfUnsloth, "max_seq_length=4096", "fast_inference=True", "fast_inference of Unsloth is true"},
		{sourceOfUnsloth, "FastLanguageModel.from", "FastDiffusionModel.from",
			"FastDiffusionModel of Unsloth loads the model"},
		{sourceOfVision, "r=8", "r=8, finetune_audio_layers=True", "finetune_audio_layers of get_peft_model is true"},
		{sourceOfVision, "r=8", "r=8, target_modules='.*'", `target_modules of get_peft_model is ".*"`},
		{sourceOfVision, "model = FastVisionModel.get_peft_model(model", "other = FastVisionModel.other(model",
			"use_gradient_checkpointing of Unsloth is"},
		{sourceOfUnsloth, "r=32", "r=32, finetune_mlp_modules=False",
			"finetune_mlp_modules of get_peft_model is false"},
		{sourceOfUnsloth, "SFT", "GRPO", "generates answers with the trainer's own weights"},
		{sourceOfTrainer, "AutoModelForCausalLM.f", "AutoModelForTokenClassification.f",
			"head is not planned by a source"},
		{sourceOfTrainer, `AutoModelForCausalLM.from_pretrained("gpt2", dtype="bfloat16")`, "Own()",
			"model is Own(...), which only a run can tell"},
	} {
		if !strings.Contains(change.in, change.old) {
			t.Fatalf("%q is not in the source", change.old)
		}
		f, err := readAs(t, "train.py", strings.ReplaceAll(change.in, change.old, change.new))
		said := ""
		if err != nil {
			said = err.Error()
			var wrong *fault.Input
			if errors.As(err, &wrong) {
				said += wrong.Hint
			}
		} else {
			for _, n := range f.Notes {
				said += n.What
			}
		}
		if !strings.Contains(said, change.says) {
			t.Errorf("%s: %q, want %q", change.new, said, change.says)
		}
	}
}

// TestNoSettingsOfSources: a source of Python is not edited, so that flags say its changes.
func TestNoSettingsOfSources(t *testing.T) {
	for file, text := range map[string]string{"train.py": sourceOfLoRA, "trainer.py": sourceOfTrainer} {
		s, err := LoadSettings(file, files.Texts{file: []byte(text)})
		if s != nil || err != nil {
			t.Errorf("%s has settings %v, error %v", file, s, err)
		}
	}
}
