package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// mostHolders is how many holders an explanation shows.
const mostHolders = 8

// holders returns who held the bytes of the resource, the largest first.
func (s *scene) holders(top claim, phase *ledger.PhaseName) []Holder {
	var list []Holder
	switch top.resource {
	case GPU:
		list = s.gpuHolders(top)
	case Host, CGroup, NUMANode, SharedMemory, LockedMemory:
		list = s.hostHolders(top)
	}
	list = largest(list)
	planned := largest(s.plannedHolders(top.resource, phase))
	if len(list) == 0 {
		return planned
	}
	if top.resource == GPU {
		s.division = divisionOf(planned)
	}
	return list
}

// hostHolders divides memory of the host: what was recorded goes before the kernel's words, and those before a list.
func (s *scene) hostHolders(top claim) []Holder {
	if _, kill := top.at.Fact.(evidence.BatchKill); kill { // a sample may be of the time after the kill
		if list := s.listed(top); list != nil {
			return list
		}
	}
	if pool := s.pool(top); pool != nil {
		return poolHolders(pool.fact)
	}
	if top.resource == LockedMemory {
		return s.lockedHolders(top)
	}
	if top.detail == pinned {
		if list := s.pinnedHolders(); list != nil {
			return list
		}
	}
	recorded := s.recordedHolders(top.resource)
	kill := s.killOf(top)
	if kill != nil {
		if list := kernelHolders(*kill); len(recorded) == 0 || bytesOf(list) > bytesOf(recorded)*toldAgain {
			return list
		}
	}
	if len(recorded) > 0 || top.resource == SharedMemory && s.levels != nil {
		return s.useAtEnd(top).balanced(recorded)
	}
	if list := s.listed(top); list != nil {
		return list
	}
	if top.resource == CGroup {
		if list := largest(s.statHolders()); len(list) > 0 {
			return list
		}
		return s.accountedHolders()
	}
	return nil
}

// toldAgain is how many times the bytes of the last sample the kernel must have counted at its kill for the sample to
// be too old. Below it the sample tells more, as it has components.
const toldAgain = 1.25

// killOf returns the kernel's account of the kill that a claim is about, or nil. A counter of kills is about the first
// kill of the log.
func (s *scene) killOf(top claim) *evidence.KernelKill {
	if k, ok := top.at.Fact.(evidence.KernelKill); ok {
		return &k
	}
	if _, counted := top.at.Fact.(oomCounts); counted && len(s.kills) > 0 {
		if k, ok := s.kills[0].Fact.(evidence.KernelKill); ok {
			return &k
		}
	}
	return nil
}

// bytesOf is what holders have, without what nobody is known to hold.
func bytesOf(list []Holder) (sum float64) {
	for _, h := range list {
		if h.Component != "unexplained" {
			sum += float64(h.Bytes)
		}
	}
	return sum
}

// accountedHolders returns the steps that Slurm ended for their memory, as its accounting sampled their largest task.
func (s *scene) accountedHolders() []Holder {
	killed := map[string]bool{}
	for _, k := range all[evidence.BatchKill](s.findings) {
		killed[k.fact.What] = true
	}
	var list []Holder
	for _, c := range all[evidence.Counters](s.findings) {
		if most, ok := c.fact.Values["MaxRSS"]; ok && killed[c.fact.Group] {
			name, text := "step "+c.fact.Group, "the largest task when Slurm last sampled it"
			list = append(list, Holder{name, ledger.Bytes(most), text})
		}
	}
	return list
}

// largest returns the largest holders, in the order of their bytes, and the others as one.
func largest(list []Holder) []Holder {
	list = slices.DeleteFunc(list, func(h Holder) bool { return h.Bytes <= 0 })
	slices.SortStableFunc(list, func(a, b Holder) int { return cmp.Compare(b.Bytes, a.Bytes) })
	if len(list) <= mostHolders {
		return list
	}
	others := Holder{Component: "others", Text: fmt.Sprintf("%d others", len(list)-mostHolders+1)}
	for _, h := range list[mostHolders-1:] {
		others.Bytes += h.Bytes
	}
	return append(list[:mostHolders-1], others)
}

// mostDivided is how many planned parts a note names.
const mostDivided = 5

// divisionOf says how a plan divides the bytes that were measured as a whole. Planned bytes are no part of a balance.
func divisionOf(planned []Holder) string {
	var parts []string
	for _, h := range planned[:min(len(planned), mostDivided)] {
		parts = append(parts, fmt.Sprintf("%v of %s", h.Bytes, h.Text))
	}
	if len(parts) == 0 {
		return ""
	}
	return "The plan of the job divides what its tensors hold: " + strings.Join(parts, "; ") + "."
}

