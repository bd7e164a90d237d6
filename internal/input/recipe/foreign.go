package recipe

// What to give in place of a configuration that plimsoll does not read.
const (
	byFlags = "name the model by --model, and say the rest by flags, such as " + someFlags
	byRun   = "plimsoll has no model of diffusion on paper: 'plimsoll plan --gpu NAME -- python FILE ...' plans the " +
		"program as it runs, without a GPU"
	byNeoX = "give its arguments as those of Megatron-LM (--megatron), or name the model by --model and the stage " +
		"of ZeRO by --zero"
	byTrained = "of trainings that generate answers plimsoll reads those of TRL, verl, OpenRLHF, slime and ms-swift: " +
		"name the trained model by --model, say how it is sharded by flags, and the engine on its GPUs by --rollout, " +
		"such as " + someFlags + " --rollout vllm:0.5,sleep=1; or give the model to plimsoll.plan in Python"
	someFlags = "--fsdp 2 --seq-len 4096 --micro-batch 1"
	byLoRA    = "give PEFT's adapter_config.json, or --lora with the rank and --lora-targets"
)

// trainingOf returns the kind of the configurations of a program that trains in a way of its own.
func trainingOf(program, instead, marks string) *Kind {
	return &Kind{Name: program + " configuration", Marks: marks, Instead: instead}
}

// OtherTrainings are configurations of programs that train, which plimsoll does not read, and other files that have
// keys of the programs that it reads. They come first: every mark is one that only such files have.
var OtherTrainings = []*Kind{
	{Name: "sweep over hyperparameters", Marks: "tune_config sweep_config method+parameters",
		Instead: "give the configuration of one training"},
	trainingOf("GPT-NeoX", byNeoX, `pipe_parallel_size pipe-parallel-size scaled_upper_triang_masked_softmax_fusion
		scaled-upper-triang-masked-softmax-fusion output_layer_parallelism gpt_j_residual gpt-j-residual
		no_weight_tying no-weight-tying pos_emb+num_layers pos-emb+num-layers attention_config+num_layers
		mup_width_scale lr_decay_style+train_iters lr-decay-style+train-iters`),
	trainingOf("nanotron", byFlags, "tokens.micro_batch_size tokens.sequence_length parallelism.pp_engine "+
		"parallelism.tp_mode"),
	trainingOf("levanter", byFlags, `trainer.mp trainer.num_train_steps trainer.tensor_parallel_axes
		trainer.per_device_parallelism initialize_from_hf`),
	trainingOf("LLM Foundry", byFlags, `train_loader+device_train_microbatch_size train_loader+max_duration
		train_loader+global_train_batch_size train_loader+fsdp_config`),
	trainingOf("OLMo", byFlags, "device_train_microbatch_size"),
	trainingOf("Lingua", byFlags, "distributed.fsdp_type"),
	trainingOf("LitGPT's pretraining", byFlags+" --model-library litgpt", `model_name+train.lr_warmup_steps
		model_name+train.tie_embeddings`),
	trainingOf("NeMo RL", byTrained, `policy.generation policy.dtensor_cfg policy.megatron_cfg
		policy.train_global_batch_size policy.max_total_sequence_length`),
	trainingOf("NeMo AutoModel", byFlags, "step_scheduler"),
	trainingOf("Oumi", byFlags, `training.trainer_type model.model_name+training model.model_name+generation
		model.model_name+engine`),
	trainingOf("prime-rl", byTrained, `orchestrator weight_broadcast deployment.num_train_gpus
		deployment.num_infer_gpus inference.vllm model.name+optim.lr`),
	trainingOf("verl's SFT", byFlags, "data.train_files+optim data.train_files+engine"),
	trainingOf("AReaL", byTrained, "allocation_mode experiment_name+trial_name"),
	trainingOf("ROLL", byTrained, "actor_train actor_infer sft_train strategy_args pretrain+exp_name"),
	trainingOf("trlx", byTrained, "method.name train.trainer+tokenizer"),
	trainingOf("AutoTrain", byFlags, "task+base_model+params task+project_name+params base_model+project_name+backend"),
	trainingOf("H2O LLM Studio", byFlags, "llm_backbone architecture.backbone_dtype"),
	trainingOf("mistral-finetune", byFlags, "model_id_or_path+run_dir model_id_or_path+instruct_tokenizer"),
	trainingOf("MaxText", byFlags, "base_emb_dim base_num_decoder_layers ici_fsdp_parallelism dcn_data_parallelism"),
	trainingOf("InstructLab", byFlags, "train.effective_batch_size train.max_batch_len"),
	trainingOf("SimpleTuner", byRun, "data_backend_config model_family+train_batch_size"),
	trainingOf("ai-toolkit", byRun, "config.process"),
	trainingOf("kohya's sd-scripts", byRun, "network_module train_data_dir+unet_lr"),
	trainingOf("x-flux", byRun, "data_config.img_dir"),
	trainingOf("diffusion-pipe", byRun, "micro_batch_size_per_gpu+model.type"),
	{Name: "configuration of a script with a training loop of its own, such as open-instruct's", Instead: byFlags,
		Marks: "use_slow_tokenizer with_tracking checkpointing_steps dataset_mixer_list"},
	{Name: "training by TRL that generates answers", Marks: "trl_generates", Instead: byTrained,
		Commands: commandsOf("trl_generates", "trl ppo", "trl online_dpo", "ppo.py", "online_dpo.py", "gkd.py")},
	{Name: "training by train_ppo of OpenRLHF or another program that generates answers", Marks: "generates_answers",
		Instead: byTrained, Commands: commandsOf("generates_answers", "openrlhf/cli/train_ppo.py",
			"examples/run_grpo_math.py")},
	{Name: "training by a program that generates answers", Marks: "trains_policy", Instead: byTrained,
		Commands: commandsOf("trains_policy", "skyrl/train/entrypoints/main_base.py",
			"skyrl_train/entrypoints/main_base.py", "examples/run_grpo.py", "examples/run_dpo.py", "examples/run_rm.py",
			"verl/trainer/main.py", "areal/launcher/local.py", "areal/launcher/ray.py", "areal/launcher/slurm.py")},
	{Name: "record of a run by Weights & Biases", Marks: "_wandb wandb_version"},
	{Name: "description of a dataset", Marks: "builder_name features+splits _data_files dataset_info"},
}

