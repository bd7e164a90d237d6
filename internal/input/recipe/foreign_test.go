package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/recipe/recipetest"
)

// TestForeignConfigurations gives files of programs that plimsoll does not read. Each is refused by the name of its
// program, whichever flag it is given to, though it has keys of programs that plimsoll reads.
func TestForeignConfigurations(t *testing.T) {
	for _, c := range []struct{ file, text, program string }{
		{"neox.yml", "{\"pipe_parallel_size\": 1, \"num_layers\": 4, \"zero_optimization\": {\"stage\": 1},\n" +
			"  # a comment\n  \"train_micro_batch_size_per_gpu\": 2, \"checkpoint_activations\": True}\n", "GPT-NeoX"},
		{"neox-dashes.yml", "pipe-parallel-size: 2\ntrain_batch_size: 8\n", "GPT-NeoX"},
		{"nanotron.yaml", "parallelism:\n  dp: 2\n  pp_engine: 1f1b\nmodel:\n  dtype: bfloat16\ntokens:\n" +
			"  micro_batch_size: 1\n", "nanotron"},
		{"levanter.yaml", "model_name_or_path: org/model\ntrainer:\n  mp: p=f32\n  num_train_steps: 10\n", "levanter"},
		{"levanter-tag.yaml", "data: !include other.yaml\ntrainer:\n  num_train_steps: 10\n", "levanter"},
		{"foundry.yaml", "max_seq_len: 2048\nmodel:\n  d_model: 64\ntrain_loader:\n  name: text\n" +
			"device_train_microbatch_size: 4\n", "LLM Foundry"},
		{"olmo.yaml", "run_name: a\nmodel:\n  d_model: 64\ndevice_train_microbatch_size: 4\n", "OLMo"},
		{"lingua.yaml", "model_type: x\nmodel:\n  dim: 64\ndistributed:\n  fsdp_type: full_shard\n", "Lingua"},
		{"litgpt.yaml", "model_name: tiny\nout_dir: o\ntrain:\n  lr_warmup_steps: 5\n", "LitGPT"},
		{"nemo-rl.yaml", "defaults: a.yaml\npolicy:\n  model_name: m\n  dtensor_cfg:\n    enabled: true\n", "NeMo RL"},
		{"automodel.yaml", "step_scheduler:\n  global_batch_size: 8\nmodel:\n  _target_: a.b\n", "NeMo AutoModel"},
		{"oumi.yaml", "model:\n  model_name: org/m\ntraining:\n  trainer_type: TRL_SFT\n", "Oumi"},
		{"rl.toml", "max_steps = 4\n[orchestrator]\nbatch_size = 2\n", "prime-rl"},
		{"verl_sft.yaml", "data:\n  train_files: a\noptim:\n  lr: 1.0e-5\n", "verl's SFT"},
		{"areal.yaml", "experiment_name: a\ntrial_name: b\nactor:\n  path: m\n", "AReaL"},
		{"roll.yaml", "exp_name: a\npretrain: org/m\nlora_target: q_proj\nactor_train:\n  x: 1\nseed: 1\n", "ROLL"},
		{"autotrain.yml", "task: llm-sft\nbase_model: org/m\nproject_name: p\nparams:\n  lr: 1e-5\n", "AutoTrain"},
		{"loop.yaml", "model_name_or_path: org/m\nper_device_train_batch_size: 1\nwith_tracking: true\n",
			"training loop of its own"},
		{"config.json", `{"model_family": "flux", "data_backend_config": "d.json", "checkpointing_steps": 500}`, "SimpleTuner"},
		{"flux.yaml", "job: extension\nconfig:\n  name: n\n  process:\n  - type: sd_trainer\n", "ai-toolkit"},
		{"lora.toml", "pretrained_model_name_or_path = \"m\"\nnetwork_module = \"networks.lora\"\n", "kohya"},
		{"wan.toml", "micro_batch_size_per_gpu = 1\noutput_dir = \"o\"\n[model]\ntype = \"wan\"\n", "diffusion-pipe"},
		{"jinja.yaml", "model_name_or_path: \"/m/{{ NAME }}\"\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\n",
			"this file is a template"},
		{"lora.json", `{"lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"]}`, "LoRA adapter of a script"},
		{"dataset_info.json", `{"builder_name": "json", "dataset_name": "d", "features": {}, "splits": {}}`, "dataset"},
		{"cli.yaml", "trainer:\n  accelerator: gpu\n  max_epochs: 2\nmodel:\n  class_path: a.B\n", "Lightning"},
		{"hydra.yaml", "defaults:\n  - base\nlearning_rate: 1.0e-5\noutput_dir: o\n", "Hydra"},
		{"generation_config.json", `{"eos_token_id": 2, "transformers_version": "4.50.0"}`, "generation_config.json"},
		{"sweep.yaml", "method: bayes\nmetric:\n  name: loss\nparameters:\n  lr:\n    min: 1\n", "sweep"},
		{"wandb.yaml", "_wandb:\n  value: {}\nmodel_type:\n  value: a\nlearning_rate:\n  value: 1.0\n", "Biases"},
		{"workflow.yml", "on: push\ndefaults:\n  run:\n    shell: bash\njobs:\n  build:\n    runs-on: a\n", "GitHub"},
		{"sizes.yaml", "hidden_size: 64\nnum_hidden_layers: 2\n", "which is JSON"},
		{"zero.yaml", "zero_optimization:\n  stage: 2\ntrain_batch_size: 8\n", "which is JSON"},
		{"deploy.yaml", "apiVersion: v1\nkind: Service\n---\napiVersion: v1\nkind: Pod\n", "Kubernetes"},
	} {
		path := filepath.Join(t.TempDir(), c.file)
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		flag, err := Detect(path, files.Texts{})
		if err == nil && flag == ConfigFlag {
			_, err = LoadFramework(path, Source{})
		}
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), path, ""), c.program) {
			t.Errorf("%s is for %q: %v", c.file, flag, err)
		} else {
			recipetest.RequireInput(t, err)
		}
		if flag == MegatronFlag {
			t.Errorf("%s is taken for a training by Megatron core", c.file)
		}
		for flag, load := range loaders {
			if err := load(path); err == nil && c.file != "sizes.yaml" { // that has no quantization_config
				t.Errorf("%s accepts %s", flag, c.file)
			}
		}
	}
}

