package engine

import (
	"slices"

	"plimsoll/arena"
	"plimsoll/host"
	"plimsoll/ledger"
)

// ChoosePages takes huge pages when the host grants them: the hugetlb pool must
// have room for every arena, and shared memory is joined into huge pages only
// where the administrator allows it.
func ChoosePages(h *host.Host, shards []ShardConfig) arena.Pages {
	var whole ledger.Bytes
	for _, shard := range shards {
		for _, a := range shard.Arenas() {
			whole += arena.HugetlbPages.Round(a.Size)
		}
	}
	switch {
	case HugetlbFree(h) >= whole:
		return arena.HugetlbPages
	case slices.Contains([]string{"always", "within_size", "advise", "force"}, h.HugePages.Shared):
		return arena.TransparentHugePages
	}
	return arena.BasePages
}

// HugetlbFree is the room in the pool that arenas are taken from, which other
// memory is not taken from.
func HugetlbFree(h *host.Host) ledger.Bytes {
	for _, pool := range h.HugePages.Pools {
		if pool.Size == arena.HugetlbSize {
			return ledger.Bytes(pool.Free) * pool.Size
		}
	}
	return 0
}
