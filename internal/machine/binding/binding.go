// Package binding gives each rank of a node, and each role within a rank, CPUs of its own.
//
// Trainer threads and optimizer workers on one physical core take turns on its arithmetic units. A worker far from
// its memory waits for it. Both cost more than any tuning of the step gains. So Split hands out physical cores, never
// single CPU ids, and only cores that the process may use. The rules, the weightiest first:
//
//  1. only usable CPUs;
//  2. every rank has a core, and no core has two ranks while there are enough;
//     where a launcher gave the ranks masks, each stays inside its own;
//  3. cores of one speed are shared out evenly, to within one core;
//  4. a rank's cores are near its GPU;
//  5. NUMA nodes and caches are cut as rarely as possible;
//  6. the same host and request always give the same plan.
package binding

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// maxRanks is a bound; a larger number is certainly a typing error.
const maxRanks = 1 << 16

// Request is what a job wants from this node.
type Request struct {
	Ranks int // processes on this node
	// TrainerCores is the trainer's share. The zero value gives all cores to the optimizer.
	TrainerCores TrainerShare
	// GPUs are PCI addresses, one for each rank, "" for a rank without a GPU; nil where no rank has a GPU.
	GPUs []string
	// Peers are the affinity masks that a launcher gave the ranks, in the order of the ranks. With nil every rank may
	// use the CPUs of this process.
	Peers []cpuset.CPUSet
	// MemoryPolicy is one of the policies below; empty lets Split choose.
	MemoryPolicy string
	// Reserve is how many cores to leave to the system and to other programs.
	Reserve int
	// OneThreadPerCore leaves the other hardware threads of the trainer's cores idle. The optimizer's cores always
	// run one thread.
	OneThreadPerCore bool
}

// Assignment is the CPUs of each rank and role.
type Assignment struct {
	Ranks []Rank `json:"ranks"`
}

// Rank is the share of one rank.
type Rank struct {
	Rank int
	// TrainerCPUs is the affinity mask of the trainer process: every usable hardware thread of its cores.
	TrainerCPUs cpuset.CPUSet
	// OptimizerCPUs holds one hardware thread of each core of the optimizer, for one pinned worker each. The other
	// threads of these cores stay idle.
	OptimizerCPUs cpuset.CPUSet
	// OMPNumThreads is for the trainer: one thread for each of its cores, or 0 where there is no trainer.
	OMPNumThreads int
	// NUMANodes are the nodes for the memory of the rank. MemoryPolicy is how the rank's process asks for them.
	NUMANodes    []int
	MemoryPolicy string
	// Shared reports that another rank, or both roles, use a core, because there are too few cores.
	Shared  bool
	Reasons []string // one sentence each
}

type rankJSON struct {
	Rank          int      `json:"rank"`
	TrainerCPUs   string   `json:"trainer_cpus"`
	OptimizerCPUs string   `json:"optimizer_cpus"`
	OMPNumThreads int      `json:"omp_num_threads"`
	NUMANodes     []int    `json:"numa_nodes"`
	MemoryPolicy  string   `json:"memory_policy"`
	Shared        bool     `json:"shared"`
	Reasons       []string `json:"reasons"`
}

// MarshalJSON writes CPUs in the kernel's form: "0-3,8".
func (r Rank) MarshalJSON() ([]byte, error) {
	return json.Marshal(rankJSON{
		r.Rank, r.TrainerCPUs.String(), r.OptimizerCPUs.String(),
		r.OMPNumThreads, r.NUMANodes, r.MemoryPolicy, r.Shared, r.Reasons,
	})
}

// UnmarshalJSON reads the form that MarshalJSON writes.
func (r *Rank) UnmarshalJSON(data []byte) error {
	var from rankJSON
	if err := json.Unmarshal(data, &from); err != nil {
		return err
	}
	trainer, err := host.ParseList(from.TrainerCPUs)
	if err != nil {
		return err
	}
	optimizer, err := host.ParseList(from.OptimizerCPUs)
	if err != nil {
		return err
	}
	*r = Rank{
		from.Rank, trainer, optimizer,
		from.OMPNumThreads, from.NUMANodes, from.MemoryPolicy, from.Shared, from.Reasons,
	}
	return nil
}