// TestForeignKeys gives files with keys of a program that plimsoll reads, of which the program knows few.
func TestForeignKeys(t *testing.T) {
	for name, text := range map[string]string{
		"own.yaml":       "model_name_or_path: org/m\nwidgets: 3\ncolours: blue\nshapes: [1]\n",
		"half.yaml":      "base_model: org/m\nsuite: a\nengine: b\nharness: c\n",
		"deepspeed.json": `{"zero_optimization": {"stage": 2}, "layers": 4, "width": 64, "heads": 2}`,
	} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		flag, err := Detect(path, files.Texts{})
		if err == nil && flag == ConfigFlag {
			_, err = LoadFramework(path, Source{})
		} else if err == nil {
			err = loaders[flag](path)
		}
		if err == nil || !strings.Contains(err.Error(), "of its") {
			t.Errorf("%s is for %q: %v", name, flag, err)
		}
	}
}

// TestRefusalBeforeForeignKeys gives a file of ms-swift that generates answers, with keys that only its other commands
// know: the refusal says so, and not that the file is none of ms-swift.
func TestRefusalBeforeForeignKeys(t *testing.T) {
	text := "rlhf_type: ppo\nmodel: org/m\ntuner_type: lora\nteacher: a\nroll: b\nrewards: c\nweights: d\nhost: e\n"
	if _, err := ParseFramework("grpo.yaml", []byte(text), Source{}); err == nil ||
		!strings.Contains(err.Error(), "rlhf_type is ppo") {
		t.Errorf("got %v", err)
	}
}

// TestTemplateOfChats: what a key says is no variable of the file if it is a template itself.
func TestTemplateOfChats(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config_full.yaml")
	text := "model_name_or_path: org/m\ntorch_dtype: bfloat16\ndataset_mixer:\n  a: 1.0\nlearning_rate: 1.0e-5\n" +
		"chat_template: \"{% for m in messages %}{{ eos_token }}{{'<|x|>' + m['role']}}{% endfor %}\"\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadFramework(path, Source{}); err != nil {
		t.Error(err)
	}
}
