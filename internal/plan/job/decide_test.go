package job

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
)

// compared compares jobs. Functions of optimizers and compiled patterns have no
// equality; the names and the texts that they were made from have.
var compared = cmp.Options{
	cmpopts.IgnoreFields(Optimizer{}, "States"),
	cmp.AllowUnexported(Optimizer{}),
	cmp.Comparer(func(a, b *optimizerKind) bool { return a == b }), // rows of one table
	cmpopts.IgnoreUnexported(deepspeed.Config{}, peft.Adapter{}),
	cmp.Comparer(func(a, b *model.Model) bool { return reflect.DeepEqual(a, b) }),
}

// variants are requests that decide on copies of what was read: sizes that are
// "auto", fused experts, targets by default and by pattern, and offloaded shards.
func variants(t *testing.T) map[string]Request {
	file := filestest.InNewFolder(t)
	pattern := file("pattern.json", `{"peft_type": "LORA", "r": 4, "target_modules": ".*self_attn.*_proj"}`)
	unnamed := file("unnamed.json", `{"peft_type": "LORA", "r": 4}`)
	mixture := file("config.json", `{"model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64, `+
		`"intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, `+
		`"num_key_value_heads": 2, "num_experts": 4}`)
	zero := file("zero.json", `{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, `+
		`"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", `+
		`"stage3_param_persistence_threshold": "auto"}, "optimizer": {"type": "AdamW"}}`)
	launch := file("launch.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  "+
		"fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")
	training := file("args.json", `{"per_device_train_batch_size": 2, "bf16": true, "gradient_checkpointing": true}`)
	return map[string]Request{
		"sizes":       {Model: "qwen2.5-0.5b", DeepSpeed: zero, GPUs: 4, TrainingArgs: training},
		"experts":     {Model: mixture, DeepSpeed: zero, GPUs: 4},
		"old experts": {Model: mixture, DeepSpeed: zero, GPUs: 4, Transformers: "4.57"},
		"a pattern":   {Model: mixture, Adapter: pattern, Precision: "bf16"},
		"defaults":    {Model: "qwen2.5-0.5b", Adapter: unnamed, Quantization: "nf4", FSDP: "2", GPUs: 2},
		"shards":      {Model: "qwen2.5-0.5b", Accelerate: launch, OffloadParameters: true},
	}
}

func randomOverrides() Overrides {
	one := func(n ...int) int { return n[rand.IntN(len(n))] }
	var stage *int
	if rand.IntN(2) > 0 {
		stage = new(rand.IntN(4))
	}
	return Overrides{GPUs: one(0, 1, 2, 8), Nodes: one(0, 1, 4), Sequence: one(0, 64, 4096),
		MicroBatch: one(0, 1, 3), Accumulation: one(0, 1, 5),
		Recompute: append(Recomputes, "")[rand.IntN(len(Recomputes)+1)], ZeROStage: stage,
		OffloadOptimizer: []string{"", "none", "cpu"}[rand.IntN(3)]}
}

// TestDecideIsPure decides jobs from the same inputs in several goroutines. Each
// must be what freshly read files give, and the order must not matter.
func TestDecideIsPure(t *testing.T) {
	for name, q := range variants(t) {
		t.Run(name, func(t *testing.T) {
			in, err := Read(q)
			if err != nil {
				t.Fatal(err)
			}
			var wait sync.WaitGroup
			for range 3 {
				wait.Go(func() {
					for range 5 {
						checkFresh(t, q, in, randomOverrides())
					}
				})
			}
			wait.Wait()
			checkFresh(t, q, in, Overrides{})
		})
	}
}

func checkFresh(t *testing.T, q Request, in *Inputs, o Overrides) {
	t.Helper()
	again, err := Read(q)
	if err != nil {
		t.Error(err)
		return
	}
	got, failed := Decide(in, o)
	want, refused := Decide(again, o)
	if fmt.Sprint(failed) != fmt.Sprint(refused) {
		t.Errorf("%+v: %v, from files that were just read %v", o, failed, refused)
		return
	}
	if difference := cmp.Diff(want, got, compared); difference != "" {
		t.Errorf("%+v: from files that were just read (-) and from shared ones (+):\n%s", o, difference)
	}
	if failed == nil && got.Adapter != nil && !cmp.Equal(targets(want), targets(got)) {
		t.Errorf("%+v: other modules are adapted", o)
	}
}

// targets returns the modules that the adapter of a job adapts.
func targets(j *Job) []string {
	var list []string
	for _, path := range j.Model.Network.Linears() {
		if j.Adapter.Targets(path) {
			list = append(list, path)
		}
	}
	return list
}

// TestOverrides tests that an override goes before flags and files.
func TestOverrides(t *testing.T) {
	q := variants(t)["sizes"]
	in, err := Read(q)
	if err != nil {
		t.Fatal(err)
	}
	j, err := Decide(in, Overrides{GPUs: 8, Nodes: 2, Sequence: 256, MicroBatch: 3, Accumulation: 5, Recompute: "none"})
	if err != nil {
		t.Fatal(err)
	}
	if j.World != 16 || j.Sequence != 256 || j.MicroBatch != 3 || j.Accumulation != 5 || j.Recompute != nil {
		t.Errorf("the job is %+v", j)
	}
	j, err = Decide(in, Overrides{ZeROStage: new(2), OffloadOptimizer: "cpu"})
	if err != nil || j.DeepSpeed.ZeROStage != 2 || j.DeepSpeed.OffloadOptimizer.Device != "cpu" ||
		j.DeepSpeed.OverlapReduction {
		t.Errorf("DeepSpeed is %+v, %v", j.DeepSpeed, err)
	}
	asked, err := q.Resolve()
	if err != nil || asked.World != 4 || asked.MicroBatch != 2 || asked.Recompute == nil {
		t.Errorf("without overrides it is %+v, %v", asked, err)
	}
}

// TestGlobalBatch: torchtitan and LLaMA-Factory's trainer v1 make as many micro batches of the batch of all ranks as it
// takes.
func TestGlobalBatch(t *testing.T) {
	const titan = `[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 2
global_batch_size = 64
[parallelism]
tensor_parallel_degree = %d
expert_parallel_degree = %d
[activation_checkpoint]
mode = "full"
`
	file := filestest.InNewFolder(t)
	for _, c := range []struct {
		tensor, experts, gpus, accumulation int
	}{{1, 8, 8, 4}, {2, 1, 8, 8}, {1, 1, 6, 0}, {2, 8, 8, 0}} {
		path := file(fmt.Sprintf("%d-%d.toml", c.tensor, c.gpus), fmt.Sprintf(titan, c.tensor, c.experts))
		j, err := Request{Configs: []string{path}, GPUs: c.gpus, GPU: "H200"}.Resolve()
		if c.accumulation == 0 {
			if err == nil {
				t.Errorf("%+v: %d micro batches", c, j.Accumulation)
			}
			continue
		}
		if err != nil || j.Accumulation != c.accumulation || j.Parallel.Expert != int64(c.experts) {
			t.Errorf("%+v: %+v, %v", c, j, err)
		}
	}
	const factory = `model: x
train_dataset: d
micro_batch_size: 2
global_batch_size: 32
cp_size: 2
flash_attn: flash_attention_2
dist_config: {name: fsdp2}
`
	j, err := Request{Model: "qwen3-8b", Configs: []string{file("v1.yaml", factory)}, GPUs: 8, GPU: "H200"}.Resolve()
	if err != nil || j.Accumulation != 4 {
		t.Errorf("%+v, %v", j, err)
	}
}
