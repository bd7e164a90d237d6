package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// drawn is a job by a seed and a number. The same two make the same job again.
type drawn struct {
	random *rand.Rand
	row
	size  size
	words []string // of the name
}

// size is a model that jobs are drawn of: its name in the catalog, and what of it may vary.
type size struct {
	model  string
	layers string // the key of config.json that counts its blocks; "" leaves the model as it is
	fewest int    // blocks that a shorter model has at least
	kind   kind
}

// kind says what a model reads and answers, which decides the jobs that it may have.
type kind int

const (
	decoder kind = iota
	mixture
	encoder
	translator
	vision
)

const blocks = "num_hidden_layers"

var sizes = []size{
	{"llama-3.2-1b", blocks, 3, decoder}, {"llama-3.2-3b", blocks, 4, decoder}, {"llama-3-8b", blocks, 4, decoder},
	{"tinyllama-1.1b", blocks, 5, decoder}, {"smollm2-135m", "", 0, decoder}, {"smollm2-360m", blocks, 7, decoder},
	{"qwen2-1.5b", blocks, 5, decoder}, {"qwen2.5-0.5b", "", 0, decoder}, {"qwen2.5-3b", blocks, 6, decoder},
	{"qwen2.5-7b", blocks, 3, decoder}, {"qwen3-0.6b", "", 0, decoder}, {"qwen3-1.7b", blocks, 6, decoder},
	{"qwen3-8b", blocks, 4, decoder}, {"mistral-7b", blocks, 4, decoder}, {"gemma-2b", blocks, 4, decoder},
	{"gemma-2-2b", blocks, 4, decoder}, {"gemma-3-270m", "", 0, decoder}, {"gemma-3-1b", blocks, 7, decoder},
	{"phi-3-mini", blocks, 5, decoder}, {"phi-4-mini", blocks, 5, decoder}, {"phi-1.5", blocks, 5, decoder},
	{"gpt2", "", 0, decoder}, {"gpt2-medium", "", 0, decoder}, {"opt-125m", "", 0, decoder},
	{"opt-1.3b", "", 0, decoder}, {"pythia-410m", "", 0, decoder}, {"olmo-2-1124-7b", blocks, 4, decoder},
	{"smollm3-3b", blocks, 5, decoder}, {"starcoder2-3b", blocks, 5, decoder}, {"stablelm-2-1_6b", blocks, 5, decoder},
	{"olmoe-1b-7b-0924", blocks, 3, mixture}, {"qwen3-30b-a3b", blocks, 3, mixture},
	{"mixtral-8x7b", blocks, 2, mixture},
	{"bert-large", blocks, 6, encoder}, {"t5-small", "", 0, translator}, {"t5-base", "", 0, translator},
	{"vit-base-patch16-224", "", 0, vision}, {"vit-large-patch16-224", "", 0, vision},
}

// draw makes the job of a number under a seed.
func draw(seed, number uint64) row {
	d := drawn{random: rand.New(rand.NewPCG(seed, number))}
	d.size = pick(d.random, sizes...)
	d.GPU = pick(d.random, "H200", "A100-80GB", "RTX-4090")
	d.Model = d.size.model
	d.Config = document{}
	if d.size.layers != "" && (d.size.kind == mixture || d.oneOf(2)) {
		d.Config[d.size.layers] = d.size.fewest + d.random.IntN(5)
	}
	d.lengths()
	switch {
	case d.oneOf(5):
		d.ownLoop()
	case d.size.kind == decoder && d.oneOf(6):
		d.tuneWithTRL()
	default:
		d.trainer()
	}
	if d.size.kind == translator {
		d.Config["decoder_start_token_id"] = 0 // which configurations have, and the catalog leaves out
	}
	if d.size.kind == encoder {
		d.Config["architectures"] = []string{pick(d.random, "BertForSequenceClassification", "BertForMaskedLM")}
	}
	if !strings.HasPrefix(d.size.model, "gpt2") && d.size.kind != vision && d.oneOf(3) {
		d.Attention = "eager"
		d.Sequence = min(d.Sequence, 1500)
		if d.TRL != nil {
			d.Attention, d.TRL["attn_implementation"] = "", "eager"
		}
		d.say("eager")
	}
	d.Name = strings.Join(d.words, ", ")
	return d.row
}

// oneOf says yes once in n times.
func (d *drawn) oneOf(n int) bool { return d.random.IntN(n) == 0 }

func (d *drawn) say(format string, arguments ...any) {
	d.words = append(d.words, fmt.Sprintf(format, arguments...))
}

