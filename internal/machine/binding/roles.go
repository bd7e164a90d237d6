package binding

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// roles divides the cores of one rank.
type roles struct {
	host    *host.Host
	cores   []*core // in the order of the machine
	share   TrainerShare
	policy  string        // as requested
	near    cpuset.CPUSet // the CPUs near the rank's GPU
	threads int           // how many can run at a time

	oneThread bool // the trainer uses one hardware thread of each core
}

func (r roles) assign() Rank {
	part := Rank{}
	budget := min(len(r.cores), r.threads)
	if budget < len(r.cores) {
		part.reason("the CPU quota of %.4g (%s) is enough for %s", r.host.Quota, r.host.QuotaFrom,
			ledger.Plural(budget, "core"))
	}
	trainer, optimizer := r.divide(&part, budget)
	halves := 0
	for _, c := range append(slices.Clone(trainer), optimizer...) {
		if !c.whole {
			halves++
		}
	}
	if halves > 0 {
		part.reason("of %s only some hardware threads are usable; another process may run on the others",
			ledger.Plural(halves, "core"))
	}
	part.TrainerCPUs, part.OptimizerCPUs = r.cpusOfTrainer(trainer), firstCPUs(optimizer)
	if isolated := part.TrainerCPUs.Intersection(r.host.Isolated); isolated.Size() > 1 {
		part.reason("CPUs %s are isolated: the kernel moves no thread between them, so the program "+
			"has to bind its threads itself", isolated)
	}
	part.NUMANodes = r.memoryNodes(optimizer)
	if len(optimizer) == 0 {
		part.NUMANodes = r.memoryNodes(trainer)
	}
	policy, why := r.memoryPolicy(part.NUMANodes)
	part.MemoryPolicy = policy
	part.reason("%s", why)
	return part
}

// reason says why a part is as it is.
func (part *Rank) reason(format string, values ...any) {
	part.Reasons = append(part.Reasons, fmt.Sprintf(format, values...))
}

// divide returns the cores of each role, of which as many as the budget run at a time.
func (r roles) divide(part *Rank, budget int) (trainer, optimizer []*core) {
	switch {
	case r.share == TrainerShare{}:
		return nil, spread(r.cores, budget)
	case r.share.Fraction == 1:
		part.OMPNumThreads = r.team(budget)
		part.reason("no optimizer beside the trainer: all cores are the trainer's")
		if part.OMPNumThreads < budget {
			part.reason("%s for the trainer, one for each fast core: OpenMP waits for its slowest thread",
				ledger.Plural(part.OMPNumThreads, "OpenMP thread"))
		}
		return r.cores, nil
	case len(r.cores) == 1:
		part.Shared, part.OMPNumThreads = true, 1
		part.reason("one core for two roles: trainer and optimizer share it")
		return r.cores, r.cores
	}
	want := r.share.Cores
	if r.share.Fraction > 0 {
		want = int(math.Round(r.share.Fraction * float64(budget)))
	}
	// Each role gets a core, even where the quota is for one.
	budget = max(budget, 2)
	number := min(max(want, 1), budget-1)
	if number < r.share.Cores {
		part.reason("%s asked for the trainer, %d given: the optimizer needs one", ledger.Plural(want, "core"), number)
	}
	if r.share.Fraction > 0 {
		number = r.team(number)
	}
	trainer = r.nearest(number)
	if slower := slowerThanFirst(trainer); slower > 0 {
		part.reason("%d of the trainer's cores are slower than its others, as there are too few fast ones; its OpenMP "+
			"threads wait for them", slower)
	} else if slowerThanFirst(r.byKind()) > 0 {
		part.reason("the trainer has cores of one speed, as its OpenMP threads wait for the slowest; the " +
			"optimizer's workers do not wait")
	}
	rest := slices.DeleteFunc(slices.Clone(r.cores), func(c *core) bool { return slices.Contains(trainer, c) })
	optimizer = spread(rest, budget-number)
	part.OMPNumThreads = number
	part.reason("%s for the trainer (%s asked for), %s for the optimizer", ledger.Plural(number, "core"), r.share,
		ledger.Plural(len(optimizer), "core"))
	return trainer, optimizer
}

// cpusOfTrainer returns all hardware threads of cores, or one of each if the trainer uses one.
func (r roles) cpusOfTrainer(cores []*core) cpuset.CPUSet {
	if r.oneThread {
		return firstCPUs(cores)
	}
	var cpus []int
	for _, c := range cores {
		cpus = append(cpus, c.Usable.UnsortedList()...)
	}
	return cpuset.New(cpus...)
}

func firstCPUs(cores []*core) cpuset.CPUSet {
	var cpus []int
	for _, c := range cores {
		cpus = append(cpus, c.first)
	}
	return cpuset.New(cpus...)
}

