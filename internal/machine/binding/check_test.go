//go:build linux

package binding_test

import (
	"fmt"
	"maps"
	"slices"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// check returns what is wrong with the plan for the request, or "".
func check(h *host.Host, request binding.Request) string {
	plan, err := binding.Split(h, request)
	if err != nil {
		return err.Error()
	}
	if again, err := binding.Split(h, request); err != nil || !cmp.Equal(plan, again, sameCPUs) {
		return "a second split differs"
	}
	if len(plan.Ranks) != request.Ranks {
		return fmt.Sprintf("%d ranks", len(plan.Ranks))
	}
	own := slices.Repeat([]cpuset.CPUSet{h.CPUs}, request.Ranks)
	same := true
	if request.Peers != nil { // the CPUs of each rank, within the CPUs of all ranks
		own = request.Peers
		all := cpuset.New()
		for _, mask := range own {
			all, same = all.Union(mask), same && mask.Equals(own[0])
		}
		if h, err = h.WithAffinity(all); err != nil {
			return err.Error()
		}
	}
	coreOf := map[int]int{}
	usable := 0
	for i, core := range h.Cores {
		for _, cpu := range core.Siblings.UnsortedList() {
			coreOf[cpu] = i
		}
		if !core.Usable.IsEmpty() {
			usable++
		}
	}
	coresOf := func(cpus cpuset.CPUSet) map[int]bool {
		cores := map[int]bool{}
		for _, cpu := range cpus.UnsortedList() {
			cores[coreOf[cpu]] = true
		}
		return cores
	}
	wantsTrainer := request.TrainerCores != binding.TrainerShare{}
	sharers := ranksOf(h, plan)
	owner := map[int]int{}
	byKind := map[int][]int{} // kind to cores of each rank
	totals := []int{}
	used := 0
	for i, rank := range plan.Ranks {
		trainer, optimizer := coresOf(rank.TrainerCPUs), coresOf(rank.OptimizerCPUs)
		if rank.Rank != i {
			return fmt.Sprintf("rank %d in place %d", rank.Rank, i)
		}
		if !rank.TrainerCPUs.Union(rank.OptimizerCPUs).IsSubsetOf(own[i].Intersection(h.CPUs)) {
			return fmt.Sprintf("rank %d has CPUs that are not usable", i)
		}
		if len(optimizer) == 0 || wantsTrainer != (len(trainer) > 0) {
			return fmt.Sprintf("rank %d: %d cores for the trainer, %d for the optimizer", i, len(trainer),
				len(optimizer))
		}
		if rank.OptimizerCPUs.Size() != len(optimizer) {
			return fmt.Sprintf("rank %d: two workers on one core", i)
		}
		if !rank.Shared && rank.OMPNumThreads != len(trainer) {
			return fmt.Sprintf("rank %d: %d threads on %d cores", i, rank.OMPNumThreads, len(trainer))
		}
		for core := range trainer {
			if optimizer[core] && !rank.Shared {
				return fmt.Sprintf("rank %d: trainer and optimizer share a core", i)
			}
			if !h.Cores[core].Usable.Intersection(own[i]).IsSubsetOf(rank.TrainerCPUs) {
				return fmt.Sprintf("rank %d: half a core for the trainer", i)
			}
		}
		maps.Copy(optimizer, trainer)
		for core := range optimizer {
			if other, taken := owner[core]; taken && (same && usable >= request.Ranks || !rank.Shared) {
				return fmt.Sprintf("ranks %d and %d share a core", other, i)
			}
			owner[core] = i
			kind := h.Cores[core].Kind
			if byKind[kind] == nil {
				byKind[kind] = make([]int, request.Ranks)
			}
			byKind[kind][i]++
		}
		totals = append(totals, len(optimizer))
		used += len(optimizer)
		if rank.Shared != (sharers[i] > 1) && !(wantsTrainer && len(optimizer) == 1) {
			return fmt.Sprintf("rank %d: shared is %v", i, rank.Shared)
		}
		for _, id := range rank.NUMANodes {
			if !slices.Contains(h.MemoryNodes(), id) {
				return fmt.Sprintf("rank %d: no memory on node %d", i, id)
			}
		}
		if len(rank.NUMANodes) == 0 && len(h.MemoryNodes()) > 0 {
			return fmt.Sprintf("rank %d has no memory node", i)
		}
		data, err := rank.MarshalJSON()
		var back binding.Rank
		if err != nil || back.UnmarshalJSON(data) != nil || !cmp.Equal(rank, back, sameCPUs) {
			return fmt.Sprintf("rank %d does not survive JSON: %s", i, data)
		}
	}
	if !same { // the masks decide how even the shares can be
		return ""
	}
	if problem := checkPlaces(h, request, plan); problem != "" && usable >= request.Ranks && h.Quota == 0 {
		return problem
	}
	if spread(totals) > 1 {
		return fmt.Sprintf("uneven: %v", totals)
	}
	if h.Quota == 0 {
		for kind, cores := range byKind {
			if spread(cores) > 1 {
				return fmt.Sprintf("kind %d is uneven: %v", kind, cores)
			}
		}
		if usable >= request.Ranks && used != usable {
			return fmt.Sprintf("%d of %d cores used", used, usable)
		}
	} else if used > max(int(h.Quota), 2*request.Ranks) { // every role needs a core
		return fmt.Sprintf("%d threads under a quota of %v", used, h.Quota)
	}
	return ""
}

// checkPlaces returns what is wrong with the places of the ranks, or "".
func checkPlaces(h *host.Host, request binding.Request, plan *binding.Assignment) string {
	groups, pairs := [2]map[string]bool{{}, {}}, [2]map[string]bool{{}, {}}
	for i, rank := range plan.Ranks {
		cpus := rank.TrainerCPUs.Union(rank.OptimizerCPUs)
		for _, core := range h.Cores {
			if core.Usable.Intersection(cpus).IsEmpty() {
				continue
			}
			for level, group := range []string{fmt.Sprint("cache ", core.Cache), fmt.Sprint("nodes ", core.Nodes)} {
				groups[level][group] = true
				pairs[level][fmt.Sprint(group, " rank ", i)] = true
			}
		}
		if len(request.GPUs) == 0 {
			continue
		}
		nearTo := func(address string) cpuset.CPUSet {
			at := slices.IndexFunc(h.GPUs, func(d host.Device) bool { return d.Address == address })
			return h.GPUs[at].CPUs
		}
		local := nearTo(request.GPUs[i])
		mine, near, trainerNear, owners, available := 0, 0, 0, 0, 0
		for _, address := range request.GPUs {
			if !nearTo(address).Intersection(local).IsEmpty() {
				owners++
			}
		}
		for _, core := range h.UsableCores() {
			has, isNear := !core.Usable.Intersection(cpus).IsEmpty(), core.Usable.IsSubsetOf(local)
			if isNear {
				available++
			}
			if has {
				mine++
				if isNear {
					near++
					if core.Usable.IsSubsetOf(rank.TrainerCPUs) {
						trainerNear++
					}
				}
			}
		}
		if len(h.Kinds) == 1 && near < min(mine, available/owners) {
			return fmt.Sprintf("rank %d has %d of %d cores near its GPU, which %d ranks are near to", i, near,
				available, owners)
		}
		if want := request.TrainerCores.Cores; len(h.Kinds) == 1 && want > 0 && near >= 2*want &&
			trainerNear < want && mine > want {
			return fmt.Sprintf("rank %d: the trainer is not near the GPU", i)
		}
	}
	if len(request.GPUs) > 0 || len(h.Kinds) > 1 {
		return ""
	}
	// A line with that many cut groups has at most that many more pieces.
	for level := range groups {
		if len(pairs[level]) > len(groups[level])+request.Ranks-1 {
			return fmt.Sprintf("%d pieces of %d groups for %d ranks", len(pairs[level]), len(groups[level]),
				request.Ranks)
		}
	}
	return ""
}

// ranksOf returns for each rank the number of ranks on its cores.
func ranksOf(h *host.Host, plan *binding.Assignment) []int {
	most := make([]int, len(plan.Ranks))
	for _, core := range h.UsableCores() {
		ranks := []int{}
		for i, rank := range plan.Ranks {
			if slices.ContainsFunc(core.Usable.UnsortedList(), func(cpu int) bool {
				return rank.TrainerCPUs.Contains(cpu) || rank.OptimizerCPUs.Contains(cpu)
			}) {
				ranks = append(ranks, i)
			}
		}
		for _, i := range ranks {
			most[i] = max(most[i], len(ranks))
		}
	}
	return most
}

func spread(counts []int) int { return slices.Max(counts) - slices.Min(counts) }