// gpuHolders divides a GPU's memory as PyTorch's error does, and by component where the client has counted it.
func (s *scene) gpuHolders(top claim) []Holder {
	var list []Holder
	counted := false
	if s.levels != nil {
		for _, m := range s.levels.ended {
			for _, g := range m.Ended.GPUs {
				for _, h := range g.Holdings {
					if m.Rank == s.rank() {
						list, counted = append(list, holderOf(h, "counted at the last mark")), true
					}
				}
			}
		}
	}
	f, ok := top.at.Fact.(evidence.GPUOutOfMemory)
	for i := range s.Snapshots {
		shot := &s.Snapshots[i]
		if ok && f.Device >= 0 && shot.Device >= 0 && shot.Device != f.Device && len(s.Snapshots) > 1 ||
			shot.Rank != evidence.NoRank && s.rank() != evidence.NoRank && shot.Rank != s.rank() {
			continue
		}
		if !counted {
			list, counted = append(list, snapshotHolders(*shot)...), true
		}
		s.shot = shot
		break
	}
	if driver, is := top.at.Fact.(evidence.DriverOutOfMemory); is && driver.Waking && !counted {
		return s.asleep(top.at)
	}
	if !ok {
		return list
	}
	return append(append(list, s.uncounted(f, list)...), gpuShares(f)...)
}

// asleep divides a GPU between a rollout engine that wakes and all others, as the engine has said when it went to sleep
// before.
func (s *scene) asleep(at evidence.Finding) (list []Holder) {
	for _, slept := range all[evidence.EngineSlept](s.findings) {
		if slept.File == at.File && slept.Number <= at.Number && (slept.Rank == at.Rank || at.Rank == evidence.NoRank) {
			list = []Holder{
				{"rollout_engine", slept.fact.Freed.Bytes, "given back when the engine slept, and needed again"},
				{"trainer", slept.fact.Left.Bytes, "in use while the engine slept; the trainer may have more by now"},
			}
		}
	}
	return list
}

// uncounted is what PyTorch says its tensors held beyond the components that were counted, at a mark before the failure
// or in a snapshot.
func (s *scene) uncounted(f evidence.GPUOutOfMemory, counted []Holder) []Holder {
	if !f.Allocated.Known {
		return nil
	}
	rest, text := f.Allocated.Bytes-f.Pools.Bytes, "tensors of this process"
	for _, h := range counted {
		rest -= h.Bytes
	}
	if len(counted) > 0 {
		if rest < rounding {
			return nil
		}
		text = "tensors that were not counted at the last mark"
		if s.shot != nil && len(s.shot.Lines) > 0 {
			text += ", most by " + s.shot.Lines[0].Place
		}
	}
	return []Holder{{"pytorch_allocated", rest, text}}
}

// gpuShares are the shares of a GPU beside tensors, with what is left of the card.
func gpuShares(f evidence.GPUOutOfMemory) []Holder {
	list := []Holder{
		{"cuda_graph_pools", f.Pools.Bytes, "private pools of PyTorch, such as those of CUDA graphs"},
		{"pytorch_reserved_unused", slack(f), "reserved by PyTorch, and in no tensor"},
		{"outside_pytorch", outside(f), outsideWords(f)},
	}
	if rest := unlisted(f); rest > rounding {
		text := "in use, and of no process that the error lists"
		if !f.Self.Known {
			text = "in use, and not PyTorch's: the context and libraries of this process, or other processes"
		}
		list = append(list, Holder{"unexplained", rest, text})
	}
	for _, p := range f.Others {
		list = append(list, Holder{fmt.Sprintf("process %d", p.PID), p.Used.Bytes, "another process on this GPU"})
	}
	return list
}

func outsideWords(f evidence.GPUOutOfMemory) string {
	if f.Backend == "MPS" {
		return "this process outside of PyTorch: what Metal holds for other libraries"
	}
	return "this process outside of PyTorch: the CUDA context, NCCL, cuDNN, graphs"
}

// snapshotHolders returns the components of a snapshot. A snapshot has a holding for every line of the source.
func snapshotHolders(shot Snapshot) []Holder {
	sums := map[ledger.Component]ledger.Bytes{}
	for _, h := range shot.Holdings {
		sums[h.Component] += h.Bytes
	}
	var list []Holder
	for _, component := range slices.Sorted(maps.Keys(sums)) {
		list = append(list, holderOf(ledger.Holding{Component: component, Bytes: sums[component]}, "in the snapshot"))
	}
	return list
}

func holderOf(h ledger.Holding, when string) Holder {
	return Holder{string(h.Component), h.Bytes, h.Component.Title() + ", " + when}
}