func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// lengths draws a batch: even lengths as people choose them, and odd ones as data have them.
func (d *drawn) lengths() {
	d.Batch = pick(d.random, 1, 1, 2, 3, 4, 8)
	most := 8192 / d.Batch
	switch d.size.kind {
	case encoder, translator:
		most = 512
	case vision:
		d.Batch *= 8
		return
	}
	if strings.HasPrefix(d.Model, "gpt2") {
		most = min(most, 1024)
	}
	if strings.HasPrefix(d.Model, "opt") || d.Model == "phi-1.5" || d.Model == "tinyllama-1.1b" ||
		d.Model == "pythia-410m" {
		most = min(most, 2048)
	}
	if d.oneOf(3) {
		d.Sequence = 100 + d.random.IntN(most-99)
		return
	}
	d.Sequence = min(most, pick(d.random, 256, 512, 1024, 1024, 2048, 4096))
}

// ownLoop draws a loop in plain PyTorch, on one GPU.
func (d *drawn) ownLoop() {
	d.say("own loop")
	optimizer := pick(d.random, "adamw", "adamw", "sgd")
	implementation := pick(d.random, "foreach", "fused", "for-loop")
	d.Loop = document{"batch": d.Batch, "optimizer": optimizer, "implementation": implementation,
		"autocast": d.oneOf(2), "checkpointing": d.oneOf(3), "clip": pick(d.random, 0, 1)}
	d.say("%s/%s", optimizer, implementation)
	if d.Loop["autocast"] == true {
		d.Config["torch_dtype"] = "float32" // the planner's flags have autocast of fp32 weights alone
	} else {
		d.dtype(false)
	}
	for _, key := range []string{"autocast", "checkpointing", "clip"} {
		if d.Loop[key] == true || d.Loop[key] == 1 {
			d.say("%s", key)
		}
	}
}

// dtype draws the dtype of the weights, which a model of the catalog has or has not.
func (d *drawn) dtype(autocast bool) {
	of := "bfloat16"
	if autocast && d.oneOf(2) || d.oneOf(5) {
		of = "float32"
	}
	d.Config["torch_dtype"] = of
	d.say("%s", of)
}

// tuneWithTRL draws the arguments of trl sft.
func (d *drawn) tuneWithTRL() {
	d.say("trl sft")
	d.dtype(true)
	d.TRL = document{"per_device_train_batch_size": d.Batch, "bf16": true,
		"gradient_checkpointing": d.oneOf(2)}
	if d.oneOf(2) {
		d.TRL["use_peft"], d.TRL["lora_r"] = true, pick(d.random, 8, 16, 64)
		d.say("LoRA")
	}
	if d.oneOf(4) {
		d.TRL["gradient_accumulation_steps"] = 2
	}
	if d.oneOf(4) {
		d.TRL["loss_type"] = "nll"
		d.say("nll")
	}
}

// trainer draws arguments of transformers' Trainer, and how its ranks share the model.
func (d *drawn) trainer() {
	d.say("Trainer")
	a := document{"per_device_train_batch_size": d.Batch, "max_grad_norm": pick(d.random, 1.0, 1.0, 0.0)}
	d.Arguments = a
	d.precision()
	if d.oneOf(2) {
		a["gradient_checkpointing"] = true
		a["gradient_checkpointing_kwargs"] = document{"use_reentrant": d.oneOf(3)}
		d.say("checkpoints")
	}
	if d.oneOf(4) {
		a["gradient_accumulation_steps"] = pick(d.random, 2, 4)
		d.say("accumulation")
	}
	if d.oneOf(8) && d.size.kind == decoder {
		a["label_smoothing_factor"] = 0.1
		d.say("label smoothing")
	}
	if d.oneOf(12) {
		a["eval_strategy"], a["eval_steps"], a["per_device_eval_batch_size"] = "steps", 1, d.Batch
		d.say("evaluation")
	}
	if d.size.kind == decoder && d.oneOf(3) {
		d.adapt()
	}
	if d.Quantization != nil || !d.oneOf(2) {
		d.optimizer()
	} else {
		d.share()
	}
	family := strings.HasPrefix(d.Model, "llama") || strings.HasPrefix(d.Model, "qwen")
	if family && d.size.kind == decoder && d.Accelerate == nil && d.oneOf(5) {
		a["use_liger_kernel"] = true // whose loss cannot read the parameters of FSDP2
		d.say("Liger")
	}
}

