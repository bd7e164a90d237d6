package host

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
)

// Memory is the memory that can still be allocated.
type Memory struct {
	Total     ledger.Bytes `json:"total_bytes"`     // MemTotal; 0 where unknown
	Available ledger.Bytes `json:"available_bytes"` // MemAvailable
	Limits    []Limit      `json:"limits"`
	// AddressSpace bounds all mappings of this process, whatever is behind them; nil for no limit.
	AddressSpace *Limit `json:"address_space"`
}

// Limit is a memory limit on this process and others with it. The limits are each cgroup limit up the tree, the
// commit limit where the kernel does not overcommit, and the memory of the allowed NUMA nodes where some nodes are
// forbidden.
//
// Used excludes the file cache that the kernel drops when memory gets short (inactive_file): it would not block an
// allocation. The working set of Kubernetes excludes it, too.
type Limit struct {
	Name  string       `json:"name"` // "cgroup /a/b memory.max"
	Limit ledger.Bytes `json:"limit_bytes"`
	Used  ledger.Bytes `json:"used_bytes"`
}

// Headroom returns how many bytes may still be allocated, and the name of the counter that decides. An empty name
// means that nothing is known.
func (m Memory) Headroom() (ledger.Bytes, string) { return m.HeadroomWith(0) }

// HeadroomWith is Headroom with that many bytes from a pool. Of all limits, only the address space counts the pool.
func (m Memory) HeadroomWith(pool ledger.Bytes) (ledger.Bytes, string) {
	room, name := m.Available, ""
	if m.Total > 0 {
		name = "MemAvailable"
	}
	for _, limit := range m.Limits {
		if left := max(0, limit.Limit-limit.Used); name == "" || left < room {
			room, name = left, limit.Name
		}
	}
	if room += pool; m.AddressSpace != nil {
		if left := max(0, m.AddressSpace.Limit-m.AddressSpace.Used); name == "" || left < room {
			room, name = left, m.AddressSpace.Name
		}
	}
	return room, name
}

func (t tree) memory(nodes []NUMANode, groups controlGroups) Memory {
	info := ParseFields(t.text("proc/meminfo"))
	available, ok := info["MemAvailable"]
	if !ok { // before Linux 3.14
		available = min(info["MemTotal"], info["MemFree"]+info["Inactive(file)"])
	}
	m := Memory{
		Total:     ledger.Bytes(info["MemTotal"]),
		Available: ledger.Bytes(available),
		Limits:    groups.memoryLimits(),
	}
	if mode := t.text("proc/sys/vm/overcommit_memory"); mode == "2" {
		m.Limits = append(m.Limits, Limit{
			Name:  "CommitLimit (vm.overcommit_memory is 2)",
			Limit: ledger.Bytes(info["CommitLimit"]),
			Used:  ledger.Bytes(info["Committed_AS"]),
		})
	}
	if limit, ok := nodeLimit(nodes); ok {
		m.Limits = append(m.Limits, limit)
	}
	if limit, limited := t.addressSpace(); limited {
		m.AddressSpace = &limit
	}
	return m
}

// nodeLimit returns the memory of the usable nodes, where that is less than all memory. MemAvailable also counts
// forbidden nodes and GPU memory.
func nodeLimit(nodes []NUMANode) (Limit, bool) {
	limit, ids, some := Limit{}, []int{}, false
	for _, node := range nodes {
		switch {
		case node.MemTotal == 0:
		case node.Allowed && node.hasMemory():
			ids = append(ids, node.ID)
			limit.Limit += node.MemTotal
			limit.Used += max(0, node.MemTotal-node.MemFree-node.reclaimable)
		default:
			some = true
		}
	}
	limit.Name = fmt.Sprintf("memory of NUMA nodes %s", cpuset.New(ids...))
	return limit, some && len(ids) > 0
}

// HugePages lists the available ways to large pages.
type HugePages struct {
	Pools       []HugePagePool `json:"pools"`         // by size
	Transparent string         `json:"transparent"`   // "always", "madvise" or "never"; empty where the kernel has none
	Shared      string         `json:"shared_memory"` // the same for shared memory (shmem_enabled)
	// Joins reports whether the kernel joins pages of shared memory into huge pages on request (MADV_COLLAPSE),
	// whatever Shared says. Discovery tries it on a live host; on a recorded host it is unknown.
	Joins bool `json:"joins_shared_memory"`
}

// HugePagePool is a pool of hugetlb pages of one size.
type HugePagePool struct {
	Size  ledger.Bytes `json:"page_bytes"`
	Total int64        `json:"total_pages"`
	Free  int64        `json:"free_pages"`
}

func (t tree) hugePages() HugePages {
	const directory = "sys/kernel/mm/"
	return HugePages{
		Pools:       t.hugePagePools(directory + "hugepages"),
		Transparent: selected(t.text(directory + "transparent_hugepage/enabled")),
		Shared:      selected(t.text(directory + "transparent_hugepage/shmem_enabled")),
	}
}

func (t tree) hugePagePools(directory string) []HugePagePool {
	pools := []HugePagePool{}
	for _, name := range t.names(directory) {
		digits, ok := strings.CutPrefix(name, "hugepages-")
		size, err := strconv.ParseUint(strings.TrimSuffix(digits, "kB"), 10, 32)
		if !ok || err != nil {
			continue
		}
		pool := HugePagePool{Size: ledger.Bytes(size) * ledger.KiB}
		pool.Total, _ = t.number(path.Join(directory, name, "nr_hugepages"))
		pool.Free, _ = t.number(path.Join(directory, name, "free_hugepages"))
		pools = append(pools, pool)
	}
	slices.SortFunc(pools, func(a, b HugePagePool) int { return int(a.Size - b.Size) })
	return pools
}
