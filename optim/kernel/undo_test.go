package kernel

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// TestLoggedUpdatesAgree holds logged updates, from several turns on, against
// the reference, and the logs of vector kernels against plain Go's.
func TestLoggedUpdatesAgree(t *testing.T) {
	for _, set := range testedSets(t) {
		for _, f := range formats() {
			t.Run(fmt.Sprintf("%v/%v", set, f), func(t *testing.T) {
				r := rand.New(rand.NewPCG(3, uint64(set)))
				for range 10 {
					turn := f.granule()
					n := 1 + r.IntN(7*turn)
					first := r.IntN((n+turn-1)/turn) * turn
					got, want, logged := newChunk(t, f, n, 3), newChunk(t, f, n, 0), newChunk(t, f, n, 1)
					want.First, logged.First = got.First, got.First
					fill(r, f, want, false)
					copyChunk(got, want)
					copyChunk(logged, want)
					log, plain := UndoIn(guarded(t, f.UndoBytes(), 64, 0)), UndoIn(make([]byte, f.UndoBytes()))
					log.Begin()
					plain.Begin()
					constants := steps(f.Algorithm)[1]
					set.UpdateLogged(f, &constants, got, first, log)
					Generic.UpdateLogged(f, &constants, logged, first, plain)
					updateReference(f, &constants, want.Slice(first, n))
					if d := differ(f, got, want); d != "" {
						t.Fatalf("n=%d first=%d: %s", n, first, d)
					}
					if !bytes.Equal(log.bytes, plain.bytes) {
						t.Fatalf("n=%d first=%d: the log is another than plain Go's", n, first)
					}
				}
			})
		}
	}
}

// TestBrokenOffUpdatesAreMadeAgain breaks updates off in the middle of turns
// again and again, also those that make one again, and has another set of
// kernels go on each time.
func TestBrokenOffUpdatesAreMadeAgain(t *testing.T) {
	for _, f := range formats() {
		t.Run(f.String(), func(t *testing.T) {
			log := UndoIn(make([]byte, f.UndoBytes()))
			rapid.Check(t, func(t *rapid.T) {
				r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				n := 1 + r.IntN(9*f.granule())
				want, got := plainChunk(f, n), plainChunk(f, n)
				fill(r, f, want, false)
				copyChunk(got, want)
				constants := steps(f.Algorithm)[1]
				updateReference(f, &constants, want)
				log.Begin()
				first := 0
				for range r.IntN(8) {
					breakOff(r, f, &constants, got, first, log)
					if !log.Begun() {
						continue
					}
					if first = log.Restore(f, got); r.IntN(2) == 0 {
						// Broken off while it is being restored.
						spoil(r, f, got.Slice(first, min(first+f.granule(), n)))
						first = log.Restore(f, got)
					}
				}
				sets := Available()
				sets[r.IntN(len(sets))].UpdateLogged(f, &constants, got, first, log)
				if d := differ(f, got, want); d != "" {
					t.Fatal(d)
				}
			})
		})
	}
}

// breakOff updates some turns of a chunk, and leaves the last as it may be in
// the middle, or the log of the next.
func breakOff(r *rand.Rand, f Format, constants *Constants, c Chunk, first int, log Undo) {
	turn := f.granule()
	turns := r.IntN((c.Len()-first+turn-1)/turn + 1)
	end := min(first+turns*turn, c.Len())
	sets := Available()
	sets[r.IntN(len(sets))].UpdateLogged(f, constants, c.Slice(0, end), first, log)
	if turns > 0 && r.IntN(3) > 0 {
		inFlight := 1
		if f.Moments == MomentsInt8 { // whose codes lag behind
			inFlight = 2
		}
		spoil(r, f, c.Slice(first+max(turns-inFlight, 0)*turn, end))
		return
	}
	if turns == 0 && log.Begun() {
		return // a turn that is kept again is what it was
	}
	for _, stream := range log.turn(f, first+turns*turn) {
		anything(r, stream)
	}
}

// spoil makes anything of what an update changes.
func spoil(r *rand.Rand, f Format, c Chunk) {
	for _, stream := range c.changed(f) {
		anything(r, stream)
	}
}

func anything(r *rand.Rand, stream []byte) {
	for i := range stream {
		stream[i] = byte(r.Uint32())
	}
}

// plainChunk is a chunk in ordinary memory.
func plainChunk(f Format, n int) Chunk {
	c := Chunk{Gradient: Array{f.Gradient, make([]byte, int64(n)*f.Gradient.Size())}}
	for i := range f.Algorithm.Moments() {
		c.Moments[i] = Array{f.momentType(), make([]byte, int64(n)*f.momentType().Size())}
	}
	if f.Moments == MomentsInt8 {
		c.Headers = make([]uint16, (n+Block-1)/Block)
	}
	if f.hasParameter() {
		c.Parameter = make([]uint16, n)
	}
	if f.State == FP32 {
		c.Master = make([]float32, n)
	} else {
		c.Low = make([]uint16, n)
	}
	return c
}
