//go:build linux

package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// BenchmarkStep makes journaled steps of small shards, and of a shard of many small sections: there the time to find a
// chunk and its streams counts most.
func BenchmarkStep(b *testing.B) {
	for _, test := range []struct {
		sections int
		elements int64 // of each
	}{{1, 1 << 10}, {1, 1 << 20}, {4096, 256}, {2, 4 << 20}} {
		b.Run(fmt.Sprintf("sections=%d/elements=%d", test.sections, test.elements), func(b *testing.B) {
			var sections []shard.Section
			for i := range test.sections {
				sections = append(sections, shard.Section{Elements: test.elements, Group: i % 2})
			}
			available := kernel.Available()
			s, err := NewShard(ShardConfig{Layout: layout(split, shard.DefaultChunk, sections),
				Kernel: available[len(available)-1], CPUs: cpus(b, 1), Journal: true})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			fillShard(s)
			optimizers := []optim.Optimizer{optim.DefaultAdamW(), optim.DefaultAdamW()}
			for b.Loop() {
				if err := s.Begin(s.Steps()+1, 1, optimizers); err != nil {
					b.Fatal(err)
				}
				s.Wait()
			}
		})
	}
}

// BenchmarkOrder makes steps of a shard of 256 chunks without an order, with one, and with one while a goroutine waits
// for range after range, in turns. It reports how much longer the median steps with an order are, in percent.
func BenchmarkOrder(b *testing.B) {
	const elements, ranges = 256 * shard.DefaultChunk, 32
	available := kernel.Available()
	s, err := NewShard(ShardConfig{Layout: uniform(split, elements), Kernel: available[len(available)-1],
		CPUs: cpus(b, 2), Journal: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	fillShard(s)
	order := make([]shard.Range, ranges)
	for i, place := range rand.New(rand.NewPCG(1, 1)).Perm(ranges) {
		order[place] = s.config.Range().Share(i, ranges)
	}
	optimizers := []optim.Optimizer{optim.DefaultAdamW()}
	var took [3][]float64
	for b.Loop() {
		for way := range took {
			s.SetOrder(order[:ranges*min(way, 1)])
			begin := time.Now()
			if err := s.Begin(s.Steps()+1, 1, optimizers); err != nil {
				b.Fatal(err)
			}
			for _, r := range order[:ranges*(way/2)] {
				s.WaitRange(r)
			}
			s.Wait()
			took[way] = append(took[way], time.Since(begin).Seconds())
		}
	}
	for way := range took {
		slices.Sort(took[way])
	}
	plain := took[0][len(took[0])/2]
	b.ReportMetric(1000*plain, "ms/step")
	b.ReportMetric(100*(took[1][len(took[1])/2]/plain-1), "%-ordered")
	b.ReportMetric(100*(took[2][len(took[2])/2]/plain-1), "%-awaited")
}

// BenchmarkSums makes steps of two shards, one with sums and one without, in turns. It reports how much longer the
// median and the lowest decile of the steps with sums are, in percent.
func BenchmarkSums(b *testing.B) {
	for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
		for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
			f := split
			f.State, f.Moments = state, moments
			b.Run(fmt.Sprint(f), func(b *testing.B) { benchmarkSums(b, f) })
		}
	}
}

func benchmarkSums(b *testing.B, f kernel.Format) {
	const elements = 768 * shard.DefaultChunk
	available := kernel.Available()
	var shards [2]*Shard
	for i := range shards {
		s, err := NewShard(ShardConfig{Layout: uniform(f, elements), Kernel: available[len(available)-1],
			CPUs: cpus(b, 2), Journal: true, Sums: i == 1})
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
		fillShard(s)
		shards[i] = s
	}
	optimizers := []optim.Optimizer{optim.DefaultAdamW()}
	var took [2][]float64
	for b.Loop() {
		for way, s := range shards {
			begin := time.Now()
			if err := s.Begin(s.Steps()+1, 1, optimizers); err != nil {
				b.Fatal(err)
			}
			s.Wait()
			took[way] = append(took[way], time.Since(begin).Seconds())
		}
	}
	for way := range took {
		slices.Sort(took[way])
	}
	at := func(way, part int) float64 { return took[way][len(took[way])/part] }
	b.ReportMetric(1000*at(0, 2), "ms/step")
	b.ReportMetric(100*(at(1, 2)/at(0, 2)-1), "%-sums")
	b.ReportMetric(100*(at(1, 10)/at(0, 10)-1), "%-sums-decile")
}
