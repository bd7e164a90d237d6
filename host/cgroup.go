package host

import (
	"math"
	"path"
	"slices"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/ledger"
)

// controlGroups finds the directories of the cgroups this process is in.
// Controllers may be spread over several hierarchies of version 1 and the one
// of version 2, each with its own path.
type controlGroups struct {
	tree
	members []membership
	mounts  []mount
}

func (t tree) controlGroups() controlGroups {
	groups := controlGroups{
		tree:    t,
		members: parseMemberships(t.text("proc/self/cgroup")),
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

// unifiedMount is where version 2 is mounted by convention.
const unifiedMount = "sys/fs/cgroup"

// guessedMemberships are for hosts without /proc/self/cgroup: sandboxes that
// hide it, and kernels before cgroups, which had cpusets alone. The file for the
// cpuset names the cgroup of version 2, too. Where that is missing as well, the
// mount points are the best guess: in a container they show its own cgroup.
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

// levels are the cgroups of a controller that can be seen, from the one this
// process is in up to the mount point, in every hierarchy that may hold the
// controller. Not every directory need exist: a reader skips what is missing.
//
// The path of a process that was moved out of its cgroup namespace starts with
// "/..". It cannot be followed; the mount point is the closest to be seen.
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
			// The mount may show only a part of the hierarchy: a container's.
			if inside, ok := strings.CutPrefix(below, strings.TrimSuffix(root, "/")); ok && (inside == "" || inside[0] == '/') {
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

// cpuset is the CPU list ("cpus") or node list ("mems") of the nearest cgroup
// that has one that is not empty, and the name of the cgroup. In version 2 only the effective list holds
// what comes from above; in version 1 a list is never wider than its parent's.
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

// quota is the tightest CPU quota of all levels and its name: a cgroup never
// has more than its ancestors.
func (g controlGroups) quota() (float64, string) {
	tightest, name := math.Inf(1), ""
	for _, l := range g.levels("cpu") {
		if quota := parseQuota(g.text(path.Join(l.directory, "cpu.max"))); quota > 0 && quota < tightest {
			tightest, name = quota, l.name+" cpu.max"
		}
		text := g.text(path.Join(l.directory, "cpu.cfs_quota_us")) + " " + g.text(path.Join(l.directory, "cpu.cfs_period_us"))
		if quota := parseQuota(text); quota > 0 && quota < tightest {
			tightest, name = quota, l.name+" cpu.cfs_quota_us"
		}
	}
	if name == "" {
		return 0, ""
	}
	return tightest, name
}

// memoryCounters are the limits a cgroup may have, with the counter that runs
// against each. Past memory.high a process is not killed but stalled, which
// for a training job is the end as well. memory.memsw counts swap too.
var memoryCounters = []struct{ limit, used string }{
	{"memory.max", "memory.current"},
	{"memory.high", "memory.current"},
	{"memory.limit_in_bytes", "memory.usage_in_bytes"},
	{"memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"},
}

// threadLimits are the limits of processes and threads of all levels.
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
			limit, ok := parseLimit(g.text(path.Join(l.directory, counter.limit)))
			if !ok {
				continue
			}
			used, _ := parseLimit(g.text(path.Join(l.directory, counter.used)))
			stat := parseFields(g.text(path.Join(l.directory, "memory.stat")))
			cache, ok := stat["total_inactive_file"] // version 1: with the cgroups below
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
