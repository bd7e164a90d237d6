package binding

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/host"
)

// core is a usable core and the groups that it shares with other cores.
type core struct {
	host.Core
	first int  // its lowest usable CPU
	whole bool // all its hardware threads are usable
	// groups are numbered within each level; -1 is no group.
	groups [levels]int
}

// The levels at which cores form groups.
const (
	ofPackage = iota
	ofDie
	ofNode
	ofCache
	levels
)

// together is the cost of a cut between two cores, for each group that both belong to. The costs of the groups add
// up.
var together = [levels]int{ofPackage: 1, ofDie: 1, ofNode: 2, ofCache: 4}

// inOrder lists the usable cores so that neighbours in the list are close in the machine. The nesting of the levels
// differs between machines: a node may hold many caches, and with sub-NUMA clustering a cache may span several nodes.
// The level with the fewest groups is the outermost.
func inOrder(h *host.Host) []*core {
	cores := []*core{}
	nodes := map[string]int{}
	for _, c := range h.UsableCores() {
		// Cores in the same set of nodes form one group, so nodes with overlapping maps count as one.
		key := fmt.Sprint(c.Nodes)
		if _, ok := nodes[key]; !ok {
			nodes[key] = len(nodes)
		}
		node := nodes[key]
		if len(c.Nodes) == 0 {
			node = -1
		}
		cores = append(cores, &core{Core: c, first: lowest(c.Usable), whole: c.Whole(),
			groups: [levels]int{c.Package, c.Die, node, c.Cache}})
	}
	sizes, order := [levels]int{}, []int{}
	for level := range levels {
		order = append(order, level)
		distinct := map[int]bool{}
		for _, c := range cores {
			distinct[c.groups[level]] = true
		}
		sizes[level] = len(distinct)
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(sizes[a], sizes[b]) })
	slices.SortFunc(cores, func(a, b *core) int {
		for _, level := range order {
			if result := cmp.Compare(a.groups[level], b.groups[level]); result != 0 {
				return result
			}
		}
		return cmp.Compare(a.first, b.first)
	})
	return cores
}

func lowest(cpus cpuset.CPUSet) int { return slices.Min(cpus.UnsortedList()) }

// within returns the core as a rank with that mask sees it.
func (c core) within(mask cpuset.CPUSet) *core {
	if own := c.Usable.Intersection(mask); own.Size() < c.Usable.Size() {
		c.Usable, c.first = own, lowest(own)
	}
	return &c
}

// divide gives each rank cores that its mask touches.
func divide(cores []*core, masks, near []cpuset.CPUSet) *divider {
	d := &divider{
		cores: cores, masks: masks, near: near,
		parts: make([][]int, len(masks)), owed: make([]int, len(masks)), may: make([]bool, len(masks)),
		users: make([][]int, len(cores)),
	}
	d.same = !slices.ContainsFunc(masks, func(mask cpuset.CPUSet) bool { return !mask.Equals(masks[0]) })
	pools := d.pools()
	switch {
	case !d.same:
		for i, shares := range balance(pools, len(masks)) {
			d.owed = shares
			d.divide(pools[i])
		}
	case len(cores) >= len(masks):
		for _, p := range pools {
			d.owe(len(p.cores))
			d.divide(p)
		}
	}
	for rank, part := range d.parts {
		slices.Sort(part)
		for _, position := range part {
			d.users[position] = append(d.users[position], rank)
		}
	}
	for rank, part := range d.parts {
		if len(part) == 0 {
			d.join(rank)
		}
	}
	return d
}

// join gives a core to a rank for which none was left. It takes the least loaded core that the rank may use, then a
// near one, then the fastest.
func (d *divider) join(rank int) {
	far := func(position int) int {
		if d.near[rank].Contains(d.cores[position].first) {
			return 0
		}
		return 1
	}
	best := -1
	for i, c := range d.cores {
		if !d.mayUse(rank, c) {
			continue
		}
		if best < 0 || cmp.Or(cmp.Compare(len(d.users[i]), len(d.users[best])), cmp.Compare(far(i), far(best)),
			cmp.Compare(c.Kind, d.cores[best].Kind)) < 0 {
			best = i
		}
	}
	d.users[best] = append(d.users[best], rank)
	d.parts[rank] = []int{best}
}

// divider shares out the pools of equal cores, one after the other.
type divider struct {
	cores []*core
	masks []cpuset.CPUSet // the CPUs that each rank may use
	same  bool            // all masks are equal
	near  []cpuset.CPUSet // the part of each mask near the rank's GPU
	parts [][]int         // of each rank: positions in the list of cores
	users [][]int         // of each core: its ranks

	// State of the current pool: the cores still owed to each rank, the ranks that may get one core more, and the
	// number of such extra cores.
	owed  []int
	may   []bool
	extra int
}

