package report

import (
	"fmt"
	"strings"

	"github.com/go-json-experiment/json"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// TopologySchema is the schema of the JSON document.
const TopologySchema = "plimsoll.topology/1"

// Topology is the document of the resources that a process may use on its host.
type Topology struct {
	Schema  string `json:"schema"`
	Version string `json:"version"`
	*host.Host

	UsableCores int              `json:"usable_cores"`
	Excluded    []host.Exclusion `json:"excluded"`
	MemoryNodes []int            `json:"memory_nodes"` // nodes to place memory on
	Headroom    ledger.Bytes     `json:"headroom_bytes"`
	LimitedBy   string           `json:"headroom_from"`
}

// NewTopology makes the document of a host.
func NewTopology(version string, h *host.Host) *Topology {
	t := &Topology{
		Schema: TopologySchema, Version: version, Host: h,
		UsableCores: len(h.UsableCores()), Excluded: h.Excluded(), MemoryNodes: h.MemoryNodes(),
	}
	t.Headroom, t.LimitedBy = h.Memory.Headroom()
	return t
}

// MarshalJSON writes CPUs as lists in the kernel's form.
func (t *Topology) MarshalJSON() ([]byte, error) {
	type plain Topology // without this method
	return json.Marshal((*plain)(t), json.WithMarshalers(json.MarshalFunc(func(cpus cpuset.CPUSet) ([]byte, error) {
		return json.Marshal(cpus.String())
	})))
}

// Page shows the limits, then the machine as a tree.
func (t *Topology) Page() *Page {
	return &Page{
		Title:    "Topology of " + title(t.Host),
		Sections: []Section{{t.limits()}, {coresPicture(t.Host), machineTree(t.Host)}, {distances(t.Nodes)}},
		Document: t,
	}
}

// limits returns what the process may use, and what forbids the rest.
func (t *Topology) limits() Facts {
	var f Facts
	f.add("host", "%s", title(t.Host))
	f.add("usable CPUs", "%s: %s", t.CPUs, coresText(t.Cores))
	for _, e := range t.Excluded {
		f.add("not usable", "%s: %s", e.CPUs, e.Reason)
	}
	if forbidden := forbiddenMemory(t.Nodes); !forbidden.IsEmpty() {
		f.add("not usable", "memory of NUMA nodes %s: not among the allowed memory nodes (cpuset.mems)", forbidden)
	}
	if !t.Isolated.IsEmpty() {
		f.add("isolated", "%s: the kernel moves no thread to or from these CPUs by itself (isolcpus); %s", t.Isolated,
			usableOf(t.Isolated, t.CPUs))
	}
	if !t.NoHZFull.IsEmpty() {
		f.add("nohz_full", "%s: no timer tick while one thread runs", t.NoHZFull)
	}
	if t.Quota > 0 {
		f.add("quota", "%.4g CPUs (%s)", t.Quota, t.QuotaFrom)
	}
	if t.LimitedBy != "" {
		f.add("memory", "%v, %v of it available; %v may still be allocated (%s)", t.Memory.Total, t.Memory.Available,
			t.Headroom, t.LimitedBy)
	}
	for _, limit := range t.Memory.Limits {
		f.add("limit", "%v, %v of it used (%s)", limit.Limit, limit.Used, limit.Name)
	}
	if a := t.Memory.AddressSpace; a != nil {
		f.add("limit", "%v, %v of it used (%s)", a.Limit, a.Used, a.Name)
	}
	if t.FileSize > 0 {
		f.add("limit", "%v a file, in memory too (ulimit -f, RLIMIT_FSIZE)", t.FileSize)
	}
	for _, limit := range t.ThreadLimits {
		f.add("limit", "%s, %d of them running (%s)", counted(limit.Limit, "thread"), limit.Used, limit.Name)
	}
	if pages := hugePagesText(t.HugePages); pages != "" {
		f.add("huge pages", "%s", pages)
	}
	return f
}

// usableOf describes which of the CPUs are usable.
func usableOf(cpus, usable cpuset.CPUSet) string {
	switch own := cpus.Intersection(usable); {
	case own.IsEmpty():
		return "none of them usable"
	case own.Equals(cpus):
		return "all of them usable"
	default:
		return "of them usable " + own.String()
	}
}

func forbiddenMemory(nodes []host.NUMANode) cpuset.CPUSet {
	ids := []int{}
	for _, node := range nodes {
		if !node.Allowed && node.MemTotal > 0 && node.Class != host.NodeGPU {
			ids = append(ids, node.ID)
		}
	}
	return cpuset.New(ids...)
}

func title(h *host.Host) string {
	name := processorName(h.Name)
	if h.Kernel != "" {
		name += ", Linux " + h.Kernel
	}
	return name
}

// processorName returns a name for every processor, also where the kernel gives none.
func processorName(name string) string {
	if name == "" {
		return "unknown processor"
	}
	return name
}

// coresText counts the usable cores, and those with unusable hardware threads.
func coresText(cores []host.Core) string {
	usable, halves := 0, 0
	for _, c := range cores {
		if c.Usable.IsEmpty() {
			continue
		}
		usable++
		if !c.Whole() {
			halves++
		}
	}
	text := counted(usable, "core")
	if halves > 0 {
		text += fmt.Sprintf(", %d of them with some threads only", halves)
	}
	return text
}

func counted[N int | int64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func hugePagesText(pages host.HugePages) string {
	parts := []string{}
	for _, pool := range pages.Pools {
		parts = append(parts, fmt.Sprintf("%v: %d of %d free", pool.Size, pool.Free, pool.Total))
	}
	if pages.Transparent != "" {
		parts = append(parts, "transparent "+pages.Transparent)
	}
	if pages.Shared != "" {
		parts = append(parts, "for shared memory "+pages.Shared)
	}
	if pages.Joins {
		parts = append(parts, "joined when asked to")
	}
	return strings.Join(parts, "; ")
}

// distances returns the matrix of distances, or only the values where the matrix is large.
func distances(nodes []host.NUMANode) Block {
	if len(nodes) < 2 || nodes[0].Distances == nil {
		return Facts{}
	}
	const readable = 8
	if len(nodes) > readable {
		values := []int{}
		for _, node := range nodes {
			values = append(values, node.Distances...)
		}
		var f Facts
		f.add("distances", "%s, between %d nodes",
			strings.Trim(strings.ReplaceAll(fmt.Sprint(cpuset.New(values...).List()), " ", ", "), "[]"), len(nodes))
		return f
	}
	t := &Table{Style: Plain, Columns: []Column{{Title: "distances"}}}
	for _, node := range nodes {
		t.Columns = append(t.Columns, Column{Title: fmt.Sprint(node.ID), Kind: Number, Width: 4})
		row := []any{fmt.Sprintf("%18s", fmt.Sprintf("node %d", node.ID))}
		for _, distance := range node.Distances {
			row = append(row, distance)
		}
		t.add(row...)
	}
	return t
}