// kernelHolders returns the processes of the kernel's table, or the kinds of memory that the kernel has counted, and
// what remains of the memory that was short.
func kernelHolders(k evidence.KernelKill) []Holder {
	var list []Holder
	for _, p := range k.Processes {
		h := Holder{fmt.Sprintf("process %d", p.PID), p.Resident, fmt.Sprintf("%s, resident", p.Name)}
		if p.Anonymous > 0 { // newer kernels tell it apart, and shared pages are then counted once
			h.Bytes, h.Text = p.Anonymous, fmt.Sprintf("%s, anonymous memory", p.Name)
		}
		list = append(list, h)
	}
	if len(list) > 0 {
		return kernelUse(k).balanced(list)
	}
	if inGroup(nil, k) && len(k.Stats) > 0 {
		return kindHolders(k.Stats)
	}
	name := fmt.Sprintf("process %d", k.PID)
	list = []Holder{
		{name, k.Anonymous.Bytes, k.Name + ", anonymous memory"},
		{name, k.Shared.Bytes, k.Name + ", shared memory: /dev/shm, or pinned by CUDA"},
		{name, k.PageTables.Bytes, k.Name + ", page tables"},
	}
	u := kernelUse(k)
	u.rest = "of other processes, which this log does not list, or of none"
	return u.balanced(list)
}

// kindHolders returns the kinds of a cgroup's memory. The page cache is left out: the kernel frees it before it kills.
func kindHolders(stats map[string]ledger.Bytes) []Holder {
	return []Holder{
		{"anonymous", stats["anon"] + stats["rss"], "heap and other anonymous memory of the cgroup"},
		{"shared_memory", stats["shmem"], "shared memory of the cgroup: /dev/shm, or pinned by CUDA"},
		{"kernel", stats["kernel"], "the kernel's own memory for the cgroup, such as page tables"},
	}
}

// statHolders returns the kinds of memory that memory.stat has.
func (s *scene) statHolders() []Holder {
	stats := map[string]ledger.Bytes{}
	for _, name := range []string{"anon", "rss", "shmem", "kernel"} {
		stats[name], _, _ = s.value(name)
	}
	return kindHolders(stats)
}

// recordedHolders returns the processes of the last sample, and the arenas and tensors by component.
func (s *scene) recordedHolders(resource Resource) []Holder {
	if s.levels == nil {
		return nil
	}
	if node := s.shortNode(); node != nil && resource == NUMANode {
		return s.holdersOnNode(node.Node)
	}
	sums := map[string]*Holder{}
	var order []string
	add := func(component string, bytes ledger.Bytes, text string) {
		if sums[component] == nil {
			sums[component] = &Holder{Component: component, Text: text}
			order = append(order, component)
		}
		sums[component].Bytes += bytes
	}
	named := map[int]ledger.Bytes{} // by rank
	for _, m := range s.levels.ended {
		for _, h := range m.Ended.Holdings {
			if resource != SharedMemory {
				add(string(h.Component), h.Bytes, h.Component.Title()+", counted at the last mark")
				named[m.Rank] += h.Bytes
			}
		}
	}
	for _, p := range s.levels.processes {
		if p.Role == samples.Keeper {
			continue
		}
		rest := p.Proportional.Anonymous + p.Proportional.Shared
		if p.Role == samples.RankProcess {
			rest -= named[p.Rank]
		}
		for _, m := range p.Mappings {
			switch {
			case m.Arena != "":
				add(string(m.Arena), m.Proportional, m.Arena.Title()+", an arena of Plimsoll")
				rest -= m.Proportional
			case m.Kind == samples.SharedMapping && resource == SharedMemory:
				add(m.Name, m.Proportional, "mapped by the job")
			}
		}
		if resource != SharedMemory {
			add(fmt.Sprintf("process %d", p.PID), rest, fmt.Sprintf("%s (%s of rank %d), the rest of its memory",
				p.Name,
				p.Role, p.Rank))
		}
	}
	var list []Holder
	for _, name := range order {
		list = append(list, *sums[name])
	}
	return list
}

// holdersOnNode returns what the processes of the last sample hold of a NUMA node.
func (s *scene) holdersOnNode(node int) []Holder {
	var list []Holder
	for _, p := range s.levels.processes {
		for _, n := range p.NUMANodes {
			if n.Node == node && n.Bytes > 0 {
				list = append(list, Holder{fmt.Sprintf("process %d", p.PID), n.Bytes,
					fmt.Sprintf("%s (%s of rank %d), on NUMA node %d", p.Name, p.Role, p.Rank, node)})
			}
		}
	}
	return list
}

// plannedHolders returns the components that a plan has at the peak of the phase, or at the device's peak.
func (s *scene) plannedHolders(resource Resource, phase *ledger.PhaseName) []Holder {
	kind := ledger.Host
	switch resource {
	case GPU:
		kind = ledger.GPU
	case Host, CGroup, NUMANode:
	default:
		return nil
	}
	var devices []ledger.Device
	if len(s.Plans) > 0 {
		devices = s.Plans[0].Devices
	} else if p, _ := s.planned(); p != nil {
		devices = p.Devices
	}
	for i := range devices {
		d := &devices[i]
		if d.Kind != kind {
			continue
		}
		at := d.Peak()
		for k := range d.Phases {
			if phase != nil && d.Phases[k].Name == *phase {
				at = &d.Phases[k]
			}
		}
		var list []Holder
		for _, h := range slices.Concat(at.Components, d.Outside) {
			list = append(list, holderOf(h, "planned for "+string(at.Name)))
		}
		return list
	}
	return nil
}
