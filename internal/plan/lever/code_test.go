package lever

import (
	"slices"
	"testing"

	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// TestCode: what a change takes back has no line of a program, and what it sets says its value.
func TestCode(t *testing.T) {
	for name, want := range map[string]struct {
		settings []amend.Setting
		lines    []string
	}{
		"a setting": {when(true, to(recipe.GradientCheckpointing, true))[0],
			[]string{"model.gradient_checkpointing_enable()"}},
		"taken back": {when(true, to(recipe.Stage, 3), to(recipe.ParameterDevice, "cpu"), to(sharded, nil),
			to(hostStates, nil), to(hostUpdate, nil), to(activations, nil))[0],
			[]string{`"stage": 3 in "zero_optimization" of DeepSpeed's configuration`,
				`"offload_param": {"device": "cpu"} in "zero_optimization"`}},
		"a format": {when(true, to(hostUpdate, job.ServiceOptimizer+"/int8"))[0],
			[]string{`plimsoll.torch.AdamW(model.parameters(), ..., moments="int8")`}},
		"a disk": {when(true, to(stateDisk, "/mnt/nvme"))[0],
			[]string{`plimsoll.torch.AdamW(..., tier=["/mnt/nvme"])`}},
		"one micro batch": {when(true, to(recipe.MicroBatch, 2), to(recipe.Accumulation, 1))[0],
			[]string{"per_device_train_batch_size=2"}},
	} {
		if got := codeOf(want.settings); !slices.Equal(got, want.lines) {
			t.Errorf("%s: lines %q, expected %q", name, got, want.lines)
		}
	}
}
