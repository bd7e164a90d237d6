package report

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// RehearsedHost describes the host.
type RehearsedHost struct {
	CPU             string       `json:"cpu"`
	Kernel          string       `json:"kernel"`
	UsableCPUs      string       `json:"usable_cpus"`
	UsableCores     int          `json:"usable_cores"`
	NUMANodes       int          `json:"numa_nodes"`
	MemoryTotal     ledger.Bytes `json:"memory_total_bytes"`
	MemoryAvailable ledger.Bytes `json:"memory_available_bytes"`
}

func newHost(h *host.Host) RehearsedHost {
	return RehearsedHost{
		CPU: h.Name, Kernel: h.Kernel, UsableCPUs: h.CPUs.String(), UsableCores: len(h.UsableCores()),
		NUMANodes: len(h.Nodes), MemoryTotal: h.Memory.Total, MemoryAvailable: h.Memory.Available,
	}
}

func (h RehearsedHost) String() string {
	memory := "memory not known"
	if h.MemoryTotal > 0 {
		memory = fmt.Sprintf("%v of %v available", h.MemoryAvailable, h.MemoryTotal)
	}
	return fmt.Sprintf("%s, %s (CPUs %s), %s", processorName(h.CPU), counted(h.UsableCores, "usable core"),
		h.UsableCPUs, memory)
}
