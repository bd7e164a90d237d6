package host

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
)

// NodeClass is the kind of memory of a NUMA node.
type NodeClass string

// The classes of NUMA nodes.
const (
	NodeOrdinary NodeClass = "cpus and memory"
	NodeCPUs     NodeClass = "cpus only"
	NodeMemory   NodeClass = "memory only" // CXL, high-bandwidth or persistent memory, to spill into
	NodeGPU      NodeClass = "gpu memory"  // never used for host state
	NodeEmpty    NodeClass = "empty"
)

// NUMANode is a memory controller, some CPUs, or both.
type NUMANode struct {
	ID        int           `json:"id"` // a name: ids may be sparse
	Class     NodeClass     `json:"class"`
	CPUs      cpuset.CPUSet `json:"cpus"` // online, but not necessarily usable
	MemTotal  ledger.Bytes  `json:"memory_total_bytes"`
	MemFree   ledger.Bytes  `json:"memory_free_bytes"`
	Allowed   bool          `json:"memory_allowed"` // this process may place memory here
	Distances []int         `json:"distances"`      // to each of Host.Nodes; nil where the firmware gives none
	// Near lists the ids of the nodes with CPUs that reach this memory fastest.
	Near      []int          `json:"near"`
	HugePages []HugePagePool `json:"huge_pages"`

	reclaimable ledger.Bytes
}

// hasMemory reports whether the node has memory other than a GPU's.
func (n NUMANode) hasMemory() bool { return n.Class == NodeOrdinary || n.Class == NodeMemory }

// MemoryNodes returns the ids of the nodes to place memory on. It prefers allowed nodes with memory and CPUs. Where
// there are none, it returns the allowed memory-only nodes. It never returns GPU memory.
func (h *Host) MemoryNodes() []int {
	ordinary, other := []int{}, []int{}
	for _, node := range h.Nodes {
		switch {
		case !node.Allowed:
		case node.Class == NodeOrdinary:
			ordinary = append(ordinary, node.ID)
		case node.Class == NodeMemory:
			other = append(other, node.ID)
		}
	}
	if len(ordinary) > 0 {
		return ordinary
	}
	return other
}

// Node returns the node of that id, or nil.
func (h *Host) Node(id int) *NUMANode {
	i := slices.IndexFunc(h.Nodes, func(n NUMANode) bool { return n.ID == id })
	if i < 0 {
		return nil
	}
	return &h.Nodes[i]
}

const nodeDirectory = "sys/devices/system/node"

func (t tree) nodes(online cpuset.CPUSet, groups controlGroups) []NUMANode {
	ids := cpuset.New(t.numbered(nodeDirectory, "node")...)
	if set, err := ParseList(t.text(nodeDirectory + "/online")); err == nil && !set.IsEmpty() {
		ids = ids.Intersection(set)
	}
	allowed := t.memoryAllowed(groups)
	withMemory, _ := ParseList(t.text(nodeDirectory + "/has_memory"))
	ofGPU := t.gpuMemoryNodes()
	nodes := []NUMANode{}
	for _, id := range ids.List() {
		directory := path.Join(nodeDirectory, "node"+strconv.Itoa(id))
		info := ParseFields(t.text(directory + "/meminfo"))
		node := NUMANode{
			ID:        id,
			CPUs:      t.cpus(online, directory+"/cpulist", directory+"/cpumap"),
			MemTotal:  ledger.Bytes(info["MemTotal"]),
			MemFree:   ledger.Bytes(info["MemFree"]),
			Allowed:   allowed.IsEmpty() || allowed.Contains(id),
			HugePages: t.hugePagePools(directory + "/hugepages"),

			reclaimable: ledger.Bytes(info["Inactive(file)"] + info["SReclaimable"]),
		}
		_, told := info["MemTotal"]
		memory := node.MemTotal > 0 || !told && (withMemory.IsEmpty() || withMemory.Contains(id))
		switch cpus := !node.CPUs.IsEmpty(); {
		case ofGPU.Contains(id):
			node.Class = NodeGPU
		case cpus && memory:
			node.Class = NodeOrdinary
		case cpus:
			node.Class = NodeCPUs
		case memory:
			node.Class = NodeMemory
		default:
			node.Class = NodeEmpty
		}
		nodes = append(nodes, node)
	}
	for i := range nodes {
		nodes[i].Distances = t.distances(nodes[i].ID, len(nodes))
		if nodes[i].Class == NodeEmpty && ofMultiInstanceGPU(nodes[i].ID, ofGPU) {
			nodes[i].Class = NodeGPU
		}
	}
	for i := range nodes {
		nodes[i].Near = t.near(nodes, i)
	}
	return nodes
}