// precision draws autocast, or none.
func (d *drawn) precision() {
	switch {
	case d.oneOf(6):
		d.Arguments["fp16"] = true
		d.Config["torch_dtype"] = "float32"
		d.say("fp16")
	case d.oneOf(4):
		d.dtype(false)
		d.say("no autocast")
	default:
		d.Arguments["bf16"] = true
		d.dtype(true)
	}
}

// optimizer draws one that a single rank may have.
func (d *drawn) optimizer() {
	if d.oneOf(2) {
		return
	}
	name := pick(d.random, "adamw_torch", "adafactor", "sgd", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
		"lion_8bit", "adamw_torch_fused", "rmsprop", "adagrad")
	d.Arguments["optim"] = name
	d.say("%s", name)
}

// adapt draws LoRA, and perhaps quantized weights below it.
func (d *drawn) adapt() {
	r := pick(d.random, 4, 8, 16, 32, 64, 128)
	d.Adapter = document{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": 2 * r,
		"lora_dropout": pick(d.random, 0.0, 0.0, 0.05, 0.1), "target_modules": "all-linear"}
	d.say("LoRA %d", r)
	if strings.HasPrefix(d.Model, "llama") || strings.HasPrefix(d.Model, "qwen") || d.Model == "mistral-7b" {
		d.Adapter["target_modules"] = pick[any](d.random, "all-linear", []string{"q_proj", "v_proj"},
			[]string{"q_proj", "k_proj", "v_proj", "o_proj"}, []string{"gate_proj", "up_proj", "down_proj"})
	}
	switch {
	case d.oneOf(8):
		d.Adapter["use_dora"] = true
		d.say("DoRA")
	case d.oneOf(6):
		d.Adapter["use_rslora"] = true
	}
	if d.oneOf(3) && d.Arguments["fp16"] == nil && !strings.HasPrefix(d.Model, "gpt2") {
		d.Quantization = document{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
			"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": d.oneOf(2)}
		if d.oneOf(4) {
			d.Quantization = document{"load_in_8bit": true}
		}
		d.say("quantized")
	}
}

// share draws how ranks share the model.
func (d *drawn) share() {
	d.GPUs = pick(d.random, 2, 4, 8, 8)
	bf16 := d.Arguments["bf16"] == true
	switch pick(d.random, "ddp", "fsdp1", "fsdp2", "zero", "zero") {
	case "ddp":
		d.say("DDP")
	case "fsdp1":
		if !bf16 || d.Adapter != nil || d.size.kind != decoder && d.size.kind != mixture {
			d.say("DDP")
			return
		}
		d.Accelerate = document{"fsdp_version": 1, "fsdp_reshard_after_forward": pick(d.random, "FULL_SHARD",
			"FULL_SHARD", "SHARD_GRAD_OP")}
		d.shardedOptions("FSDP1")
	case "fsdp2":
		if !bf16 || d.size.kind != decoder && d.size.kind != mixture {
			d.say("DDP")
			return
		}
		d.Accelerate = document{"fsdp_version": 2, "fsdp_reshard_after_forward": !d.oneOf(4)}
		d.shardedOptions("FSDP2")
	case "zero":
		d.zero()
	}
}

// shardedOptions draws what both versions of FSDP have.
func (d *drawn) shardedOptions(name string) {
	d.say("%s", name)
	if d.oneOf(5) {
		d.Accelerate["fsdp_offload_params"] = true
		d.say("offload")
	}
	if d.Arguments["gradient_checkpointing"] == true && d.oneOf(2) {
		delete(d.Arguments, "gradient_checkpointing")
		delete(d.Arguments, "gradient_checkpointing_kwargs")
		d.Accelerate["fsdp_activation_checkpointing"] = true
	}
}

// zero draws a stage of DeepSpeed's ZeRO.
func (d *drawn) zero() {
	stage := pick(d.random, 0, 1, 2, 2, 3, 3)
	d.DeepSpeed = document{"stage": stage, "overlap_comm": d.oneOf(2), "contiguous_gradients": true}
	d.say("ZeRO-%d", stage)
	onHost := document{"device": "cpu", "pin_memory": d.oneOf(2)}
	if stage >= 1 && d.oneOf(4) {
		d.DeepSpeed["offload_optimizer"] = onHost
		d.say("optimizer on the host")
	}
	if stage == 3 && d.oneOf(4) {
		d.DeepSpeed["offload_param"] = onHost
		d.say("parameters on the host")
	}
	if d.oneOf(3) {
		d.DeepSpeed["reduce_bucket_size"] = pick(d.random, 20_000_000, 200_000_000)
	}
}
