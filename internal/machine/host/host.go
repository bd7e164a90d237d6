// Package host describes what this process may use of its machine: CPUs, cores, caches, NUMA nodes, memory, GPUs, and
// the limits on all of them.
//
// In every container and batch job, a process may use less than the machine has. So the package reads each fact where
// the kernel enforces it: the affinity mask, the cgroups up to the root, the allowed memory nodes. Ids are names,
// never indexes: they may be sparse, repeat or start anywhere. The kernel's masks alone decide which CPUs are
// siblings.
package host

import (
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// Host is what one process may use. All slices have a fixed order, so two discoveries of the same machine are equal.
type Host struct {
	Name   string `json:"cpu"`    // CPU model; empty where the kernel does not say
	Kernel string `json:"kernel"` // release

	CPUs    cpuset.CPUSet `json:"usable_cpus"` // the online CPUs of the affinity mask
	Online  cpuset.CPUSet `json:"online_cpus"`
	Offline cpuset.CPUSet `json:"offline_cpus"` // present but switched off
	// Cpuset is the CPU list of the nearest cgroup that has one. A batch system cuts the masks of the job's processes
	// from this pool. Without a cpuset it is Online. CpusetFrom names the cgroup.
	Cpuset     cpuset.CPUSet `json:"cpuset_cpus"`
	CpusetFrom string        `json:"cpuset_from"`
	// Isolated and NoHZFull are the CPUs that the administrator set apart. They are usable only if the affinity mask
	// holds them.
	Isolated cpuset.CPUSet `json:"isolated_cpus"`
	NoHZFull cpuset.CPUSet `json:"nohz_full_cpus"`

	Packages []Package  `json:"packages"`
	Dies     []Die      `json:"dies"`       // empty unless packages have several
	Caches   []Cache    `json:"caches"`     // last-level cache groups
	Kinds    []CoreKind `json:"core_kinds"` // fastest first; one kind on an ordinary machine
	Cores    []Core     `json:"cores"`      // all online cores, by lowest CPU
	Nodes    []NUMANode `json:"numa_nodes"` // by id; empty on a machine without NUMA support

	// Quota is CPU time as a number of CPUs, the tightest of all cgroups up to the root; 0 for none. QuotaFrom names
	// the counter that sets it.
	Quota     float64 `json:"quota_cpus"`
	QuotaFrom string  `json:"quota_from"`

	// ThreadLimits bound how many threads this process and others may start together.
	ThreadLimits []ThreadLimit `json:"thread_limits"`
	// FileSize is the largest file that this process may make, in memory or on disk; 0 for no limit.
	FileSize ledger.Bytes `json:"file_size_limit_bytes"`

	Memory    Memory    `json:"memory"`
	HugePages HugePages `json:"huge_pages"`

	GPUs []Device `json:"gpus"`
	NICs []Device `json:"nics"`
}

// Package is a processor package: a socket, or what a hypervisor shows as one.
type Package struct {
	ID   int           `json:"id"` // physical_package_id, a name; -1 where the firmware gives none
	CPUs cpuset.CPUSet `json:"cpus"`
}

// Die is a part of a package that has several.
type Die struct {
	ID   int           `json:"id"` // within its package
	CPUs cpuset.CPUSet `json:"cpus"`
}

// Cache is a group of CPUs that share their last level of cache: L3, or L2
// where there is no L3.
type Cache struct {
	Level int           `json:"level"`
	Size  ledger.Bytes  `json:"size_bytes"` // 0 where the kernel does not say
	CPUs  cpuset.CPUSet `json:"cpus"`
}

// CoreKind is a class of cores of about equal speed.
type CoreKind struct {
	// the property that differs between the kinds; empty when there is only one
	Name     string        `json:"name"`
	Capacity float64       `json:"capacity"` // relative to the fastest kind, which is 1
	CPUs     cpuset.CPUSet `json:"cpus"`
}

// Core is a physical core.
type Core struct {
	Siblings cpuset.CPUSet `json:"cpus"`        // its online hardware threads
	Usable   cpuset.CPUSet `json:"usable_cpus"` // the siblings that this process may use; may be empty
	Package  int           `json:"package"`     // index into Host.Packages
	Die      int           `json:"die"`         // index into Host.Dies, -1 for none
	Cache    int           `json:"cache"`       // index into Host.Caches, -1 for none
	Kind     int           `json:"kind"`        // index into Host.Kinds
	// Nodes are the ids of the NUMA nodes that list the core. Some cores have none; faulty firmware with overlapping
	// maps gives several.
	Nodes []int `json:"numa_nodes"`
}

// Whole reports whether this process may use every hardware thread of the core.
func (c Core) Whole() bool { return c.Usable.Size() == c.Siblings.Size() }

// first returns the lowest hardware thread, which stands for the core in sysfs.
func (c Core) first() int { return slices.Min(c.Siblings.UnsortedList()) }

// UsableCores returns the cores with at least one usable hardware thread.
func (h *Host) UsableCores() []Core {
	cores := []Core{}
	for _, core := range h.Cores {
		if !core.Usable.IsEmpty() {
			cores = append(cores, core)
		}
	}
	return cores
}

// OneThreadPerCore returns one usable CPU of each usable core.
func (h *Host) OneThreadPerCore() cpuset.CPUSet {
	cpus := []int{}
	for _, core := range h.UsableCores() {
		cpus = append(cpus, slices.Min(core.Usable.UnsortedList()))
	}
	return cpuset.New(cpus...)
}

// Exclusion is a set of CPUs that this process may not use, and the reason.
type Exclusion struct {
	CPUs   cpuset.CPUSet `json:"cpus"`
	Reason string        `json:"reason"`
}

// Excluded lists the CPUs of the machine that are not usable. Each CPU gets the first reason that applies: offline,
// then the cgroup, then the others.
func (h *Host) Excluded() []Exclusion {
	excluded := []Exclusion{}
	left := h.Online.Difference(h.CPUs)
	exclude := func(cpus cpuset.CPUSet, reason string) {
		if !cpus.IsEmpty() {
			excluded = append(excluded, Exclusion{cpus, reason})
			left = left.Difference(cpus)
		}
	}
	exclude(h.Offline, "offline")
	exclude(left.Difference(h.Cpuset), "not in the cpuset of "+h.CpusetFrom)
	exclude(left.Intersection(h.Isolated), "isolated by the administrator (isolcpus)")
	exclude(left, "not in the affinity mask")
	return excluded
}

// Discover reads the host from a file system whose root holds proc and sys, so a recorded machine can stand for a
// real one. The affinity is the result of sched_getaffinity. No file has the same content: the list in
// /proc/self/status may name offline CPUs.
//
// A missing or unreadable file leaves its fact unknown; it never stops the discovery. The only error is that no
// usable CPU is left.
func Discover(root fs.FS, affinity cpuset.CPUSet) (*Host, error) {
	t := tree{root}
	groups := t.controlGroups()
	h := &Host{
		Name:      t.modelName(),
		Kernel:    t.text("proc/sys/kernel/osrelease"),
		Online:    t.online(),
		HugePages: t.hugePages(),
	}
	if h.Online.IsEmpty() {
		h.Online = affinity // without sysfs: the mask holds online CPUs only
	}
	if h.Online.IsEmpty() {
		return h.WithAffinity(affinity) // returns the error
	}
	h.Isolated = t.cpus(h.Online, "sys/devices/system/cpu/isolated")
	h.NoHZFull = t.cpus(h.Online, "sys/devices/system/cpu/nohz_full")
	h.Cpuset, h.CpusetFrom = groups.cpuset("cpus")
	if h.Cpuset = h.Cpuset.Intersection(h.Online); h.Cpuset.IsEmpty() {
		h.Cpuset, h.CpusetFrom = h.Online, ""
	}
	if present, err := ParseList(t.text("sys/devices/system/cpu/present")); err == nil {
		h.Offline = present.Difference(h.Online)
	}
	h.Packages = t.packages(h.Online)
	h.Dies = t.dies(h.Online, len(h.Packages))
	h.Caches = t.caches(h.Online)
	h.Nodes = t.nodes(h.Online, groups)
	h.Cores = t.cores(h)
	h.Kinds = t.kinds(h)
	h.Quota, h.QuotaFrom = groups.quota()
	h.Memory = t.memory(h.Nodes, groups)
	h.ThreadLimits = groups.threadLimits()
	if size, limited := t.resourceLimit(fileSizeLine); limited {
		h.FileSize = ledger.Bytes(size)
	}
	h.GPUs, h.NICs = t.devices(h)
	return h.WithAffinity(affinity)
}

// WithAffinity returns the same host for a process with another affinity mask.
func (h *Host) WithAffinity(mask cpuset.CPUSet) (*Host, error) {
	other := *h
	other.CPUs = h.Online.Intersection(mask)
	if other.CPUs.IsEmpty() {
		return nil, fault.Inputf("no usable CPU: the affinity mask is %q and the online CPUs are %q", mask, h.Online).
			WithHint("give the process at least one online CPU (taskset, cpuset.cpus, srun --cpu-bind)")
	}
	other.Cores = slices.Clone(h.Cores)
	for i, core := range other.Cores {
		other.Cores[i].Usable = core.Siblings.Intersection(other.CPUs)
	}
	return &other, nil
}

// tree reads the small files of proc and sys. Each method returns the zero value for a file that is missing or
// malformed.
type tree struct{ root fs.FS }

// text returns the content without white space at the ends, and without the zero byte that some kernels append to a
// list.
func (t tree) text(name string) string {
	data, err := fs.ReadFile(t.root, name)
	if err != nil {
		return ""
	}
	return strings.Trim(string(data), " \t\n\x00")
}

// head returns the first 16 KiB. The /proc/cpuinfo of a large machine has megabytes, which the kernel generates as
// they are read.
func (t tree) head(name string) string {
	file, err := t.root.Open(name)
	if err != nil {
		return ""
	}
	defer file.Close()
	data, _ := io.ReadAll(io.LimitReader(file, 16<<10)) // a part is enough
	return string(data)
}

func (t tree) number(name string) (int64, bool) {
	n, err := strconv.ParseInt(t.text(name), 10, 64)
	return n, err == nil
}

// maskFiles hold masks; the other CPU files hold lists.
var maskFiles = map[string]bool{
	"core_cpus": true, "thread_siblings": true, "package_cpus": true, "core_siblings": true, "die_cpus": true,
	"shared_cpu_map": true, "cpumap": true, "local_cpus": true,
}

// cpus reads the first of the named files that holds CPUs, and drops the offline CPUs.
func (t tree) cpus(online cpuset.CPUSet, names ...string) cpuset.CPUSet {
	for _, name := range names {
		parse := ParseList
		if maskFiles[path.Base(name)] {
			parse = ParseMask
		}
		if set, err := parse(t.text(name)); err == nil && !set.IsEmpty() {
			return set.Intersection(online)
		}
	}
	return cpuset.New()
}

// names returns the entries of a directory, sorted.
func (t tree) names(directory string) []string {
	entries, err := fs.ReadDir(t.root, directory)
	if err != nil {
		return nil
	}
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// numbered returns the numbers of the directory entries that are the prefix and a number, in order.
func (t tree) numbered(directory, prefix string) []int {
	ids := []int{}
	for _, name := range t.names(directory) {
		if digits, ok := strings.CutPrefix(name, prefix); ok {
			if id, err := strconv.ParseUint(digits, 10, 16); err == nil {
				ids = append(ids, int(id))
			}
		}
	}
	slices.Sort(ids)
	return ids
}

// modelName returns the first line of /proc/cpuinfo that names the processor. Arm kernels give only numbers; there it
// is the implementer and the part.
func (t tree) modelName() string {
	fields := map[string]string{}
	for line := range strings.Lines(t.head("proc/cpuinfo")) {
		key, value, _ := strings.Cut(line, ":")
		key = strings.ToLower(strings.TrimSpace(key))
		if _, seen := fields[key]; !seen {
			fields[key] = strings.Join(strings.Fields(value), " ")
		}
	}
	for _, key := range []string{"model name", "cpu model", "cpu"} {
		if fields[key] != "" {
			return fields[key]
		}
	}
	if fields["cpu part"] != "" {
		return "implementer " + fields["cpu implementer"] + " part " + fields["cpu part"]
	}
	return ""
}

func cpuFile(cpu int, name string) string {
	return path.Join("sys/devices/system/cpu", "cpu"+strconv.Itoa(cpu), name)
}