// divide shares out one pool. Cores near a GPU go first to the ranks of GPUs that they are near to; then the rest are
// shared.
func (d *divider) divide(p pool) {
	rest := p.cores
	for _, owners := range d.neighbours(p.ranks) {
		nearby := func(position int) bool { return d.near[owners[0]].Contains(d.cores[position].first) }
		local := slices.DeleteFunc(slices.Clone(rest), func(position int) bool { return !nearby(position) })
		taken := d.hand(local, owners)
		rest = slices.DeleteFunc(slices.Clone(rest),
			func(position int) bool { return slices.Contains(taken, position) })
	}
	// A rank that already has cores continues next to them.
	ranks := slices.Clone(p.ranks)
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(d.anchor(a), d.anchor(b)) })
	d.hand(rest, ranks)
}

// owe sets even shares. The remainder goes to the ranks that got less of the earlier pools.
func (d *divider) owe(cores int) {
	ranks := len(d.parts)
	d.owed, d.may, d.extra = make([]int, ranks), make([]bool, ranks), cores%ranks
	fewest := math.MaxInt
	for _, part := range d.parts {
		fewest = min(fewest, len(part))
	}
	poor := 0
	for rank, part := range d.parts {
		d.owed[rank] = cores / ranks
		d.may[rank] = len(part) == fewest
		if d.may[rank] {
			poor++
		}
	}
	if poor < d.extra {
		for rank := range d.may {
			if d.may[rank] {
				d.owed[rank]++
			}
			d.may[rank] = !d.may[rank]
		}
		d.extra -= poor
	}
}

// neighbours groups the ranks by the CPUs near their GPUs, the smallest sets first: a core near a cache is near its
// node, too.
func (d *divider) neighbours(ranks []int) [][]int {
	groups := [][]int{}
	for _, rank := range ranks {
		cpus := d.near[rank]
		if cpus.IsEmpty() {
			continue
		}
		i := slices.IndexFunc(groups, func(ranks []int) bool { return d.near[ranks[0]].Equals(cpus) })
		if i < 0 {
			groups = append(groups, nil)
			i = len(groups) - 1
		}
		groups[i] = append(groups[i], rank)
	}
	slices.SortStableFunc(groups, func(a, b []int) int {
		return cmp.Compare(d.near[a[0]].Size(), d.near[b[0]].Size())
	})
	return groups
}

// anchor returns the first position of a rank.
func (d *divider) anchor(rank int) int {
	if len(d.parts[rank]) == 0 {
		return len(d.cores)
	}
	return slices.Min(d.parts[rank])
}

// hand gives the ranks as many of the positions as they may have, in even shares that follow each other. It returns
// the positions given.
func (d *divider) hand(positions, ranks []int) []int {
	owed, may := 0, 0
	for _, rank := range ranks {
		owed += d.owed[rank]
		if d.may[rank] {
			may++
		}
	}
	given := positions[:min(len(positions), owed+min(may, d.extra))]
	sizes, grow := make([]int, len(ranks)), make([]bool, len(ranks))
	level := math.MaxInt
	if len(given) < owed {
		level = d.level(len(given), ranks)
	}
	for i, rank := range ranks {
		sizes[i], grow[i] = d.owed[rank], d.may[rank]
		if level < math.MaxInt { // too few: share the available positions evenly
			sizes[i], grow[i] = min(d.owed[rank], level), d.owed[rank] > level
		}
	}
	for i, part := range d.arrange(given, sizes, grow) {
		rank := ranks[i]
		d.parts[rank] = append(d.parts[rank], part...)
		if len(part) > d.owed[rank] {
			d.may[rank] = false
			d.extra--
		}
		d.owed[rank] = max(0, d.owed[rank]-len(part))
	}
	return given
}

// level returns the highest share that the cores allow, where no rank gets more than it is owed.
func (d *divider) level(cores int, ranks []int) int {
	for level := 0; ; level++ {
		left := cores
		for _, rank := range ranks {
			left -= min(d.owed[rank], level+1)
		}
		if left < 0 {
			return level
		}
	}
}

// cut chooses which of the growable parts grow by one core. The parts then fill the positions, and the cuts between
// them cost the least.
func (d *divider) cut(positions, sizes []int, grow []bool) []int {
	extra := len(positions)
	for _, size := range sizes {
		extra -= size
	}
	// best[used] is the least cost of the parts so far when that many of them have grown.
	best := make([]int, extra+1)
	for used := range best {
		best[used] = math.MaxInt32
	}
	best[0] = 0
	grown := make([][]bool, len(sizes)) // by part and used
	start := 0
	for i, size := range sizes {
		next := make([]int, extra+1)
		grown[i] = make([]bool, extra+1)
		start += size
		for used := range next {
			next[used] = best[used]
			if used > 0 && grow[i] && best[used-1] < best[used] {
				next[used], grown[i][used] = best[used-1], true
			}
			if end := start + used; next[used] < math.MaxInt32 && end > 0 && end < len(positions) {
				next[used] += d.cost(positions[end-1], positions[end])
			}
		}
		best = next
	}
	result := slices.Clone(sizes)
	for i, used := len(sizes)-1, extra; i >= 0; i-- {
		if grown[i][used] {
			result[i]++
			used--
		}
	}
	return result
}

