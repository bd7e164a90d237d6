package amend

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/recipe"
)

// TestApply edits several settings of two files. Lines are those of the files as they were.
func TestApply(t *testing.T) {
	file := filestest.InNewFolder(t)
	zero := file("ds.json", `{
  "train_batch_size": 16,
  "train_micro_batch_size_per_gpu": "auto", // from the Trainer
  "zero_optimization": {
    "stage": 2, // half
    "reduce_bucket_size": 5e8
  }
}
`)
	trainer := file("args.json", "{\n  \"output_dir\": \"x\",\n  \"per_device_train_batch_size\": 8\n}\n")
	r, err := Apply(nil, []string{zero, trainer}, []Setting{{recipe.MicroBatch, 4}, {recipe.TrainBatch, 8},
		{recipe.OptimizerDevice, "cpu"}, {recipe.ReduceBucket, 200000000}, {recipe.GradientCheckpointing, true},
		{recipe.FSDPOffload, true}, {recipe.ParameterDevice, "none"}})
	if err != nil {
		t.Fatal(err)
	}
	said := ""
	for _, e := range r.Edits {
		said += strings.NewReplacer(zero, "ds.json", trainer, "args.json").Replace(e.String()) + "\n"
	}
	const want = `args.json:3: per_device_train_batch_size 8 -> 4
ds.json:2: train_batch_size 16 -> 8
ds.json:4: zero_optimization.offload_optimizer.device "cpu" (new)
ds.json:6: zero_optimization.reduce_bucket_size 5e8 -> 200000000
args.json:1: gradient_checkpointing true (new)
`
	if said != want {
		t.Errorf("%s\nwant\n%s", said, want)
	}
	if fmt.Sprint(r.Rest) != "[{FSDP offload true}]" {
		t.Errorf("%v is left", r.Rest)
	}
	text := string(r.Texts[zero])
	if !strings.Contains(text, "// half") || !strings.Contains(text, "// from the Trainer") {
		t.Errorf("comments are lost:\n%s", text)
	}
}
