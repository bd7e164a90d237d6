package engine

import (
	"fmt"
	"testing"

	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
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
