package host

import (
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
)

// controlGroups finds the directories of the cgroups that a process is in. The controllers may be spread over the
// one hierarchy of version 2 and several of version 1, each with its own path.
type controlGroups struct {
	tree
	members []membership
	mounts  []mount
}

func (t tree) controlGroups() controlGroups { return t.controlGroupsOf("self") }

func (t tree) controlGroupsOf(pid string) controlGroups {
	groups := controlGroups{
		tree:    t,
		members: parseMemberships(t.text(path.Join("proc", pid, "cgroup"))),
		mounts:  parseMountInfo(t.text("proc/self/mountinfo")),
	}
	if len(groups.mounts) == 0 {
		groups.mounts = parseMounts(t.text("proc/mounts"))
	}
	if len(groups.mounts) == 0 && t.text(path.Join(unifiedMount, "cgroup.controllers")) != "" {
		groups.mounts = []mount{{root: "/", point: "/" + unifiedMount, kind: "cgroup2"}}
	}
	if len(groups.members) == 0 {
		groups.members = t.guessedMemberships(groups.mounts)
	}
	return groups
}

// unifiedMount is the conventional mount point of version 2.
const unifiedMount = "sys/fs/cgroup"

// guessedMemberships guesses the cgroups on a host without /proc/self/cgroup: a sandbox that hides the file, or a
// kernel before cgroups, which had only cpusets. /proc/self/cpuset names the cgroup of version 2, too. Where that
// file is missing as well, the mount points are the best guess: in a container they show its own cgroup.
func (t tree) guessedMemberships(mounts []mount) []membership {
	group := t.text("proc/self/cpuset")
	if group == "" {
		group = "/"
	}
	guessed := []membership{{path: group}, {controllers: []string{"cpuset"}, path: group}}
	for _, m := range mounts {
		if m.kind == "cgroup" && !slices.Contains(m.options, "cpuset") {
			guessed = append(guessed, membership{controllers: m.options, path: "/"})
		}
	}
	return guessed
}

// level is one cgroup: the directory to read and the name to report.
type level struct{ directory, name string }

// levels returns the visible cgroups of a controller, from the one that this process is in up to the mount point. It
// covers every hierarchy that may hold the controller. Some of the directories may not exist; readers skip them.
//
// The path of a process that was moved out of its cgroup namespace starts with "/..". Such a path cannot be followed;
// the mount point is the closest visible cgroup.
func (g controlGroups) levels(controller string) []level {
	levels := []level{}
	for _, member := range g.members {
		unified := len(member.controllers) == 0
		if !unified && !slices.Contains(member.controllers, controller) {
			continue
		}
		for _, m := range g.mounts {
			switch {
			case unified && m.kind == "cgroup2":
			case !unified && m.kind == "cgroup" && slices.Contains(m.options, controller):
			case !unified && m.kind == controller: // a cpuset file system
			default:
				continue
			}
			root := path.Clean("/" + m.root)
			below := path.Clean("/" + member.path)
			// The mount may show only a part of the hierarchy, as in a container.
			if inside, ok := strings.CutPrefix(below, strings.TrimSuffix(root, "/")); ok &&
				(inside == "" || inside[0] == '/') {
				below = path.Clean("/" + inside)
			}
			for ; ; below = path.Dir(below) {
				levels = append(levels, level{
					directory: strings.TrimPrefix(path.Join(m.point, below), "/"),
					name:      "cgroup " + path.Join(root, below),
				})
				if below == "/" {
					break
				}
			}
			break // a second mount of the hierarchy shows nothing new
		}
	}
	return levels
}

// MemoryGroup is a cgroup with a memory controller: its name, and the directory with its files.
type MemoryGroup struct{ Name, Directory string }

// MemoryGroups returns the visible cgroups that account for the memory of a process, the innermost first. The root of
// version 2 has no counters, so it is not among them.
func MemoryGroups(root fs.FS, pid int) []MemoryGroup {
	t := tree{root}
	groups := []MemoryGroup{}
	for _, l := range t.controlGroupsOf(strconv.Itoa(pid)).levels("memory") {
		if t.text(path.Join(l.directory, "memory.current")) != "" ||
			t.text(path.Join(l.directory, "memory.usage_in_bytes")) != "" {
			groups = append(groups, MemoryGroup{Name: l.name, Directory: l.directory})
		}
	}
	return groups
}

// cpuset returns the CPU list ("cpus") or node list ("mems") of the nearest cgroup with a non-empty list, and the
// name of that cgroup. In version 2 only the effective list includes the restrictions of the ancestors. In version 1
// a list is never wider than its parent's.
func (g controlGroups) cpuset(which string) (cpuset.CPUSet, string) {
	names := []string{"cpuset." + which + ".effective", "cpuset." + which, which}
	for _, l := range g.levels("cpuset") {
		for _, name := range names {
			if set, err := ParseList(g.text(path.Join(l.directory, name))); err == nil && !set.IsEmpty() {
				return set, l.name
			}
		}
	}
	return cpuset.New(), ""
}

// quota returns the tightest CPU quota of all levels and its name. A cgroup never has more than its ancestors.
func (g controlGroups) quota() (float64, string) {
	tightest, name := math.Inf(1), ""
	for _, l := range g.levels("cpu") {
		if quota := parseQuota(g.text(path.Join(l.directory, "cpu.max"))); quota > 0 && quota < tightest {
			tightest, name = quota, l.name+" cpu.max"
		}
		text := g.text(path.Join(l.directory, "cpu.cfs_quota_us")) + " " +
			g.text(path.Join(l.directory, "cpu.cfs_period_us"))
		if quota := parseQuota(text); quota > 0 && quota < tightest {
			tightest, name = quota, l.name+" cpu.cfs_quota_us"
		}
	}
	if name == "" {
		return 0, ""
	}
	return tightest, name
}

// memoryCounters are the limits that a cgroup may have, with the counter that runs against each. The kernel does not
// kill a process beyond memory.high but stalls it, which ends a training job as well. memory.memsw counts swap, too.
var memoryCounters = []struct{ limit, used string }{
	{"memory.max", "memory.current"},
	{"memory.high", "memory.current"},
	{"memory.limit_in_bytes", "memory.usage_in_bytes"},
	{"memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"},
}

// threadLimits returns the limits of processes and threads of all levels.
func (g controlGroups) threadLimits() []ThreadLimit {
	limits := []ThreadLimit{}
	for _, l := range g.levels("pids") {
		limit, limited := g.number(path.Join(l.directory, "pids.max"))
		used, _ := g.number(path.Join(l.directory, "pids.current"))
		if limited {
			limits = append(limits, ThreadLimit{Name: l.name + " pids.max", Limit: limit, Used: used})
		}
	}
	return limits
}

func (g controlGroups) memoryLimits() []Limit {
	limits := []Limit{}
	for _, l := range g.levels("memory") {
		for _, counter := range memoryCounters {
			limit, ok := ParseLimit(g.text(path.Join(l.directory, counter.limit)))
			if !ok {
				continue
			}
			used, _ := ParseLimit(g.text(path.Join(l.directory, counter.used)))
			stat := ParseFields(g.text(path.Join(l.directory, "memory.stat")))
			cache, ok := stat["total_inactive_file"] // version 1; includes the cgroups below
			if !ok {
				cache = stat["inactive_file"]
			}
			limits = append(limits, Limit{
				Name:  l.name + " " + counter.limit,
				Limit: limit,
				Used:  max(0, used-ledger.Bytes(cache)),
			})
		}
	}
	return limits
}
