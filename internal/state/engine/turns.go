package engine

import (
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Shares returns the chunks of each worker's own range: those for which [Shard.Each] has it call a function.
func (s *Shard) Shares() [][]kernel.Chunk {
	shares := make([][]kernel.Chunk, s.workers.Count())
	for worker := range shares {
		own := (shard.Range{Count: int64(s.config.Chunks)}).Share(worker, len(shares))
		for unit := own.First; unit < own.End(); unit++ {
			shares[worker] = append(shares[worker], s.chunk(int(unit)).state())
		}
	}
	return shares
}

// OnWorkers has every worker of all shards call body, all at once. It returns when each has.
func OnWorkers(shards []*Shard, body func(rank, worker int)) {
	for rank, s := range shards {
		s.wait()
		s.workers.Start(func(worker int) { body(rank, worker) })
	}
	for _, s := range shards {
		s.wait()
	}
}
