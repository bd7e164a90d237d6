package host

import (
	"io/fs"
	"path"
)

// OOMKills is how many processes the kernel has killed for want of memory.
type OOMKills struct {
	Name  string // of the counter
	Count int64
}

// ReadOOMKills reads the counters of this process's cgroups, the nearest
// first, and then that of the host.
func ReadOOMKills(root fs.FS) []OOMKills {
	t := tree{root}
	var kills []OOMKills
	add := func(name, file string) {
		if count, ok := parseFields(t.text(file))["oom_kill"]; ok {
			kills = append(kills, OOMKills{name, count})
		}
	}
	for _, l := range t.controlGroups().levels("memory") {
		for _, file := range []string{"memory.events", "memory.oom_control"} {
			add(l.name+" "+file, path.Join(l.directory, file))
		}
	}
	add("the host, in /proc/vmstat,", "proc/vmstat")
	return kills
}
