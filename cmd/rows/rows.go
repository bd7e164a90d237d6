package main

// row is a job. Both plans read the same files.
type row struct {
	Name     string   `json:"name"`
	Model    string   `json:"model"`            // of the catalog
	Config   document `json:"config,omitempty"` // keys in place of those of the model's config.json
	Sequence int      `json:"sequence"`
	Batch    int      `json:"-"`              // which the arguments have, too
	GPU      string   `json:"gpu,omitempty"`  // "" is that of the command
	GPUs     int      `json:"gpus,omitempty"` // of one node; 0 is 1
	// One of these three says what trains: arguments of the Trainer, of trl sft, or settings of a loop of its own.
	Arguments document `json:"arguments,omitempty"`
	TRL       document `json:"trl,omitempty"`
	Loop      document `json:"loop,omitempty"`
	// These are configurations that programs or launchers name. Accelerate has what is special in fsdp_config, and
	// DeepSpeed in zero_optimization.
	Accelerate   document `json:"accelerate,omitempty"`
	DeepSpeed    document `json:"deepspeed,omitempty"`
	Adapter      document `json:"adapter,omitempty"`
	Quantization document `json:"quantization,omitempty"`
	Attention    string   `json:"attention,omitempty"`
}

// document is a configuration.
type document map[string]any

// with returns a document with further keys.
func (d document) with(more document) document {
	sum := document{}
	for _, keys := range []document{d, more} {
		for key, value := range keys {
			sum[key] = value
		}
	}
	return sum
}

// always are arguments of the Trainer that all jobs have, of TRL's, too.
var always = document{"output_dir": "out", "max_steps": 10, "report_to": "none"}

var (
	plain        = document{"per_device_train_batch_size": 1, "bf16": true}
	checkpointed = plain.with(document{"gradient_checkpointing": true})
	lora         = document{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32,
		"lora_dropout":   0.0,
		"target_modules": []string{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
)

// launched is accelerate's configuration of a job under FSDP.
func (r row) launched() document {
	fsdp := document{"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
		"fsdp_offload_params": false, "fsdp_cpu_ram_efficient_loading": true}
	return document{"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_machines": 1,
		"machine_rank": 0, "main_training_function": "main", "rdzv_backend": "static", "same_network": true,
		"distributed_type": "FSDP", "num_processes": max(1, r.GPUs), "fsdp_config": fsdp.with(r.Accelerate)}
}

// zeroed is DeepSpeed's configuration of a job.
func (r row) zeroed() document {
	all := document{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
		"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": r.DeepSpeed}
	precision := "bf16"
	if r.Arguments["fp16"] == true {
		precision = "fp16"
	}
	all[precision] = document{"enabled": "auto"}
	return all
}

func sharded(version int, more document) document {
	again := any(true)
	if version == 1 {
		again = "FULL_SHARD"
	}
	return document{"fsdp_version": version, "fsdp_reshard_after_forward": again}.with(more)
}

func zero(stage int, more document) document {
	return document{"stage": stage, "overlap_comm": true, "contiguous_gradients": true}.with(more)
}

// rows are the jobs.
func rows() []row {
	all := []row{}
	for _, model := range []string{"qwen2.5-0.5b", "llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "pythia-1.4b",
		"smollm2-1.7b", "gpt2-large", "opt-1.3b", "starcoder2-3b", "phi-1.5"} {
		all = append(all, row{Name: "Trainer", Model: model, Sequence: 1024, Arguments: plain})
	}
	for _, model := range []string{"llama-3-8b", "mistral-7b", "qwen2.5-7b", "gemma-2-2b", "phi-3-mini",
		"olmo-2-1124-7b"} {
		all = append(all, row{Name: "Trainer, checkpoints", Model: model, Sequence: 2048, Arguments: checkpointed})
	}
	of1B := func(name string, more document) row {
		return row{Name: name, Model: "llama-3.2-1b", Sequence: 2048, Arguments: plain.with(more)}
	}
	batch := document{"per_device_train_batch_size": 4}
	all = append(all,
		of1B("batch of 4", batch),
		of1B("batch of 4, checkpoints", checkpointed.with(batch)),
		of1B("4 micro batches", document{"gradient_accumulation_steps": 4}),
		of1B("fp32", document{"bf16": false}),
		of1B("AdamW, foreach", document{"optim": "adamw_torch"}),
		of1B("Adafactor", document{"optim": "adafactor"}),
		of1B("SGD", document{"optim": "sgd"}),
		of1B("no clipping", document{"max_grad_norm": 0}),
		of1B("torch.compile", document{"torch_compile": true}),
	)
	for _, model := range []string{"llama-3-8b", "qwen2.5-7b"} {
		all = append(all,
			row{Name: "LoRA", Model: model, Sequence: 1024, Arguments: plain, Adapter: lora},
			row{Name: "LoRA, checkpoints", Model: model, Sequence: 4096, Arguments: checkpointed, Adapter: lora})
	}
	of8 := func(name, model string, arguments, accelerate, deepspeed document) row {
		return row{Name: name, Model: model, Sequence: 2048, GPUs: 8, Arguments: arguments, Accelerate: accelerate,
			DeepSpeed: deepspeed}
	}
	onHost := document{"device": "cpu", "pin_memory": true}
	return append(all,
		of8("DDP", "llama-3.2-1b", plain, nil, nil),
		of8("FSDP2", "llama-3.2-1b", plain, sharded(2, nil), nil),
		of8("FSDP2", "llama-3-8b", plain, sharded(2, nil), nil),
		of8("FSDP2, checkpoints", "llama-3-8b", plain, sharded(2, document{"fsdp_activation_checkpointing": true}),
			nil),
		of8("FSDP1", "llama-3.2-1b", plain, sharded(1, nil), nil),
		of8("FSDP1", "llama-3-8b", plain, sharded(1, nil), nil),
		of8("ZeRO-1", "llama-3.2-1b", plain, nil, zero(1, nil)),
		of8("ZeRO-2", "llama-3.2-1b", plain, nil, zero(2, nil)),
		of8("ZeRO-2, checkpoints", "llama-3-8b", checkpointed, nil, zero(2, nil)),
		of8("ZeRO-2, optimizer on the host", "llama-3-8b", checkpointed, nil,
			zero(2, document{"offload_optimizer": onHost})),
		of8("ZeRO-3", "llama-3.2-1b", plain, nil, zero(3, nil)),
		of8("ZeRO-3, checkpoints", "llama-3-8b", checkpointed, nil, zero(3, nil)),
		of8("ZeRO-3, all on the host", "llama-3-8b", checkpointed, nil, zero(3, document{"offload_optimizer": onHost,
			"offload_param": onHost})),
	)
}
