package deepspeed

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/recipetest"
)

// defaultsOf is the meaning of an empty object, without the notes.
func defaultsOf() Config {
	none := Offload{Device: "none", PinMemory: true, Ratio: 1, Buffers: 4}
	parameters := none
	parameters.Buffers, parameters.BufferElements, parameters.HeldElements, parameters.Ratio = 5, 1e8, 1e9, 0
	return Config{
		ZeRO: ZeRO{
			Sizes: Sizes{
				ReduceBucket: 5e8, AllgatherBucket: 5e8, SubGroup: 1e9, PrefetchBucket: 5e7,
				PersistentParameter: 1e5, PersistentModel: math.MaxInt64, LiveParameters: 1e9, ReuseDistance: 1e9,
				Group: -1, SecondaryPartition: 1,
			},
			EfficientLinear:   true,
			OffloadOptimizer:  none,
			OffloadParameters: parameters,
		},
		Types:             Types{Precision: dtype.F32, SequenceCommunication: dtype.F32},
		PipelineReentrant: true,
		SequenceParallel:  1,
		GradientClipping:  1,
	}
}

// TestGood changes the defaults to the meaning of each file of testdata/good.
func TestGood(t *testing.T) {
	tests := []struct {
		file  string
		means func(*Config)
		notes []string // each a part of the note
	}{
		{"minimal", func(d *Config) {
			d.Batch = Batch{Train: 8}
		}, []string{"minimal.json: gradient_clipping is not given"}},
		{"zero2_offload", func(d *Config) {
			d.ZeROStage, d.OverlapReduction = 2, true
			d.Sizes.AllgatherBucket = 2e8
			d.OffloadOptimizer = Offload{Device: "cpu", PinGiven: true, Ratio: 1, Buffers: 4}
			d.Precision, d.GradientAccumulationDType = dtype.BF16, dtype.F32
			d.Optimizer = &Optimizer{
				Type:           "AdamW",
				LR:             3e-5,
				Beta1:          0.9,
				Beta2:          0.95,
				Epsilon:        1e-8,
				WeightDecay:    0.1,
				AdamW:          true,
				BiasCorrection: true,
			}
			d.Batch = Batch{Train: 64, Micro: 4}
		}, nil},
		{"zero3_auto", func(d *Config) {
			d.ZeROStage, d.OverlapReduction = 3, true
			d.Sizes.LiveParameters = 2e9
			d.OffloadOptimizer.Device, d.OffloadParameters.Device = "cpu", "cpu"
			d.OffloadOptimizer.PinGiven, d.OffloadParameters.PinGiven, d.GatherOnSave = true, true, true
			d.Precision = dtype.Invalid
			d.LossScale = LossScale{InitialPower: 16, Window: 1000, Hysteresis: 2, Minimum: 1}
			d.Optimizer = &Optimizer{
				Type:           "AdamW",
				LR:             1e-3,
				Beta1:          0.9,
				Beta2:          0.999,
				Epsilon:        1e-8,
				AdamW:          true,
				BiasCorrection: true,
				Defaulted:      []string{"lr", "betas", "eps", "weight_decay"},
			}
			d.Auto = strings.Fields(`bf16.enabled fp16.enabled gradient_accumulation_steps gradient_clipping
				optimizer.params.betas optimizer.params.eps optimizer.params.lr optimizer.params.weight_decay
				scheduler.params.total_num_steps scheduler.params.warmup_max_lr scheduler.params.warmup_min_lr scheduler.params.warmup_num_steps
				train_batch_size train_micro_batch_size_per_gpu
				zero_optimization.reduce_bucket_size zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_prefetch_bucket_size`)
		}, nil},
		{"zenflow", func(d *Config) {
			d.ZeROStage, d.OverlapReduction = 2, true
			d.OffloadOptimizer.Device, d.OffloadOptimizer.PinGiven = "cpu", true
			d.ZenFlow = &ZenFlow{TopKRatio: 0.05, UpdateInterval: 4, OverlapStep: true, Offload: true}
			d.Precision, d.GradientClipping = dtype.BF16, 0
			d.Optimizer = &Optimizer{
				Type:      "Adam",
				LR:        2e-5,
				Beta1:     0.9,
				Beta2:     0.999,
				Epsilon:   1e-8,
				Defaulted: []string{"betas", "eps", "weight_decay"},
			}
			d.Batch = Batch{Micro: 8}
		}, nil},
		{"super_offload", func(d *Config) {
			d.ZeROStage = 3
			d.Sizes.SubGroup, d.Sizes.LiveParameters = 4e8, 5e8
			d.OffloadOptimizer = Offload{
				Device:       "cpu",
				PinMemory:    true,
				PinGiven:     true,
				Ratio:        0.9,
				SuperOffload: true,
				Buffers:      4,
			}
			d.Precision, d.LowPrecisionMaster, d.LowPrecisionState = dtype.BF16, true, true
			d.Optimizer = &Optimizer{
				Type:           "AdamW",
				LR:             1e-5,
				Beta1:          0.9,
				Beta2:          0.999,
				Epsilon:        1e-8,
				AdamW:          true,
				BiasCorrection: true,
				Defaulted:      []string{"betas", "eps", "weight_decay"},
			}
			d.Batch = Batch{Train: 8, Accumulation: 1}
		}, nil},
		{"fp16_static", func(d *Config) {
			d.ZeROStage, d.Sizes.ReduceBucket = 1, 1e6
			d.Precision, d.GradientClipping, d.CheckpointActivationsOnCPU = dtype.F16, 0.5, true
			d.LossScale = LossScale{
				Static:                128,
				InitialPower:          16,
				Hysteresis:            2,
				Minimum:               1,
				ConsecutiveHysteresis: true,
			}
			d.Optimizer = &Optimizer{
				Type:           "Adam",
				LR:             1e-3,
				Beta1:          0.9,
				Beta2:          0.999,
				Epsilon:        1e-8,
				WeightDecay:    0.01,
				AdamW:          true,
				BiasCorrection: true,
				TorchAdam:      true,
				Defaulted:      []string{"lr", "betas", "eps", "weight_decay"},
			}
			d.Batch = Batch{Train: 16, Micro: 2}
		}, nil},
		{"deprecated", func(d *Config) {
			d.ZeROStage, d.Precision = 2, dtype.BF16
			d.OffloadOptimizer.Device = "cpu"
			d.Optimizer = &Optimizer{
				Type:              "Lion",
				LR:                1e-3,
				Beta1:             0.9,
				Beta2:             0.999,
				AdamW:             true,
				LowPrecisionState: true,
				Defaulted:         []string{"lr", "betas", "eps", "weight_decay"},
			}
			d.Batch = Batch{Train: 16}
		}, []string{
			"deprecated.json:4:3: bfloat16 is deprecated",
			"deprecated.json:7:5: zero_optimization.cpu_offload is deprecated",
			"deprecated.json:8:5: zero_optimization.cpu_offload_use_pin_memory is deprecated and has no effect",
			"deprecated.json:9:5: zero_optimization.cpu_offload_param is deprecated",
			"deprecated.json:11:3: eigenvalue has no effect",
			"deprecated.json:5:3: zero_optimization.offload_param has no effect at stage 2",
			"deprecated.json: gradient_clipping is not given",
			"deprecated.json:5:3: zero_optimization.offload_optimizer.pin_memory is not given",
		}},
		{"oldest", func(d *Config) {
			d.ZeROStage, d.Sizes.AllgatherBucket = 1, 1000
			d.Batch = Batch{Train: 16}
		}, []string{"oldest.json:5:3: allgather_size is deprecated",
			"oldest.json:4:3: zero_optimization is a boolean"}},
		{"ignored", func(d *Config) {
			d.ZeROStage = 2
			d.OffloadOptimizer.Device, d.OffloadOptimizer.PinGiven = "cpu", true
			d.Batch = Batch{Train: 16}
		}, []string{
			"ignored.json:5:3: bfloat16 is deprecated",
			"ignored.json:8:48: zero_optimization.offload_optimizer.super_offload has no effect at stage 2",
			`ignored.json:8:27: zero_optimization.offload_optimizer.device is "nvme", which stage 2 treats as "cpu"`,
			`ignored.json:5:3: bfloat16 has no effect beside "bf16"`,
		}},
		{"accelerate_auto", func(d *Config) {
			d.Precision = dtype.BF16
			d.OffloadOptimizer.Ratio = 0.5 // refused at stage 2, but this may be 3
			d.Auto = []string{"zero_optimization.offload_optimizer.device", "zero_optimization.stage"}
		}, nil},
		{"nvme", func(d *Config) {
			d.Beside = []string{"leaf_module: ZeRO-3 gathers all parameters of such modules at once"}
			d.ZeROStage, d.OverlapReduction = 3, true
			d.OffloadOptimizer.Device, d.OffloadParameters.Device = "nvme", "nvme"
			d.Optimizer = &Optimizer{Type: "SGD", LR: 0.1, Defaulted: []string{"betas", "eps", "weight_decay"}}
			d.Batch = Batch{Micro: 1, Accumulation: 16}
		}, []string{"nvme.json:7:5: zero_optimization.offload_optimizer.pin_memory is not given"}},
	}
	for _, test := range tests {
		t.Run(test.file, func(t *testing.T) {
			path := filepath.Join("testdata/good", test.file+".json")
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got, err := Parse(path, text, version.Version{})
			if err != nil {
				t.Fatal(err)
			}
			want := defaultsOf()
			want.File = path
			test.means(&want)
			if diff := cmp.Diff(&want, got, cmpopts.IgnoreUnexported(Config{}),
				cmpopts.IgnoreFields(Config{}, "Notes")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(got.Notes) != len(test.notes) {
				t.Fatalf("notes: %v", got.Notes)
			}
			for i, note := range test.notes {
				if !strings.Contains(got.Notes[i].String(), note) {
					t.Errorf("note %d is %q, want %q", i, got.Notes[i], note)
				}
			}
		})
	}
}

// TestResolveBatch omits each number of a true batch equation. DeepSpeed
// derives the number again, or 1 accumulation step.
func TestResolveBatch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full := Batch{
			Micro:        rapid.IntRange(1, 1<<20).Draw(t, "micro"),
			Accumulation: rapid.IntRange(1, 1<<20).Draw(t, "accumulation"),
		}
		ranks := rapid.IntRange(1, 1<<20).Draw(t, "ranks")
		full.Train = full.Micro * full.Accumulation * ranks
		for _, test := range []struct{ given, want Batch }{
			{full, full},
			{Batch{Micro: full.Micro, Accumulation: full.Accumulation}, full},
			{Batch{Train: full.Train, Accumulation: full.Accumulation}, full},
			{Batch{Train: full.Train, Micro: full.Micro}, full},
			{Batch{Micro: full.Micro}, Batch{full.Micro * ranks, full.Micro, 1}},
			{Batch{Train: full.Train}, Batch{full.Train, full.Micro * full.Accumulation, 1}},
		} {
			got, err := parsed(t, test.given).ResolveBatch(ranks)
			if err != nil || got != test.want {
				t.Fatalf("%+v on %d ranks: got %+v, %v, want %+v", test.given, ranks, got, err, test.want)
			}
		}
		if _, err := parsed(t, Batch{full.Train + 1, full.Micro, full.Accumulation}).ResolveBatch(ranks); err == nil {
			t.Fatal("a contradiction was accepted")
		}
	})
}

