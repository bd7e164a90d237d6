package engine

import (
	"context"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/shard"
)

// ChoosePages returns huge pages if the host grants them. Either the hugetlb pool has
// room for every arena, or the kernel collapses pages into huge ones.
func ChoosePages(h *host.Host, arenas []arena.Plan) arena.Pages {
	var whole ledger.Bytes
	for _, a := range arenas {
		whole += arena.HugetlbPages.Round(a.Size)
	}
	switch {
	case HugetlbFree(h) >= whole:
		return arena.HugetlbPages
	case h.HugePages.Joins, slices.Contains([]string{"always", "within_size", "advise", "force"}, h.HugePages.Shared):
		return arena.TransparentHugePages
	}
	return arena.BasePages
}

// ArenasOf returns the arenas of several shards.
func ArenasOf(shards []ShardConfig) []arena.Plan {
	var arenas []arena.Plan
	for _, config := range shards {
		arenas = append(arenas, config.Arenas()...)
	}
	return arenas
}

// HugetlbFree returns the free bytes of the hugetlb pool that arenas come from. No
// other memory comes from it.
func HugetlbFree(h *host.Host) ledger.Bytes {
	for _, pool := range h.HugePages.Pools {
		if pool.Size == arena.HugetlbSize {
			return ledger.Bytes(pool.Free) * pool.Size
		}
	}
	return 0
}

// Populate has the kernel give all arenas their pages. Each page lies on the NUMA node
// of the worker that will update most of it. The shard must be new: it holds nothing
// but zeros. The workers call advance with the bytes that they have populated. When
// the context is done, they leave the rest out.
func (s *Shard) Populate(ctx context.Context, advance func(ledger.Bytes)) {
	const portion = 32 * arena.PopulateUnit
	s.wait()
	s.workers.Start(func(worker int) {
		for i, plan := range s.config.Arenas() {
			if plan.Component == ledger.StepJournal {
				continue // it was written when it was made
			}
			a := s.arenas[i]
			units := shard.Range{Count: int64((a.Mapped() + arena.PopulateUnit - 1) / arena.PopulateUnit)}
			own := units.Share(worker, s.workers.Count())
			first := ledger.Bytes(own.First) * arena.PopulateUnit
			end := min(a.Mapped(), ledger.Bytes(own.End())*arena.PopulateUnit)
			for ; first < end && ctx.Err() == nil; first += portion {
				a.Populate(first, min(first+portion, end))
				advance(min(portion, end-first))
			}
		}
	})
	s.wait()
}
