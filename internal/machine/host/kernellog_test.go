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
<4>[  300.500000] child invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
<6>[  300.500001] oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/job,task_memcg=/job/a,task=child,pid=99,uid=0
<3>[  300.500002] Memory cgroup out of memory: Killed process 99 (child) total-vm:1kB, anon-rss:1kB, file-rss:0kB
<4>[  400.500000] old invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
<6>[  400.500001] Task in /slurm/step killed as a result of limit of /slurm
<3>[  400.500002] Killed process 11 (old) total-vm:1kB, anon-rss:1kB, file-rss:0kB
`

func TestKillsInKernelLog(t *testing.T) {
	lines := strings.Split(kernelLogOfKills, "\n")
	withoutTimes := strings.NewReplacer("[  100.500003] ", "", "[  200.500003] ", "").Replace(kernelLogOfKills)
	for name, c := range map[string]struct {
		log      string
		pids     []int
		groups   []string
		after    time.Duration
		expected []string
	}{
		"ours":                {kernelLogOfKills, []int{5, 77}, nil, 90 * time.Second, lines[1:5]},
		"both":                {kernelLogOfKills, []int{88, 77}, nil, 0, slices.Concat(lines[1:5], lines[6:8])},
		"of another job":      {kernelLogOfKills, []int{5}, []string{"/other", "/job/a", ""}, 0, nil},
		"before the job":      {kernelLogOfKills, []int{77}, nil, 100500003 * time.Microsecond, nil},
		"just after it began": {kernelLogOfKills, []int{77}, nil, 100500002 * time.Microsecond, lines[1:5]},
		"without times":       {withoutTimes, []int{77, 88}, nil, 0, nil},
		"empty":               {"", []int{77}, []string{"/job"}, 0, nil},
		"never sampled":       {kernelLogOfKills, []int{5}, []string{"/job"}, 0, lines[8:11]},
		"of an old kernel":    {kernelLogOfKills, nil, []string{"/slurm"}, 0, lines[11:14]},
		"of a past job":       {kernelLogOfKills, nil, []string{"/job"}, 301 * time.Second, nil},
	} {
		if found := killsIn(strings.Split(c.log, "\n"), c.pids, c.groups, c.after); !slices.Equal(found, c.expected) {
			t.Errorf("%s: %q, expected %q", name, found, c.expected)
		}
	}
}

func TestEndOfKernelLog(t *testing.T) {
	for log, expected := range map[string]time.Duration{
		"":                              0,
		kernelLogOfKills:                400500002 * time.Microsecond,
		kernelLogOfKills + "<6>no time": 400500002 * time.Microsecond,
		"<6>[99999.000001] eth0: up\n<6>eth0: down": 99999*time.Second + time.Microsecond,
	} {
		if end := endOf(strings.Split(log, "\n")); end != expected {
			t.Errorf("%q ends at %v, expected %v", log, end, expected)
		}
	}
}
