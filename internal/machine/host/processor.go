package host

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"

	"k8s.io/utils/cpuset"
)

// online reads which CPUs are online. Old kernels have no list. There a CPU is online unless its own file says 0;
// without such files, it is online if it has a topology.
func (t tree) online() cpuset.CPUSet {
	const directory = "sys/devices/system/cpu"
	if set, err := ParseList(t.text(directory + "/online")); err == nil && !set.IsEmpty() {
		return set
	}
	on := []int{}
	for _, cpu := range t.numbered(directory, "cpu") {
		state := t.text(cpuFile(cpu, "online"))
		if state == "1" || state == "" && t.text(cpuFile(cpu, "topology/physical_package_id")) != "" {
			on = append(on, cpu)
		}
	}
	return cpuset.New(on...)
}

// partition divides the CPUs into groups. It asks for a CPU's mask only while the CPU is in no group. So the groups
// are disjoint whatever the masks say, and few files are read. A CPU with an empty mask is in no group.
func partition(cpus cpuset.CPUSet, mask func(cpu int) cpuset.CPUSet, add func(first int, group cpuset.CPUSet)) {
	done := make(map[int]bool, cpus.Size())
	for _, cpu := range cpus.List() {
		if done[cpu] {
			continue
		}
		members := []int{}
		for _, member := range mask(cpu).UnsortedList() {
			if !done[member] {
				members = append(members, member)
				done[member] = true
			}
		}
		if len(members) > 0 {
			add(cpu, cpuset.New(members...))
		}
	}
}

func (t tree) packages(online cpuset.CPUSet) []Package {
	packages := []Package{}
	partition(online, func(cpu int) cpuset.CPUSet {
		// core_siblings is the older name of package_cpus.
		mask := t.cpus(online,
			cpuFile(cpu, "topology/package_cpus_list"), cpuFile(cpu, "topology/package_cpus"),
			cpuFile(cpu, "topology/core_siblings_list"), cpuFile(cpu, "topology/core_siblings"))
		return mask.Union(cpuset.New(cpu))
	}, func(first int, group cpuset.CPUSet) {
		id, ok := t.number(cpuFile(first, "topology/physical_package_id"))
		if !ok {
			id = -1
		}
		packages = append(packages, Package{ID: int(id), CPUs: group})
	})
	return packages
}

// dies returns the dies where some package has several, and none otherwise.
func (t tree) dies(online cpuset.CPUSet, packages int) []Die {
	dies := []Die{}
	partition(online, func(cpu int) cpuset.CPUSet {
		return t.cpus(online, cpuFile(cpu, "topology/die_cpus_list"), cpuFile(cpu, "topology/die_cpus"))
	}, func(first int, group cpuset.CPUSet) {
		id, ok := t.number(cpuFile(first, "topology/die_id"))
		if !ok {
			id = -1
		}
		dies = append(dies, Die{ID: int(id), CPUs: group})
	})
	if len(dies) <= packages {
		return nil
	}
	return dies
}

// caches returns the groups that share the highest level of data cache. Level 1 always belongs to one core, so caches
// skips it.
func (t tree) caches(online cpuset.CPUSet) []Cache {
	caches := []Cache{}
	var found Cache
	partition(online, func(cpu int) cpuset.CPUSet {
		found = Cache{Level: 1}
		directory := cpuFile(cpu, "cache")
		for _, index := range t.numbered(directory, "index") {
			directory := path.Join(directory, "index"+strconv.Itoa(index))
			level, _ := t.number(directory + "/level")
			if int(level) > found.Level && t.text(directory+"/type") != "Instruction" {
				found = Cache{
					Level: int(level),
					Size:  parseSize(t.text(directory + "/size")),
					CPUs:  t.cpus(online, directory+"/shared_cpu_list", directory+"/shared_cpu_map"),
				}
			}
		}
		return found.CPUs
	}, func(_ int, group cpuset.CPUSet) {
		found.CPUs = group
		caches = append(caches, found)
	})
	return caches
}

// cores groups CPUs by the masks of their siblings. It places each core in the packages, caches and nodes found
// before.
func (t tree) cores(h *Host) []Core {
	packageOf, dieOf, cacheOf, nodesOf := map[int]int{}, map[int]int{}, map[int]int{}, map[int][]int{}
	for i, p := range h.Packages {
		for _, cpu := range p.CPUs.UnsortedList() {
			packageOf[cpu] = i
		}
	}
	for i, die := range h.Dies {
		for _, cpu := range die.CPUs.UnsortedList() {
			dieOf[cpu] = i + 1
		}
	}
	for i, cache := range h.Caches {
		for _, cpu := range cache.CPUs.UnsortedList() {
			cacheOf[cpu] = i + 1
		}
	}
	for _, node := range h.Nodes {
		for _, cpu := range node.CPUs.UnsortedList() {
			nodesOf[cpu] = append(nodesOf[cpu], node.ID)
		}
	}
	cores := []Core{}
	partition(h.Online, func(cpu int) cpuset.CPUSet {
		// thread_siblings is the older name of core_cpus.
		mask := t.cpus(h.Online,
			cpuFile(cpu, "topology/core_cpus_list"), cpuFile(cpu, "topology/core_cpus"),
			cpuFile(cpu, "topology/thread_siblings_list"), cpuFile(cpu, "topology/thread_siblings"))
		return mask.Union(cpuset.New(cpu))
	}, func(first int, group cpuset.CPUSet) {
		cores = append(cores, Core{
			Siblings: group,
			Package:  packageOf[first],
			Die:      dieOf[first] - 1,
			Cache:    cacheOf[first] - 1,
			Nodes:    nodesOf[first],
		})
	})
	return cores
}

