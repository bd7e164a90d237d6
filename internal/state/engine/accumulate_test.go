//go:build linux

package engine

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// someNumbers are numbers of a type that depend on a seed.
func someNumbers(random *rand.Rand, of dtype.Type, n int) kernel.Array {
	numbers := kernel.Array{Type: of, Data: make([]byte, n*int(of.Size()))}
	for i := range n {
		numbers.Put(i, float32(random.NormFloat64()))
	}
	return numbers
}

// TestBrokenOffAccumulationsAreFinished leaves the memory of a shard as a process may
// leave it that is killed while it adds to the gradients, or adds a half-added gradient
// again. Another process then adds the same gradient.
func TestBrokenOffAccumulationsAreFinished(t *testing.T) {
	for i, c := range crashCases() {
		of := []dtype.Type{dtype.BF16, dtype.F32, dtype.F16}[i%3]
		c.format.Gradient = of
		t.Run(c.name+", "+of.String(), func(t *testing.T) {
			s := c.newShard(t, true)
			makeSteps(t, s, 1) // whose marks and logs are there still
			before := imageOf(s)
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				restoreImage(s, before)
				first := random.IntN(crashElements)
				gradient := someNumbers(random, []dtype.Type{dtype.BF16, dtype.F16, dtype.F32}[random.IntN(3)],
					1+random.IntN(crashElements-first))
				kernel.Generic.Accumulate(s.gradient.Slice(first, first+gradient.Len()), gradient)
				after := imageOf(s)
				restoreImage(s, before)
				finished, _, _, _ := s.Accumulations()
				now := Accumulation{shard.Range{First: int64(first), Count: int64(gradient.Len())}, gradient.Type}
				s.beginAccumulation(now)
				for range 1 + random.IntN(3) {
					breakOffAccumulation(s, random, gradient)
				}
				other := attachOther(t, s, 1+random.IntN(3), kernel.Available()[random.IntN(len(kernel.Available()))])
				defer other.Close()
				if other.Finish() {
					t.Fatal("a step was finished, and none was under way")
				}
				if n, _, last, half := other.Accumulations(); n != finished || last != now || !half {
					t.Fatalf("%d accumulations are finished, want %d; the last, %v, is half made: %v",
						n, finished, last, half)
				}
				if err := beginNext(other); err == nil || !strings.Contains(err.Error(), "half done") {
					t.Fatalf("a step of gradients of which one is half added: %v", err)
				}
				if _, err := New([]*Shard{other}, []optim.Optimizer{optim.DefaultAdamW()}, 0); err == nil ||
					!strings.Contains(err.Error(), "half done") {
					t.Fatalf("an engine of gradients of which one is half added: %v", err)
				}
				if gradient.Len() > 1 {
					if err := other.Accumulate(now.First, gradient.Slice(1, gradient.Len())); err == nil ||
						!strings.Contains(err.Error(), "is half done") {
						t.Fatalf("another gradient was added: %v", err)
					}
				}
				if err := other.Accumulate(now.First, gradient); err != nil {
					t.Fatal(err)
				}
				if n, _, _, half := other.Accumulations(); n != finished+1 || half {
					t.Fatalf("%d accumulations are finished, want %d; one more is half made: %v", n, finished+1, half)
				}
				if !bytes.Equal(imageOf(s), after) {
					t.Fatal("the gradients are others than after an accumulation that is not broken off")
				}
				if err := other.Accumulate(now.First, gradient); err != nil {
					t.Fatal(err)
				}
				if bytes.Equal(imageOf(s), after) && !bytes.Equal(before, after) && of == dtype.F32 {
					t.Fatal("the next accumulation added nothing")
				}
			})
		})
	}
}

// breakOffAccumulation goes on with the accumulation under way, as [Shard.Accumulate]
// does, and stops somewhere. Each slot stops at a place of its own.
func breakOffAccumulation(s *Shard, random *rand.Rand, gradient kernel.Array) {
	for _, slot := range s.slots {
		unit := int(slot.unit.Load())
		if !slot.undo.Begun() || s.isAdded(unit) {
			continue
		}
		if random.IntN(len(s.slots)) == 0 {
			sum, _ := s.sumOf(unit, gradient)
			addPart(s, slot, unit, slot.undo.RestoreSum(sum), random, gradient)
			return
		}
		s.resumeAccumulation(slot, gradient)
	}
	chunks := s.config.ChunksOf(s.accumulations.last().Range)
	units := int(chunks.Count)
	free := 0
	for _, unit := range random.Perm(units)[:random.IntN(units+1)] {
		unit += int(chunks.First)
		switch {
		case free == len(s.slots) || s.isAdded(unit):
		case random.IntN(2) == 0:
			s.addUnit(free, unit, gradient)
		default:
			s.slots[free].begin(unit)
			addPart(s, s.slots[free], unit, 0, random, gradient)
			free++
		}
	}
}

// addPart adds to a chunk from some element on, and stops in the middle of a tile, which
// may then hold any values.
func addPart(s *Shard, slot slot, unit, first int, random *rand.Rand, gradient kernel.Array) {
	sum, part := s.sumOf(unit, gradient)
	const tile = 512
	tiles := random.IntN((sum.Len()-first+tile-1)/tile + 1)
	end := min(first+tiles*tile, sum.Len())
	s.config.Kernel.AccumulateLogged(sum.Slice(0, end), part.Slice(0, end), first, slot.undo)
	if end > first {
		broken := sum.Slice((end-1)/tile*tile, end).Data
		for i := range broken {
			broken[i] = byte(random.Int())
		}
	}
}

