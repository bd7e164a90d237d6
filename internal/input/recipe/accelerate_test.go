package recipe

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/recipetest"
)

func TestAccelerateBad(t *testing.T) { recipetest.Refused(t, "accelerate", 52, newest(LoadAccelerate)) }

// TestAccelerate compares the meaning of each text. Some are files that
// "accelerate config" writes.
func TestAccelerate(t *testing.T) {
	none := defaults().OffloadParameters
	deepSpeed := func(file string, means func(*deepspeed.Config)) *deepspeed.Config {
		d := defaults()
		d.File, d.ZeROStage = file, 2
		d.Auto = []string{"gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
			"train_micro_batch_size_per_gpu"}
		means(&d)
		return &d
	}
	const pins = "zero_optimization.offload_optimizer.pin_memory is not given"
	for _, test := range []struct {
		name, text string
		want       Accelerate
		notes      []string
		deepNotes  []string
	}{
		{"no.yaml", `
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
downcast_bf16: 'no'
fsdp_config: {}
gpu_ids: all
machine_rank: 0
main_process_ip: null
megatron_lm_config: {}
mixed_precision: 'no'
num_processes: 1
same_network: true
tpu_env: []
use_cpu: false
`, Accelerate{Engine: "none", Processes: 1, Machines: 1, Precision: Unmixed}, nil, nil},
		{"ddp.yaml", `
distributed_type: MULTI_GPU
mixed_precision: FP8
num_machines: 2
num_processes: 15
gpu_ids: 0,1, 2
use_cpu: off
fp8_config: {backend: MS-AMP, opt_level: O2}
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: max-autotune
fsdp_config: {fsdp_version: 2}
`, Accelerate{Engine: "ddp", Processes: 15, Machines: 2, GPUs: []string{"0", "1", "2"},
			Precision: MixedFP8, FP8Backend: "msamp", CompileBackend: "inductor"},
			[]string{"num_processes is 15, which is not a multiple of the 2 machines: accelerate starts 7 on each",
				"fsdp_config has no effect: distributed_type is MULTI_GPU"}, nil},
		{"old.json", `{"distributed_type": "NO", "fp16": true, "num_processes": 4, "dynamo_backend": "EAGER"}`,
			Accelerate{Engine: "none", Processes: 1, Machines: 1, Precision: MixedF16, CompileBackend: "eager"},
			[]string{"fp16 is deprecated", "dynamo_backend is deprecated", "num_processes has no effect"}, nil},
		{"fsdp1.yaml", `
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: 'true'
  fsdp_ignored_modules: null
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer,BertPooler
  fsdp_use_orig_params: no
`, Accelerate{Engine: "fsdp", Processes: 8, Machines: 1, Precision: MixedBF16,
			FSDP: &FSDP{
				Version:                 1,
				Strategy:                "shard_grad_op",
				WrapPolicy:              "transformer_based_wrap",
				WrapLayers:              []string{"BertLayer", "BertPooler"},
				OffloadParameters:       true,
				ActivationCheckpointing: true,
				BackwardPrefetch:        "backward_pre",
				ForwardPrefetch:         true,
				SyncModuleStates:        true,
				RAMEfficientLoading:     true,
				StateDictType:           "sharded_state_dict",
			}}, nil, nil},
		{"fsdp1_reshard.yaml", `
distributed_type: FSDP
fsdp_config:
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
`, Accelerate{Engine: "fsdp", Machines: 1, Precision: Unmixed,
			FSDP: &FSDP{
				Version:             1,
				Strategy:            "full_shard",
				WrapPolicy:          "size_based_wrap",
				WrapBySize:          1e8,
				UseOrigParams:       true,
				BackwardPrefetch:    "none",
				SyncModuleStates:    true,
				RAMEfficientLoading: true,
				StateDictType:       "full_state_dict",
			}},
			[]string{"fsdp_backward_prefetch_policy has no effect",
				"fsdp_reshard_after_forward has no effect with FSDP1"}, nil},
		{"fsdp1_number.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: '5'}\n",
			Accelerate{Engine: "fsdp", Machines: 1, Precision: Unmixed,
				FSDP: &FSDP{
					Version:             1,
					Strategy:            "hybrid_shard_zero2",
					WrapPolicy:          "no_wrap",
					UseOrigParams:       true,
					BackwardPrefetch:    "none",
					SyncModuleStates:    true,
					RAMEfficientLoading: true,
					StateDictType:       "full_state_dict",
				}}, nil, nil},
		{"fsdp2.yaml", `
distributed_type: FSDP
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_sharding_strategy: NO_SHARD
  fsdp_forward_prefetch: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
`, Accelerate{Engine: "fsdp", Processes: 8, Machines: 1, Precision: Unmixed,
			FSDP: &FSDP{
				Version:          2,
				Strategy:         "shard_grad_op",
				WrapPolicy:       "transformer_based_wrap",
				UseOrigParams:    true,
				BackwardPrefetch: "none",
				StateDictType:    "sharded_state_dict",
			},
			Parallelism: &Parallelism{Replicate: 2, Shard: 2, Tensor: 2, Context: 1, Sequence: 1}},
			[]string{"fsdp_forward_prefetch has no effect with FSDP2",
				"fsdp_sharding_strategy has no effect with FSDP2"}, nil},
		{"deepspeed.yaml", `
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock
`, Accelerate{Engine: "deepspeed", Machines: 1, Precision: MixedBF16, MoELayers: []string{"MixtralSparseMoeBlock"},
			DeepSpeed: deepSpeed("deepspeed.yaml", func(d *deepspeed.Config) {
				d.ZeROStage, d.OverlapReduction, d.Precision, d.GradientClipping = 3, true, dtype.BF16, 0.5
				d.OffloadOptimizer.Device = "cpu"
				d.Batch.Accumulation, d.GatherOnSave = 4, true
				d.Auto = []string{"train_batch_size", "train_micro_batch_size_per_gpu"}
			})}, nil, []string{pins}},
		{"deepspeed_default.yaml", "distributed_type: DEEPSPEED\nmixed_precision: fp16\n",
			Accelerate{
				Engine:    "deepspeed",
				Machines:  1,
				Precision: MixedF16,
				DeepSpeed: deepSpeed("deepspeed_default.yaml", func(d *deepspeed.Config) {
					d.Precision = dtype.F16
					d.LossScale = deepspeed.LossScale{InitialPower: 16, Window: 1000, Hysteresis: 2, Minimum: 1}
				}),
			}, nil, nil},
		{"nvme.yaml",
			"distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: '3', offload_param_device: nvme, " +
				"offload_param_nvme_path: /nvme}\n",
			Accelerate{
				Engine:    "deepspeed",
				Machines:  1,
				Precision: Unmixed,
				ZeRO3Init: true,
				DeepSpeed: deepSpeed("nvme.yaml", func(d *deepspeed.Config) {
					d.ZeROStage, d.OverlapReduction = 3, true
					d.OffloadParameters = none
					d.OffloadParameters.Device = "nvme"
				}),
			}, nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseAccelerate(test.name, []byte(test.text), Source{})
			if err != nil {
				t.Fatal(err)
			}
			test.want.File = test.name
			if diff := cmp.Diff(&test.want, got, cmpopts.IgnoreUnexported(deepspeed.Config{}),
				cmpopts.IgnoreFields(deepspeed.Config{}, "Notes"), cmpopts.IgnoreFields(Accelerate{},
					"Notes")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			recipetest.RequireNotes(t, got.Notes, test.notes)
			if got.DeepSpeed != nil {
				recipetest.RequireNotes(t, got.DeepSpeed.Notes, test.deepNotes)
			}
		})
	}
}

