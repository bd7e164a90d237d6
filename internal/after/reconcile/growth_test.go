package reconcile

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// rising returns a function that rises by so many bytes a step from a step on.
func rising(bytes ledger.Bytes, from int) func(int) ledger.Bytes {
	return func(step int) ledger.Bytes { return bytes * ledger.Bytes(max(step-from, 0)) }
}

// TestLeakIsSized makes leaks of any slope, start and noise. Each is found and sized within 5 %.
func TestLeakIsSized(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := rapid.IntRange(60, 400).Draw(t, "steps")
		from := rapid.IntRange(0, steps/2).Draw(t, "from")
		slope := ledger.Bytes(rapid.Int64Range(int64(ledger.MiB), int64(ledger.GiB)).Draw(t, "slope"))
		total := float64(slope) * float64(steps-from)
		run := training{steps: steps, perStep: rapid.IntRange(3, 9).Draw(t, "samples of a step"),
			noise:     rapid.Float64Range(0, 0.01).Draw(t, "noise") * total,
			states:    ledger.Bytes(rapid.Int64Range(0, int64(ledger.GiB)).Draw(t, "states")),
			anonymous: rising(slope, from), random: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))}
		run.marks = rapid.Bool().Draw(t, "marks")
		found := leaks(Compare(run.record(), nil).Growth)
		if len(found) != 1 {
			t.Fatalf("%d leaks: %+v", len(found), found)
		}
		g := found[0]
		if g.Kind != Anonymous || g.Role != samples.RankProcess || g.Rank != 0 || !near(g.BytesPerStep, slope, 0.05) {
			t.Fatalf("want %d a step from %d on, found %+v", slope, from, g)
		}
		if late := int(g.FromStep) - max(from, 2); late > steps/8 || late < -steps/8 {
			t.Fatalf("the leak starts in step %d, found %d", from, g.FromStep)
		}
	})
}

// TestLeakOfLateSamples: a busy host samples the first steps late, after the phase that leaks.
func TestLeakOfLateSamples(t *testing.T) {
	const slope = 4 * ledger.MiB
	for late := 1; late < 16; late++ {
		run := training{steps: 24, perStep: 3, late: late, anonymous: rising(slope, 0)}
		found := leaks(Compare(run.record(), nil).Growth)
		if len(found) != 1 || !near(found[0].BytesPerStep, slope, 0.01) {
			t.Errorf("%d late steps: want %v a step, found %+v", late, slope, found)
		}
	}
}

// TestLeakLeavesFreeHeapOut: malloc keeps more and more memory free between the blocks of a leak. That is no part of
// what the program keeps.
func TestLeakLeavesFreeHeapOut(t *testing.T) {
	const slope = 100 * ledger.MiB
	run := training{steps: 20, perStep: 6, marks: true, anonymous: rising(slope, 0), freeHeap: rising(slope/8, 0)}
	found := leaks(Compare(run.record(), nil).Growth)
	if len(found) != 1 || found[0].Kind != Anonymous || !near(found[0].BytesPerStep, slope, 0.02) {
		t.Errorf("want %v a step, found %+v", slope, found)
	}
}

// TestNoLeak has runs that do not leak: noise, garbage that is collected now and then, caches that fill up, and states
// that appear in the first step.
func TestNoLeak(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := rapid.IntRange(20, 400).Draw(t, "steps")
		full := rapid.IntRange(2, steps/2).Draw(t, "full")
		period := rapid.IntRange(2, steps/2).Draw(t, "period")
		amplitude := ledger.Bytes(rapid.Int64Range(0, int64(64*ledger.MiB)).Draw(t, "amplitude"))
		shape := rapid.SampledFrom([]func(int) ledger.Bytes{
			func(int) ledger.Bytes { return 0 },
			func(step int) ledger.Bytes { return amplitude * ledger.Bytes(step%period) },
			func(step int) ledger.Bytes { return amplitude * ledger.Bytes(min(step, full)) },
		}).Draw(t, "shape")
		run := training{steps: steps, perStep: rapid.IntRange(3, 9).Draw(t, "samples of a step"),
			noise:     rapid.Float64Range(0, float64(20*ledger.MiB)).Draw(t, "noise"),
			states:    ledger.Bytes(rapid.Int64Range(0, int64(ledger.GiB)).Draw(t, "states")),
			anonymous: shape, random: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)),
			marks: rapid.Bool().Draw(t, "marks")}
		if found := leaks(Compare(run.record(), nil).Growth); len(found) != 0 {
			t.Fatalf("a leak was found: %+v", found)
		}
	})
}