// TestBrokenOffClearIsFinished: the next process may add at once.
func TestBrokenOffClearIsFinished(t *testing.T) {
	s := crashCases()[0].newShard(t, true)
	makeSteps(t, s, 2)
	s.beginAccumulation(Accumulation{shard.Range{First: 5, Count: 10}, dtype.F32}) // and is never finished
	s.accumulations.clearing.Store(true)
	clear(s.gradient.Data[:1000])
	s.accumulations.begun.Store(0)
	other := attachOther(t, s, 2, kernel.Generic)
	defer other.Close()
	other.Finish()
	if n, cleared, _, half := other.Accumulations(); n != 0 || cleared != 2 || half {
		t.Errorf("%d gradients were added since step %d, one half: %v", n, cleared, half)
	}
	for i := range crashElements {
		if s.gradient.At(i) != 0 {
			t.Fatalf("element %d is %v, and all were cleared", i, s.gradient.At(i))
		}
	}
	gradient := kernel.Array{Type: dtype.F32, Data: make([]byte, 40)}
	if err := other.Accumulate(5, gradient); err != nil {
		t.Error(err)
	}
	if n, _, _, _ := other.Accumulations(); n != 1 {
		t.Errorf("%d gradients were added", n)
	}
}

// TestBrokenOffWritesAreMadeAgain leaves the memory of a shard as a process may leave it
// that is killed while it writes moments. Another process writes the same.
func TestBrokenOffWritesAreMadeAgain(t *testing.T) {
	for _, c := range crashCases() {
		if c.format.Moments != kernel.MomentsInt8 && c.name != "adamw split bf16" {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			s := c.newShard(t, true)
			makeSteps(t, s, 2) // whose marks and logs are there still
			before := imageOf(s)
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				number, first := random.IntN(2), random.IntN(crashElements)
				values := make([]float32, 1+random.IntN(crashElements-first))
				for i := range values {
					values[i] = float32(random.ExpFloat64())
				}
				restoreImage(s, before)
				s.WriteMoment(number, int64(first), values)
				after := imageOf(s)
				restoreImage(s, before)
				breakOffWrite(s, random, number, first, values)
				other := attachOther(t, s, 1+random.IntN(3), kernel.Generic)
				defer other.Close()
				for range 1 + random.IntN(2) {
					other.Finish()
				}
				for i, x := range imageOf(s) {
					if x != before[i] && x != after[i] {
						t.Fatalf("byte %d is neither what it was nor what is written", i)
					}
				}
				other.WriteMoment(number, int64(first), values)
				if !bytes.Equal(imageOf(s), after) {
					t.Fatal("the state is another than after a write that is not broken off")
				}
				// What is finished stays.
				if other.Finish(); !bytes.Equal(imageOf(s), after) {
					t.Fatal("a write that was finished was undone")
				}
			})
		})
	}
}

// TestWritesAreMarked: whoever finds a write of moments broken off knows that it is one.
func TestWritesAreMarked(t *testing.T) {
	s := crashCases()[0].newShard(t, true)
	values, over := make([]float32, crashElements), atomic.Bool{}
	seen := make(chan bool)
	go func() {
		marked := false
		for ; !marked && !over.Load(); runtime.Gosched() {
			marked = s.writing.Load()
		}
		seen <- marked
	}()
	await(t, func() bool {
		s.WriteMoment(1, 0, values)
		select {
		case marked := <-seen:
			over.Store(true)
			return marked
		default:
			return false
		}
	})
	if s.writing.Load() {
		t.Error("a write that is over is still marked")
	}
}

// breakOffWrite writes a moment and stops somewhere. Each slot stops at a place of its
// own.
func breakOffWrite(s *Shard, random *rand.Rand, number, first int, values []float32) {
	s.clearLogs()
	s.writing.Store(true)
	all := shard.Range{First: int64(first), Count: int64(len(values))}
	chunks := s.config.ChunksOf(all)
	units := int(chunks.Count)
	free := 0
	for _, unit := range random.Perm(units)[:random.IntN(units+1)] {
		unit += int(chunks.First)
		c := s.chunk(unit)
		s.chunkSums.void(unit)
		own := c.Intersect(all)
		place, from, to := int(c.First), int(own.First), int(own.End())
		if free == len(s.slots) {
			return
		}
		broken := random.IntN(2) == 0
		if broken {
			to = from + random.IntN(to-from+1)
			if block := place + (to-place)/kernel.Block*kernel.Block; block > from {
				to = block
			}
		}
		held := c.state()
		s.writeUnit(free, unit, &held, number, from-place, values[from-first:to-first])
		if !broken {
			continue
		}
		if slot := s.slots[free]; slot.undo.Begun() { // in the middle of the last block
			block := (to - 1 - place) / kernel.Block
			state := c.state().Slice(block*kernel.Block, min((block+1)*kernel.Block, int(c.Count)))
			for _, stream := range [][]byte{state.Moments[0].Data, state.Moments[1].Data, bytesOf(state.Headers)} {
				for i := range stream {
					stream[i] = byte(random.Int())
				}
			}
		}
		free++
	}
}
