package binding

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// Reserve returns the host without the cores that are left to the system.
func Reserve(h *host.Host, cores int) (*host.Host, error) {
	r := Request{Ranks: 1, Reserve: cores}
	if err := r.check(); err != nil {
		return nil, err
	}
	h, _, err := r.reserve(h, []cpuset.CPUSet{h.CPUs})
	return h, err
}

// reserve removes the system's cores from the host and from the masks of the ranks. Every rank keeps a core.
func (r Request) reserve(h *host.Host, masks []cpuset.CPUSet) (*host.Host, []cpuset.CPUSet, error) {
	if r.Reserve == 0 {
		return h, masks, nil
	}
	left, kept, cores := h.CPUs, slices.Clone(masks), len(h.UsableCores())
	reserved := 0
	for _, c := range forTheSystem(h) {
		without := slices.Clone(kept)
		for rank := range without {
			without[rank] = without[rank].Difference(c.Siblings)
		}
		lastOfARank := slices.ContainsFunc(without, func(mask cpuset.CPUSet) bool { return mask.IsEmpty() })
		if reserved < r.Reserve && !lastOfARank && cores-reserved > r.Ranks {
			left, kept = left.Difference(c.Siblings), without
			reserved++
		}
	}
	if reserved < r.Reserve {
		return nil, nil, fault.Inputf("--reserve is %d, and only %d of the %s can be spared by %s", r.Reserve, reserved,
			ledger.Plural(cores, "usable core"), ledger.Plural(r.Ranks, "rank")).
			WithHint("reserve fewer cores, or start fewer ranks")
	}
	h, err := h.WithAffinity(left)
	return h, kept, err
}

// forTheSystem returns the usable cores in the order in which the system gets them: the slowest first, then one of
// each NUMA node in turn, then the lowest. CPU 0 comes early, as it does most of the kernel's work.
func forTheSystem(h *host.Host) []host.Core {
	cores, turn := h.UsableCores(), map[int]int{}
	slices.SortFunc(cores, func(a, b host.Core) int { return cmp.Compare(lowest(a.Siblings), lowest(b.Siblings)) })
	seen := map[string]int{}
	for _, c := range cores {
		group := fmt.Sprint(c.Kind, c.Nodes)
		turn[lowest(c.Siblings)] = seen[group]
		seen[group]++
	}
	slices.SortStableFunc(cores, func(a, b host.Core) int {
		return cmp.Or(cmp.Compare(b.Kind, a.Kind), cmp.Compare(turn[lowest(a.Siblings)], turn[lowest(b.Siblings)]))
	})
	return cores
}
