//go:build linux

package engine

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// BenchmarkAccumulate adds fp32 gradients, and gradients of the shard's own type, to the
// gradients of a shard. It alternates runs with a journal and runs without, over the same
// memory. The metrics are medians: ns an element, and how much longer a run with a
// journal takes.
func BenchmarkAccumulate(b *testing.B) {
	for _, of := range []dtype.Type{dtype.BF16, dtype.F32} {
		for _, workers := range []int{1, 2} {
			for _, n := range []int{1 << 20, 32 << 20} {
				b.Run(fmt.Sprintf("fp32 to %v/workers=%d/n=%dMi", of, workers, n>>20), func(b *testing.B) {
					benchmarkAccumulate(b, of, workers, n)
				})
			}
		}
	}
}

func benchmarkAccumulate(b *testing.B, of dtype.Type, workers, n int) {
	available := kernel.Available()
	format := kernel.Format{State: kernel.FP32, Parameter: dtype.BF16, Gradient: of}
	config := ShardConfig{
		Layout: layout(format, shard.DefaultChunk, shard.Uniform(format, int64(n))),
		Kernel: available[len(available)-1], CPUs: cpus(b, workers), Journal: true,
	}
	journaled, err := NewShard(config)
	if err != nil {
		b.Fatal(err)
	}
	defer journaled.Close()
	files := map[string]*os.File{}
	for _, a := range journaled.Arenas() {
		files[a.Name()] = a.File()
	}
	config.Journal = false
	plain, err := AttachShard(config, files)
	if err != nil {
		b.Fatal(err)
	}
	defer plain.Close()
	gradient := kernel.Array{Type: dtype.F32, Data: make([]byte, 4*n)}
	for i := range n {
		gradient.Put(i, 1e-3)
	}
	turn := func(s *Shard) float64 {
		begin := time.Now()
		if err := s.Accumulate(0, gradient); err != nil {
			b.Fatal(err)
		}
		return float64(time.Since(begin).Nanoseconds()) / float64(n)
	}
	var with, without, ratios []float64
	for i := 0; b.Loop(); i++ {
		order := []*Shard{plain, journaled}
		if i%2 == 0 {
			slices.Reverse(order)
		}
		for _, s := range order {
			if took := turn(s); s == plain {
				without = append(without, took)
			} else {
				with = append(with, took)
			}
		}
		ratios = append(ratios, with[i]/without[i])
	}
	median := func(of []float64) float64 {
		slices.Sort(of)
		return of[len(of)/2]
	}
	b.ReportMetric(median(without), "ns/element-without")
	b.ReportMetric(median(with), "ns/element-with")
	b.ReportMetric(100*median(ratios)-100, "%added")
	b.ReportMetric(100*ratios[len(ratios)/4]-100, "%quarter")
	b.ReportMetric(100*ratios[len(ratios)*3/4]-100, "%three-quarters")
	b.ReportMetric(0, "ns/op") // of both together
}
