package host

import (
	"fmt"
	"io/fs"
	"os"
	"path"

	"plimsoll/internal/base/ledger"
)

// MemoryCounter counts what the kernel did when memory ran out in one cgroup or on the whole host.
type MemoryCounter struct {
	Name    string       // "cgroup /a/b memory.events oom_kill"
	Group   string       // "cgroup /a/b"
	Limit   ledger.Bytes // 0 for none
	Reached int64        // how often the limit was reached
	Kills   int64        // processes that the kernel killed
}

// LocalMemoryCounters returns the counters of the host that this process runs on.
func LocalMemoryCounters() []MemoryCounter { return MemoryCounters(os.DirFS("/")) }

// MemoryCounters reads the counters of every cgroup that this process is in, innermost first, and then the counters
// of the host.
func MemoryCounters(root fs.FS) []MemoryCounter {
	t := tree{root}
	counters := []MemoryCounter{}
	for _, l := range t.controlGroups().levels("memory") {
		counter := MemoryCounter{Group: l.name}
		read := func(name string) map[string]int64 { return ParseFields(t.text(path.Join(l.directory, name))) }
		limit := func(name string) ledger.Bytes {
			if limit, ok := ParseLimit(t.text(path.Join(l.directory, name))); ok {
				return limit
			}
			return 0
		}
		if events := read("memory.events"); len(events) > 0 {
			counter.Name, counter.Kills = l.name+" memory.events oom_kill", events["oom_kill"]
			counter.Reached = events["oom"]
			if local := read("memory.events.local"); len(local) > 0 {
				counter.Reached = local["oom"] // without the cgroups below
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
	if events := ParseFields(t.text("proc/vmstat")); len(events) > 0 {
		counters = append(counters, MemoryCounter{Name: "/proc/vmstat oom_kill", Group: "the host",
			Kills: events["oom_kill"]})
	}
	return counters
}

// KillsBehind says that the kernel has killed a process between two readings although the job ended with 0, or returns
// "". A shell's pipeline has the exit code of its last command.
func KillsBehind(before, after []MemoryCounter) string {
	known := map[string]int64{}
	for _, counter := range before {
		known[counter.Name] = counter.Kills
	}
	for _, counter := range after { // the innermost cgroup first, the host last
		if kills := counter.Kills - known[counter.Name]; kills > 0 {
			return fmt.Sprintf("the job ended with exit code 0, but the kernel's OOM killer killed a process of %s "+
				"meanwhile (%s counted %d more); a shell's pipeline hides the end of its first command: "+
				"set -o pipefail shows it", counter.Group, counter.Name, kills)
		}
	}
	return ""
}

// ExplainKill reports whether the kernel killed a process with SIGKILL between two readings, and names the limit that
// was reached. The limit may belong to another cgroup than the killed process.
func ExplainKill(before, after []MemoryCounter) string {
	known := map[string]MemoryCounter{}
	for _, counter := range before {
		known[counter.Name] = counter
	}
	kills, limit := "", "no limit visible here was reached, so the host was out of memory, or the "+
		"NUMA nodes that the job may use were"
	for i := range after { // outermost first, so that the innermost cgroup wins
		counter := after[len(after)-1-i]
		was := known[counter.Name]
		if counter.Kills > was.Kills {
			kills = fmt.Sprintf("%s counted %d more kills", counter.Name, counter.Kills-was.Kills)
		}
		if counter.Limit > 0 && counter.Reached > was.Reached {
			limit = fmt.Sprintf("the limit of %v of %s was reached", counter.Limit, counter.Group)
		}
	}
	switch {
	case len(after) == 0:
		return "killed by SIGKILL, often by the kernel's OOM killer; this host shows no counter of its kills"
	case kills == "":
		return "killed by SIGKILL, and the kernel's OOM killer counted no kill: a batch system or a person sent it"
	}
	return fmt.Sprintf("the kernel's OOM killer killed it (%s); %s", kills, limit)
}
