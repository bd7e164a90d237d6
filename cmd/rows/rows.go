package main

// row is a job of transformers' Trainer. Both plans read the same files.
type row struct {
	name     string
	model    string // of the catalog
	sequence int
	gpus     int // of one node; 0 is 1
	// files are written beside the program: arguments of the Trainer, and configurations that they or launchers name.
	arguments  document
	accelerate document // has the program started by accelerate launch
	deepspeed  document
	adapter    document
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

var (
	plain = document{"output_dir": "out", "per_device_train_batch_size": 1, "bf16": true, "max_steps": 10,
		"report_to": "none", "gradient_checkpointing": false}
	checkpointed = plain.with(document{"gradient_checkpointing": true})
	lora         = document{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32,
		"lora_dropout":   0.0,
		"target_modules": []string{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
	launch = document{"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_machines": 1,
		"machine_rank": 0, "main_training_function": "main", "rdzv_backend": "static", "same_network": true}
)

func sharded(version int, more document) document {
	again := any(true)
	if version == 1 {
		again = "FULL_SHARD"
	}
	return launch.with(document{"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": document{
		"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
		"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_offload_params": false, "fsdp_reshard_after_forward": again,
		"fsdp_cpu_ram_efficient_loading": true,
	}.with(more)})
}

func zero(stage int, more document) document {
	return document{"bf16": document{"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
		"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
		"zero_optimization": document{"stage": stage, "overlap_comm": true, "contiguous_gradients": true}.with(more)}
}

// rows are the jobs.
func rows() []row {
	all := []row{}
	for _, model := range []string{"qwen2.5-0.5b", "llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "pythia-1.4b",
		"smollm2-1.7b", "gpt2-large", "opt-1.3b", "starcoder2-3b", "phi-1.5"} {
		all = append(all, row{name: "Trainer", model: model, sequence: 1024, arguments: plain})
	}
	for _, model := range []string{"llama-3-8b", "mistral-7b", "qwen2.5-7b", "gemma-2-2b", "phi-3-mini",
		"olmo-2-1124-7b"} {
		all = append(all, row{name: "Trainer, checkpoints", model: model, sequence: 2048, arguments: checkpointed})
	}
	of1B := func(name string, more document) row {
		return row{name: name, model: "llama-3.2-1b", sequence: 2048, arguments: plain.with(more)}
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
			row{name: "LoRA", model: model, sequence: 1024, arguments: plain, adapter: lora},
			row{name: "LoRA, checkpoints", model: model, sequence: 4096, arguments: checkpointed, adapter: lora})
	}
	of8 := func(name, model string, arguments, accelerate, deepspeed document) row {
		return row{name: name, model: model, sequence: 2048, gpus: 8, arguments: arguments, accelerate: accelerate,
			deepspeed: deepspeed}
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
