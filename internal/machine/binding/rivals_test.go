//go:build linux

package binding_test

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// rival is another program's rule for giving CPUs to the ranks of a host, in short form. It returns nil where the
// program refuses.
type rival struct {
	name   string
	source string
	split  func(h *host.Host, ranks int) []cpuset.CPUSet
}

var rivals = []rival{
	{"DeepSpeed launcher", "deepspeed/utils/numa.py get_numactl_cmd, --bind_cores_to_rank", deepSpeedLauncher},
	{"DeepSpeed ZenFlow", "deepspeed/runtime/zenflow/zenflow_utils.py _compute_zf_pt_affinity", zenFlow},
	{"naive slice", "equal slices of sched_getaffinity's list", naiveSlice},
	{"torch exclusive", "torch/numa/binding.py, torchrun --numa-binding=exclusive", torchExclusive},
	{"Kubernetes packed", "pkg/kubelet/cm/cpumanager/cpu_assignment.go takeByTopologyNUMAPacked", kubernetesPacked},
	{"plimsoll", "this package", ours},
}

// equalSlices returns slices of equal length; nobody uses the remainder.
func equalSlices(cpus []int, ranks int) []cpuset.CPUSet {
	each := len(cpus) / ranks
	parts := []cpuset.CPUSet{}
	for rank := range ranks {
		parts = append(parts, cpuset.New(cpus[rank*each:(rank+1)*each]...))
	}
	return parts
}

// deepSpeedLauncher takes the ids from 0 to the number of physical cores.
func deepSpeedLauncher(h *host.Host, ranks int) []cpuset.CPUSet {
	ids := []int{}
	for id := range h.Cores {
		ids = append(ids, id)
	}
	return equalSlices(ids, ranks)
}

// zenFlow takes the usable ids below the number of physical cores.
func zenFlow(h *host.Host, ranks int) []cpuset.CPUSet {
	ids := slices.DeleteFunc(h.CPUs.List(), func(id int) bool { return id >= len(h.Cores) })
	return equalSlices(ids, ranks)
}

func naiveSlice(h *host.Host, ranks int) []cpuset.CPUSet { return equalSlices(h.CPUs.List(), ranks) }

// torchExclusive divides the usable cores of a GPU's node evenly among all
// GPUs of the node; the first ones get one more.
func torchExclusive(h *host.Host, ranks int) []cpuset.CPUSet {
	parts := []cpuset.CPUSet{}
	for rank := range ranks {
		if rank >= len(h.GPUs) {
			return nil
		}
		node := max(0, h.GPUs[rank].Node)
		place, sharing := 0, 0
		for i, gpu := range h.GPUs {
			if max(0, gpu.Node) == node {
				if i < rank {
					place++
				}
				sharing++
			}
		}
		cores := []host.Core{}
		for _, core := range h.UsableCores() {
			if slices.Contains(core.Nodes, node) {
				cores = append(cores, core)
			}
		}
		each, extra := len(cores)/sharing, len(cores)%sharing
		if each == 0 {
			return nil
		}
		start := place*each + min(place, extra)
		if place < extra {
			each++
		}
		part := cpuset.New()
		for _, core := range cores[start : start+each] {
			part = part.Union(core.Usable)
		}
		parts = append(parts, part)
	}
	return parts
}

// kubernetesPacked gives each rank in turn the same number of CPUs. It takes whole sockets or NUMA nodes while they
// fit, then whole cores, then threads, each time from the group with the fewest free CPUs.
func kubernetesPacked(h *host.Host, ranks int) []cpuset.CPUSet {
	free := h.CPUs
	threads := h.Online.Size() / len(h.Cores) // as Kubernetes counts
	each := h.CPUs.Size() / ranks / threads * threads
	if each == 0 {
		each = h.CPUs.Size() / ranks
	}
	groups := map[int]cpuset.CPUSet{} // of the level with more groups
	perNode := len(h.Nodes) > len(h.Packages)
	for _, core := range h.Cores {
		key := core.Package
		if perNode && len(core.Nodes) > 0 {
			key = core.Nodes[0]
		}
		groups[key] = groups[key].Union(core.Siblings)
	}
	order := func() []int {
		keys := slices.Sorted(maps.Keys(groups))
		slices.SortStableFunc(keys, func(a, b int) int {
			return cmp.Compare(groups[a].Intersection(free).Size(), groups[b].Intersection(free).Size())
		})
		return keys
	}
	parts := []cpuset.CPUSet{}
	for range ranks {
		part, need := cpuset.New(), each
		take := func(cpus cpuset.CPUSet) {
			if !cpus.IsEmpty() && cpus.Size() <= need {
				part, free, need = part.Union(cpus), free.Difference(cpus), need-cpus.Size()
			}
		}
		for _, key := range order() {
			if groups[key].IsSubsetOf(free) {
				take(groups[key])
			}
		}
		for _, whole := range []bool{true, false} {
			for _, key := range order() {
				for _, core := range h.Cores {
					switch {
					case !core.Siblings.IsSubsetOf(groups[key]):
					case whole && core.Siblings.IsSubsetOf(free):
						take(core.Siblings)
					case !whole:
						for _, cpu := range core.Siblings.Intersection(free).List() {
							take(cpuset.New(cpu))
						}
					}
				}
			}
		}
		parts = append(parts, part)
	}
	return parts
}

// ours returns the CPUs of a rank's trainer and optimizer together.
func ours(h *host.Host, ranks int) []cpuset.CPUSet {
	plan, err := binding.Split(h, binding.Request{Ranks: ranks, GPUs: binding.GPUsInOrder(h, ranks),
		TrainerCores: binding.DefaultTrainerShare})
	if err != nil {
		return nil
	}
	parts := []cpuset.CPUSet{}
	for _, rank := range plan.Ranks {
		parts = append(parts, rank.TrainerCPUs.Union(rank.OptimizerCPUs))
	}
	return parts
}

// zenFlowRoles gives the first half of a rank's list to the trainer.
func zenFlowRoles(cpus cpuset.CPUSet) (trainer, optimizer cpuset.CPUSet) {
	ids := cpus.List()
	n := int(math.Ceil(0.5 * float64(len(ids))))
	if n == len(ids) {
		return cpus, cpus
	}
	return cpuset.New(ids[:n]...), cpuset.New(ids[n:]...)
}
