//go:build linux

package launch

import (
	"strings"
	"testing"

	"plimsoll/internal/machine/host"
)

func TestExplain(t *testing.T) {
	inner := host.MemoryCounter{Name: "cgroup /a/b memory.events oom_kill", Group: "cgroup /a/b"}
	outer := host.MemoryCounter{Name: "cgroup /a memory.events oom_kill", Group: "cgroup /a", Limit: 1 << 30}
	machine := host.MemoryCounter{Name: "/proc/vmstat oom_kill", Group: "the host", Kills: 3}
	before := []host.MemoryCounter{inner, outer, machine}
	killed := func(c host.MemoryCounter, reached int64) host.MemoryCounter {
		c.Kills, c.Reached = c.Kills+1, reached
		return c
	}
	for _, test := range []struct {
		code  int
		after []host.MemoryCounter
		want  string
	}{
		{137, before, "the kernel's OOM killer counted no kill"},
		{137, []host.MemoryCounter{killed(inner, 0), killed(outer, 1), killed(machine, 0)},
			"(cgroup /a/b memory.events oom_kill counted 1 more kills); the limit of 1.00 GiB of " +
				"cgroup /a was reached"},
		{137, []host.MemoryCounter{inner, outer, killed(machine, 0)},
			"(/proc/vmstat oom_kill counted 1 more kills); no limit"},
		{137, nil, "shows no counter"},
		{139, before, "segmentation fault"},
		{135, before, "/dev/shm"},
	} {
		if got := explain(test.code, true, before, test.after); !strings.Contains(got, test.want) {
			t.Errorf("%d: got %q, want %q", test.code, got, test.want)
		}
	}
	if got := explain(137, false, before, before); !strings.Contains(got, "the program returned it itself") {
		t.Errorf("the program's own 137: got %q", got)
	}
	if got := explain(1, false, before, before); got != "" {
		t.Errorf("1 is explained: %q", got)
	}
}
