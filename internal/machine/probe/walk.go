//go:build linux

package probe

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// A walk is a reading for which the kernel visits every page that a process maps: smaps_rollup, smaps or numa_maps.
// Its cost grows with the process. Walks share a budget, and each is made as often as that allows.
type walk int

const (
	rollupWalk walk = iota
	mappingsWalk
	nodesWalk
	walkKinds
)

// file is the name in /proc/PID, and period the time between two walks of a process where the budget allows more.
func (w walk) file() string          { return [...]string{"smaps_rollup", "smaps", "numa_maps"}[w] }
func (w walk) period() time.Duration { return [...]time.Duration{1, 10, 10}[w] * time.Second }

// memory is what the sampler remembers of a process between samples.
type memory struct {
	limitsRead           time.Time
	addressSpace, locked ledger.Bytes

	last   [walkKinds]time.Time // when each walk was made
	factor [walkKinds]float64   // what it cost, to what was expected; 0 before the first
	rollup rollup
	// sharedSwap is shared memory that is swapped out: /proc/PID/status leaves it out.
	sharedSwap ledger.Bytes
	readAt     time.Time // of rollup; zero if there is none

	mappings []samples.Mapping // nil but in the sample that follows the walk
	nodes    []samples.NUMANode
	mapsCost samples.MappingCost
}

// walks makes walks in a goroutine of its own: the kernel lets a reader wait while a process frees hundreds of
// gigabytes, or for as long as it hangs.
type walks struct {
	budget
	jobs    chan job
	results chan result
	pending *job // that has not ended
}

// job is a walk of a process.
type job struct {
	Identity
	walk
	began    time.Time
	expected time.Duration
}

// result is what a walk has found.
type result struct {
	job
	err       error
	wall, cpu time.Duration
	rollup    rollup
	mappings  []samples.Mapping
	nodes     []samples.NUMANode
}

func newWalks(root fs.FS, clock clock) walks {
	w := walks{
		budget: budget{share: walkShare, most: longestWalk, credit: firstWalks},
		jobs:   make(chan job), results: make(chan result, 1), // so that the goroutine ends after Close
	}
	go func(jobs <-chan job, results chan<- result) {
		runtime.LockOSThread() // for the CPU time; the thread ends with the goroutine
		for job := range jobs {
			cpu := clock.cpu()
			r := result{job: job}
			r.err = r.read(root)
			r.wall, r.cpu = clock.now().Sub(job.began), clock.cpu()-cpu
			results <- r
		}
	}(w.jobs, w.results)
	return w
}

func (w *walks) close() { close(w.jobs) }

func (r *result) read(root fs.FS) error {
	return read(root, procFile(r.PID, r.file()), func(file io.Reader) error {
		switch r.walk {
		case rollupWalk:
			text, err := io.ReadAll(file)
			if err == nil {
				r.rollup, err = parseRollup(string(text))
			}
			return err
		case mappingsWalk:
			table, shared := mappingTable{}, sharedDevices(root)
			err := eachArea(file, func(a area) { table.add(a, shared) })
			r.mappings = table.list()
			return err
		default:
			nodes, err := parseNUMAMaps(file)
			for _, node := range slices.Sorted(maps.Keys(nodes)) {
				r.nodes = append(r.nodes, samples.NUMANode{Node: node, Bytes: nodes[node]})
			}
			return err
		}
	})
}

// sharedDevices returns the devices of the tmpfs that are mounted here: mappings of their files are shared memory.
func sharedDevices(root fs.FS) map[string]bool {
	devices := map[string]bool{}
	text, _ := fs.ReadFile(root, "proc/self/mountinfo") // without it, names alone tell
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); len(fields) > 2 && strings.HasPrefix(after, "tmpfs ") {
			var major, minor int
			if n, _ := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); n == 2 {
				devices[fmt.Sprintf("%02x:%02x", major, minor)] = true // as smaps shows it
			}
		}
	}
	return devices
}

// walk makes the walks that are due and within the budget, and returns their CPU time.
func (s *Sampler) walk(processes []samples.Process) (cost time.Duration) {
	patient := time.NewTimer(patience)
	defer patient.Stop()
	var refused [walkKinds]refusal
	for {
		if s.walks.pending == nil {
			next, ok := s.nextWalk(processes, &refused)
			if !ok {
				break
			}
			s.walks.pending = &next
			s.walks.jobs <- next
		}
		select {
		case r := <-s.walks.results:
			s.walks.pending = nil
			s.walks.spend(r.cpu)
			cost += r.cpu
			s.apply(r, processes)
			continue
		case <-patient.C:
			pending := s.walks.pending
			if waited := s.clock.now().Sub(pending.began); waited > 2*longestWalk {
				s.miss("/proc/%d/%s has been read for %v: the process is changing its memory, or it hangs",
					pending.PID, pending.file(), waited.Round(time.Second))
			}
		}
		break
	}
	for w, r := range refused {
		if r.count > 0 {
			s.miss("/proc/PID/%s of %d processes is not read: it would keep a process from mapping memory for %v",
				walk(w).file(), r.count, r.longest.Round(100*time.Millisecond))
		}
	}
	return cost
}

