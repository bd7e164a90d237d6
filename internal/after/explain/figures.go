package explain

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// Conditions of the tables for GPUs. PyTorch prints sizes with two decimals, so that figures that are derived from
// them are rounded.

// allowed, allocated and free are the figures of an error.
func allowed(f evidence.GPUOutOfMemory) ledger.Bytes   { return f.Allowed.Bytes }
func allocated(f evidence.GPUOutOfMemory) ledger.Bytes { return f.Allocated.Bytes }
func free(f evidence.GPUOutOfMemory) ledger.Bytes      { return f.Free.Bytes }

// slack is what PyTorch had reserved beyond its tensors.
func slack(f evidence.GPUOutOfMemory) ledger.Bytes {
	if !f.Reserved.Known || !f.Allocated.Known {
		return 0
	}
	return f.Reserved.Bytes - f.Allocated.Bytes
}

// outside is what the process held beside PyTorch's allocator, or 0 if unknown.
func outside(f evidence.GPUOutOfMemory) ledger.Bytes {
	if !f.Self.Known || !f.Reserved.Known {
		return 0
	}
	return max(f.Self.Bytes-f.Reserved.Bytes, 0)
}

// missing is what was needed beyond free memory.
func missing(f evidence.GPUOutOfMemory) ledger.Bytes { return max(f.Requested.Bytes-f.Free.Bytes, 0) }

func capped(_ *scene, f evidence.GPUOutOfMemory) bool {
	return f.Allowed.Known && !onMetal(nil, f) && (enoughFree(nil, f) || f.Reserved.Known &&
		f.Reserved.Bytes+f.Requested.Bytes > f.Allowed.Bytes && f.Allowed.Bytes < f.Total.Bytes)
}

// onMetal reports whether an Apple GPU ran out. Its allocator's limit is PYTORCH_MPS_HIGH_WATERMARK_RATIO.
func onMetal(_ *scene, f evidence.GPUOutOfMemory) bool { return f.Backend == "MPS" }

// relevantShare is the part of a GPU, as a divisor, from which on reserved memory without tensors is worth a change.
const relevantShare = 50

// fragmented holds if the unused pieces are a share of the card and would have met the request, and nothing beside
// PyTorch dwarfs them.
func fragmented(_ *scene, f evidence.GPUOutOfMemory) bool {
	return f.Requested.Known && slack(f) > 0 && slack(f) >= f.Requested.Bytes &&
		slack(f) >= f.Total.Bytes/relevantShare && !enoughFree(nil, f) && !dwarfs(outside(f), slack(f)) &&
		!dwarfs(others(f), slack(f)) &&
		!dwarfs(unlisted(f), slack(f))
}

func dwarfs(held, pieces ledger.Bytes) bool { return held > 2*pieces }

// outsidePyTorch holds if the process has far more than the context of CUDA outside of PyTorch.
func outsidePyTorch(_ *scene, f evidence.GPUOutOfMemory) bool {
	return outside(f) > cardOf(f)/10 && outside(f) > 2*ledger.GiB && outside(f) >= missing(f) && !enoughFree(nil, f)
}

// aboveCard holds if the request alone exceeds what the GPU has in all.
func aboveCard(_ *scene, f evidence.GPUOutOfMemory) bool {
	return cardOf(f) > 0 && f.Requested.Bytes > cardOf(f)
}

func aboveCardText(f evidence.GPUOutOfMemory) string {
	return fmt.Sprintf("ran out of GPU memory: it asked for %v at once, and no GPU of %v can ever hold that",
		f.Requested.Bytes, cardOf(f))
}

// cardOf is all that the error says may be used of the GPU, or 0 if unknown. Metal states no more than what it allows.
func cardOf(f evidence.GPUOutOfMemory) ledger.Bytes {
	if f.Total.Known {
		return f.Total.Bytes
	}
	return f.Allowed.Bytes
}

func enoughFree(_ *scene, f evidence.GPUOutOfMemory) bool {
	return f.Free.Known && f.Requested.Known && f.Free.Bytes >= f.Requested.Bytes
}

// gpuMostlyFree reports whether a line or a sample shows a GPU with most of its memory free.
func (s *scene) gpuMostlyFree() bool {
	for _, f := range all[evidence.AllocationRetried](s.findings) {
		if f.fact.Free.Known && f.fact.Total.Known && f.fact.Free.Bytes > f.fact.Total.Bytes/2 {
			return true
		}
	}
	usages := all[evidence.GPUUsage](s.findings)
	if s.levels == nil || len(s.levels.gpus) == 0 {
		return len(usages) > 0 && !slices.ContainsFunc(usages, func(u seen[evidence.GPUUsage]) bool {
			return u.fact.Free.Bytes < u.fact.Total.Bytes/2
		})
	}
	for _, g := range s.levels.gpus {
		if g.Free < g.Total/2 {
			return false
		}
	}
	return true
}

