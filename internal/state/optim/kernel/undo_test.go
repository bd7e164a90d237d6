//go:build linux

package kernel

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// TestLoggedUpdatesAgree compares logged updates, from several tiles on, with the
// reference, and the logs of vector kernels with those of plain Go.
func TestLoggedUpdatesAgree(t *testing.T) {
	for _, set := range testedSets(t) {
		for _, f := range formats() {
			t.Run(fmt.Sprintf("%v/%v", set, f), func(t *testing.T) {
				r := rand.New(rand.NewPCG(3, uint64(set)))
				for range 10 {
					tile := f.granule()
					n := 1 + r.IntN(7*tile)
					first := r.IntN((n+tile-1)/tile) * tile
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

// TestBrokenOffUpdatesAreMadeAgain breaks updates off in the middle of tiles, again and
// again. Another set of kernels goes on each time, and is broken off, too.
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
						spoil(r, f, got.Slice(first, min(first+f.granule(), int(log.head().kept.Load()))))
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

// breakOff updates some tiles of a chunk. It leaves the last tile, or the log of the next,
// as a kill in the middle may leave it.
func breakOff(r *rand.Rand, f Format, constants *Constants, c Chunk, first int, log Undo) {
	tile := f.granule()
	tiles := r.IntN((c.Len()-first+tile-1)/tile + 1)
	end := min(first+tiles*tile, c.Len())
	before := plainChunk(f, c.Len())
	copyChunk(before, c)
	sets := Available()
	sets[r.IntN(len(sets))].UpdateLogged(f, constants, c.Slice(0, end), first, log)
	if tiles > 0 && r.IntN(3) > 0 {
		inFlight := 1
		if f.Moments == MomentsInt8 { // whose codes lag behind
			inFlight = 2
		}
		spoil(r, f, c.Slice(first+max(tiles-inFlight, 0)*tile, end))
		if f.Moments == MomentsInt8 && r.IntN(2) == 0 {
			unfinish(r, f, c.Slice(0, end), before, first+(tiles-1)*tile, log)
		}
		return
	}
	if tiles == 0 && log.Begun() {
		return // a tile that is kept again is what it was
	}
	for _, stream := range log.tile(f, first+tiles*tile) {
		anything(r, stream)
	}
}

// unfinish leaves the last block of int8 moments kept up to some element. The elements
// behind it have not been changed, and nothing has been encoded.
func unfinish(r *rand.Rand, f Format, c, before Chunk, last int, log Undo) {
	n := c.Len()
	kept := min(last+abi.Block/8*(1+r.IntN(8)), n)
	log.head().kept.Store(int64(kept))
	moments := c.Slice(last, n)
	moments.Parameter, moments.Low, moments.LowBytes, moments.Master = nil, nil, nil, nil
	copyChunk(moments, before.Slice(last, n))
	changed, was := c.changed(f), before.changed(f)
	for i, ring := range log.tile(f, last) {
		if i == abi.UndoHeaders || len(changed[i]) == 0 {
			continue
		}
		size := len(changed[i]) / n
		copy(changed[i][kept*size:], was[i][kept*size:])
		anything(r, ring[(kept-last)*size:])
	}
}

// spoil overwrites the streams that an update changes.
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

// plainChunk returns a chunk in ordinary memory.
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
	switch f.State {
	case FP32:
		c.Master = make([]float32, n)
	case Split:
		c.Low = make([]uint16, n)
	case Split24:
		c.LowBytes = make([]byte, n)
	}
	return c
}

// TestBrokenOffAccumulationsAreMadeAgain breaks accumulations to a sum off in the middle of tiles,
// again and again, also while they are made again.
func TestBrokenOffAccumulationsAreMadeAgain(t *testing.T) {
	types := []dtype.Type{dtype.BF16, dtype.F16, dtype.F32}
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		of, added := types[r.IntN(3)], types[r.IntN(3)]
		log := UndoIn(make([]byte, Format{Gradient: of}.UndoBytes()))
		n := 1 + r.IntN(6*sumTile)
		want, gradient := Array{of, make([]byte, n*int(of.Size()))}, Array{added, make([]byte, n*int(added.Size()))}
		for i := range n {
			want.Put(i, float32(r.NormFloat64()))
			gradient.Put(i, float32(r.NormFloat64()))
		}
		got := Array{of, bytes.Clone(want.Data)}
		Generic.Accumulate(want, gradient)
		log.Begin()
		first := 0
		for range r.IntN(8) {
			end := min(first+r.IntN((n-first+sumTile-1)/sumTile+1)*sumTile, n)
			sets := Available()
			sets[r.IntN(len(sets))].AccumulateLogged(got.Slice(0, end), gradient.Slice(0, end), first, log)
			if last := (end - 1) / sumTile * sumTile; end > first && r.IntN(2) == 0 {
				anything(r, got.Slice(last, end).Data)
			} else if end > first {
				anything(r, log.sumTile(of, last+sumTile)) // the next was being kept
			}
			if !log.Begun() {
				continue
			}
			if first = log.RestoreSum(got); r.IntN(2) == 0 {
				anything(r, got.Slice(first, min(first+sumTile, n)).Data) // while it is being restored
				first = log.RestoreSum(got)
			}
		}
		sets := Available()
		sets[r.IntN(len(sets))].AccumulateLogged(got, gradient, first, log)
		if !bytes.Equal(got.Data, want.Data) {
			t.Fatalf("%d %v added to %v, broken off: the sum is another", n, added, of)
		}
	})
}

// TestMomentsAreWrittenAgain writes moments of a chunk and breaks that off in the middle of
// blocks. It writes them again, also if they are written already. The bits are the same as
// after one write.
func TestMomentsAreWrittenAgain(t *testing.T) {
	for _, moments := range []MomentType{MomentsFP32, MomentsBF16, MomentsInt8} {
		f := Format{Adam, Split, moments, dtype.BF16, dtype.BF16}
		log := UndoIn(make([]byte, f.UndoBytes()))
		rapid.Check(t, func(t *rapid.T) {
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
			n := 1 + r.IntN(3*Block)
			if r.IntN(2) == 0 {
				n = 1 + r.IntN(8) // in which one element counts
			}
			c, want := plainChunk(f, n), plainChunk(f, n)
			for number := range c.Headers {
				b := c.block(number)
				firsts, roots := anyMoments(r, len(b.first))
				Generic.encode(b, firsts, roots, atRandom(r.Uint32()))
			}
			number, from := r.IntN(2), r.IntN(n)
			values, roots := anyMoments(r, 1+r.IntN(n-from))
			if number == 1 {
				for i, s := range roots {
					values[i] = s * s
				}
			}
			copyChunk(want, c)
			want.PutMoment(f, number, from, values, Undo{})
			for range r.IntN(4) {
				end := from + r.IntN(len(values)+1)
				if whole := end / Block * Block; whole > from {
					end = whole
				}
				log.Begin()
				c.PutMoment(f, number, from, values[:end-from], log)
				if moments == MomentsInt8 && log.Begun() {
					last := (end - 1) / Block * Block
					block := c.Slice(last, min(last+Block, n))
					for i, stream := range block.changed(f) {
						if i >= abi.UndoMoment1 {
							anything(r, stream)
						}
					}
					log.RestoreMoments(f, c)
				}
			}
			for range 1 + r.IntN(2) {
				c.PutMoment(f, number, from, values, log)
			}
			if d := differ(f, c, want); d != "" {
				t.Fatalf("elements %d to %d of %d of moment %d: %s", from, from+len(values), n, number, d)
			}
		})
	}
}

// TestMomentsThatAreRoundedDownOverAPowerOfTwo: if the largest number of a block is, the
// steps of the block are finer the next time that it is encoded.
func TestMomentsThatAreRoundedDownOverAPowerOfTwo(t *testing.T) {
	f := Format{Adam, Split, MomentsInt8, dtype.BF16, dtype.BF16}
	c, want := plainChunk(f, 2), plainChunk(f, 2)
	c.PutBlock(0, []float32{1, 1}, []float32{122. / 64 * 122 / 64, 2})
	tiny := []float32{0x1p-80}
	copyChunk(want, c)
	want.PutMoment(f, 1, 1, tiny, Undo{})
	var both [2][2]float32
	for i := range 2 {
		both[0][i], both[1][i] = c.Moment(0, i), c.Moment(1, i)
	}
	both[1][1] = tiny[0]
	if c.PutBlock(0, both[0][:], both[1][:]); c.Headers[0] == want.Headers[0] {
		t.Error("the steps do not change: this test is of nothing")
	}
	copyChunk(c, want)
	c.PutMoment(f, 1, 1, tiny, Undo{})
	if d := differ(f, c, want); d != "" {
		t.Error(d)
	}
}

// anyMoments returns first moments and roots of second moments: of all sizes, or nearly the
// same, and now and then infinite and NaN.
func anyMoments(r *rand.Rand, n int) (firsts, roots []float32) {
	middle, spread, full := -70+140*r.Float64(), 50*r.Float64()*r.Float64(), 1.5*r.Float64()
	firsts, roots = make([]float32, n), make([]float32, n)
	for i := range roots {
		if r.Float64() < full {
			roots[i] = float32(math.Exp2(middle + spread*(r.Float64()-0.5)))
			firsts[i] = roots[i] * float32(math.Exp2(8*(r.Float64()-0.8))) * float32(1-2*r.IntN(2))
		}
		if r.IntN(200) == 0 {
			roots[i], firsts[i] = float32(math.NaN()), float32(math.Inf(1))
		}
	}
	return firsts, roots
}
