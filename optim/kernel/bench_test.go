package kernel

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"plimsoll/dtype"
)

// BenchmarkAdam measures an update and the pure traffic of the same streams, in
// cache and in memory.
func BenchmarkAdam(b *testing.B) {
	var a Adam
	a.Set(steps(rand.New(rand.NewPCG(1, 1)))[0])
	for _, f := range []Format{{Split, dtype.BF16, dtype.BF16}, {FP32, dtype.BF16, dtype.F32}} {
		for _, n := range []int{16 << 10, 16 << 20} {
			c := newChunk(b, f, n, 0)
			fill(rand.New(rand.NewPCG(1, 1)), f, c, false)
			for _, set := range Available() {
				for name, run := range map[string]func(Chunk){
					"update":  func(c Chunk) { set.Adam(f, &a, c) },
					"traffic": func(c Chunk) { set.Traffic(f, c) },
				} {
					b.Run(fmt.Sprintf("n=%dKi/state=%v/impl=%v/%s", n>>10, f.State, set, name), func(b *testing.B) {
						b.SetBytes(f.TrafficBytes() * int64(n))
						for b.Loop() {
							run(c)
						}
						b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/parameter")
					})
				}
			}
		}
	}
}
