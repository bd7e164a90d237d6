package explain

import (
	"fmt"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// suspects are the usual ones, each with what clears it. A check returns "" where nothing does.
var suspects = []struct {
	resource Resource
	clears   func(s *scene, top claim) string
}{
	{GPU, gpuCleared},
	{GPU, warningsCleared},
	{GPU, fragmentationCleared},
	{Host, hostCleared},
	{CGroup, cacheCleared},
	{CGroup, killsCleared},
	{SharedMemory, sharedMemoryCleared},
	{LockedMemory, func(s *scene, _ claim) string {
		if limit, known := s.lockedLimit(); known && limit < 0 {
			return "RLIMIT_MEMLOCK is unlimited"
		}
		return ""
	}},
	{AddressSpace, addressesCleared},
}

// ruledOut returns the suspects that it was not.
func (s *scene) ruledOut(top claim) []RuledOut {
	var list []RuledOut
	for _, suspect := range suspects {
		if why := suspect.clears(s, top); why != "" {
			list = append(list, RuledOut{suspect.resource, why})
		}
	}
	if s.killBesideCrash() == nil && len(s.kills) == 0 && len(all[evidence.KernelKill](s.findings)) > 0 {
		k := all[evidence.KernelKill](s.findings)[0]
		list = append(list, RuledOut{Host, fmt.Sprintf("the kernel killed process %d (%s), but no process of the job "+
			"ended by SIGKILL", k.fact.PID, k.fact.Name)})
	}
	return list
}

func gpuCleared(s *scene, top claim) string {
	if top.resource != GPU && s.gpuMostlyFree() {
		return "most of the GPU's memory was free"
	}
	return ""
}

func warningsCleared(s *scene, top claim) string {
	if top.resource != GPU && len(all[evidence.AllocationRetried](s.findings)) > 0 {
		return "the allocator's warnings only say that it freed its cache and tried again; no error of it followed"
	}
	return ""
}

func fragmentationCleared(_ *scene, top claim) string {
	f, ok := top.at.Fact.(evidence.GPUOutOfMemory)
	if !ok || top.detail != "capacity" || !f.Reserved.Known {
		return ""
	}
	if slack(f) >= f.Requested.Bytes {
		return fmt.Sprintf("fragmentation: only %v of %v were reserved without a tensor", slack(f), f.Total.Bytes)
	}
	return fmt.Sprintf("fragmentation: only %v were reserved without a tensor, less than the %v asked for", slack(f),
		f.Requested.Bytes)
}

func hostCleared(s *scene, top claim) string {
	k, kernel := top.at.Fact.(evidence.KernelKill)
	switch {
	case top.resource == Host:
		return ""
	case kernel && top.resource == CGroup:
		return "the kernel names the limit of a cgroup, not the host's memory"
	case kernel && top.resource == NUMANode && len(k.Nodes) > 1:
		var free ledger.Bytes
		for _, n := range k.Nodes {
			free += n.Free.Bytes
		}
		return fmt.Sprintf("the host had %v free on its NUMA nodes together", free)
	case s.plentyFree():
		return fmt.Sprintf("the host had %v of %v available", s.available(), s.memory())
	}
	return ""
}

// cacheCleared says that the page cache of a cgroup was not the cause: the kernel frees it at the limit.
func cacheCleared(s *scene, top claim) string {
	file, _, _ := s.value("file")
	if k, ok := top.at.Fact.(evidence.KernelKill); ok && k.Stats["file"]+k.Stats["cache"] > 0 {
		file = k.Stats["file"] + k.Stats["cache"]
	}
	if file == 0 {
		return ""
	}
	return fmt.Sprintf("page cache: %v of files counted, but the kernel frees the page cache before it kills", file)
}

func killsCleared(s *scene, top claim) string {
	if top.resource == CGroup || top.resource == NUMANode || top.resource == Host {
		return ""
	}
	for _, o := range all[oomCounts](s.findings) {
		if o.fact.kills() == 0 {
			return "the kernel's OOM killer counted no kill"
		}
	}
	return ""
}

// addressesCleared takes the word of a sample where there is a recording: a rank may have limited itself after its
// start.
func addressesCleared(s *scene, top claim) string {
	if top.resource == AddressSpace {
		return ""
	}
	unlimited := false
	if len(s.Recordings) == 0 {
		l := s.limit("RLIMIT_AS")
		unlimited = l != nil && !l.fact.Bytes.Known
	} else if s.levels != nil {
		ranks := s.levels.of(s.rank())
		unlimited = len(ranks) > 0 && s.addressSpaceLimit() == 0
	}
	if !unlimited {
		return ""
	}
	return "RLIMIT_AS is unlimited"
}

func sharedMemoryCleared(s *scene, top claim) string {
	if top.resource != SharedMemory && s.levels != nil && s.sharedMemoryFree() { // df may have looked afterwards
		used, size := s.sharedMemory()
		return fmt.Sprintf("/dev/shm had %v of %v in use", used, size)
	}
	return ""
}