// Conditions of the tables for host memory.

// addressSpaceLimit is RLIMIT_AS of the rank, or 0 if there is none or it is unknown.
func (s *scene) addressSpaceLimit() ledger.Bytes {
	if s.levels != nil {
		for _, p := range s.levels.of(s.rank()) {
			if p.AddressSpaceLimit > 0 {
				return p.AddressSpaceLimit
			}
		}
	}
	if l := s.limit("RLIMIT_AS"); l != nil && l.fact.Bytes.Known {
		return l.fact.Bytes.Bytes
	}
	return 0
}

// overAddressSpace holds if the last sample shows that the request exceeds RLIMIT_AS.
func overAddressSpace(s *scene, f evidence.HostAllocationFailed) bool {
	if s.levels == nil {
		return false
	}
	for _, p := range s.levels.of(s.rank()) {
		if p.AddressSpaceLimit > 0 && p.Virtual+f.Requested.Bytes > p.AddressSpaceLimit {
			return true
		}
	}
	return false
}

// overCommit holds if the kernel promises no more than CommitLimit, and the request exceeds it.
func overCommit(s *scene, f evidence.HostAllocationFailed) bool {
	if l := s.limit("overcommit"); l == nil || l.fact.Bytes.Bytes != 2 {
		return false
	}
	limit, _, known := s.value("CommitLimit")
	committed, _, _ := s.value("Committed_AS")
	return !known || committed+f.Requested.Bytes > limit
}

// aboveHost holds if the host has less memory than was asked for.
func aboveHost(s *scene, f evidence.HostAllocationFailed) bool {
	total := s.memory()
	return total > 0 && f.Requested.Bytes > total
}

// memory is the memory of the host, or 0 if unknown.
func (s *scene) memory() ledger.Bytes {
	if s.levels != nil && s.levels.node.Memory > 0 {
		return s.levels.node.Memory
	}
	total, _, _ := s.value("MemTotal")
	return total
}

// available is the memory of the host that was free for programs, or 0 if unknown.
func (s *scene) available() ledger.Bytes {
	if s.levels != nil && s.levels.node.Memory > 0 {
		return s.levels.node.Available
	}
	available, _, _ := s.value("MemAvailable")
	return available
}

// plentyFree reports whether a fifth of the host's memory was free.
func (s *scene) plentyFree() bool { return s.memory() > 0 && s.available() > s.memory()/5 }

// almostFull is the part of the host's memory, in percent, above which the kernel's OOM killer is not far.
const almostFull = 90

// stayedFree reports whether a fifth of the host's memory was free to the end, as far as the last samples tell.
func (s *scene) stayedFree() bool {
	return s.plentyFree() && (s.levels == nil || s.available()-s.levels.falling > s.memory()/5)
}

// fullHost returns the last line of a framework that says how much of the host's memory was used, if that was almost
// all of it, or nil.
func (s *scene) fullHost() *evidence.Finding {
	for _, u := range slices.Backward(all[evidence.MemoryUsage](s.findings)) {
		switch {
		case u.fact.HostPercent >= almostFull:
			return &u.Finding
		case u.fact.HostPercent > 0:
			return nil
		}
	}
	return nil
}

// boundNodes returns the NUMA nodes that the memory policy leaves to the rank that ended first, or nil for all.
func (s *scene) boundNodes() []int {
	if s.levels != nil {
		for _, bound := range s.levels.bound {
			if bound.Rank == s.rank() {
				return bound.NUMANodes
			}
		}
	}
	return nil
}

// shortNode returns the NUMA node that had no memory left, or the only one that the memory policy leaves to the rank
// that ended first; nil if the last sample tells of none.
func (s *scene) shortNode() *samples.NUMAFree {
	if n := s.levels.exhaustedNode(); n != nil || s.levels == nil {
		return n
	}
	bound := s.boundNodes()
	if len(bound) != 1 {
		return nil
	}
	nodes := s.levels.node.NUMANodes
	if i := slices.IndexFunc(nodes, func(n samples.NUMAFree) bool { return n.Node == bound[0] }); i >= 0 {
		return &nodes[i]
	}
	return nil
}

