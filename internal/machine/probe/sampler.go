//go:build linux

package probe

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host"
)

// The shares of a core that readings may take beside the cheap ones of every sample.
const (
	walkShare = 0.004 // to walk the page tables of the job's processes
	passShare = 0.001 // to look for new processes
)

const (
	// longestWalk bounds one walk of page tables. While it goes on, the process cannot map or unmap memory.
	longestWalk = time.Second
	// patience is how long a sample waits for walks. One that takes longer belongs to the next sample.
	patience   = 200 * time.Millisecond
	firstWalks = 100 * time.Millisecond // credit of walks at the start
	passPeriod = time.Second
	// settledPeriod is how often the resource limits and the cgroups of a process are read: they hardly ever change.
	settledPeriod = time.Minute
)

// Sampler samples the processes of a job, their cgroups, the host and the GPUs. It is for one goroutine.
type Sampler struct {
	root    fs.FS
	clock   clock
	devShm  func() samples.FileSystem // nil for a recorded machine
	gpus    *GPUs
	roots   map[int]Root // by PID
	members map[Identity]*member
	meminfo map[string]int64
	missed  []string

	groups     []host.MemoryGroup
	groupsRead time.Time

	pass struct { // over /proc
		budget
		last time.Time
		cost time.Duration
	}
	walks walks
}

// NewSampler returns a sampler of this host. The GPUs may be nil.
func NewSampler(gpus *GPUs) *Sampler {
	s := newSampler(os.DirFS("/"), systemClock{})
	s.devShm, s.gpus = devShm, gpus
	return s
}

func newSampler(root fs.FS, clock clock) *Sampler {
	s := &Sampler{root: root, clock: clock, roots: map[int]Root{}, members: map[Identity]*member{}}
	s.pass.budget = budget{share: passShare, most: longestWalk, credit: firstWalks}
	s.walks = newWalks(root, clock)
	return s
}

// Close ends the sampler. A reading that hangs is left behind.
func (s *Sampler) Close() { s.walks.close() }

// Sample samples the job with these roots. The caller decides how often; a process's numbers in /proc/PID/status are
// of this instant, and those that need a walk of its page tables may be older: see [samples.Process].
func (s *Sampler) Sample(roots []Root) samples.Sample {
	runtime.LockOSThread() // for the CPU time
	defer runtime.UnlockOSThread()
	began := s.clock.cpu()
	s.missed = nil
	s.adopt(roots)
	s.look()
	sample := samples.Sample{Node: s.node(), Processes: s.processes(), Groups: s.readGroups()}
	walked := s.walk(sample.Processes)
	s.complete(sample.Processes)
	sample.GPUs = []samples.GPU{}
	if s.gpus != nil {
		gpus, missed := s.gpus.Read()
		sample.GPUs = append(sample.GPUs, gpus...)
		s.missed = append(s.missed, missed...)
	}
	sample.Missed = s.missed
	sample.Cost = s.clock.cpu() - began + walked
	return sample
}

// look looks for new processes when the budget allows it.
func (s *Sampler) look() {
	now := s.clock.now()
	if now.Sub(s.pass.last) < passPeriod || !s.pass.affords(now, s.pass.cost) {
		return
	}
	began := s.clock.cpu()
	s.discover()
	s.pass.last, s.pass.cost = now, s.clock.cpu()-began
	s.pass.spend(s.pass.cost)
}

// processes reads the cheap numbers of all members, by PID. It forgets members that have ended.
func (s *Sampler) processes() []samples.Process {
	processes := []samples.Process{}
	for id, m := range s.members {
		p, err := s.process(m)
		switch {
		case err == nil:
			processes = append(processes, p)
		case errors.Is(err, errNoMemory) || hasGone(err):
			delete(s.members, id)
		default:
			s.miss("%v", err)
		}
	}
	slices.SortFunc(processes, func(a, b samples.Process) int { return a.PID - b.PID })
	return processes
}

func (s *Sampler) process(m *member) (samples.Process, error) {
	p := samples.Process{PID: m.PID, StartTime: m.StartTime, Rank: m.rank, Role: m.role}
	text, err := fs.ReadFile(s.root, procFile(m.PID, "status"))
	if err != nil {
		return p, err
	}
	if err := setStatus(&p, string(text)); errors.Is(err, errNoKinds) {
		s.miss("/proc/%d/status: %v", m.PID, err)
	} else if err != nil {
		return p, err
	}
	// The start time is read last: if it is still the same, the rest is not of another process either.
	found, err := s.stat(m.PID)
	if err != nil {
		return p, err
	}
	if found.StartTime != m.StartTime {
		return p, errNoMemory
	}
	p.Parent, p.Name, p.CPUTime = found.parent, found.name, found.cpu
	if now := s.clock.now(); m.limitsRead.IsZero() || now.Sub(m.limitsRead) >= settledPeriod {
		m.limitsRead = now
		m.addressSpace, m.locked = parseResourceLimits(s.text(procFile(m.PID, "limits")))
	}
	p.AddressSpaceLimit, p.LockedLimit = m.addressSpace, m.locked
	return p, nil
}

// devShm returns the size of /dev/shm, or 0 if there is no such file system.
func devShm() samples.FileSystem {
	const tmpfs = 0x01021994
	var found unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &found); err != nil || found.Type != tmpfs {
		return samples.FileSystem{}
	}
	block := ledger.Bytes(found.Bsize)
	return samples.FileSystem{
		Size: ledger.Bytes(found.Blocks) * block, Used: ledger.Bytes(found.Blocks-found.Bfree) * block,
	}
}