// arrange assigns positions to the parts. It tries one line. It also tries to give every part the same number of
// whole groups of a level first and the rest in a line. For example, three parts of four equal nodes get a node each
// and a third of the fourth, so one node is cut. A line would cut two.
func (d *divider) arrange(positions, sizes []int, grow []bool) [][]int {
	best := d.inLine(positions, sizes, grow)
	least := d.measure(best)
	for level := range levels {
		for _, parts := range d.wholeFirst(level, positions, sizes, grow) {
			if cuts := d.measure(parts); cuts.fewerThan(least) {
				best, least = parts, cuts
			}
		}
	}
	return best
}

func (d *divider) inLine(positions, sizes []int, grow []bool) [][]int {
	parts := [][]int{}
	for _, size := range d.cut(positions, sizes, grow) {
		parts, positions = append(parts, positions[:size:size]), positions[size:]
	}
	return parts
}

// wholeFirst returns arrangements that give each part the same number of whole groups. They differ in the groups left
// for the rest.
func (d *divider) wholeFirst(level int, positions, sizes []int, grow []bool) [][][]int {
	groups := d.runs(level, positions)
	each := len(groups) / len(sizes)
	if len(sizes) < 2 || each == 0 || len(groups)%len(sizes) == 0 {
		return nil
	}
	left := len(groups) - each*len(sizes)
	found := [][][]int{}
	// how many parts take their groups before the remainder
	for _, before := range []int{len(sizes), 0, len(sizes) / 2} {
		whole, smaller := make([][]int, len(sizes)), slices.Clone(sizes)
		fits := true
		for i := range sizes {
			first := i * each
			if i >= before {
				first += left
			}
			whole[i] = slices.Concat(groups[first : first+each]...)
			smaller[i] -= len(whole[i])
			fits = fits && smaller[i] >= 0
		}
		if !fits {
			continue
		}
		rest := slices.Concat(groups[before*each : before*each+left]...)
		for i, part := range d.inLine(rest, smaller, grow) {
			whole[i] = append(whole[i], part...)
		}
		found = append(found, whole)
	}
	return found
}

// runs divides the positions into runs within one group of the level.
func (d *divider) runs(level int, positions []int) [][]int {
	runs := [][]int{}
	for i, position := range positions {
		if i == 0 || d.cores[position].groups[level] != d.cores[positions[i-1]].groups[level] {
			runs = append(runs, nil)
		}
		runs[len(runs)-1] = append(runs[len(runs)-1], position)
	}
	return runs
}

// cuts counts how parts lie in the groups of each level.
type cuts struct {
	pieces [levels]int // pieces of groups: a group in three parts is three
	groups [levels]int // groups in more than one part
}

func (d *divider) measure(parts [][]int) cuts {
	found := cuts{}
	for level := range levels {
		sharers, last := map[int]int{}, map[int]int{}
		for i, part := range parts {
			for _, position := range part {
				group := d.cores[position].groups[level]
				if group < 0 || last[group] == i+1 {
					continue
				}
				last[group] = i + 1
				sharers[group]++
				found.pieces[level]++
				if sharers[group] == 2 {
					found.groups[level]++
				}
			}
		}
	}
	return found
}

// fewerThan reports whether fewer groups are cut, and no part reaches into more groups of any level.
func (c cuts) fewerThan(other cuts) bool {
	cost, otherCost := 0, 0
	for level, weight := range together {
		if c.pieces[level] > other.pieces[level] {
			return false
		}
		cost += weight * c.groups[level]
		otherCost += weight * other.groups[level]
	}
	return cost < otherCost
}

// groupReasons describes the kinds of a rank's cores, and the ranks that share its caches.
func (d *divider) groupReasons(rank int, h *host.Host) []string {
	reasons := []string{}
	slower := 0
	own, others := map[int]bool{-1: false}, []int{}
	for _, position := range d.parts[rank] {
		if d.cores[position].Kind > 0 {
			slower++
		}
		own[d.cores[position].Cache] = true
	}
	if slower > 0 {
		reasons = append(reasons, fmt.Sprintf("%d of its cores slower than the fastest of this host", slower))
	}
	if len(d.parts) == 1 || len(h.Caches) == 0 {
		return reasons
	}
	for position, users := range d.users {
		if own[d.cores[position].Cache] {
			others = append(others, users...)
		}
	}
	others = slices.DeleteFunc(others, func(other int) bool { return other == rank })
	if len(others) == 0 {
		return append(reasons, "shares no cache with another rank")
	}
	return append(reasons, "shares a cache with "+ranksCalled(others))
}

func (d *divider) cost(a, b int) int {
	cost := 0
	for level, group := range d.cores[a].groups {
		if group >= 0 && group == d.cores[b].groups[level] {
			cost += together[level]
		}
	}
	return cost
}
