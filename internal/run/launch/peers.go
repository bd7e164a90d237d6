//go:build linux

package launch

import (
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/files"
	"plimsoll/internal/machine/host"
)

// peerPatience is how long to wait for the other ranks of this host. Launchers start
// all of them at about the same time.
const peerPatience = 5 * time.Second

// Peer is a rank of this host.
type Peer struct {
	Mask        cpuset.CPUSet // its affinity mask
	Environment Environment   // its environment at the start
}

// Peers returns all ranks of this host in order, as the kernel has them, or nil if they
// cannot be found.
//
// Launchers other than Slurm do not say which CPUs they gave to which rank. But each
// rank is a process of plimsoll below the same launcher. Peers waits for all of them:
// ranks that divide the same masks get disjoint parts.
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

// localVariable returns the name of the variable with a rank's number on its host, or
// "" if the launcher has none.
func localVariable(p *Placement, environment Environment) string {
	for _, l := range launchers {
		if l.name == p.Launcher && l.local != "" && has(l.local)(environment) {
			return l.local
		}
	}
	return ""
}

// LauncherVariable returns a variable of the environment that the launcher itself was
// started with, "" if it was not set. known is false if the environment cannot be read.
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

// launcherOf returns the nearest ancestor of a process that is no rank itself, and how
// many steps above it is.
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

// peersBelow returns the processes of this program below a launcher, by local rank. If
// a rank has several, the one nearest to the launcher counts: those below it may be
// bound already.
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

// environmentOf returns the environment that a process was started with, as far as it
// can be read.
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