// lockedLimit is RLIMIT_MEMLOCK, -1 for unlimited.
func (s *scene) lockedLimit() (limit ledger.Bytes, known bool) {
	if s.levels != nil {
		for _, p := range s.levels.of(s.rank()) {
			if p.LockedLimit != 0 {
				return p.LockedLimit, true
			}
		}
	}
	l := s.limit("RLIMIT_MEMLOCK")
	switch {
	case l == nil:
		return 0, false
	case !l.fact.Bytes.Known:
		return -1, true
	}
	return l.fact.Bytes.Bytes, true
}

// limitsFiles reports whether the job began with a limit on the size of files.
func (s *scene) limitsFiles() bool {
	l := s.limit("RLIMIT_FSIZE")
	return l != nil && l.fact.Bytes.Known
}

// sharedMemory returns what a sample or df shows of /dev/shm.
func (s *scene) sharedMemory() (used, size ledger.Bytes) {
	if s.levels != nil && s.levels.node.SharedFiles.Size > 0 {
		return s.levels.node.SharedFiles.Used, s.levels.node.SharedFiles.Size
	}
	for _, f := range all[evidence.FileSystem](s.findings) {
		if f.fact.Mount == "/dev/shm" {
			used, size = f.fact.Used.Bytes, f.fact.Size.Bytes
		}
	}
	return used, size
}

// sharedMemoryFull and sharedMemoryFree report how full /dev/shm was. Both are false if that is unknown.
func (s *scene) sharedMemoryFull() bool {
	used, size := s.sharedMemory()
	return size > 0 && used > size/20*19
}

func (s *scene) sharedMemoryFree() bool {
	used, size := s.sharedMemory()
	if s.levels != nil && float64(size-used) < s.levels.before.Seconds()*fastestFill {
		return false
	}
	return size > 0 && used < size/2
}

// fastestFill is how many bytes of /dev/shm a job may fill in a second. Its files go with the process that dies, so
// that only what a sample shows of the time before tells.
const fastestFill = float64(16 * ledger.GiB)

// rank is that of the witness.
func (s *scene) rank() int {
	if s.witness == nil {
		return evidence.NoRank
	}
	return s.witness.rank
}

// Conditions and texts of the tables for kills.

func inGroup(_ *scene, k evidence.KernelKill) bool {
	return strings.HasSuffix(k.Constraint, "MEMCG") || k.Constraint == "" && (k.Limit.Known || k.Group != "" ||
		k.WholeGroup)
}

func onNodes(_ *scene, k evidence.KernelKill) bool {
	return strings.HasSuffix(k.Constraint, "MEMORY_POLICY") || strings.HasSuffix(k.Constraint, "CPUSET")
}

func groupText(k evidence.KernelKill) string {
	text := "was killed by the kernel: "
	switch {
	case k.Group != "" && k.Limit.Known:
		text += fmt.Sprintf("the cgroup %s reached its limit of %v", k.Group, k.Limit.Bytes)
	case k.Limit.Known:
		text += fmt.Sprintf("its cgroup reached its limit of %v", k.Limit.Bytes)
	default:
		text += "its cgroup reached its memory limit"
	}
	return text
}

func nodeText(k evidence.KernelKill) string {
	text := "was killed by the kernel: it may use memory of "
	nodes := k.NodeMask
	if nodes == "" || nodes == "(null)" {
		nodes = k.MemsAllowed
	}
	if nodes == "" {
		text += "some NUMA nodes only"
	} else {
		text += "NUMA node " + nodes + " only"
	}
	if strings.HasSuffix(k.Constraint, "CPUSET") {
		return text + " (its cpuset), and that was full"
	}
	return text + " (its memory policy), and that was full"
}

func hostText(evidence.KernelKill) string {
	return "was killed by the kernel's OOM killer: the host ran out of memory"
}

func limitText(o oomCounts) string {
	at := o.atLimit()
	text := fmt.Sprintf("was killed by the kernel: %s reached its memory limit", at.group)
	if at.limit > 0 {
		text += fmt.Sprintf(" of %v", at.limit)
	}
	return text
}

// byLimit holds for batch systems that hold a job to a limit. The others act when the host runs low.
func byLimit(s *scene, b evidence.BatchKill) bool {
	switch b.By {
	case "systemd":
		return b.Limit.Known || s.peakAtLimit("")
	case "Ray": // its limit is the memory of the node
		return false
	case "systemd-oomd", "earlyoom", "the kubelet", "the hosting service", evidence.UserSpace, recorder:
		return b.Limit.Known
	}
	return true
}

func batchText(b evidence.BatchKill) string {
	what := b.What
	if what != "" {
		what = " (" + what + ")"
	}
	return fmt.Sprintf("was killed for its memory, as %s says%s", b.By, what)
}
