package host

import (
	"io/fs"
	"path"

	"plimsoll/ledger"
)

// MemoryCounter counts what the kernel did for want of memory in one cgroup,
// or on the whole host.
type MemoryCounter struct {
	Name    string       // "cgroup /a/b memory.events oom_kill"
	Group   string       // "cgroup /a/b"
	Limit   ledger.Bytes // 0 for none
	Reached int64        // how often the limit was in the way
	Kills   int64        // processes that the kernel ended
}

// MemoryCounters reads the counters of every cgroup that this process is in,
// the innermost first, and then those of the host.
func MemoryCounters(root fs.FS) []MemoryCounter {
	t := tree{root}
	counters := []MemoryCounter{}
	for _, l := range t.controlGroups().levels("memory") {
		counter := MemoryCounter{Group: l.name}
		read := func(name string) map[string]int64 { return parseFields(t.text(path.Join(l.directory, name))) }
		limit := func(name string) ledger.Bytes {
			if limit, ok := parseLimit(t.text(path.Join(l.directory, name))); ok {
				return limit
			}
			return 0
		}
		if events := read("memory.events"); len(events) > 0 {
			counter.Name, counter.Kills = l.name+" memory.events oom_kill", events["oom_kill"]
			counter.Reached = events["oom"]
			if local := read("memory.events.local"); len(local) > 0 {
				counter.Reached = local["oom"] // without the groups below
			}
			counter.Limit = limit("memory.max")
		} else if control := read("memory.oom_control"); len(control) > 0 {
			counter.Name, counter.Kills = l.name+" memory.oom_control oom_kill", control["oom_kill"]
			counter.Reached, _ = t.number(path.Join(l.directory, "memory.failcnt"))
			counter.Limit = limit("memory.limit_in_bytes")
		} else {
			continue
		}
		counters = append(counters, counter)
	}
	if events := parseFields(t.text("proc/vmstat")); len(events) > 0 {
		counters = append(counters, MemoryCounter{Name: "/proc/vmstat oom_kill", Group: "the host", Kills: events["oom_kill"]})
	}
	return counters
}
