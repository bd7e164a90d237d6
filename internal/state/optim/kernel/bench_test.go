//go:build linux

package kernel

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"plimsoll/internal/base/dtype"
)

// BenchmarkUpdate measures an update, an update with an undo log, and the pure traffic of
// the same streams, in cache and in memory.
func BenchmarkUpdate(b *testing.B) {
	for _, f := range []Format{
		{Adam, Split, MomentsFP32, dtype.BF16, dtype.BF16},
		{Adam, Split, MomentsBF16, dtype.BF16, dtype.BF16},
		{Adam, Split, MomentsInt8, dtype.BF16, dtype.BF16},
		{Adam, FP32, MomentsFP32, dtype.BF16, dtype.F32},
	} {
		constants, log := steps(f.Algorithm)[0], UndoIn(make([]byte, f.UndoBytes()))
		for _, n := range []int{16 << 10, 16 << 20} {
			c := newChunk(b, f, n, 0)
			fill(rand.New(rand.NewPCG(1, 1)), f, c.Slice(0, 16<<10), false)
			for filled := 16 << 10; filled < n; filled *= 2 {
				copyChunk(c.Slice(filled, 2*filled), c.Slice(0, filled))
			}
			for _, set := range Available() {
				for _, pass := range []struct {
					name string
					run  func(Chunk)
				}{
					{"update", func(c Chunk) { set.Update(f, &constants, c) }},
					{"logged", func(c Chunk) { set.UpdateLogged(f, &constants, c, 0, log) }},
					{"traffic", func(c Chunk) { set.Traffic(f, c) }},
				} {
					b.Run(fmt.Sprintf("n=%dKi/state=%v/moments=%v/impl=%v/pass=%s", n>>10, f.State, f.Moments, set,
						pass.name), func(b *testing.B) {
						b.SetBytes(f.TrafficBytes(int64(n)))
						for b.Loop() {
							pass.run(c)
						}
						b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/parameter")
					})
				}
			}
		}
	}
}

// BenchmarkFormats measures updates of the other algorithms and element types,
// in cache.
func BenchmarkFormats(b *testing.B) {
	const n = 16 << 10
	for _, f := range []Format{
		{Adam, FP32, MomentsFP32, dtype.F16, dtype.F16},
		{Adam, FP32, MomentsInt8, dtype.F16, dtype.F16},
		{Lion, Split, MomentsFP32, dtype.BF16, dtype.BF16},
		{Lion, Split, MomentsBF16, dtype.BF16, dtype.BF16},
		{Adagrad, Split, MomentsFP32, dtype.BF16, dtype.BF16},
		{Adagrad, Split, MomentsBF16, dtype.BF16, dtype.BF16},
		{SGD, Split, MomentsFP32, dtype.BF16, dtype.BF16},
		{SGD, FP32, MomentsBF16, dtype.F32, dtype.F32},
	} {
		c := newChunk(b, f, n, 0)
		fill(rand.New(rand.NewPCG(1, 1)), f, c, false)
		constants := steps(f.Algorithm)[0]
		for _, set := range Available() {
			b.Run(fmt.Sprintf("%v/impl=%v", f, set), func(b *testing.B) {
				b.SetBytes(f.TrafficBytes(n))
				for b.Loop() {
					set.Update(f, &constants, c)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/parameter")
			})
		}
	}
}

// BenchmarkAccumulate measures the sum of two gradients, in cache.
func BenchmarkAccumulate(b *testing.B) {
	const n = 16 << 10
	for _, typ := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
		sum, gradient := Array{dtype.F32, make([]byte, 4*n)}, Array{typ, make([]byte, n*typ.Size())}
		for i := range n {
			gradient.Put(i, 1e-3)
		}
		for _, set := range Available() {
			b.Run(fmt.Sprintf("gradient=%v/impl=%v", typ, set), func(b *testing.B) {
				b.SetBytes(n * (8 + typ.Size()))
				for b.Loop() {
					set.Accumulate(sum, gradient)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/parameter")
			})
		}
	}
}

// BenchmarkSumSquares measures the sum of the squares of a gradient, one norm block after
// the other, in cache and in memory.
func BenchmarkSumSquares(b *testing.B) {
	const block = 64 << 10
	for _, typ := range []dtype.Type{dtype.BF16, dtype.F32} {
		for _, n := range []int{block, 64 << 20} {
			g := Array{typ, make([]byte, int64(n)*typ.Size())}
			for i := range n {
				g.Put(i, 1e-3)
			}
			for _, set := range Available() {
				b.Run(fmt.Sprintf("n=%dKi/gradient=%v/impl=%v", n>>10, typ, set), func(b *testing.B) {
					b.SetBytes(block * typ.Size())
					for at := 0; b.Loop(); at = (at + block) % n {
						set.SumSquares(g.Slice(at, at+block))
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/block, "ns/parameter")
				})
			}
		}
	}
}
