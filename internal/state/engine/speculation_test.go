//go:build linux

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// speculating are the cases of shards whose steps may speculate.
func speculating(t *testing.T, test func(t *testing.T, c crashCase)) {
	for _, c := range crashCases() {
		if c.retracts {
			t.Run(c.name, func(t *testing.T) { test(t, c) })
		}
	}
}

// beginSpeculation begins the next step as a speculation, often with another factor than it will have.
func beginSpeculation(s *Shard, random *rand.Rand) error {
	u := nextUpdate(s)
	u.Speculates = true
	u.GradScale *= float64(1 + random.IntN(2))
	return s.BeginArriving(u, nil)
}

// decideAnyhow has the step under way, all of whose gradients are there, made as the next step, or skipped.
func decideAnyhow(s *Shard, random *rand.Rand) error {
	norm := s.SumSquares()
	want := 0.0
	for from := 0; from < s.gradient.Len(); from += normBlock {
		want += s.config.Kernel.SumSquares(s.gradient.Slice(from, min(from+normBlock, s.gradient.Len())))
	}
	if norm != want {
		return fmt.Errorf("the sum of squares is %v, want %v", norm, want)
	}
	if random.IntN(3) == 0 {
		return s.Decide(Verdict{Skip: true})
	}
	scale, _ := nextStep(s)
	return s.Decide(Verdict{GradScale: scale})
}

// speculateAnyhow speculates on the next step until it is made or skipped.
func speculateAnyhow(s *Shard, random *rand.Rand) error {
	if err := beginSpeculation(s, random); err != nil {
		return err
	}
	if random.IntN(6) == 0 {
		return errors.Join(s.Decide(Verdict{Skip: true}), waited(s))
	}
	arriveAnyhow(s, random, writeNothing)
	if err := decideAnyhow(s, random); err != nil {
		return err
	}
	wait := waitAnywhere(s, random)
	defer wait()
	return waited(s)
}

// speculateRightly speculates on the next step with the factor that it has.
func speculateRightly(s *Shard, random *rand.Rand) error {
	u := nextUpdate(s)
	u.Speculates = true
	if err := s.BeginArriving(u, nil); err != nil {
		return err
	}
	arriveAnyhow(s, random, writeNothing)
	return errors.Join(s.Decide(Verdict{GradScale: u.GradScale}), waited(s))
}

func waited(s *Shard) error {
	s.Wait()
	return s.Err()
}

// finishAnyhow finishes what another process has left.
func finishAnyhow(s *Shard, random *rand.Rand) error {
	s.Finish()
	switch {
	case s.AwaitsVerdict():
		arriveAnyhow(s, random, writeNothing)
		if err := decideAnyhow(s, random); err != nil {
			return err
		}
	case s.MissesGradients():
		arriveAnyhow(s, random, writeNothing)
	}
	return waited(s)
}

// TestSpeculatedSteps speculates on hundreds of steps, some of which are made with the same factor, some with another,
// and some skipped. The state is always that of steps that wait for the norm.
func TestSpeculatedSteps(t *testing.T) {
	speculating(t, func(t *testing.T, c crashCase) {
		for _, journal := range []bool{true, false} {
			plain, s := c.newShard(t, false), c.newShard(t, journal)
			random := rand.New(rand.NewPCG(1, 1))
			skippedSteps, deferred := 0, 0
			for s.Steps() < 60 {
				steps := s.Steps()
				s.SetOrder(randomRanges(s, random, 2))
				speculate := speculateAnyhow
				if steps == 0 {
					speculate = speculateRightly // and yet most chunks are left: nothing can retract a first step
				}
				if err := speculate(s, random); err != nil {
					t.Fatal(err)
				}
				if s.arrivals.missing.Load() != 0 {
					t.Fatal("the next step would wait for gradients of one that was skipped")
				}
				if s.Steps() == steps {
					skippedSteps++
				} else {
					makeSteps(t, plain, 1)
				}
				if !bytes.Equal(imageOf(s), imageOf(plain)) || !slices.Equal(s.OwnSteps(), plain.OwnSteps()) {
					t.Fatalf("after step %d (%d before) the state is another than that of steps that wait", s.Steps(),
						steps)
				}
				if slices.ContainsFunc(s.chunks, func(c shard.Chunk) bool {
					return s.phase() == confirmed && !s.isLeft(c.Section) &&
						s.done[c.Number].Load() == s.counters.mark()
				}) {
					deferred++
				}
			}
			if skippedSteps < 10 || deferred == 0 {
				t.Errorf("%d steps were skipped, and in %d some chunk was left for later", skippedSteps, deferred)
			}
		}
	})
}