// refusal counts the walks of a kind that would take too long.
type refusal struct {
	count   int
	longest time.Duration
}

// nextWalk returns the walk that has been due for longest, measured by its period, if the budget affords it. A cheap
// one never goes before it: it would be paid from the same credit, and the expensive one would never be made.
func (s *Sampler) nextWalk(processes []samples.Process, refused *[walkKinds]refusal) (job, bool) {
	now := s.clock.now()
	*refused = [walkKinds]refusal{}
	var best job
	bestDue, found := 0.0, false
	for _, p := range processes {
		m := s.members[Identity{p.PID, p.StartTime}]
		for w := range walkKinds {
			due := float64(now.Sub(m.last[w])) / float64(w.period())
			if due < 1 {
				continue
			}
			expected := s.expected(&p, m, w)
			switch {
			case expected > longestWalk:
				refused[w].count++
				refused[w].longest = max(refused[w].longest, expected)
			case !found || cmp.Or(-cmp.Compare(due, bestDue), cmp.Compare(w, best.walk),
				cmp.Compare(expected, best.expected)) < 0:
				best, bestDue, found = job{m.Identity, w, now, expected}, due, true
			}
		}
	}
	return best, found && s.walks.affords(now, best.expected)
}

// What a walk takes at first sight, as measured (docs/watch.md). How a process really compares is learned.
const (
	walkStart    = 20 * time.Microsecond
	walkBasePage = 22 * time.Nanosecond
	walkHugePage = 80 * time.Nanosecond
	hugePage     = 2 * ledger.MiB
)

// expected returns the CPU time that a walk will take. How much of a process is on huge pages is known after the walk
// only; until then the share on the whole host stands for it.
func (s *Sampler) expected(p *samples.Process, m *member, w walk) time.Duration {
	base := s.firstSight(p)
	if m.factor[w] > 0 {
		base = time.Duration(float64(base) * m.factor[w])
	}
	return base
}

func (s *Sampler) firstSight(p *samples.Process) time.Duration {
	huge := float64(p.Resident.Hugetlb)
	for _, kind := range []struct {
		resident   ledger.Bytes
		huge, from string
	}{
		{p.Resident.Anonymous, "AnonHugePages", "AnonPages"},
		{p.Resident.Shared, "ShmemHugePages", "Shmem"},
	} {
		if all := s.meminfo[kind.from]; all > 0 {
			huge += float64(kind.resident) * min(1, float64(s.meminfo[kind.huge])/float64(all))
		}
	}
	base := max(0, float64(p.Resident.Sum())-huge)
	return walkStart + time.Duration(base/float64(os.Getpagesize())*float64(walkBasePage)+
		huge/float64(hugePage)*float64(walkHugePage))
}

// apply takes in what a walk has found. A process that has ended meanwhile is forgotten at the next sample.
func (s *Sampler) apply(r result, processes []samples.Process) {
	i := slices.IndexFunc(processes, func(p samples.Process) bool {
		return Identity{p.PID, p.StartTime} == r.Identity
	})
	m := s.members[r.Identity]
	if i < 0 || m == nil {
		return
	}
	now := s.clock.now()
	m.last[r.walk] = now
	m.factor[r.walk] = min(20, max(0.05, float64(r.cpu)/float64(s.firstSight(&processes[i]))))
	var failed *fs.PathError
	switch {
	case r.err == nil:
	case errors.Is(r.err, errNoMemory), hasGone(r.err):
		return
	case errors.Is(r.err, fs.ErrPermission):
		m.last[r.walk] = now.Add(settledPeriod) // saying so once in a while is enough
		s.miss("/proc/%d/%s: permission denied: only the user of the process, and root, may read it", r.PID, r.file())
		return
	case errors.As(r.err, &failed):
		s.miss("/proc/%d/%s: %v", r.PID, r.file(), failed.Err)
		return
	default:
		s.miss("%v", r.err)
		return
	}
	switch r.walk {
	case rollupWalk:
		m.rollup, m.readAt = r.rollup, now
		m.sharedSwap = max(0, r.rollup.swap-processes[i].Swap)
	case mappingsWalk:
		m.mappings, m.mapsCost = r.mappings, samples.MappingCost{Wall: r.wall, CPU: r.cpu}
	default:
		m.nodes = r.nodes
	}
}

// complete adds what walks have found to the processes.
func (s *Sampler) complete(processes []samples.Process) {
	now := s.clock.now()
	for i := range processes {
		p := &processes[i]
		m := s.members[Identity{p.PID, p.StartTime}]
		p.ProportionalAge = -1
		if !m.readAt.IsZero() {
			p.ProportionalAge = now.Sub(m.readAt)
			p.Proportional, p.Huge = m.rollup.proportional, m.rollup.huge
			p.Swap += m.sharedSwap
		}
		p.Mappings, p.NUMANodes, p.MapsCost = m.mappings, m.nodes, m.mapsCost
		m.mappings, m.nodes, m.mapsCost = nil, nil, samples.MappingCost{}
	}
}
