package job

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/allocator"
)

// variables are those of the environment that the user's script or source sets, by their names, as far as they change
// what the job holds. Flags go before them.
type variables map[string]recipe.Variable

func (set variables) add(list []recipe.Variable) {
	for _, v := range list {
		set[v.Name] = v
	}
}

// variables reads the variables of a script and of the source that it starts, which sets its own after that.
func (r *resolver) variables() (err error) {
	set := variables{}
	if s := r.Inputs.script; s != nil {
		set.add(s.Launch.Environment)
	}
	if f := r.Inputs.framework; f != nil {
		set.add(f.Environment)
	}
	if err = r.visible(set[recipe.VisibleVariable]); err != nil {
		return err
	}
	r.job.Allocator, err = set.allocator(r.Allocator, r.job.Versions.Torch, r.assume)
	return err
}

// allocator returns the settings of PyTorch's allocator: those of a flag, or of a variable.
func (set variables) allocator(flag string, torch version.Version, assume func(string, ...any)) (string, error) {
	if v := set[recipe.UncachedVariable]; v.Name != "" && v.Value != "" && v.Value != "0" {
		assume("%v: %s is not planned: the plan has PyTorch's cache, and without it the GPU holds less",
			v.Place, v.Name)
	}
	v := set[recipe.LaterAllocatorVariable]
	if v.Name == "" || !torch.AtLeast(2, 9, 0) && set[recipe.AllocatorVariable].Name != "" {
		v = set[recipe.AllocatorVariable]
	}
	switch {
	case v.Name == "" || flag != "":
		return flag, nil
	case v.Unknown:
		assume("the allocator's usual settings: %v: only a run can tell %s; give --alloc-conf", v.Place, v.Name)
		return "", nil
	}
	if _, err := allocator.ParseConfiguration(v.Value, torch); err != nil {
		return "", &fault.Input{Where: v.Place, Err: fmt.Errorf("%s is %q: %w", v.Name, v.Value, err),
			Hint: "--alloc-conf with other settings goes before it"}
	}
	if v.Value != "" {
		assume("the allocator's settings are %s: %v: %s says so", v.Value, v.Place, v.Name)
	}
	return v.Value, nil
}

// seen returns the devices that a variable shows.
func seen(v recipe.Variable) []string {
	return slices.DeleteFunc(strings.Split(v.Value, ","), func(s string) bool { return strings.TrimSpace(s) == "" })
}

// seesNone refuses a job that sees no GPU.
func seesNone(v recipe.Variable) error {
	devices := seen(v)
	if v.Name == "" || v.Unknown || len(devices) > 0 && !strings.HasPrefix(strings.TrimSpace(devices[0]), "-") {
		return nil
	}
	return v.Place.Inputf("%s is %q: the program sees no GPU, and trains on the CPU", v.Name, v.Value).
		WithHint("leave the line out, or plan the training on the CPU by --cpu")
}

// visible refuses a job that sees no GPU, and one process that sees several: transformers' Trainer then divides each
// batch among them by DataParallel.
func (r *resolver) visible(v recipe.Variable) error {
	devices := seen(v)
	switch {
	case v.Name == "" || v.Unknown || r.CPU:
	case seesNone(v) != nil:
		return seesNone(v)
	case len(devices) > 1 && r.Inputs.script == nil && r.GPUs <= 1 && r.launch == nil:
		return v.Place.Inputf("%s shows %d GPUs, and one process starts: transformers' Trainer then divides each "+
			"batch among the GPUs by DataParallel, which is not planned", v.Name, len(devices)).
			WithHint(fmt.Sprintf("start a rank on each GPU, such as by torchrun --nproc_per_node %d, and give --gpus "+
				"%d; or show one GPU", len(devices), len(devices)))
	}
	return nil
}
