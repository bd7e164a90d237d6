package host

import (
	"io/fs"
	"os"

	"plimsoll/ledger"
)

// SparePageCache is how much of files this process may write ahead of the disk:
// half of what may still be allocated, and no more than the kernel lets wait for
// the disk without making all who write wait. Where nothing is known it is 0.
func SparePageCache(root fs.FS) ledger.Bytes {
	t := tree{root}
	groups := t.controlGroups()
	memory := t.memory(t.nodes(t.online(), groups), groups)
	room, _ := memory.Headroom()
	limits := parseFields(t.text("proc/vmstat"))
	background, some := limits["nr_dirty_background_threshold"]
	limit, all := limits["nr_dirty_threshold"]
	if !some || !all || memory.Available == 0 {
		return 0
	}
	// Half way between the two the kernel begins to hold writers up. The limits
	// are parts of what is available, also within a control group.
	part := float64((background+limit)/2*int64(os.Getpagesize())) / float64(memory.Available)
	return ledger.Bytes(float64(room) * min(part, 0.5))
}
