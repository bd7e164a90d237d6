package explain

import (
	"fmt"
	"math"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// inUse is what a memory of the host had in use, by what the kernel counts beside the processes.
type inUse struct {
	used ledger.Bytes // in all, or 0 if unknown
	// The kinds. Each has only what no process of the list is known to hold.
	anonymous, shared, kernel, cache ledger.Bytes
	hugePages, freeHugePages         ledger.Bytes // the pools, and what nobody uses of them
	rest                             string       // what the remainder may be
	late                             ledger.Bytes // came after the last sample
	lateText                         string
}

// tellingShare is the part of the memory in use, as a divisor, from which on a remainder is said.
const tellingShare = 50

// balanced returns the holders with the kinds that none of them holds, and with the remainder. Processes may count a
// page that they share more than once, so a kind is no more than what is left.
func (u inUse) balanced(holders []Holder) []Holder {
	if u.used == 0 { // pools of huge pages are of no process's count
		u = inUse{used: math.MaxInt64, hugePages: u.hugePages, freeHugePages: u.freeHugePages}
	}
	left := u.used - u.late
	for _, h := range holders {
		left -= h.Bytes
	}
	if u.late > 0 {
		holders = append(holders, Holder{"unexplained", u.late + min(left, 0), u.lateText})
		left = max(left, 0)
	}
	take := func(component string, bytes ledger.Bytes, text string) {
		if bytes = min(bytes, left); bytes > 0 {
			holders = append(holders, Holder{component, bytes, text})
			left -= bytes
		}
	}
	pools := "pools of huge pages"
	if u.freeHugePages > 0 {
		pools += fmt.Sprintf(", of which %v are set apart and unused", u.freeHugePages)
	}
	take("huge_pages", u.hugePages, pools)
	take("kernel", u.kernel, "the kernel's own memory, such as page tables")
	take("anonymous", u.anonymous, "heap and other anonymous memory of processes that are not listed")
	take("shared_memory", u.shared, "shared memory beside these: files in /dev/shm, or pinned by CUDA")
	take("page_cache", u.cache, "page cache, which the kernel frees before it kills")
	if u.rest != "" && left > u.used/tellingShare && left > rounding {
		holders = append(holders, Holder{"unexplained", left, u.rest})
	}
	return holders
}

const (
	restOfGroup = "counted in the cgroup, and of no kind that is listed"
	restOfNode  = "on this NUMA node, and of no process of the job: page cache, other processes, or the kernel's own"
	restOfHost  = "of no process and no kind that the kernel lists: pinned by drivers, or the kernel's own"
)

// kernelUse is what a kill of the kernel says of the memory that was short.
func kernelUse(k evidence.KernelKill) inUse {
	if k.Usage.Known {
		return inUse{used: k.Usage.Bytes, shared: k.Stats["shmem"], kernel: k.Stats["kernel"],
			cache: max(k.Stats["file"]+k.Stats["cache"]-k.Stats["shmem"], 0), rest: restOfGroup}
	}
	if onNodes(nil, k) { // the figures are those of all nodes
		return inUse{}
	}
	u := inUse{shared: k.Stats["shmem"], cache: k.Stats["active_file"] + k.Stats["inactive_file"],
		kernel:    k.Stats["kernel_stack"] + k.Stats["pagetables"] + k.Stats["slab_unreclaimable"],
		hugePages: k.Stats[evidence.HugePages], freeHugePages: k.Stats[evidence.FreeHugePages], rest: restOfHost}
	for _, n := range k.Nodes {
		if !n.Size.Known || !n.Free.Known { // the log is cut
			u.used = 0
			return u
		}
		u.used += n.Size.Bytes - n.Free.Bytes
	}
	return u
}

// unusedHugePages is what is set apart for huge pages and used by nobody, where that is a share of the memory.
func (s *scene) unusedHugePages(top claim) ledger.Bytes {
	u := inUse{}
	if k, ok := top.at.Fact.(evidence.KernelKill); ok {
		u = kernelUse(k)
	} else if s.levels != nil {
		u = s.recordedUse(Host)
	}
	if u.freeHugePages < max(u.used/tellingShare, ledger.GiB) {
		return 0
	}
	return u.freeHugePages
}

// recordedUse is what the last sample says of a memory, beside the processes of the job.
func (s *scene) recordedUse(resource Resource) inUse {
	var job samples.Kinds
	for _, p := range s.levels.processes {
		job.Anonymous += p.Proportional.Anonymous
		job.Shared += p.Proportional.Shared
	}
	switch n := s.levels.node; resource {
	case SharedMemory:
		return inUse{used: n.SharedFiles.Used, rest: "files that no process of the job maps: of others, or left behind"}
	case CGroup:
		for _, g := range s.levels.groups {
			if g.Limit > 0 {
				return inUse{used: g.Current, anonymous: g.Anonymous - job.Anonymous, shared: g.Shared - job.Shared,
					kernel: g.Kernel, cache: g.File - g.Shared, rest: restOfGroup}
			}
		}
	case NUMANode:
		if short := s.shortNode(); short != nil {
			return inUse{used: short.Memory - short.Free, rest: restOfNode}
		}
	case Host:
		return inUse{used: n.Memory - n.Free, anonymous: n.Anonymous - job.Anonymous, shared: n.Shared - job.Shared,
			cache: n.PageCache, hugePages: n.HugetlbTotal, freeHugePages: n.HugetlbFree, rest: restOfHost}
	}
	return inUse{}
}

// useAtEnd is what a memory had in use when it ran out: what the last sample says, and all of a memory that is known to
// have been full. The difference came after the sample.
func (s *scene) useAtEnd(top claim) inUse {
	u := s.recordedUse(top.resource)
	full, text := ledger.Bytes(0), "taken after the last sample of the recording"
	if kill := s.killOf(top); kill != nil && top.resource == CGroup {
		full = kill.Usage.Bytes
	}
	if counts, ok := top.at.Fact.(oomCounts); ok && top.resource == CGroup {
		if at := counts.atLimit(); at != nil {
			full = at.limit
		}
	}
	if top.resource == SharedMemory && !s.sharedMemoryFree() {
		_, full = s.sharedMemory()
		if _, said := top.at.Fact.(evidence.SharedMemoryFull); !said {
			text += ", if /dev/shm was full"
		}
	}
	if late := full - u.used; late > full/tellingShare {
		u.used, u.late, u.lateText = full, late, text
	}
	return u
}

// listed returns the holders of the memory of the host that a program lists, with what the list leaves out.
func (s *scene) listed(top claim) []Holder {
	list := s.listNear(top.at)
	if list == nil {
		return nil
	}
	var holders []Holder
	for _, h := range list.Holders {
		name := fmt.Sprintf("process %d", h.PID)
		if h.PID == 0 {
			name = h.Name
		}
		holders = append(holders, Holder{name, h.Bytes, fmt.Sprintf("%s, as %s lists it", h.Name, list.By)})
	}
	return s.listedUse(list).balanced(holders)
}

// listNear returns the list of who holds memory that belongs to a finding: the next one in its file, the last one
// before it, or any.
func (s *scene) listNear(at evidence.Finding) *evidence.MemoryList {
	var near *seen[evidence.MemoryList]
	for _, l := range all[evidence.MemoryList](s.findings) {
		after := l.File == at.File && l.Number >= at.Number
		if near == nil || l.File == at.File || near.File != at.File {
			near = &l
		}
		if after {
			break
		}
	}
	if near == nil {
		return nil
	}
	return &near.fact
}

// listedUse is what else the files say of the memory that a list divides. Of docker's containers and Kubernetes' pods
// nobody says how much memory of their host is in use.
func (s *scene) listedUse(list *evidence.MemoryList) inUse {
	if list.By == "Ray" {
		for _, kill := range all[evidence.BatchKill](s.findings) {
			if kill.fact.By == list.By && kill.fact.Used.Known {
				return inUse{used: kill.fact.Used.Bytes, shared: s.stored(),
					rest: "of processes that Ray does not list, and shared memory such as its object store"}
			}
		}
	}
	if list.Holders[0].PID == 0 {
		return inUse{}
	}
	total, _, known := s.value("MemTotal")
	if free, _, ok := s.value("MemFree"); ok && known {
		u := inUse{used: total - free, rest: restOfHost}
		u.shared, _, _ = s.value("Shmem")
		cached, _, _ := s.value("Cached")
		u.cache = max(cached-u.shared, 0)
		u.kernel, _, _ = s.value("SUnreclaim")
		u.hugePages, _, _ = s.value("Hugetlb")
		return u
	}
	return inUse{}
}
