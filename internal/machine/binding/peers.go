package binding

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/host"
)

// masks returns the CPUs that each rank may use, and the host as seen by all ranks together.
//
// Batch systems hand out CPUs, not cores: the masks of two ranks may overlap or hold different threads of one core.
func (r Request) masks(h *host.Host) (*host.Host, []cpuset.CPUSet, error) {
	if len(r.Peers) == 0 {
		return h, slices.Repeat([]cpuset.CPUSet{h.CPUs}, r.Ranks), nil
	}
	masks, all := []cpuset.CPUSet{}, cpuset.New()
	for rank, peer := range r.Peers {
		mask := peer.Intersection(h.Online)
		if mask.IsEmpty() {
			return nil, nil, fault.Inputf("no CPU of the mask %q of rank %d is online; those are %q", peer, rank,
				h.Online).WithHint("give every rank at least one online CPU")
		}
		masks, all = append(masks, mask), all.Union(mask)
	}
	pool, err := h.WithAffinity(all)
	return pool, masks, err
}

// pool is a number of cores of one kind that the same ranks may use. Some ranks may have only a part of each core's
// hardware threads.
type pool struct {
	kind         int
	ranks, cores []int
	inPart       []int
}

// pools divides the cores into pools, in the order in which to share them out. A pool of few ranks comes first, so
// that later pools can balance it. Then the fastest kind comes first.
func (d *divider) pools() []pool {
	everyone := []int{}
	for rank := range d.masks {
		everyone = append(everyone, rank)
	}
	pools, known := []pool{}, map[string]int{}
	for position, c := range d.cores {
		ranks, inPart, key := everyone, []int(nil), fmt.Sprint(c.Kind)
		if !d.same {
			ranks = slices.DeleteFunc(slices.Clone(everyone), func(rank int) bool { return !d.mayUse(rank, c) })
			inPart = slices.DeleteFunc(slices.Clone(ranks),
				func(rank int) bool { return c.Usable.IsSubsetOf(d.masks[rank]) })
			key = fmt.Sprint(c.Kind, ranks, inPart)
		}
		i, ok := known[key]
		if !ok {
			i = len(pools)
			known[key], pools = i, append(pools, pool{kind: c.Kind, ranks: ranks, inPart: inPart})
		}
		pools[i].cores = append(pools[i].cores, position)
	}
	slices.SortStableFunc(pools, func(a, b pool) int {
		return cmp.Or(cmp.Compare(len(a.ranks), len(b.ranks)), cmp.Compare(a.kind, b.kind))
	})
	return pools
}

func (d *divider) mayUse(rank int, c *core) bool {
	return !c.Usable.Intersection(d.masks[rank]).IsEmpty()
}

// balance returns how many cores of each pool each rank gets. The totals of the ranks are as even as the pools allow.
// It starts with a good guess and passes cores on between ranks until no rank can be relieved: an optimal
// semi-matching (Harvey, Ladner, Lovász, Tamir, "Semi-matchings for bipartite graphs and load balancing", 2003).
func balance(pools []pool, ranks int) (shares [][]int) {
	total := make([]int, ranks)
	for i, p := range pools {
		shares = append(shares, make([]int, ranks))
		for range p.cores {
			poorest := slices.MinFunc(p.ranks, func(a, b int) int { return cmp.Compare(total[a], total[b]) })
			shares[i][poorest]++
			total[poorest]++
		}
	}
	for rank := 0; rank < ranks; rank++ {
		if relieve(rank, pools, shares, total) {
			rank = -1 // restart, as another rank may now have a way
		}
	}
	for rank := range ranks {
		wholeFor(rank, pools, shares)
	}
	return shares
}

// wholeFor exchanges one of the rank's partial cores for a whole core, if the rank has no whole core and another rank
// has two. The totals stay.
func wholeFor(rank int, pools []pool, shares [][]int) {
	whole := func(rank int) (n int) {
		for i, p := range pools {
			if !slices.Contains(p.inPart, rank) {
				n += shares[i][rank]
			}
		}
		return n
	}
	if whole(rank) > 0 {
		return
	}
	for give, part := range pools {
		for take, p := range pools {
			if shares[give][rank] == 0 || !slices.Contains(p.ranks, rank) || slices.Contains(p.inPart, rank) {
				continue
			}
			for _, other := range p.ranks {
				if shares[take][other] > 0 && slices.Contains(part.ranks, other) && whole(other) > 1 {
					shares[give][rank]--
					shares[give][other]++
					shares[take][other]--
					shares[take][rank]++
					return
				}
			}
		}
	}
}

// relieve moves one core from the rank to another that has at least two fewer. The move may pass through other ranks,
// each of which gets a core and gives one of another pool.
func relieve(rank int, pools []pool, shares [][]int, total []int) bool {
	type giver struct{ rank, pool int }
	from := map[int]giver{rank: {}}
	for queue := []int{rank}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		if total[at]+2 <= total[rank] {
			total[at]++
			total[rank]--
			for at != rank {
				g := from[at]
				shares[g.pool][at]++
				shares[g.pool][g.rank]--
				at = g.rank
			}
			return true
		}
		for i, p := range pools {
			if shares[i][at] == 0 {
				continue
			}
			for _, next := range p.ranks {
				if _, seen := from[next]; !seen {
					from[next] = giver{at, i}
					queue = append(queue, next)
				}
			}
		}
	}
	return false
}

// peerReasons explains how a rank's mask was used.
func (d *divider) peerReasons(rank int) []string {
	if d.same {
		return nil
	}
	reasons := []string{fmt.Sprintf("inside its own affinity mask, %s", d.masks[rank])}
	var kept, lost, others, keepers []int
	for i, c := range d.cores {
		if !d.mayUse(rank, c) {
			continue
		}
		contested := false
		for other := range d.masks {
			if other != rank && d.mayUse(other, c) {
				contested = true
				if slices.Contains(d.users[i], rank) {
					others = append(others, other)
				}
			}
		}
		switch cpus := c.Usable.UnsortedList(); {
		case !contested:
		case slices.Contains(d.users[i], rank):
			kept = append(kept, cpus...)
		default:
			lost, keepers = append(lost, cpus...), append(keepers, d.users[i]...)
		}
	}
	if len(kept) > 0 {
		reasons = append(reasons, fmt.Sprintf("CPUs %s: cores also in the mask of %s; this rank keeps them",
			cpuset.New(kept...), ranksCalled(others)))
	}
	if len(lost) > 0 {
		reasons = append(reasons, fmt.Sprintf("CPUs %s: cores also in its mask; they go to %s, as no core has two "+
			"ranks", cpuset.New(lost...), ranksCalled(keepers)))
	}
	return reasons
}

func ranksCalled(ids []int) string {
	if set := cpuset.New(ids...); set.Size() > 1 {
		return "ranks " + set.String()
	}
	return fmt.Sprint("rank ", ids[0])
}