// memoryAllowed returns the nodes that memory may come from; empty where unknown.
func (t tree) memoryAllowed(groups controlGroups) cpuset.CPUSet {
	if set := t.statusList("Mems_allowed_list"); !set.IsEmpty() {
		return set
	}
	mems, _ := groups.cpuset("mems")
	return mems
}

// statusList returns a list of /proc/self/status; empty where there is none.
func (t tree) statusList(key string) cpuset.CPUSet {
	for line := range strings.Lines(t.text("proc/self/status")) {
		if list, ok := strings.CutPrefix(line, key+":"); ok {
			set, _ := ParseList(list)
			return set
		}
	}
	return cpuset.New()
}

// gpuMemoryNodes asks the NVIDIA driver which nodes are GPU memory (Grace Hopper, POWER9).
func (t tree) gpuMemoryNodes() cpuset.CPUSet {
	ids := []int{}
	for _, name := range t.names(nvidiaDirectory) {
		status := ParseFields(t.text(path.Join(nvidiaDirectory, name, "numa_status")))
		if id, ok := status["Node"]; ok && id <= maxID {
			ids = append(ids, int(id))
		}
	}
	return cpuset.New(ids...)
}

// ofMultiInstanceGPU reports whether the node may belong to one of these GPUs. A GPU that can be divided reserves
// eight nodes, one for each instance, and the driver names only the first.
func ofMultiInstanceGPU(id int, gpus cpuset.CPUSet) bool {
	for first := id - 7; first < id; first++ {
		if gpus.Contains(first) {
			return true
		}
	}
	return false
}

func (t tree) distances(id, nodes int) []int {
	words := strings.Fields(t.text(path.Join(nodeDirectory, "node"+strconv.Itoa(id), "distance")))
	if len(words) != nodes {
		return nil
	}
	distances := make([]int, nodes)
	for i, word := range words {
		n, err := strconv.Atoi(word)
		if err != nil {
			return nil
		}
		distances[i] = n
	}
	return distances
}

// near returns the nodes with the best access time that the firmware gives, or else the nearest by distance.
func (t tree) near(nodes []NUMANode, i int) []int {
	ids := []int{}
	// Class 1 is access by CPUs. Class 0 is access by any reader of memory, GPUs included.
	for _, class := range []string{"access1", "access0"} {
		initiators := t.numbered(path.Join(nodeDirectory, "node"+strconv.Itoa(nodes[i].ID), class, "initiators"),
			"node")
		for _, node := range nodes {
			if !node.CPUs.IsEmpty() && slices.Contains(initiators, node.ID) {
				ids = append(ids, node.ID)
			}
		}
		if len(ids) > 0 {
			return ids
		}
	}
	if nodes[i].Distances == nil {
		return ids
	}
	best := 0
	for j, distance := range nodes[i].Distances {
		if nodes[j].CPUs.IsEmpty() || len(ids) > 0 && distance > best {
			continue
		}
		if distance < best {
			ids = ids[:0]
		}
		ids, best = append(ids, nodes[j].ID), distance
	}
	return ids
}