// TestAccelerateFile checks what accelerate adds to a DeepSpeed file.
func TestAccelerateFile(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "accelerate.yaml")
	if err := errors.Join(
		os.WriteFile(path,
			[]byte("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  "+
				"zero3_init_flag: true\n"), 0o644),
		os.WriteFile(filepath.Join(folder, "ds.json"),
			[]byte(`{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": "auto"}, "gradient_clipping": 1.0,
			"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	got, err := LoadAccelerate(path, Source{})
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.File, want.ZeROStage, want.Batch = filepath.Join(folder, "ds.json"), 2, deepspeed.Batch{Micro: 2,
		Accumulation: 1}
	want.Sizes.PersistentModel = math.MaxInt64
	if diff := cmp.Diff(&want, got.DeepSpeed, cmpopts.IgnoreUnexported(deepspeed.Config{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !got.ZeRO3Init {
		t.Error("zero3_init_flag was not read")
	}
}

func FuzzParseAccelerate(f *testing.F) {
	recipetest.Archived(f, "testdata/bad/accelerate.txtar", func(_ string, text []byte) { f.Add(text) })
	f.Add([]byte("distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config: {zero_stage: '3', " +
		"offload_param_device: nvme}\n"))
	f.Add([]byte("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: '5', " +
		"fsdp_transformer_layer_cls_to_wrap: \"A, B\"}\n"))
	f.Add([]byte("\ufeffdistributed_type: |\n  NO\n? a\n: [b, {c: d}]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := ParseAccelerate("fuzz.yaml", text, Source{})
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and %v", got, err)
		}
		if err != nil {
			recipetest.RequireInput(t, err)
		}
	})
}

// TestBareNO reads the type NO without quotes, which YAML takes for a boolean: accelerate starts one process, too.
func TestBareNO(t *testing.T) {
	a, err := ParseAccelerate("a.yaml", []byte("distributed_type: NO\nnum_processes: 1\n"), Source{})
	if err != nil || a.Engine != "none" {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestUnknownInSections gives sections keys that accelerate passes to nobody: they are noted.
func TestUnknownInSections(t *testing.T) {
	for text, note := range map[string]string{
		"distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_parameters: true\n":           `no key "fsdp_offload_parameters"`,
		"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_optimization: {stage: 3}\n": `no key "zero_optimization"`,
	} {
		a, err := ParseAccelerate("a.yaml", []byte(text), Source{})
		if err != nil || !strings.Contains(fmt.Sprint(a.Notes), note) {
			t.Errorf("%+v, %v", a, err)
		}
	}
}
