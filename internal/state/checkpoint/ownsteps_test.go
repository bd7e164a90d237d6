//go:build linux

package checkpoint

import (
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// leaveAlone makes steps that leave the parameters of some names alone.
func leaveAlone(t *testing.T, job []Shard, names ...string) {
	t.Helper()
	for _, s := range job {
		var sections []int
		for i, p := range s.Pieces {
			if slices.Contains(names, p.Name) {
				sections = append(sections, i)
			}
		}
		of := shardtest.OptimizerOf(s.Format.Algorithm)
		u := engine.Update{Step: s.State.Steps() + 1, GradScale: 1, Optimizers: []optim.Optimizer{of, of, of},
			LeftAlone: sections}
		if err := s.State.BeginThen(u, nil); err != nil {
			t.Fatal(err)
		}
		s.State.Wait()
	}
}

// wantSteps checks how many steps the parameters of a job have had: three, but for some.
func wantSteps(t *testing.T, job []Shard, fewer map[string]int64) {
	t.Helper()
	for _, s := range job {
		for i, had := range s.State.OwnSteps() {
			want, ok := fewer[s.Pieces[i].Name]
			if !ok {
				want = 3
			}
			if had != want {
				t.Errorf("rank %d: %v has had %d steps, want %d", s.Rank, s.Pieces[i], had, want)
			}
		}
	}
}

// TestOwnStepsAreSaved saves a state whose parameters have had one, two and three steps. They have as many in another
// cut, after a conversion, and in PyTorch's formats. Formats with one number for all refuse the state.
func TestOwnStepsAreSaved(t *testing.T) {
	once, twice := shardtest.SmallModel[1].Name, shardtest.SmallModel[3].Name
	fewer := map[string]int64{once: 1, twice: 2}
	f := shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.F32)
	job := newJob(t, f, 700, shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	train(t, job, 1, 1)
	leaveAlone(t, job, once)
	leaveAlone(t, job, once, twice)
	wantSteps(t, job, fewer)
	path := save(t, t.TempDir(), job, "")
	others := newJob(t, f, 300,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 2000, 7000, 11700))
	c := load(t, path, others)
	wantSteps(t, others, fewer)
	again := newJob(t, f, 700, shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	load(t, path, again)
	for i := range job {
		shardtest.EqualState(t, bytesOfState(again[i]), bytesOfState(job[i]))
		step(t, job[i], 1)
		step(t, again[i], 1)
		shardtest.EqualState(t, bytesOfState(again[i]), bytesOfState(job[i])) // the bias corrections are the same
	}
	converted, err := c.Convert(t.Context(), t.TempDir(), Conversion{Ranks: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	one := newJob(t, f, 0, shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	load(t, converted, one)
	wantSteps(t, one, fewer)
}

// TestSharesHaveTheirOwnSteps saves a state that two ranks hold, each a share of it.
func TestSharesHaveTheirOwnSteps(t *testing.T) {
	once := shardtest.SmallModel[1].Name
	job := replicate(t, shardtest.SplitFormat,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)), 2)
	for _, s := range job {
		s.State.SetSteps(1)
	}
	leaveAlone(t, job, once)
	leaveAlone(t, job, once)
	path := save(t, t.TempDir(), job, "")
	one := newJob(t, shardtest.SplitFormat, 0,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	load(t, path, one)
	wantSteps(t, one, map[string]int64{once: 1})
}

// TestOwnStepsAreChecked spoils the steps in a manifest.
func TestOwnStepsAreChecked(t *testing.T) {
	for says, m := range map[string]manifest{
		`schema "plimsoll.shard/1" with own_steps`: {manifestHead: manifestHead{Schema: ShardSchema, Step: 3},
			OwnSteps: map[string]int64{"w": 1}},
		`"w" has had 4 steps, expected 0 to 3`: {manifestHead: manifestHead{Schema: ownStepsSchema, Step: 3},
			OwnSteps: map[string]int64{"w": 4}},
		"own_steps of 2 parameters, of which the shard has 1": {
			manifestHead: manifestHead{Schema: ownStepsSchema, Step: 3}, OwnSteps: map[string]int64{"w": 1, "v": 2}},
	} {
		if err := m.checkOwnSteps([]shard.Piece{{Name: "w"}}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %s", err, says)
		}
	}
	c := &Checkpoint{folder: folder{step: 3}, ownSteps: map[string]int64{}, parameters: map[string]*parameter{
		"w": {sources: make([]source, 2)}}}
	f := &file{path: "rank1", layout: &layout{pieces: []shard.Piece{{Name: "w"}}},
		manifest: &manifest{OwnSteps: map[string]int64{"w": 1}}}
	shardtest.MustSay(t, c.addSteps(f), `"w" has had 1 steps here, and 3 in an earlier file`)
}
