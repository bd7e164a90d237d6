package recipe

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/recipetest"
)

func TestTrainingBad(t *testing.T) { recipetest.Refused(t, "training", 80, newest(LoadTraining)) }

// trainingDefaults is the meaning of an empty object.
func trainingDefaults() Training {
	return Training{
		MicroBatch: 8, GradientAccumulation: 1, Precision: Unmixed, MaxGradNorm: 1, DDPBucketMiB: 25,
		Optimizer: TrainerOptimizer{
			Name: "adamw_torch_fused", Assumed: true,
			LR: 5e-5, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8,
		},
		DataLoader: DataLoader{PinMemory: true},
		Evaluation: Evaluation{MicroBatch: 8},
		Saving:     Saving{Enabled: true},
	}
}

// fsdp2 is the meaning of "fsdp": true.
func fsdp2() *FSDP {
	return &FSDP{Version: 2, Strategy: "full_shard", WrapPolicy: "transformer_based_wrap", UseOrigParams: true,
		BackwardPrefetch: "none", StateDictType: "full_state_dict"}
}

// TestTraining changes the defaults to the meaning of each text.
func TestTraining(t *testing.T) {
	const noVersion = `fsdp is used without a "version"`
	for _, test := range []struct {
		name, text string
		means      func(*Training)
		notes      []string
	}{
		{"empty.json", `{}`, func(*Training) {}, nil},
		{"usual.json",
			`{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16, "bf16": true, "bf16_full_eval": true, "tf32": true,
			"learning_rate": 2e-5, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.5,
			"gradient_checkpointing": true, "gradient_checkpointing_kwargs": {"use_reentrant": false},
			"dataloader_num_workers": 4, "dataloader_persistent_workers": true, "ddp_bucket_cap_mb": 100, "torch_empty_cache_steps": 10,
			"use_liger_kernel": true, "eval_strategy": "epoch", "eval_accumulation_steps": 4, "per_device_eval_batch_size": 1}`,
			func(w *Training) {
				w.MicroBatch, w.GradientAccumulation, w.Precision, w.TF32, w.MaxGradNorm = 2, 16, MixedBF16, true, 0.5
				w.Optimizer.LR, w.Optimizer.WeightDecay, w.Optimizer.Beta2, w.Optimizer.Epsilon = 2e-5, 0.1, 0.95, 1e-6
				w.Checkpointing = Checkpointing{Enabled: true, EveryN: 1}
				w.DataLoader = DataLoader{Workers: 4, PrefetchFactor: 2, PinMemory: true, PersistentWorkers: true}
				w.DDPBucketMiB, w.TorchEmptyCacheSteps, w.UseLigerKernel = 100, 10, true
				w.Evaluation = Evaluation{Enabled: true, MicroBatch: 1, AccumulationSteps: 4}
			}, nil},
		{"usual.yaml",
			"fp16: yes\nper_device_train_batch_size: 1\noptim: 'paged_adamw_8bit'\nlearning_rate: 2.0e-4 # " +
				"LoRA\nsave_strategy: 'no'\n",
			func(w *Training) {
				w.MicroBatch, w.Precision, w.Saving.Enabled = 1, MixedF16, false
				w.Optimizer.Name, w.Optimizer.Assumed, w.Optimizer.LR = "paged_adamw_8bit", false, 2e-4
			}, nil},
		{"version5.json",
			`{"activation_checkpointing": true, "activation_checkpointing_kwargs": {"every_n_layers": 2, "offload": true},
			"torch_compile_backend": "inductor", "use_cpu": true, "max_grad_norm": null, "train_sampling_strategy": "group_by_length"}`,
			func(w *Training) {
				w.Checkpointing = Checkpointing{Enabled: true, ByRelease: true, EveryN: 2, Offload: true}
				w.TorchCompile, w.TF32, w.OnCPU, w.DataLoader.PinMemory, w.MaxGradNorm, w.GroupByLength = true, true,
					true, false, 0, true
			}, []string{"activation_checkpointing is given without use_reentrant"}},
		{"version4.json",
			`{"adafactor": true, "per_gpu_train_batch_size": 3, "per_gpu_eval_batch_size": null, "evaluation_strategy": "steps", "no_cuda": false,
			"group_by_length": true, "fsdp": [], "fsdp_min_num_params": 0, "fsdp_config": {"min_num_params": 0, "xla": false}, "deepspeed": null}`,
			func(w *Training) {
				w.MicroBatch, w.GroupByLength, w.Evaluation.Enabled = 3, true, true
				w.Optimizer.Name, w.Optimizer.Assumed = "adafactor", false
			}, []string{"per_gpu_train_batch_size is deprecated", "evaluation_strategy is deprecated"}},
		{"galore.json",
			`{"optim": "galore_adamw_8bit_layerwise", "optim_target_modules": "attn, mlp", "optim_args": "rank=64, scale=2.0"}`,
			func(w *Training) {
				w.Optimizer.Name, w.Optimizer.Assumed = "galore_adamw_8bit_layerwise", false
				w.Optimizer.StepsInBackward = true
			}, nil},
		{"sft.json",
			`{"max_length": 1024, "packing": true, "eos_token": "<EOS_TOKEN>", "pad_token": "<PAD_TOKEN>", "dataset_num_proc": null, "beta": 0.1, "bf16": true}`,
			func(w *Training) { w.Precision = MixedBF16 },
			[]string{`"max_length"`, `"packing"`, `"eos_token"`, `"pad_token"`, `"dataset_num_proc"`, `"beta"`}},
		{"fsdp.json", `{"fsdp": true}`, func(w *Training) { w.FSDP = fsdp2() }, []string{noVersion}},
		{"fsdp_words.json",
			`{"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "A,B", "fsdp_offload_params": true}}`,
			func(w *Training) {
				w.FSDP = fsdp2()
				w.FSDP.Strategy, w.FSDP.OffloadParameters, w.FSDP.WrapLayers = "shard_grad_op", true, []string{"A", "B"}
			}, []string{"fsdp_config.fsdp_offload_params has no effect", noVersion}},
		{"fsdp1.json",
			`{"fsdp": ["hybrid_shard", "auto_wrap"], "gradient_checkpointing": true, "gradient_checkpointing_kwargs": {"use_reentrant": true},
			"fsdp_config": {"version": 1, "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": "true", "use_orig_params": "false",
			"cpu_ram_efficient_loading": true, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}`,
			func(w *Training) {
				w.FSDP = &FSDP{
					Version:             1,
					Strategy:            "hybrid_shard",
					WrapPolicy:          "transformer_based_wrap",
					WrapLayers:          []string{"LlamaDecoderLayer"},
					BackwardPrefetch:    "backward_pre",
					ForwardPrefetch:     true,
					SyncModuleStates:    true,
					RAMEfficientLoading: true,
					StateDictType:       "full_state_dict",
				}
				w.Checkpointing = Checkpointing{Enabled: true, Reentrant: true, EveryN: 1}
			}, []string{"fsdp is planned as hybrid_shard", "fsdp is given with gradient_checkpointing"}},
		{"fsdp_size.json",
			`{"fsdp": true, "fsdp_config": {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000000,
			"transformer_layer_cls_to_wrap": "A", "reshard_after_forward": false, "use_orig_params": true, "state_dict_type": "sharded_state_dict"}}`,
			func(w *Training) {
				w.FSDP = fsdp2()
				w.FSDP.WrapPolicy, w.FSDP.WrapBySize, w.FSDP.Strategy, w.FSDP.StateDictType = "size_based_wrap",
					1000000, "shard_grad_op", "sharded_state_dict"
			}, []string{"fsdp_config.use_orig_params has no effect with FSDP2",
				"fsdp_config.transformer_layer_cls_to_wrap has no effect with SIZE_BASED_WRAP"}},
		{"fsdp_size_zero.json",
			`{"fsdp": true, "fsdp_config": {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0, "activation_checkpointing": true}}`,
			func(w *Training) {
				w.FSDP = fsdp2()
				w.FSDP.WrapPolicy, w.FSDP.ActivationCheckpointing = "no_wrap", true
			}, []string{"fsdp_config.min_num_params has no effect at 0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseTraining(test.name, []byte(test.text), Source{})
			if err != nil {
				t.Fatal(err)
			}
			want := trainingDefaults()
			want.File = test.name
			test.means(&want)
			if diff := cmp.Diff(&want, got, cmpopts.IgnoreFields(Training{}, "Notes"),
				cmpopts.IgnoreFields(TrainerOptimizer{}, "LowRank")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			recipetest.RequireNotes(t, got.Notes, test.notes)
		})
	}
}

// TestTrainingCompanions checks that paths are relative to the file that names
// them, and that the named files are read as parts of it.
// TestVersionOfFSDP holds which FSDP the Trainer takes where nothing says a version, by the release of transformers.
func TestVersionOfFSDP(t *testing.T) {
	for release, want := range map[string]int{"": 2, "4.27.0": 1, "5.9.0": 1, "5.10.0": 2, "5.24.0": 2} {
		of, err := version.Version{}, error(nil)
		if release != "" {
			of, err = version.Parse(release)
		}
		if err != nil {
			t.Fatal(err)
		}
		for given, want := range map[string]int{"": want, `, "fsdp_config": {"version": 2}`: 2,
			`, "fsdp_config": {"version": 1}`: 1} {
			w, err := ParseTraining("args.json", []byte(`{"fsdp": "full_shard auto_wrap"`+given+`}`),
				Source{Releases: func(string) version.Version { return of }})
			if err != nil {
				t.Fatal(err)
			}
			if w.FSDP.Version != want {
				t.Errorf("transformers %q with %q takes FSDP%d, expected FSDP%d", release, given, w.FSDP.Version, want)
			}
		}
	}
}

func TestTrainingCompanions(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"args.json": `{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": true, "max_grad_norm": 0.5,
			"learning_rate": 1e-5, "weight_decay": 0.1, "deepspeed": "configs/ds.json"}`,
		"configs/ds.json": `{
			"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
			"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
			"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
			"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
			"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "auto"},
				"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}`,
		"sharded.json":      `{"fsdp": "full_shard", "fsdp_config": "configs/fsdp.json"}`,
		"configs/fsdp.json": `{"fsdp_version": 2, "fsdp_cpu_offload": true, "wobble": 1}`,
	} {
		path := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}

	got, err := LoadTraining(filepath.Join(folder, "args.json"), Source{})
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.File, want.ZeROStage, want.Precision = filepath.Join(folder, "configs", "ds.json"), 3, dtype.BF16
	want.OverlapReduction = true
	want.OffloadOptimizer.Device, want.OffloadOptimizer.PinGiven = "cpu", true
	want.GradientClipping, want.Batch = 0.5, deepspeed.Batch{Micro: 2, Accumulation: 4}
	want.Optimizer = &deepspeed.Optimizer{
		Type:           "AdamW",
		LR:             1e-5,
		Beta1:          0.9,
		Beta2:          0.999,
		Epsilon:        1e-8,
		WeightDecay:    0.1,
		AdamW:          true,
		BiasCorrection: true,
	}
	want.Auto = strings.Fields(`scheduler.params.warmup_num_steps zero_optimization.reduce_bucket_size
		zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_prefetch_bucket_size`)
	if diff := cmp.Diff(&want, got.DeepSpeed, cmpopts.IgnoreUnexported(deepspeed.Config{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if batch, err := got.DeepSpeed.ResolveBatch(4); err != nil ||
		batch != (deepspeed.Batch{Train: 32, Micro: 2, Accumulation: 4}) {
		t.Errorf("the batch is %+v, %v", batch, err)
	}
	got.DeepSpeed = got.DeepSpeed.ResolveSizes(4096)
	if s := got.DeepSpeed.Sizes; s.ReduceBucket != 4096*4096 || s.PrefetchBucket != 15099494 ||
		s.PersistentParameter != 40960 {
		t.Errorf("the sizes are %+v", s)
	}

	got, err = LoadTraining(filepath.Join(folder, "sharded.json"), Source{})
	if err != nil {
		t.Fatal(err)
	}
	f := fsdp2()
	f.OffloadParameters = true
	if diff := cmp.Diff(f, got.FSDP); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	recipetest.RequireNotes(t, got.Notes,
		[]string{`fsdp.json:1:47: TrainingArguments knows no key "wobble" in fsdp_config`})
}

func FuzzParseTraining(f *testing.F) {
	recipetest.Archived(f, "testdata/bad/training.txtar",
		func(file string, text []byte) { f.Add(strings.HasSuffix(file, ".yaml"), text) })
	f.Add(false,
		[]byte(`{"fsdp": true, "fsdp_config": {"version": 1, "backward_prefetch": "BACKWARD_PRE"}, "optim_args": "a=b"}`))
	f.Add(false, []byte(`{"deepspeed": {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}}`))
	f.Add(true, []byte("fp16: yes\noptim: sgd\ndeepspeed:\n  zero_optimization: {stage: 3}\n"))
	f.Fuzz(func(t *testing.T, yaml bool, text []byte) {
		file := "fuzz.json"
		if yaml {
			file = "fuzz.yaml"
		}
		got, err := ParseTraining(file, text, Source{})
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and %v", got, err)
		}
		if err != nil {
			recipetest.RequireInput(t, err)
		}
	})
}