// TestBrokenOffSpeculations breaks a second step off that speculates, or on which there was a verdict. The next process
// goes on from there, and ends with the state of the first step or of the second.
func TestBrokenOffSpeculations(t *testing.T) {
	speculating(t, func(t *testing.T, c crashCase) {
		s := c.newShard(t, true)
		makeSteps(t, s, 9) // then chunks can be retracted
		before, own := imageOf(s), s.OwnSteps()
		makeSteps(t, s, 1)
		after := imageOf(s)
		for range s.slots { // breakOff has each do what a worker does
			s.speculation.retractors = append(s.speculation.retractors, &kernel.Retractor{})
		}
		rapid.Check(t, func(t *rapid.T) {
			random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
			s.current.underway.Store(s.finished.Load()) // another process has finished it
			restoreImage(s, before)
			if err := errors.Join(s.SetOwnSteps(0, own), s.SetStepsOnly(9), beginSpeculation(s, random),
				s.LeaveMissing(leftNext(s)...)); err != nil {
				t.Fatal(err)
			}
			s.wait()
			breakOff(s, random)
			if random.IntN(2) == 0 {
				breakVerdictOff(s, random)
			}
			other := attachOther(t, s, 1+random.IntN(3), kernel.Available()[random.IntN(len(kernel.Available()))])
			defer other.Close()
			decided := other.phase()
			if err := finishAnyhow(other, random); err != nil {
				t.Fatal(err)
			}
			want := after
			if other.Steps() == 9 {
				want = before
			}
			if !bytes.Equal(imageOf(s), want) || decided == skipped && other.Steps() == 10 {
				t.Fatalf("phase %d: at step %d the state is another", decided, other.Steps())
			}
		})
	})
}

// breakVerdictOff gives a verdict, follows it for some chunks and stops.
func breakVerdictOff(s *Shard, random *rand.Rand) {
	for _, slot := range s.slots {
		s.resume(slot)
	}
	s.clearLogs()
	scale, _ := nextStep(s)
	of := skipped
	if random.IntN(2) == 0 {
		for unit := range s.done { // all gradients were there
			if !s.isDone(unit) && s.prepareRetraction(0, unit, new(s.chunk(unit).state())) {
				s.makeUpdate(0, unit, new(s.chunk(unit).state()), time.Now())
			}
		}
		of = s.phaseAfter(scale)
	}
	s.setPhase(s.begun.Load(), of)
	s.findFactor()
	free := 1
	for _, unit := range random.Perm(s.config.Chunks)[:random.IntN(s.config.Chunks+1)] {
		switch state := s.chunk(unit).state(); {
		case !s.needsWork(unit):
		case random.IntN(2) == 0:
			_, _ = s.changeUnit(0, unit, &state)
		case of == redone && s.done[unit].Load() == s.speculatedMark() && random.IntN(2) == 0 && free < len(s.slots):
			s.retract(0, unit, &state)
			s.slots[free].begin(unit)
			changePart(s, s.slots[free], unit, 0, random)
			free++
		case s.done[unit].Load() == s.speculatedMark() && free < len(s.slots):
			retractPart(s, free, unit, random)
			free++
		case of == redone && s.done[unit].Load() != s.speculatedMark() && !s.isLeft(s.chunks[unit].Section) &&
			free < len(s.slots):
			s.slots[free].begin(unit)
			changePart(s, s.slots[free], unit, 0, random)
			free++
		}
	}
	if of == skipped && s.unitsLeft() == 0 && random.IntN(2) == 0 {
		s.before.Store(s.decided.before.Load() - int64(s.begun.Load())) // as forgetSkipped begins
	}
}

// retractPart retracts a chunk up to some tile, of which anything may be there.
func retractPart(s *Shard, number, unit int, random *rand.Rand) {
	slot, c := s.slots[number], s.chunk(unit)
	format, state := c.section.format, c.state()
	slot.beginRetraction(unit)
	tile := format.Moments.Tile()
	end := min(random.IntN(int(c.Count)/tile+1)*tile+tile, int(c.Count))
	(&kernel.Retractor{}).Retract(s.config.Kernel, format, s.speculatedConstants(c), state.Slice(0, end), s.logOf(unit),
		0, slot.undo)
	for _, stream := range changed(format, new(state.Slice((end-1)/tile*tile, end))) {
		for i := range stream {
			stream[i] = byte(random.Int())
		}
	}
}
