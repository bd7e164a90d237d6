//go:build linux

package probe

import (
	"cmp"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host"
)

// fields reads a file of names and numbers; a missing file has none.
func (s *Sampler) fields(name string) map[string]int64 { return host.ParseFields(s.text(name)) }

// text reads a small file; a missing file is empty.
func (s *Sampler) text(name string) string {
	text, err := fs.ReadFile(s.root, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// node reads the memory of the host.
func (s *Sampler) node() samples.Node {
	s.meminfo = s.fields("proc/meminfo")
	if s.meminfo["MemTotal"] == 0 {
		s.miss("/proc/meminfo cannot be read")
	}
	size := func(name string) ledger.Bytes { return ledger.Bytes(s.meminfo[name]) }
	node := samples.Node{
		Memory: size("MemTotal"), Available: size("MemAvailable"), Free: size("MemFree"),
		PageCache: max(0, size("Buffers")+size("Cached")-size("Shmem")),
		Shared:    size("Shmem"), Anonymous: size("AnonPages"),
		Locked:    max(size("Mlocked"), size("Unevictable")),
		SwapTotal: size("SwapTotal"), SwapFree: size("SwapFree"),
		CommitLimit: size("CommitLimit"), Committed: size("Committed_AS"),
		Pressure:  parsePressure(s.text("proc/pressure/memory")),
		NUMANodes: s.numaNodes(),
		Kills:     s.fields("proc/vmstat")["oom_kill"],
	}
	node.HugetlbTotal, node.HugetlbFree = s.hugetlb()
	if s.devShm != nil {
		node.SharedFiles = s.devShm()
	}
	return node
}

// hugetlb returns the pools of huge pages of all sizes together. /proc/meminfo counts one size only.
func (s *Sampler) hugetlb() (total, free ledger.Bytes) {
	const directory = "sys/kernel/mm/hugepages"
	for _, entry := range s.entries(directory) {
		digits, ok := strings.CutPrefix(entry, "hugepages-")
		size, err := strconv.ParseUint(strings.TrimSuffix(digits, "kB"), 10, 31)
		if !ok || err != nil {
			continue
		}
		count := func(name string) ledger.Bytes {
			n, _ := strconv.ParseUint(s.text(path.Join(directory, entry, name)), 10, 31) // a missing pool is empty
			return ledger.Bytes(n * size << 10)
		}
		total += count("nr_hugepages")
		free += count("free_hugepages")
	}
	return total, free
}

func (s *Sampler) entries(directory string) []string {
	entries, err := fs.ReadDir(s.root, directory)
	if err != nil {
		return nil
	}
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name()
	}
	return names
}

// numaNodes returns the NUMA nodes with memory, by id.
func (s *Sampler) numaNodes() []samples.NUMAFree {
	const directory = "sys/devices/system/node"
	nodes := []samples.NUMAFree{}
	for _, entry := range s.entries(directory) {
		digits, ok := strings.CutPrefix(entry, "node")
		id, err := strconv.ParseUint(digits, 10, 16)
		if !ok || err != nil {
			continue
		}
		info := s.fields(path.Join(directory, entry, "meminfo"))
		if info["MemTotal"] > 0 {
			nodes = append(nodes, samples.NUMAFree{
				Node: int(id), Memory: ledger.Bytes(info["MemTotal"]), Free: ledger.Bytes(info["MemFree"]),
			})
		}
	}
	slices.SortFunc(nodes, func(a, b samples.NUMAFree) int { return a.Node - b.Node })
	return nodes
}

// parsePressure reads the text of /proc/pressure/memory or of a cgroup's memory.pressure: lines such as
//
//	some avg10=0.00 avg60=0.00 avg300=0.00 total=20351
//
// with the total in microseconds.
func parsePressure(text string) samples.Pressure {
	p := samples.Pressure{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		for _, word := range words {
			total, ok := strings.CutPrefix(word, "total=")
			n, err := strconv.ParseUint(total, 10, 50)
			switch {
			case !ok || err != nil:
			case words[0] == "some":
				p.Some = time.Duration(n) * time.Microsecond
			case words[0] == "full":
				p.Full = time.Duration(n) * time.Microsecond
			}
		}
	}
	return p
}

// findGroups finds the cgroups of the job's roots, the innermost first. A process is hardly ever moved, so it does so
// once in a while.
func (s *Sampler) findGroups() {
	if now := s.clock.now(); now.Sub(s.groupsRead) >= settledPeriod {
		s.groupsRead = now
	} else {
		return
	}
	groups := []host.MemoryGroup{}
	for _, root := range s.roots {
		for _, group := range host.MemoryGroups(s.root, root.PID) {
			if !slices.Contains(groups, group) {
				groups = append(groups, group)
			}
		}
	}
	depth := func(g host.MemoryGroup) int { return strings.Count(path.Clean(g.Directory), "/") }
	slices.SortFunc(groups, func(a, b host.MemoryGroup) int {
		return cmp.Or(depth(b)-depth(a), cmp.Compare(a.Directory, b.Directory))
	})
	s.groups = groups
}

// readGroups reads the cgroups of the job. A cgroup that has been removed is left out.
func (s *Sampler) readGroups() []samples.Group {
	s.findGroups()
	groups := []samples.Group{}
	for _, g := range s.groups {
		read := func(name string) string { return s.text(path.Join(g.Directory, name)) }
		size := func(name string) ledger.Bytes {
			if n, limited := host.ParseLimit(read(name)); limited {
				return n
			}
			return 0 // no limit, or no such file
		}
		stat := host.ParseFields(read("memory.stat"))
		held := func(name string) ledger.Bytes { return ledger.Bytes(stat[name]) }
		group := samples.Group{Name: g.Name}
		if current := read("memory.current"); current != "" {
			events := host.ParseFields(read("memory.events"))
			group.Current, _ = host.ParseLimit(current)
			group.Peak, group.Limit, group.High = size("memory.peak"), size("memory.max"), size("memory.high")
			group.Anonymous, group.Shared, group.Kernel = held("anon"), held("shmem"), held("kernel")
			if group.Kernel == 0 { // before Linux 5.18
				group.Kernel = held("kernel_stack") + held("pagetables") + held("percpu") + held("slab")
			}
			group.File = max(0, held("file")-held("shmem"))
			group.Swap = size("memory.swap.current")
			group.Pressure = parsePressure(read("memory.pressure"))
			group.Events = samples.Events{High: events["high"], Max: events["max"], OOM: events["oom"],
				OOMKill: events["oom_kill"]}
		} else if current := read("memory.usage_in_bytes"); current != "" {
			group.Current, _ = host.ParseLimit(current)
			group.Peak, group.Limit = size("memory.max_usage_in_bytes"), size("memory.limit_in_bytes")
			group.Anonymous, group.Shared = held("total_rss"), held("total_shmem")
			group.File = max(0, held("total_cache")-held("total_shmem"))
			group.Kernel, group.Swap = size("memory.kmem.usage_in_bytes"), held("total_swap")
			group.Events.Max = int64(size("memory.failcnt"))
			group.Events.OOMKill = host.ParseFields(read("memory.oom_control"))["oom_kill"]
		} else {
			continue
		}
		groups = append(groups, group)
	}
	return groups
}
