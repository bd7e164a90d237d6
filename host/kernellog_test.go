package host

import (
	"slices"
	"strings"
	"testing"
	"time"
)

const kernelLogOfKills = `<6>[   10.000001] eth0: up
<4>[  100.500000] python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
<6>[  100.500001] Tasks state (memory values in pages):
<6>[  100.500002] oom-kill:constraint=CONSTRAINT_MEMORY_POLICY,nodemask=1,task=python3,pid=77,uid=0
<3>[  100.500003] Out of memory: Killed process 77 (python3) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB
<6>[  100.600000] eth0: down
<4>[  200.500000] other invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
<3>[  200.500003] Out of memory: Killed process 88 (other) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB
`

func TestKillsInKernelLog(t *testing.T) {
	lines := strings.Split(kernelLogOfKills, "\n")
	withoutTimes := strings.NewReplacer("[  100.500003] ", "", "[  200.500003] ", "").Replace(kernelLogOfKills)
	for name, c := range map[string]struct {
		log      string
		pids     []int
		since    time.Duration
		expected []string
	}{
		"ours":           {kernelLogOfKills, []int{5, 77}, 90 * time.Second, lines[1:5]},
		"both":           {kernelLogOfKills, []int{88, 77}, 0, slices.Concat(lines[1:5], lines[6:8])},
		"of another job": {kernelLogOfKills, []int{5}, 0, nil},
		"before the job": {kernelLogOfKills, []int{77}, 102 * time.Second, nil},
		"without times":  {withoutTimes, []int{77, 88}, 0, nil},
		"empty":          {"", []int{77}, 0, nil},
	} {
		if found := killsIn(c.log, c.pids, c.since); !slices.Equal(found, c.expected) {
			t.Errorf("%s: %q, expected %q", name, found, c.expected)
		}
	}
}

func TestKernelClockMoves(t *testing.T) {
	before := KernelClock()
	time.Sleep(time.Millisecond)
	if after := KernelClock(); before <= 0 || after <= before {
		t.Errorf("the clock was at %v and is at %v", before, after)
	}
}
