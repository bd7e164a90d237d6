package host_test

import (
	"slices"
	"testing"
	"testing/fstest"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

func TestMemoryCounters(t *testing.T) {
	const (
		v1 = "11 1 0:9 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
		v2 = "11 1 0:9 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	)
	for name, test := range map[string]struct {
		files map[string]string
		want  []host.MemoryCounter
	}{
		"version 2": {map[string]string{
			"proc/self/cgroup": "0::/pod/a\n", "proc/self/mountinfo": v2, "proc/vmstat": "pgfault 7\noom_kill 4\n",
			"sys/fs/cgroup/pod/a/memory.events":     "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\n",
			"sys/fs/cgroup/pod/a/memory.max":        "max\n",
			"sys/fs/cgroup/pod/memory.events":       "max 9\noom 3\noom_kill 2\n",
			"sys/fs/cgroup/pod/memory.events.local": "max 9\noom 1\noom_kill 0\n",
			"sys/fs/cgroup/pod/memory.max":          "1073741824\n",
		}, []host.MemoryCounter{
			{Name: "cgroup /pod/a memory.events oom_kill", Group: "cgroup /pod/a", Reached: 2, Kills: 2},
			{Name: "cgroup /pod memory.events oom_kill", Group: "cgroup /pod", Limit: ledger.GiB, Reached: 1, Kills: 2},
			{Name: "/proc/vmstat oom_kill", Group: "the host", Kills: 4},
		}},
		"version 1": {map[string]string{
			"proc/self/cgroup": "4:memory:/job\n", "proc/self/mountinfo": v1,
			"sys/fs/cgroup/memory/job/memory.oom_control":    "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
			"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824\n",
			"sys/fs/cgroup/memory/job/memory.failcnt":        "77\n",
			"sys/fs/cgroup/memory/memory.oom_control":        "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
		}, []host.MemoryCounter{
			{Name: "cgroup /job memory.oom_control oom_kill", Group: "cgroup /job", Limit: ledger.GiB, Reached: 77,
				Kills: 5},
			{Name: "cgroup / memory.oom_control oom_kill", Group: "cgroup /"},
		}},
		"nothing": {nil, nil},
	} {
		root := fstest.MapFS{}
		for file, text := range test.files {
			root[file] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := host.MemoryCounters(root); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %+v, want %+v", name, got, test.want)
		}
	}
}
