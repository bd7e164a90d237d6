package binding

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/host"
)

// roles divides the cores of one rank.
type roles struct {
	host    *host.Host
	cores   []*core // in the order of the machine
	share   TrainerShare
	policy  string        // as requested
	near    cpuset.CPUSet // the CPUs near the rank's GPU
	threads int           // how many may run at a time

	oneThread bool // whether the trainer uses one hardware thread of each core
}

func (r roles) assign() Rank {
	part := Rank{}
	reason := func(format string, values ...any) {
		part.Reasons = append(part.Reasons, fmt.Sprintf(format, values...))
	}
	budget := min(len(r.cores), r.threads)
	if budget < len(r.cores) {
		reason("a CPU quota of %.4g (%s) keeps %s busy", r.host.Quota, r.host.QuotaFrom, count(budget, "core"))
	}
	want := r.share.Cores
	if r.share.Fraction > 0 {
		want = int(math.Round(r.share.Fraction * float64(budget)))
	}
	var trainer, optimizer []*core
	switch {
	case r.share == TrainerShare{}:
		optimizer = r.spread(r.cores, budget)
	case r.share.Fraction == 1:
		trainer, part.OMPNumThreads = r.cores, budget
		reason("no optimizer beside the trainer: all cores are the trainer's")
	case len(r.cores) == 1:
		trainer, optimizer = r.cores, r.cores
		part.Shared, part.OMPNumThreads = true, 1
		reason("one core for two roles: trainer and optimizer share it")
	default:
		// A core for each role, even where the quota is for one.
		budget = max(budget, 2)
		number := min(max(want, 1), budget-1)
		if number < r.share.Cores {
			reason("%s wanted for the trainer, %d given: the optimizer needs one", count(want, "core"), number)
		}
		trainer = r.nearest(number)
		rest := slices.DeleteFunc(slices.Clone(r.cores), func(c *core) bool { return slices.Contains(trainer, c) })
		optimizer = r.spread(rest, budget-number)
		part.OMPNumThreads = number
		reason("%s for the trainer (%s asked for), %s for the optimizer", count(number, "core"), r.share, count(len(optimizer), "core"))
	}
	halves := 0
	for _, c := range append(slices.Clone(trainer), optimizer...) {
		if !c.whole {
			halves++
		}
	}
	if halves > 0 {
		reason("of %s only some hardware threads are usable; another process may run on the others", count(halves, "core"))
	}
	var trainerCPUs, optimizerCPUs []int
	for _, c := range trainer {
		if r.oneThread {
			trainerCPUs = append(trainerCPUs, c.first)
		} else {
			trainerCPUs = append(trainerCPUs, c.Usable.UnsortedList()...)
		}
	}
	for _, c := range optimizer {
		optimizerCPUs = append(optimizerCPUs, c.first)
	}
	part.TrainerCPUs, part.OptimizerCPUs = cpuset.New(trainerCPUs...), cpuset.New(optimizerCPUs...)
	if isolated := part.TrainerCPUs.Intersection(r.host.Isolated); isolated.Size() > 1 {
		reason("CPUs %s are isolated: the kernel moves no thread between them, so the program has to bind its threads itself", isolated)
	}
	part.NUMANodes = r.memoryNodes(optimizer)
	if len(optimizer) == 0 {
		part.NUMANodes = r.memoryNodes(trainer)
	}
	policy, why := r.memoryPolicy(part.NUMANodes)
	part.MemoryPolicy = policy
	reason("%s", why)
	return part
}

// nearest chooses the cores of the trainer: near the GPU first, but while it
// can be helped no more than half of a node or of a kind of cores, since the
// optimizer lives on the memory bandwidth of every node it can reach.
func (r roles) nearest(number int) []*core {
	pools := r.pools()
	chosen := []*core{}
	for i, pool := range pools {
		limit := len(pool) * max(2*number, len(r.cores)) / (2 * len(r.cores))
		take := min(limit, number-len(chosen))
		chosen, pools[i] = append(chosen, pool[:take]...), pool[take:]
	}
	for len(chosen) < number { // what rounding left, one of each pool in turn
		for i, pool := range pools {
			if len(pool) > 0 && len(chosen) < number {
				chosen, pools[i] = append(chosen, pool[0]), pool[1:]
			}
		}
	}
	return chosen
}

// pools are the cores by node and kind: near the GPU first, then the fastest.
func (r roles) pools() [][]*core {
	type key struct{ far, kind, node int }
	byKey := map[key][]*core{}
	for _, c := range r.cores {
		k := key{far: 1, kind: c.Kind, node: c.groups[ofNode]}
		if r.near.Contains(c.first) {
			k.far = 0
		}
		byKey[k] = append(byKey[k], c)
	}
	keys := []key{}
	for k := range byKey {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.far, b.far), cmp.Compare(a.kind, b.kind), cmp.Compare(a.node, b.node))
	})
	pools := [][]*core{}
	for _, k := range keys {
		pools = append(pools, byKey[k])
	}
	return pools
}

func inPart(c *core) int {
	if c.whole {
		return 0
	}
	return 1
}

// spread chooses the cores of a few workers: the fastest first, whole ones
// before those of which another process may use a part, one of each cache and
// node before a second of any.
func (r roles) spread(cores []*core, number int) []*core {
	turn := map[*core]int{}
	seen := map[[3]int]int{}
	for _, c := range cores {
		group := [3]int{c.groups[ofNode], c.groups[ofCache], c.Kind}
		turn[c] = seen[group]
		seen[group]++
	}
	cores = slices.Clone(cores)
	slices.SortStableFunc(cores, func(a, b *core) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(inPart(a), inPart(b)), cmp.Compare(turn[a], turn[b]))
	})
	return cores[:min(number, len(cores))]
}

func (r roles) nearReason(gpu *host.Device) string {
	near := 0
	for _, c := range r.cores {
		if r.near.Contains(c.first) {
			near++
		}
	}
	switch {
	case gpu.CPUs.IsEmpty():
		return fmt.Sprintf("where GPU %s is attached is not known", gpu.Address)
	case r.near.IsEmpty():
		return fmt.Sprintf("none of the CPUs near GPU %s (%s) is usable", gpu.Address, gpu.CPUs)
	default:
		return fmt.Sprintf("%d of its cores near GPU %s", near, gpu.Address)
	}
}