// OtherFiles are files of other kinds that lie beside configurations.
var OtherFiles = []*Kind{
	{Name: "setting of a LoRA adapter of a script", Marks: "lora_r lora_alpha lora_rank", Instead: byLoRA},
	trainingOf("Lightning", byFlags, "trainer.accelerator trainer.max_epochs trainer.devices model.class_path"),
	{Name: "generation_config.json", Marks: "transformers_version do_sample max_new_tokens",
		Instead: "give the model's config.json"},
	{Name: "tokenizer's configuration", Marks: "tokenizer_class added_tokens_decoder added_tokens",
		Instead: "give the model's config.json"},
	{Name: "processor's configuration", Marks: "image_processor_type feature_extractor_type " +
		"processor_class", Instead: "give the model's config.json"},
	{Name: "index of a model's weights", Marks: "weight_map", Instead: "give the model's config.json, or its folder"},
	{Name: "diffusers configuration", Marks: "_diffusers_version _class_name"},
	{Name: "state of a Trainer", Marks: "log_history"},
	{Name: "Jupyter notebook that calls no trainer of transformers, TRL or Unsloth", Marks: "nbformat",
		Instead: "give its model to plimsoll.plan in a cell; or write it as a program ('jupyter nbconvert --to " +
			"script'), and 'plimsoll plan --gpu NAME -- python FILE' plans it as it runs"},
	{Name: "task of lm-evaluation-harness", Marks: "doc_to_text task+dataset_path output_type"},
	{Name: "Kubernetes manifest", Marks: "apiVersion+kind"},
	{Name: "Compose file", Marks: "services"},
	{Name: "workflow of GitHub Actions", Marks: "jobs"},
	{Name: "task of SkyPilot", Marks: "resources.accelerators resources.cloud setup+run"},
	{Name: "part of a Hydra configuration", Marks: "hydra defaults _target_",
		Instead: "give the configuration that Hydra prints with --cfg job, if it is one that plimsoll reads"},
}
