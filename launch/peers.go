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

// Peer is a rank of this host.
type Peer struct {
	Mask        cpuset.CPUSet // its affinity mask
	Environment Environment   // what it was started with
}

// Peers are all ranks of this host, in their order, as the kernel has them; nil
// where they cannot be found.
//
// Launchers other than Slurm do not say what they gave to whom, but each rank
// is a process of plimsoll below the same launcher. All are waited for: ranks
// that divide the same masks get parts that are disjoint.
func Peers(p *Placement, environment Environment) []Peer {
	local := localVariable(p, environment)
	if local == "" || p.LocalWorldSize < 2 {
		return nil
	}
	above, _ := launcherOf(os.Getpid(), local)
	for begin := time.Now(); time.Since(begin) < peerPatience; time.Sleep(20 * time.Millisecond) {
		found := peersBelow(above, local)
		peers := []Peer{}
		for rank := range p.LocalWorldSize {
			if peer, ok := found[rank]; ok {
				peers = append(peers, peer)
			}
		}
		if len(peers) == p.LocalWorldSize {
			return peers
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
	if text, err := files.ReadKernel("/proc/" + strconv.Itoa(launcher) + "/environ"); err != nil || len(text) == 0 {
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

// peersBelow finds the processes of this program below a launcher, by local rank. Of several for a rank the nearest to the launcher counts: what
// is below it may be bound already.
func peersBelow(launcher int, local string) map[int]Peer {
	peers, nearest := map[int]Peer{}, map[int]int{}
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
			peers[rank], nearest[rank] = Peer{mask, environmentOf(pid)}, steps
		}
	}
	return peers
}

// variableOf is a variable of the environment that a process was started with;
// empty where that may not be read.
func variableOf(pid int, name string) string {
	value, _ := environmentOf(pid)(name)
	return value
}

// environmentOf is the environment that a process was started with, as far as it
// may be read.
func environmentOf(pid int) Environment {
	text, _ := files.ReadKernel("/proc/" + strconv.Itoa(pid) + "/environ")
	return func(name string) (string, bool) {
		for entry := range strings.SplitSeq(string(text), "\x00") {
			if value, ok := strings.CutPrefix(entry, name+"="); ok {
				return value, true
			}
		}
		return "", false
	}
}
