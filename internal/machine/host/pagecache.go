package host

import (
	"io/fs"
	"os"

	"plimsoll/internal/base/ledger"
)

// SparePageCache returns how much file data this process may write ahead of the disk. It is half of what may still be
// allocated, within the limits beyond which the kernel slows all writers down. It is 0 where nothing is known.
func SparePageCache(root fs.FS) ledger.Bytes {
	t := tree{root}
	groups := t.controlGroups()
	memory := t.memory(t.nodes(t.online(), groups), groups)
	room, _ := memory.Headroom()
	limits := ParseFields(t.text("proc/vmstat"))
	background, some := limits["nr_dirty_background_threshold"]
	limit, all := limits["nr_dirty_threshold"]
	if !some || !all || memory.Available == 0 {
		return 0
	}
	// The kernel begins to slow writers down half way between the two limits. Both are fractions of the available
	// memory, also within a cgroup.
	part := float64((background+limit)/2*int64(os.Getpagesize())) / float64(memory.Available)
	return ledger.Bytes(float64(room) * min(part, 0.5))
}