// Split divides the usable CPUs of the host among the ranks. With peers, each rank gets CPUs of its own mask;
// otherwise all share the CPUs of this process.
func Split(h *host.Host, request Request) (*Assignment, error) {
	if err := request.check(); err != nil {
		return nil, err
	}
	gpus, err := findGPUs(h, request.Ranks, request.GPUs)
	if err != nil {
		return nil, err
	}
	h, masks, err := request.masks(h)
	if err != nil {
		return nil, err
	}
	whole := h.CPUs
	if h, masks, err = request.reserve(h, masks); err != nil {
		return nil, err
	}
	near := make([]cpuset.CPUSet, request.Ranks)
	for rank, gpu := range gpus {
		if gpu != nil {
			near[rank] = gpu.CPUs.Intersection(masks[rank])
		}
	}
	cores := inOrder(h)
	d := divide(cores, masks, near)
	plan := &Assignment{}
	for rank, positions := range d.parts {
		r := roles{host: h, share: request.TrainerCores, oneThread: request.OneThreadPerCore,
			policy: request.MemoryPolicy, near: near[rank], threads: threads(h.Quota, request.Ranks, rank)}
		for _, position := range positions {
			r.cores = append(r.cores, cores[position].within(masks[rank]))
		}
		part := r.assign()
		part.Rank = rank
		reasons := []string{fmt.Sprintf("%s of %d usable", ledger.Plural(len(r.cores), "core"), len(cores))}
		if request.Reserve > 0 {
			reasons = append(reasons, fmt.Sprintf("CPUs %s are left to the system, as asked", whole.Difference(h.CPUs)))
		}
		if gpus[rank] != nil {
			reasons = append(reasons, r.nearReason(gpus[rank]))
		}
		reasons = append(reasons, d.peerReasons(rank)...)
		reasons = append(reasons, d.groupReasons(rank, h)...)
		if sharers := len(d.users[positions[0]]); sharers > 1 {
			part.Shared = true
			reasons = append(reasons, fmt.Sprintf("%s for %s: %d ranks share core %s",
				ledger.Plural(len(cores), "usable core"), ledger.Plural(request.Ranks, "rank"), sharers,
				cores[positions[0]].Usable))
		}
		part.Reasons = append(reasons, part.Reasons...)
		plan.Ranks = append(plan.Ranks, part)
	}
	return plan, nil
}

// threads returns how many threads of a rank can run at a time under a quota for all ranks.
func threads(quota float64, ranks, rank int) int {
	if quota <= 0 || quota > math.MaxInt32 {
		return math.MaxInt32
	}
	all := int(quota)
	each := all / ranks
	if rank < all%ranks {
		each++
	}
	return max(1, each)
}

func (r Request) check() error {
	bad := func(hint, format string, values ...any) error {
		return fault.Inputf(format, values...).WithHint(hint)
	}
	switch {
	case r.Ranks < 1 || r.Ranks > maxRanks:
		return bad(fmt.Sprintf("give the number of processes on this node, 1 to %d", maxRanks),
			"%d ranks cannot be bound", r.Ranks)
	case len(r.GPUs) > 0 && len(r.GPUs) != r.Ranks:
		return bad("give one GPU for each rank, in the order of the ranks", "%s for %s",
			ledger.Plural(len(r.GPUs), "GPU"),
			ledger.Plural(r.Ranks, "rank"))
	case len(r.Peers) > 0 && len(r.Peers) != r.Ranks:
		return bad("give one mask for each rank, in the order of the ranks", "%s for %s",
			ledger.Plural(len(r.Peers), "affinity mask"), ledger.Plural(r.Ranks, "rank"))
	case r.Reserve < 0:
		return bad("give the number of cores to leave to the system", "--reserve is %d: expected 0 or more", r.Reserve)
	case r.MemoryPolicy != "" && !slices.Contains(MemoryPolicies, r.MemoryPolicy):
		return bad("give one of "+strings.Join(MemoryPolicies, ", "), "%q is no memory policy", r.MemoryPolicy)
	}
	return r.TrainerCores.check()
}

// GPUsInOrder returns the host's GPUs for Request.GPUs where there is one for each rank: launchers assign GPUs in the
// order of the bus. Otherwise only the user knows, and the result is nil.
func GPUsInOrder(h *host.Host, ranks int) []string {
	if len(h.GPUs) != ranks {
		return nil
	}
	gpus := []string{}
	for _, gpu := range h.GPUs {
		gpus = append(gpus, gpu.Address)
	}
	return gpus
}

// findGPUs returns a device, or nil, for every rank.
func findGPUs(h *host.Host, ranks int, addresses []string) ([]*host.Device, error) {
	known := []string{}
	for _, gpu := range h.GPUs {
		known = append(known, gpu.Address)
	}
	found := make([]*host.Device, ranks)
	for rank, address := range addresses {
		if address == "" {
			continue
		}
		i := slices.Index(known, normal(address))
		if i < 0 {
			hint := "this host has the GPUs " + strings.Join(known, ", ")
			if nearest := fault.Nearest(normal(address), known); nearest != "" {
				hint = fmt.Sprintf("did you mean %s?", nearest)
			} else if len(known) == 0 {
				hint = "this host has no GPU; leave the addresses out"
			}
			return nil, fault.Inputf("no GPU has the PCI address %q of rank %d", address, rank).WithHint(hint)
		}
		found[rank] = &h.GPUs[i]
	}
	return found, nil
}

// normal returns a PCI address in the form of sysfs. Other tools leave out a domain of zeros (lspci) or write it with
// eight digits (nvidia-smi).
func normal(address string) string {
	address = strings.ToLower(address)
	if strings.Count(address, ":") == 1 {
		address = "0000:" + address
	}
	domain, rest, _ := strings.Cut(address, ":")
	if n, err := strconv.ParseUint(domain, 16, 32); err == nil {
		return fmt.Sprintf("%04x:%s", n, rest)
	}
	return address
}
