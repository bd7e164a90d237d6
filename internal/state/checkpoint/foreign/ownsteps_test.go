//go:build linux

package foreign

import (
	"path/filepath"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

// TestOwnStepsAreExported: formats with a step for each parameter keep those of parameters that have had fewer.
func TestOwnStepsAreExported(t *testing.T) {
	job := newJob(t, shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.F32), 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	train(t, job, 1, 2)
	of := shardtest.OptimizerOf(kernel.Adam)
	u := engine.Update{Step: 3, GradScale: 1, Optimizers: []optim.Optimizer{of, of}, LeftAlone: []int{1, 3}}
	if err := job[0].State.BeginThen(u, nil); err != nil {
		t.Fatal(err)
	}
	job[0].State.Wait()
	c, err := checkpoint.Open(save(t, t.TempDir(), job, ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.StepOf(shardtest.SmallModel[1].Name); got != 2 {
		t.Fatalf("%s has had %d steps, want 2", shardtest.SmallModel[1].Name, got)
	}
	folder := t.TempDir()
	if err := WriteTorch(t.Context(), c, filepath.Join(folder, "state.pt"), nil); err != nil {
		t.Fatal(err)
	}
	if err := WriteDistributed(t.Context(), c, filepath.Join(folder, "distributed"), nil); err != nil {
		t.Fatal(err)
	}
	fromTorch, err := OpenTorch(t.Context(), filepath.Join(folder, "state.pt"), BesideTorch{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	fromDistributed, err := OpenDistributed(t.Context(), filepath.Join(folder, "distributed"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, from := range []*checkpoint.Checkpoint{fromTorch, fromDistributed} {
		for _, p := range shardtest.SmallModel {
			if got, want := from.StepOf(p.Name), c.StepOf(p.Name); got != want || from.Step() != 3 {
				t.Errorf("%s: %s has had %d of %d steps, want %d of 3", from.Path(), p.Name, got, from.Step(), want)
			}
		}
	}
	shardtest.MustSay(t, WriteUniversal(t.Context(), c, folder, nil), "has had",
		"one number of steps for all parameters",
		"--to torch")
}