// speeds are the files that tell how fast a core is, most reliable first.
var speeds = []string{"cpu_capacity", "cpufreq/base_frequency", "cpufreq/cpuinfo_max_freq"}

// sameSpeed is the least relative speed of a core of the same kind. Favoured cores of one kind differ by some percent
// in their highest clock.
const sameSpeed = 0.85

// kindGroup is a kind of cores while kinds divides the cores.
type kindGroup struct {
	name  string
	rank  int     // order of the kinds on a hybrid processor
	speed float64 // of the fastest core; 0 where all cores look alike
	cores []int
}

// kinds divides the cores by speed and sets Core.Kind. Kernels for hybrid processors name the kinds; on Arm the model
// register tells them apart. Elsewhere a step in capacity or clock counts as a border.
func (t tree) kinds(h *Host) []CoreKind {
	property, speedOf := t.speed(h.Cores)
	groups := t.namedKinds(h)
	if len(groups) == 1 && property != "" {
		groups = steps(path.Base(property), speedOf)
	}
	for _, g := range groups {
		for _, core := range g.cores {
			g.speed = max(g.speed, speedOf[core])
		}
	}
	slices.SortStableFunc(groups, func(a, b *kindGroup) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.speed, a.speed))
	})
	kinds := []CoreKind{}
	for i, g := range groups {
		kind := CoreKind{Name: g.name, Capacity: 1}
		if len(groups) == 1 {
			kind.Name = ""
		}
		if g.speed > 0 {
			kind.Capacity = g.speed / groups[0].speed
		}
		cpus := []int{}
		for _, core := range g.cores {
			h.Cores[core].Kind = i
			cpus = append(cpus, h.Cores[core].Siblings.UnsortedList()...)
		}
		kind.CPUs = cpuset.New(cpus...)
		kinds = append(kinds, kind)
	}
	return kinds
}

// namedKinds groups the cores by model and by the kinds that the kernel names.
func (t tree) namedKinds(h *Host) []*kindGroup {
	const model = "regs/identification/midr_el1"
	hasModel := t.text(cpuFile(h.Cores[0].first(), model)) != ""
	names := []string{"cpu_core", "cpu_atom", "cpu_lowpower"}
	named := []cpuset.CPUSet{}
	for _, name := range names {
		named = append(named, t.cpus(h.Online, "sys/devices/"+name+"/cpus"))
	}
	groups := []*kindGroup{}
	for i, core := range h.Cores {
		name, rank := "", len(names)
		if hasModel {
			name = t.text(cpuFile(core.first(), model))
		}
		for j, set := range named {
			if set.Contains(core.first()) {
				name, rank = names[j], j
			}
		}
		at := slices.IndexFunc(groups, func(g *kindGroup) bool { return g.name == name })
		if at < 0 {
			at = len(groups)
			groups = append(groups, &kindGroup{name: name, rank: rank})
		}
		groups[at].cores = append(groups[at].cores, i)
	}
	return groups
}

// steps groups the cores by speed.
func steps(property string, speedOf []float64) []*kindGroup {
	cores := make([]int, len(speedOf))
	for i := range cores {
		cores[i] = i
	}
	slices.SortStableFunc(cores, func(a, b int) int { return cmp.Compare(speedOf[b], speedOf[a]) })
	groups := []*kindGroup{}
	for i, core := range cores {
		if i == 0 || speedOf[core] < sameSpeed*speedOf[cores[i-1]] {
			groups = append(groups, &kindGroup{name: fmt.Sprintf("%s %.0f", property, speedOf[core])})
		}
		last := groups[len(groups)-1]
		last.cores = append(last.cores, core)
	}
	return groups
}

// speed reads the first property that every core has and that differs between cores. An ordinary machine has none.
func (t tree) speed(cores []Core) (property string, speedOf []float64) {
	speedOf = make([]float64, len(cores))
	for _, property := range speeds {
		same := true
		for i, core := range cores {
			value, ok := t.number(cpuFile(core.first(), property))
			if !ok || value <= 0 {
				same = true
				break
			}
			speedOf[i] = float64(value)
			same = same && speedOf[i] == speedOf[0]
		}
		if !same {
			return property, speedOf
		}
	}
	clear(speedOf)
	return "", speedOf
}
