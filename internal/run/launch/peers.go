//go:build linux

package launch

import (
	"os"
	"slices"
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
	s := newPeerSearch(p, environment)
	if s.local == "" || p.LocalWorldSize < 2 {
		return nil
	}
	for begin := time.Now(); time.Since(begin) < peerPatience; time.Sleep(20 * time.Millisecond) {
		if peers := s.look(); peers != nil {
			return peers
		}
	}
	return nil
}

// peerSearch looks for the ranks of this host.
type peerSearch struct {
	local string // the variable with a rank's number on its host; "" if the launcher has none
	// ofJob are variables with the same values in all ranks of a job. At least one of them has
	// another in another job that the same script started.
	ofJob       []string
	environment Environment
	found       []*Peer // by local rank
}

func newPeerSearch(p *Placement, environment Environment) *peerSearch {
	s := &peerSearch{environment: environment, found: make([]*Peer, p.LocalWorldSize)}
	for _, l := range launchers {
		if l.name == p.Launcher && l.local != "" && has(l.local)(environment) {
			s.local, s.ofJob = l.local, []string{l.world, l.localWorld, "MASTER_PORT"}
			break
		}
	}
	return s
}

// look returns all ranks if none is missing any more. A rank that has ended since an
// earlier look counts as it was then.
func (s *peerSearch) look() []Peer {
	for rank, peer := range s.peersBelow(s.launcher()) {
		s.found[rank] = &peer
	}
	peers := []Peer{}
	for _, peer := range s.found {
		if peer == nil {
			return nil
		}
		peers = append(peers, *peer)
	}
	return peers
}

// isOfJob reports whether a process with an environment belongs to the job of this one.
func (s *peerSearch) isOfJob(peer Environment) bool {
	return !slices.ContainsFunc(s.ofJob, func(name string) bool {
		own, inOwn := s.environment(name)
		value, inPeer := peer(name)
		return own != value || inOwn != inPeer
	})
}

// LauncherVariable returns a variable of the environment that the launcher itself was
// started with, "" if it was not set. known is false if the environment cannot be read.
func LauncherVariable(p *Placement, name string, environment Environment) (value string, known bool) {
	s := newPeerSearch(p, environment)
	if s.local == "" {
		return "", false
	}
	launcher := s.launcher()
	if text, err := files.ReadKernel("/proc/" + strconv.Itoa(launcher) + "/environ"); err != nil || len(text) == 0 {
		return "", false
	}
	return variableOf(launcher, name), true
}

// Processes that launcherOf returns where there is none of that number.
const (
	noLauncher = -1 // the process has ended
	outside    = 0  // the launcher is in another namespace of processes, and its ranks have this parent
)

// launcher returns the launcher of this process. It may end before its ranks do, and
// they get another parent.
func (s *peerSearch) launcher() int {
	launcher, _ := s.launcherOf(os.Getpid())
	return launcher
}

// launcherOf returns the nearest ancestor of a process that is no rank itself, and how
// many steps above it is.
func (s *peerSearch) launcherOf(pid int) (launcher, steps int) {
	for pid > outside {
		pid = statOf(pid, parentField)
		steps++
		if pid > outside && variableOf(pid, s.local) == "" {
			break
		}
	}
	return pid, steps
}

// peersBelow returns the processes of this program below a launcher that belong to this
// job, by local rank. If a rank has several, the one nearest to the launcher counts:
// those below it may be bound already.
func (s *peerSearch) peersBelow(launcher int) map[int]Peer {
	peers, nearest := map[int]Peer{}, map[int]int{}
	self, err := os.Stat("/proc/self/exe")
	if err != nil || launcher == noLauncher {
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
		environment := environmentOf(pid)
		text, _ := environment(s.local)
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 || rank >= len(s.found) || !s.isOfJob(environment) {
			continue
		}
		above, steps := s.launcherOf(pid)
		if above != launcher || nearest[rank] > 0 && nearest[rank] <= steps {
			continue
		}
		if mask := givenMask(pid); !mask.IsEmpty() {
			peers[rank], nearest[rank] = Peer{mask, environment}, steps
		}
	}
	return peers
}

// givenMask returns the CPUs that a process of this program was given, or none if it has
// ended. Its main thread may have fewer by now: see [bindThreads].
func givenMask(pid int) cpuset.CPUSet {
	given := cpuset.New()
	threads, _ := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			continue
		}
		if mask, err := host.Affinity(id); err == nil {
			given = given.Union(mask)
		}
	}
	return given
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