// team returns how many of at most that many threads do the most work together. All threads wait for the slowest, as
// in an OpenMP loop.
func (r roles) team(most int) int {
	byKind := r.byKind()
	size, best := most, 0.0
	for i, c := range byKind[:min(most, len(byKind))] {
		last := i+1 == min(most, len(byKind)) || byKind[i+1].Kind != c.Kind
		if speed := float64(i+1) * r.host.Kinds[c.Kind].Capacity; last && speed > best {
			size, best = i+1, speed
		}
	}
	return size
}

// byKind returns the cores, the fastest first.
func (r roles) byKind() []*core {
	return slices.SortedStableFunc(slices.Values(r.cores), func(a, b *core) int { return cmp.Compare(a.Kind, b.Kind) })
}

func slowerThanFirst(cores []*core) (slower int) {
	for _, c := range cores {
		if c.Kind > cores[0].Kind {
			slower++
		}
	}
	return slower
}

// nearest chooses the trainer's cores: the fastest first, then those near the GPU. Where possible it takes at most
// half of a node, because the optimizer needs the memory bandwidth of every node in reach.
func (r roles) nearest(number int) []*core {
	chosen := []*core{}
	for _, pools := range r.pools() {
		chosen = append(chosen, fromPools(pools, number-len(chosen))...)
	}
	return chosen
}

// fromPools takes cores from the pools, where possible at most half of each pool.
func fromPools(pools [][]*core, number int) []*core {
	all := 0
	for _, pool := range pools {
		all += len(pool)
	}
	number = min(number, all)
	chosen := []*core{}
	for i, pool := range pools {
		limit := len(pool) * max(2*number, all) / (2 * all)
		take := min(limit, number-len(chosen))
		chosen, pools[i] = append(chosen, pool[:take]...), pool[take:]
	}
	for len(chosen) < number { // make up for rounding, one core of each pool in turn
		for i, pool := range pools {
			if len(pool) > 0 && len(chosen) < number {
				chosen, pools[i] = append(chosen, pool[0]), pool[1:]
			}
		}
	}
	return chosen
}

// pools returns the cores of each kind, the fastest first, by node: near the GPU first.
func (r roles) pools() [][][]*core {
	type key struct{ kind, far, node int }
	byKey := map[key][]*core{}
	for _, c := range r.cores {
		k := key{far: 1, kind: c.Kind, node: c.groups[ofNode]}
		if r.near.Contains(c.first) {
			k.far = 0
		}
		byKey[k] = append(byKey[k], c)
	}
	keys := slices.SortedFunc(maps.Keys(byKey), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.far, b.far), cmp.Compare(a.node, b.node))
	})
	pools := [][][]*core{}
	for i, k := range keys {
		if i == 0 || k.kind != keys[i-1].kind {
			pools = append(pools, nil)
		}
		pools[len(pools)-1] = append(pools[len(pools)-1], byKey[k])
	}
	return pools
}

func inPart(c *core) int {
	if c.whole {
		return 0
	}
	return 1
}

// spread chooses the cores of a few workers. Its order: the fastest cores, whole cores before shared ones, and one
// core of each cache before a second of any. Among caches it prefers nodes, and then packages, with the fewest workers.
func spread(cores []*core, number int) []*core {
	left, chosen := slices.Clone(cores), []*core{}
	workers := map[[2]int]int{} // by level and group
	for len(chosen) < min(number, len(cores)) {
		busy := func(level int, c *core) int { return workers[[2]int{level, c.groups[level]}] }
		next := slices.MinFunc(left, func(a, b *core) int {
			return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(inPart(a), inPart(b)),
				cmp.Compare(busy(ofCache, a), busy(ofCache, b)), cmp.Compare(busy(ofNode, a), busy(ofNode, b)),
				cmp.Compare(busy(ofPackage, a), busy(ofPackage, b)))
		})
		for level, group := range next.groups {
			workers[[2]int{level, group}]++
		}
		chosen = append(chosen, next)
		left = slices.DeleteFunc(left, func(c *core) bool { return c == next })
	}
	return chosen
}

// Workers chooses CPUs for fewer workers than an optimizer has: those that the binding would give it.
func (r Rank) Workers(h *host.Host, number int) []int {
	var cores []*core
	for _, c := range inOrder(h) {
		if own := c.Usable.Intersection(r.OptimizerCPUs); !own.IsEmpty() {
			c.first = lowest(own)
			cores = append(cores, c)
		}
	}
	var cpus []int
	for _, c := range spread(cores, number) {
		cpus = append(cpus, c.first)
	}
	slices.Sort(cpus)
	return cpus
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
		return fmt.Sprintf("the kernel does not say which CPUs are near GPU %s", gpu.Address)
	case r.near.IsEmpty():
		return fmt.Sprintf("none of the CPUs near GPU %s (%s) is usable", gpu.Address, gpu.CPUs)
	default:
		return fmt.Sprintf("%d of its cores near GPU %s", near, gpu.Address)
	}
}