// TestGrowthIsToldApart has one run of each kind.
func TestGrowthIsToldApart(t *testing.T) {
	const slope = 4 * ledger.MiB
	gradients := []ledger.Holding{{Component: ledger.Gradients, Bytes: slope}}
	for name, c := range map[string]struct {
		run  training
		want Growth
	}{
		"kept gradients": {training{steps: 60, perStep: 6, anonymous: rising(slope, 0), marks: true,
			holdings: gradients},
			Growth{Role: samples.RankProcess, Kind: Anonymous, Shape: Linear, Component: ledger.Gradients}},
		"a mapping": {training{steps: 60, perStep: 6, shared: rising(slope, 0), mapping: "/dev/shm/cache"},
			Growth{Role: samples.RankProcess, Kind: Shared, Shape: Linear, Mapping: "/dev/shm/cache"}},
		"a file": {training{steps: 60, perStep: 6, file: rising(slope, 0)},
			Growth{Role: samples.RankProcess, Kind: File, Shape: Linear}},
		"a data loader": {training{steps: 60, perStep: 6, child: rising(slope, 0)},
			Growth{Role: samples.Child, Kind: Anonymous, Shape: Linear}},
		"the GPU": {training{steps: 60, perStep: 6, gpu: rising(slope, 0)},
			Growth{Role: samples.RankProcess, Kind: Driver, Shape: Linear}},
		"stairs": {training{steps: 100, perStep: 6, anonymous: func(step int) ledger.Bytes {
			return 10 * slope * ledger.Bytes(step/10)
		}}, Growth{Role: samples.RankProcess, Kind: Anonymous, Shape: Stairs, Every: 10}},
	} {
		t.Run(name, func(t *testing.T) {
			found := Compare(c.run.record(), &Plan{Parameters: int64(slope) / 2}).Growth
			if len(found) != 1 {
				t.Fatalf("found %+v", found)
			}
			g := found[0]
			if !near(g.BytesPerStep, slope, 0.05) || g.BytesPerParameter < 1.9 || g.BytesPerParameter > 2.1 {
				t.Errorf("found %d a step, %v a parameter", g.BytesPerStep, g.BytesPerParameter)
			}
			got := Growth{Role: g.Role, Kind: g.Kind, Shape: g.Shape, Mapping: g.Mapping, Component: g.Component,
				Every: g.Every}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("found %+v, want %+v", got, c.want)
			}
		})
	}
}

// TestFirstStep has states that appear in the first step. They are no leak, and their name is known where the client
// counts them.
func TestFirstStep(t *testing.T) {
	const states = 500 * ledger.MiB
	holdings := []ledger.Holding{{Component: ledger.OptimizerStates, Bytes: states}}
	for _, run := range []training{
		{steps: 30, perStep: 60, states: states, marks: true, holdings: holdings},
		{steps: 30, perStep: 60, states: states},
	} {
		found := Compare(run.record(), nil).Growth
		if len(found) != 1 || found[0].Shape != FirstStep || !near(found[0].Total, states, 0.05) ||
			(found[0].Component == ledger.OptimizerStates) != run.marks {
			t.Errorf("with marks %v: found %+v", run.marks, found)
		}
	}
}

// TestGrowthWithoutSteps: a recording without marks has no steps, and growth is told by time.
func TestGrowthWithoutSteps(t *testing.T) {
	run := training{steps: 100, perStep: 10, noPhases: true}
	r := run.record()
	for i := range r.Samples {
		p := &r.Samples[i].Processes[0]
		p.Resident.Anonymous += ledger.Bytes(r.Samples[i].Time.Seconds() * float64(20*ledger.MiB))
	}
	found := leaks(Compare(r, nil).Growth)
	if len(found) != 1 || !near(found[0].BytesPerSecond, 20*ledger.MiB, 0.05) || found[0].BytesPerStep != 0 {
		t.Errorf("found %+v", found)
	}
}
