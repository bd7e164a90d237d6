//go:build linux

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// TestSectionsThatAreLeftAlone makes steps that leave random sections alone. Each section ends as a shard of its own
// that has had its steps, and no others.
func TestSectionsThatAreLeftAlone(t *testing.T) {
	sections := []shard.Section{{Elements: 300}, {Elements: 1000, Group: 1}, {Elements: 17}, {Elements: 400, Group: 1}}
	for name, of := range map[string]optim.Optimizer{
		"adam":    optim.Adam{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, WeightDecay: 0.1},
		"adagrad": optim.Adagrad{LearningRate: 1e-2, LearningRateDecay: 0.1, Epsilon: 1e-10},
		"sgd":     optim.SGD{LearningRate: 1e-2, Momentum: 0.9, Dampening: 0.5},
	} {
		format := kernel.Format{Algorithm: of.Algorithm(), State: kernel.FP32, Parameter: dtype.F32,
			Gradient: dtype.F32}
		for _, journal := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " journal ", journal), func(t *testing.T) {
				rapid.Check(t, func(r *rapid.T) {
					checkLeftAlone(t, r, format, of, sections, journal)
				})
			})
		}
	}
}

func checkLeftAlone(t *testing.T, r *rapid.T, format kernel.Format, of optim.Optimizer, sections []shard.Section,
	journal bool) {
	open := func(sections []shard.Section) *Shard {
		s, err := NewShard(ShardConfig{Layout: layout(format, 100, sections), CPUs: cpus(t, 2), Journal: journal})
		if err != nil {
			r.Fatal(err)
		}
		return s
	}
	whole := open(sections)
	defer whole.Close()
	fillShard(whole)
	alone := make([]*Shard, len(sections))
	for i, section := range sections {
		section.Group = 0
		alone[i] = open([]shard.Section{section})
		defer alone[i].Close()
		copyImage(whole, i, alone[i])
	}
	begin := func(s *Shard, u Update) {
		if err := s.BeginThen(u, nil); err != nil {
			r.Fatal(err)
		}
		s.Wait()
	}
	for step := range int64(rapid.IntRange(1, 6).Draw(r, "steps")) {
		u := Update{Step: step + 1, GradScale: 1 / float64(step+1), Optimizers: []optim.Optimizer{of, of}}
		for i := range sections {
			if rapid.Bool().Draw(r, "left") {
				u.LeftAlone = append(u.LeftAlone, i)
				continue
			}
			own := u
			own.Step, own.LeftAlone = alone[i].Steps()+1, nil
			begin(alone[i], own)
		}
		begin(whole, u)
	}
	for i, own := range whole.OwnSteps() {
		if own != alone[i].Steps() {
			r.Errorf("section %d has had %d steps, want %d", i, own, alone[i].Steps())
		}
		was := imageOf(alone[i])
		if copyImage(whole, i, alone[i]); !bytes.Equal(was, imageOf(alone[i])) {
			r.Errorf("section %d of %v differs from a shard of its own after %d steps", i, of, own)
		}
	}
}

// copyImage copies the state of a section to a shard that has nothing else.
func copyImage(whole *Shard, section int, to *Shard) {
	from := whole.config.Section(section)
	for i := range whole.config.Streams {
		stream := &whole.config.Streams[i]
		at, _, _ := whole.config.In(stream, from)
		size := stream.Type.Size()
		copy(to.arenas[i].Bytes(), whole.arenas[i].Bytes()[at.First*size:at.End()*size])
	}
}

// TestOwnStepsAreSet goes on from a state whose sections have had different numbers of steps.
func TestOwnStepsAreSet(t *testing.T) {
	c := crashCases()[3] // its sections are mixed
	s, plain := c.newShard(t, true), c.newShard(t, false)
	makeSteps(t, plain, 5)
	want := plain.OwnSteps()
	if slices.Min(want) == slices.Max(want) {
		t.Fatalf("all sections have had %v steps: that proves nothing", want)
	}
	restoreImage(s, imageOf(plain))
	if err := errors.Join(s.SetOwnSteps(0, want[:3]), s.SetOwnSteps(3, want[3:]), s.SetStepsOnly(5)); err != nil {
		t.Fatal(err)
	}
	if got := s.OwnSteps(); s.Steps() != 5 || !slices.Equal(got, want) {
		t.Fatalf("set are %d and %v, want 5 and %v", s.Steps(), got, want)
	}
	makeSteps(t, plain, 3)
	makeSteps(t, s, 3)
	if !bytes.Equal(imageOf(s), imageOf(plain)) {
		t.Error("the state is another than if the steps had not been set")
	}
	if s.SetSteps(8); !slices.Equal(s.OwnSteps(), []int64{8, 8, 8, 8}) {
		t.Errorf("sections have had %v steps, want 8 each", s.OwnSteps())
	}
	for _, err := range []error{
		s.SetOwnSteps(1, want), s.SetOwnSteps(-1, want), s.SetOwnSteps(3, []int64{-1}), s.SetStepsOnly(7),
		s.BeginThen(Update{Step: 9, Optimizers: nextUpdate(s).Optimizers, LeftAlone: []int{4}}, nil),
	} {
		if err == nil || !slices.Equal(s.OwnSteps(), []int64{8, 8, 8, 8}) {
			t.Errorf("%v: sections have had %v steps", err, s.OwnSteps())
		}
	}
}

// TestGivenUpStepsLeaveNothingAlone gives up a step that left a section alone, before any of it was made.
func TestGivenUpStepsLeaveNothingAlone(t *testing.T) {
	c := crashCases()[3]
	s := c.newShard(t, true)
	makeSteps(t, s, 2)
	before, image := s.OwnSteps(), imageOf(s)
	if err := beginNextArriving(s); err != nil {
		t.Fatal(err)
	}
	if err := s.LeaveMissing(1); err != nil {
		t.Fatal(err)
	}
	if torn := s.Abandon(); torn || !slices.Equal(s.OwnSteps(), before) || !bytes.Equal(imageOf(s), image) {
		t.Errorf("torn is %v, and sections have had %v steps, want %v", torn, s.OwnSteps(), before)
	}
	random := rand.New(rand.NewPCG(1, 2))
	if err := beginNextArriving(s); err != nil {
		t.Fatal(err)
	}
	s.GradientsArrived(shard.Range{First: 3, Count: 1})
	if s.LeaveMissing(0) == nil {
		t.Error("a section is left alone, and a gradient of it has arrived")
	}
	arriveAnyhow(s, random, writeNothing)
	s.Wait()
	plain := c.newShard(t, false)
	makeSteps(t, plain, 3)
	if !bytes.Equal(imageOf(s), imageOf(plain)) || !slices.Equal(s.OwnSteps(), plain.OwnSteps()) {
		t.Errorf("the next step is another: sections have had %v steps, want %v", s.OwnSteps(), plain.OwnSteps())
	}
}

// TestForgottenStepsCountForNoSection sets the step of a state with a step that a killed process has begun.
func TestForgottenStepsCountForNoSection(t *testing.T) {
	s := crashCases()[3].newShard(t, true)
	makeSteps(t, s, 2)
	before := s.OwnSteps()
	s.countSteps([]int{1})
	s.begun.Add(1)
	next := attachOther(t, s, 1, kernel.Generic)
	defer next.Close()
	if err := next.SetStepsOnly(2); err != nil {
		t.Fatal(err)
	}
	if next.Steps() != 2 || !slices.Equal(next.OwnSteps(), before) {
		t.Errorf("the state is of step %d, and sections have had %v steps: expected 2 and %v", next.Steps(),
			next.OwnSteps(), before)
	}
}
