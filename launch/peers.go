package launch

import (
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/files"
	"plimsoll/host"
)

// peerPatience is how long the other ranks of this host are waited for:
// launchers start all of them at about the same time.
const peerPatience = 5 * time.Second

// PeerMasks are the affinity masks of all ranks of this host, in their order,
// as the kernel has them; nil where they cannot be found.
//
// Launchers other than Slurm do not say what they gave to whom, but each rank
// is a process of plimsoll below the same launcher. All are waited for: ranks
// that divide the same masks get parts that are disjoint.
func PeerMasks(p *Placement, environment Environment) []cpuset.CPUSet {
	local := localVariable(p, environment)
	if local == "" || p.LocalWorldSize < 2 {
		return nil
	}
	above, _ := launcherOf(os.Getpid(), local)
	for begin := time.Now(); time.Since(begin) < peerPatience; time.Sleep(20 * time.Millisecond) {
		found := masksBelow(above, local)
		masks := []cpuset.CPUSet{}
		for rank := range p.LocalWorldSize {
			if mask, ok := found[rank]; ok {
				masks = append(masks, mask)
			}
		}
		if len(masks) == p.LocalWorldSize {
			return masks
		}
	}
	return nil
}

// localVariable is the name of the variable by which the launcher numbers the
// ranks of a host; empty where it has none.
func localVariable(p *Placement, environment Environment) string {
	for _, l := range launchers {
		if l.name == p.Launcher && l.local != "" && has(l.local)(environment) {
			return l.local
		}
	}
	return ""
}

// LauncherVariable is a variable of the environment that the launcher itself was
// started with, empty where it was not set; false where that cannot be read.
func LauncherVariable(p *Placement, name string, environment Environment) (value string, known bool) {
	local := localVariable(p, environment)
	if local == "" {
		return "", false
	}
	launcher, _ := launcherOf(os.Getpid(), local)
	if text, err := os.ReadFile("/proc/" + strconv.Itoa(launcher) + "/environ"); err != nil || len(text) == 0 {
		return "", false
	}
	return variableOf(launcher, name), true
}

// launcherOf is the nearest ancestor of a process that has no rank itself, and
// how far above it is.
func launcherOf(pid int, local string) (launcher, steps int) {
	for pid > 1 {
		if pid = statOf(pid, parentField); pid < 0 {
			return 0, 0
		}
		steps++
		if variableOf(pid, local) == "" {
			break
		}
	}
	return pid, steps
}

// masksBelow reads the masks of the processes of this program below a launcher,
// by local rank. Of several for a rank the nearest to the launcher counts: what
// is below it may be bound already.
func masksBelow(launcher int, local string) map[int]cpuset.CPUSet {
	masks, nearest := map[int]cpuset.CPUSet{}, map[int]int{}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		program, err := os.Stat("/proc/" + entry.Name() + "/exe")
		if err != nil || !os.SameFile(self, program) {
			continue
		}
		rank, err := strconv.Atoi(variableOf(pid, local))
		if err != nil {
			continue
		}
		above, steps := launcherOf(pid, local)
		if above != launcher || nearest[rank] > 0 && nearest[rank] <= steps {
			continue
		}
		if mask, err := host.Affinity(pid); err == nil {
			masks[rank], nearest[rank] = mask, steps
		}
	}
	return masks
}

// variableOf is a variable of the environment that a process was started with;
// empty where that may not be read.
func variableOf(pid int, name string) string {
	text, _ := files.ReadKernel("/proc/" + strconv.Itoa(pid) + "/environ")
	for entry := range strings.SplitSeq(string(text), "\x00") {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}
