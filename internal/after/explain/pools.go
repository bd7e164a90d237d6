package explain

import (
	"fmt"
	"slices"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// pool returns the account of the memory with a budget of its own that a claim is about, or nil: the last one before
// the failure, else the first one after it.
func (s *scene) pool(top claim) *seen[evidence.PoolUsage] {
	full, ok := top.at.Fact.(evidence.SharedMemoryFull)
	if !ok {
		return nil
	}
	var near *seen[evidence.PoolUsage]
	for _, p := range all[evidence.PoolUsage](s.findings) {
		later := p.File == top.at.File && p.Number > top.at.Number
		if p.fact.By == full.By && (near == nil || !later) {
			near = &p
		}
	}
	return near
}

// stored is what Ray's object store last held, as far as its accounts tell.
func (s *scene) stored() ledger.Bytes {
	pools := all[evidence.PoolUsage](s.findings)
	for _, p := range slices.Backward(pools) {
		if p.fact.By == evidence.RayStore {
			return max(p.fact.Used.Bytes, sumOf(p.fact.Parts))
		}
	}
	return 0
}

func sumOf(parts []evidence.MemoryHolder) (sum ledger.Bytes) {
	for _, p := range parts {
		sum += p.Bytes
	}
	return sum
}

// poolHolders divides a memory with a budget of its own. What waits for room is no part of it.
func poolHolders(p evidence.PoolUsage) []Holder {
	var list []Holder
	for _, part := range p.Parts {
		list = append(list, Holder{"object_store", part.Bytes, fmt.Sprintf("%s: %s", p.By, part.Name)})
	}
	rest := "in " + p.By + ", and of no kind that it counts"
	if len(list) == 0 {
		rest = "in " + p.By + ", whose account here does not divide it"
	}
	return inUse{used: p.Used.Bytes, rest: rest}.balanced(list)
}

// lockedHolders divides the locked memory that a limit allows: what the processes of the rank have locked and pinned,
// and what else counts.
func (s *scene) lockedHolders(top claim) []Holder {
	var list []Holder
	add := func(process string, locked, byDrivers ledger.Bytes) {
		list = append(list, Holder{process, locked, "locked by mlock (VmLck)"},
			Holder{process, byDrivers, "pinned by drivers of InfiniBand and others, or io_uring (VmPin)"})
	}
	if s.levels != nil {
		for _, p := range s.levels.of(s.rank()) {
			add(fmt.Sprintf("process %d", p.PID), p.Locked, p.Pinned)
		}
	} else {
		locked, _, _ := s.value("VmLck")
		byDrivers, _, _ := s.value("VmPin")
		add("the process", locked, byDrivers)
	}
	list = slices.DeleteFunc(list, func(h Holder) bool { return h.Bytes == 0 })
	failed, _ := top.at.Fact.(evidence.LockFailed)
	limit, known := s.lockedLimit()
	if !known || limit <= 0 || !failed.Requested.Known || failed.Requested.Bytes > limit {
		return list
	}
	return inUse{used: limit - failed.Requested.Bytes, rest: "counted against the limit, and of no process that is " +
		"listed: io_uring counts by user, and memory may have been locked since"}.balanced(list)
}

// pinnedHolders divides the shared memory of the first rank to end, which pinned memory is a part of, by what DeepSpeed
// has counted; nil where it has counted nothing.
func (s *scene) pinnedHolders() []Holder {
	var counted ledger.Bytes
	for _, u := range all[evidence.MemoryUsage](s.findings) {
		if u.fact.Pinned.Known && (u.Rank == s.rank() || u.Rank == evidence.NoRank || s.rank() == evidence.NoRank) {
			counted = u.fact.Pinned.Bytes
		}
	}
	if counted == 0 {
		return nil
	}
	list := []Holder{{"pinned_by_deepspeed", counted, "pinned by DeepSpeed, as it counts"}}
	if s.levels == nil {
		return list
	}
	var shared ledger.Bytes
	for _, p := range s.levels.of(s.rank()) {
		shared += p.Proportional.Shared
	}
	return inUse{used: shared, rest: "shared memory of this rank beside that: pinned by other callers, such as data " +
		"loaders and NCCL, or in /dev/shm"}.balanced(list)
}
