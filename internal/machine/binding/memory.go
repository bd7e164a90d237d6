package binding

import (
	"fmt"
	"math"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// The memory policies of a rank, for set_mempolicy(2) over its NUMANodes.
const (
	// PolicyDefault leaves placement to the kernel: a page goes to the node of the CPU that touches it first.
	PolicyDefault = "default"
	// PolicyPreferred places pages on the nodes (MPOL_PREFERRED, or MPOL_PREFERRED_MANY for several), and elsewhere
	// only when the nodes are full.
	PolicyPreferred = "preferred"
	// PolicyInterleave places pages on the nodes in turn (MPOL_INTERLEAVE).
	PolicyInterleave = "interleave"
	// PolicyBind places pages only on the nodes (MPOL_BIND); when they are full the process is killed. Only a user's
	// request selects it.
	PolicyBind = "bind"
)

// MemoryPolicies lists all policies.
var MemoryPolicies = []string{PolicyDefault, PolicyPreferred, PolicyInterleave, PolicyBind}

// memoryPolicy returns the policy of the rank's process, and the reason. Optimizer workers place their own pages and
// do not need a policy. A trainer does: its main thread touches most pages before any worker starts.
func (r roles) memoryPolicy(nodes []int) (policy, why string) {
	list := cpuset.New(nodes...).String()
	switch {
	case len(nodes) == 0 || len(r.host.Nodes) < 2:
		return PolicyDefault, "one NUMA node: no memory policy is needed"
	case r.policy == PolicyBind:
		free := ledger.Bytes(0)
		for _, id := range nodes {
			free += r.host.Node(id).MemFree
		}
		return PolicyBind, fmt.Sprintf("memory on %s alone, as asked: the kernel kills the process when it needs "+
			"more than %v (%v are free)",
			nodesCalled(nodes), r.memory(nodes), free)
	case r.policy != "":
		return r.policy, fmt.Sprintf("memory policy %s for %s, as asked", r.policy, nodesCalled(nodes))
	case len(nodes) == 1:
		return PolicyPreferred, fmt.Sprintf("memory on NUMA node %s, nearest to the optimizer, "+
			"and elsewhere when it is full", list)
	default:
		return PolicyInterleave, fmt.Sprintf("memory interleaved over NUMA nodes %s: the optimizer has cores at each",
			list)
	}
}

func nodesCalled(nodes []int) string {
	if len(nodes) == 1 {
		return fmt.Sprintf("NUMA node %d", nodes[0])
	}
	return "NUMA nodes " + cpuset.New(nodes...).String()
}

func (r roles) memory(nodes []int) ledger.Bytes {
	total := ledger.Bytes(0)
	for _, id := range nodes {
		total += r.host.Node(id).MemTotal
	}
	return total
}

// memoryNodes returns the nodes nearest to the cores that have memory for this process.
func (r roles) memoryNodes(cores []*core) []int {
	usable := r.host.MemoryNodes()
	chosen := map[int]bool{}
	for _, c := range cores {
		for _, id := range nearestNodes(r.host, c.Nodes, usable) {
			chosen[id] = true
		}
	}
	nodes := []int{}
	for _, id := range usable {
		if chosen[id] {
			nodes = append(nodes, id)
		}
	}
	return nodes
}

// nearestNodes returns the usable nodes nearest to any of the given nodes, or all usable nodes where the distances
// are unknown.
func nearestNodes(h *host.Host, from, usable []int) []int {
	best, nodes := math.MaxInt, usable
	for _, id := range from {
		for i, node := range h.Nodes {
			if !slices.Contains(usable, node.ID) {
				continue
			}
			distance := math.MaxInt
			if distances := h.Node(id).Distances; distances != nil {
				distance = distances[i]
			}
			if node.ID == id {
				distance = 0
			}
			if distance < best {
				best, nodes = distance, nil
			}
			if distance == best && best < math.MaxInt {
				nodes = append(nodes, node.ID)
			}
		}
	}
	return nodes
}