// parsed returns a file that gives the batch. A zero is omitted or "auto".
func parsed(t *rapid.T, b Batch) *Config {
	write := func(key string, n int) string {
		switch {
		case n > 0:
			return fmt.Sprintf("%q: %d", key, n)
		case rapid.Bool().Draw(t, "auto"):
			return fmt.Sprintf("%q: \"auto\"", key)
		default:
			return fmt.Sprintf("%q: null", key)
		}
	}
	text := fmt.Sprintf("{%s, %s, %s}", write(TrainKey, b.Train), write(MicroKey, b.Micro),
		write(AccumulationKey, b.Accumulation))
	d, err := Parse("batch.json", []byte(text), version.Version{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestResolveBatchRanks checks that fewer than one rank is refused. The number
// does not come from the file, so no schema checks it.
func TestResolveBatchRanks(t *testing.T) {
	for _, ranks := range []int{0, -1, math.MinInt} {
		if _, err := (&Config{Batch: Batch{Micro: 1}}).ResolveBatch(ranks); err == nil {
			t.Errorf("%d ranks were accepted", ranks)
		}
	}
}

func FuzzParseDeepSpeed(f *testing.F) {
	const ranks = 8
	paths, err := filepath.Glob("testdata/good/*.json")
	if err != nil || len(paths) == 0 {
		f.Fatal("no seeds: ", err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, ranks)
	}
	recipetest.Archived(f, "../testdata/bad/deepspeed.txtar", func(_ string, text []byte) { f.Add(text, ranks) })
	f.Add([]byte(strings.Repeat("[", 20000)), 1)
	f.Add([]byte("{\"a\\"), 1)
	f.Add([]byte("\ufeff{/**/}#"), 1)
	f.Fuzz(func(t *testing.T, text []byte, ranks int) {
		release := version.Version{Minor: ranks & 31}
		if _, err := Parse("fuzz.json", text, release); err != nil {
			recipetest.RequireInput(t, err)
		}
		d, err := Parse("fuzz.json", text, version.Version{})
		if (d == nil) == (err == nil) {
			t.Fatalf("got %v and %v", d, err)
		}
		if err != nil {
			recipetest.RequireInput(t, err)
			return
		}
		b, err := d.ResolveBatch(ranks)
		if err != nil {
			recipetest.RequireInput(t, err)
		} else if product, ok := multiply([]factor{{b.Micro, ""}, {b.Accumulation, ""}, {ranks, ""}}); !ok ||
			product != b.Train {
			t.Fatalf("%+v on %d ranks", b, ranks)
		}
	})
}
