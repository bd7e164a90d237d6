//go:build linux

package probe

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host/hosttest"
)

// fakeClock is a clock that tests set.
type fakeClock struct {
	mu       sync.Mutex
	time     time.Time
	consumed time.Duration
}

func newFakeClock() *fakeClock { return &fakeClock{time: time.Unix(1_000_000, 0)} }

func (c *fakeClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.time
}

func (c *fakeClock) cpu() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.consumed
}

func (c *fakeClock) pass(elapsed, consumed time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.time = c.time.Add(elapsed)
	c.consumed += consumed
}

// process is a process of a recorded machine.
type process struct {
	pid, parent int
	start       uint64
	state       string // S if empty
	anonymous   ledger.Bytes
	shared      ledger.Bytes
}

// put writes the files of a process.
func put(files hosttest.Files, p process) {
	if p.state == "" {
		p.state = "S"
	}
	set := func(name, text string) { files.Set(procFile(p.pid, name), []byte(text)) }
	set("stat", fmt.Sprintf("%d (py (x) 1) %s %d 1 1 0 -1 4194560 5 0 0 0 150 50 0 0 20 0 12 0 %d 1 1\n",
		p.pid, p.state, p.parent, p.start))
	set("limits", "Limit                     Soft Limit           Hard Limit           Units     \n"+
		"Max locked memory         8388608              8388608              bytes     \n"+
		"Max address space         unlimited            unlimited            bytes     \n")
	set("cgroup", "0::/job/rank\n")
	if p.state == "Z" {
		set("status", "State:\tZ (zombie)\n")
		return
	}
	kb := func(b ledger.Bytes) int64 { return int64(b / ledger.KiB) }
	set("status", fmt.Sprintf("VmSize:\t9999 kB\nVmLck:\t64 kB\nVmPin:\t128 kB\nVmHWM:\t%d kB\nVmRSS:\t%d kB\n"+
		"RssAnon:\t%d kB\nRssFile:\t100 kB\nRssShmem:\t%d kB\nVmPTE:\t44 kB\nVmSwap:\t12 kB\n"+
		"HugetlbPages:\t2048 kB\nThreads:\t12\n",
		kb(p.anonymous+p.shared)+300, kb(p.anonymous+p.shared)+100, kb(p.anonymous), kb(p.shared)))
	set("smaps_rollup", fmt.Sprintf("00400000-7fff00000000 ---p 00000000 00:00 0    [rollup]\nRss: %d kB\nPss: 7 kB\n"+
		"Pss_Anon: %d kB\nPss_File: 10 kB\nPss_Shmem: %d kB\nAnonHugePages: 4 kB\nPrivate_Hugetlb: 2048 kB\n"+
		"Swap: 20 kB\n", kb(p.anonymous+p.shared)+100, kb(p.anonymous), kb(p.shared)/2))
	set("smaps", fmt.Sprintf("7f00-7f01 rw-s 00000000 00:01 7 /memfd:plimsoll/rank0/bf16/exp_avg (deleted)\n"+
		"Rss: %d kB\nPss: %d kB\n"+
		"7f02-7f03 rw-p 00000000 00:00 0\nRss: %d kB\nPss: %[3]d kB\nAnonymous: %[3]d kB\n",
		kb(p.shared), kb(p.shared)/2, kb(p.anonymous)))
	set("numa_maps", "7f00 default file=/memfd:plimsoll/rank0/bf16/exp_avg\\040(deleted) huge dirty=3 N1=3 "+
		"kernelpagesize_kB=2048\n7f02 default anon=5 dirty=5 N0=3 N1=2 kernelpagesize_kB=4\n")
}

// machine returns a machine with these processes in cgroups of version 2.
func machine(processes ...process) hosttest.Files {
	files := hosttest.NewFiles(nil)
	for name, text := range map[string]string{
		"proc/self/mountinfo": "11 1 0:9 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 500 kB\nMemAvailable: 600 kB\nBuffers: 10 kB\n" +
			"Cached: 200 kB\nShmem: 50 kB\nAnonPages: 100 kB\nMlocked: 3 kB\nUnevictable: 5 kB\n",
		"proc/vmstat": "pgfault 1\noom_kill 4\n",
		"proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=20\n" +
			"full avg10=0.00 avg60=0.00 avg300=0.00 total=8\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":      "8\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages":    "5\n",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages":   "1\n",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "1\n",
		"sys/devices/system/node/node4/meminfo": "Node 4 MemTotal: 1000 kB\n" +
			"Node 4 MemFree: 500 kB\n",
		"sys/fs/cgroup/job/rank/memory.current":      "1000\n",
		"sys/fs/cgroup/job/rank/memory.peak":         "2000\n",
		"sys/fs/cgroup/job/rank/memory.max":          "max\n",
		"sys/fs/cgroup/job/rank/memory.high":         "4000\n",
		"sys/fs/cgroup/job/rank/memory.swap.current": "7\n",
		"sys/fs/cgroup/job/rank/memory.stat":         "anon 500\nfile 300\nshmem 100\nkernel 50\n",
		"sys/fs/cgroup/job/rank/memory.pressure":     "some total=5\nfull total=3\n",
		"sys/fs/cgroup/job/rank/memory.events":       "low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\n",
		"sys/fs/cgroup/job/memory.current":           "3000\n",
		"sys/fs/cgroup/job/memory.max":               "9000\n",
		"sys/fs/cgroup/memory.stat":                  "anon 500\n",
	} {
		files.Set(name, []byte(text))
	}
	for _, p := range processes {
		put(files, p)
	}
	return files
}

// sampler returns a sampler of a recorded machine.
func sampler(t testing.TB, root fs.FS, clock clock) *Sampler {
	s := newSampler(root, clock)
	t.Cleanup(s.Close)
	return s
}

func root(pid, rank int) Root {
	return Root{Identity: Identity{PID: pid}, Rank: rank, Role: samples.RankProcess}
}

func TestSampleOfARecordedMachine(t *testing.T) {
	const mb = ledger.MiB
	files := machine(process{pid: 7, parent: 1, start: 100, anonymous: 64 * mb, shared: 32 * mb})
	got := sampler(t, files, newFakeClock()).Sample([]Root{root(7, 3)})
	want := samples.Sample{
		Processes: []samples.Process{{
			PID: 7, StartTime: 100, Parent: 1, Rank: 3, Role: samples.RankProcess, Name: "py (x) 1",
			Resident: samples.Kinds{Anonymous: 64 * mb, Shared: 32 * mb, File: 100 * ledger.KiB, Hugetlb: 2 * mb},
			Proportional: samples.Kinds{Anonymous: 64 * mb, Shared: 16 * mb, File: 10 * ledger.KiB,
				Hugetlb: 2 * mb},
			Huge: 2*mb + 4*ledger.KiB, Locked: 64 * ledger.KiB, Pinned: 128 * ledger.KiB,
			Swap:       20 * ledger.KiB, // 8 KiB of them shared memory
			PageTables: 44 * ledger.KiB, Virtual: 9999 * ledger.KiB, Peak: 96*mb + 300*ledger.KiB,
			AddressSpaceLimit: -1, LockedLimit: 8 * mb, CPUTime: 2 * time.Second, Threads: 12,
			Mappings: []samples.Mapping{
				{Kind: samples.AnonymousMapping, Resident: 64 * mb, Proportional: 64 * mb, Count: 1},
				{Name: "memfd:plimsoll/rank0/bf16/exp_avg", Arena: ledger.ExpAvg, Part: "bf16",
					Kind: samples.SharedMapping, Resident: 32 * mb, Proportional: 16 * mb, Count: 1},
			},
			NUMANodes: []samples.NUMANode{{Node: 0, Bytes: 3 * 4096}, {Node: 1, Bytes: 6*mb + 2*4096}},
		}},
		Node: samples.Node{
			Memory: 1000 * ledger.KiB, Available: 600 * ledger.KiB, Free: 500 * ledger.KiB,
			PageCache: 160 * ledger.KiB, Shared: 50 * ledger.KiB, Anonymous: 100 * ledger.KiB, Locked: 5 * ledger.KiB,
			HugetlbTotal: ledger.GiB + 16*mb, HugetlbFree: ledger.GiB + 10*mb,
			Pressure:  samples.Pressure{Some: 20 * time.Microsecond, Full: 8 * time.Microsecond},
			NUMANodes: []samples.NUMAFree{{Node: 4, Memory: 1000 * ledger.KiB, Free: 500 * ledger.KiB}},
			Kills:     4,
		},
		Groups: []samples.Group{
			{Name: "cgroup /job/rank", Current: 1000, Peak: 2000, High: 4000, Anonymous: 500, File: 200, Shared: 100,
				Kernel: 50, Swap: 7,
				Pressure: samples.Pressure{Some: 5 * time.Microsecond, Full: 3 * time.Microsecond},
				Events:   samples.Events{High: 1, Max: 2, OOM: 3, OOMKill: 4}},
			{Name: "cgroup /job", Current: 3000, Limit: 9000},
		},
		GPUs: []samples.GPU{},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestGroupsOfVersion1(t *testing.T) {
	files := machine(process{pid: 7, start: 100})
	files.Set("proc/7/cgroup", []byte("4:memory:/slurm/job\n0::/\n"))
	files.Set("proc/self/mountinfo", []byte("11 1 0:9 / /cg/memory rw - cgroup cgroup rw,memory\n"))
	for name, text := range map[string]string{
		"usage_in_bytes": "900", "max_usage_in_bytes": "950", "limit_in_bytes": "1000", "failcnt": "17",
		"memsw.limit_in_bytes": "9223372036854771712", "kmem.usage_in_bytes": "30",
		"stat":        "cache 1\nrss 2\ntotal_cache 500\ntotal_rss 300\ntotal_shmem 100\ntotal_swap 40\n",
		"oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
	} {
		files.Set("cg/memory/slurm/job/memory."+name, []byte(text+"\n"))
	}
	files.Set("cg/memory/memory.usage_in_bytes", []byte("5000\n"))
	files.Set("cg/memory/memory.limit_in_bytes", []byte("9223372036854771712\n"))
	got := sampler(t, files, newFakeClock()).Sample([]Root{root(7, 0)}).Groups
	want := []samples.Group{
		{Name: "cgroup /slurm/job", Current: 900, Peak: 950, Limit: 1000, Anonymous: 300, File: 400, Shared: 100,
			Kernel: 30, Swap: 40, Events: samples.Events{Max: 17, OOMKill: 2}},
		{Name: "cgroup /", Current: 5000},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// summary is who belongs to a job: "7: rank 0, 8: child of 0".
func summary(sample samples.Sample) string {
	var all []string
	for _, p := range sample.Processes {
		all = append(all, fmt.Sprintf("%d %s %d", p.PID, p.Role, p.Rank))
	}
	return strings.Join(all, ", ")
}

func TestTree(t *testing.T) {
	clock := newFakeClock()
	files := machine(
		process{pid: 2, parent: 1, start: 10},   // plimsoll run
		process{pid: 7, parent: 2, start: 100},  // rank 0
		process{pid: 8, parent: 2, start: 101},  // rank 1
		process{pid: 20, parent: 7, start: 110}, // a data loader
		process{pid: 21, parent: 20, start: 120},
		process{pid: 22, parent: 8, start: 130, state: "Z"},
		process{pid: 30, parent: 1, start: 10}, // another job
	)
	s := sampler(t, files, clock)
	roots := []Root{root(7, 0), root(8, 1),
		{Identity: Identity{PID: 2}, Rank: samples.NoRank, Role: samples.Keeper}}
	expect := func(what, want string) {
		t.Helper()
		clock.pass(2*time.Second, 0)
		sample := s.Sample(roots)
		if got := summary(sample); got != want || len(sample.Missed) > 0 {
			t.Errorf("%s: got %q, want %q; missed %q", what, got, want, sample.Missed)
		}
	}
	expect("at first", "2 keeper -1, 7 rank 0, 8 rank 1, 20 child 0, 21 child 0")
	put(files, process{pid: 7, parent: 2, start: 100, state: "Z"})
	put(files, process{pid: 20, parent: 2, start: 110})
	put(files, process{pid: 23, parent: 20, start: 140})
	expect("a rank ends, the keeper adopts its child", "2 keeper -1, 8 rank 1, 20 child 0, 21 child 0, 23 child 0")
	put(files, process{pid: 7, parent: 1, start: 900})
	put(files, process{pid: 21, parent: 1, start: 901})
	expect("other processes have the PIDs", "2 keeper -1, 8 rank 1, 20 child 0, 23 child 0")
	// Within one sample a rank ends, and another process has its PID and children.
	put(files, process{pid: 8, parent: 1, start: 950})
	put(files, process{pid: 50, parent: 8, start: 951})
	expect("another process has the PID of a rank", "2 keeper -1, 20 child 0, 23 child 0")
	roots = append(roots, Root{Identity{30, 11}, 2, samples.RankProcess})
	expect("a root that has ended before it was sampled", "2 keeper -1, 20 child 0, 23 child 0")
	roots[1] = Root{Identity{8, 950}, 1, samples.RankProcess}
	expect("the rank is started again", "2 keeper -1, 8 rank 1, 20 child 0, 23 child 0, 50 child 1")
	put(files, process{pid: 60, parent: 1, start: 990})
	put(files, process{pid: 61, parent: 60, start: 991})
	if got := summary(s.Sample([]Root{root(60, 4)})); !strings.HasSuffix(got, "60 rank 4, 61 child 4") {
		t.Errorf("a new root and its child at once: got %q", got)
	}
}

// TestBudgetSavesCredit: a budget that was not used for a day affords no more than one long reading.
func TestBudgetSavesCredit(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	b := budget{share: 0.01, most: time.Second}
	if b.affords(now, time.Millisecond) {
		t.Error("there is credit before any time has passed")
	}
	if !b.affords(now.Add(time.Second), 10*time.Millisecond) {
		t.Error("a second does not earn its share")
	}
	if now = now.Add(24 * time.Hour); !b.affords(now, time.Second) || b.affords(now, time.Second+1) {
		t.Error("a day does not earn the most, or more")
	}
}

// faulty is a file system in which some files fail, block, or cost time.
type faulty struct {
	hosttest.Files
	clock *fakeClock
	cost  func(name string) time.Duration
	fail  func(name string) error
}

func (f faulty) fault(name string) error {
	if f.cost != nil {
		cost := f.cost(name)
		f.clock.pass(cost, cost)
	}
	if f.fail != nil {
		if err := f.fail(name); err != nil {
			return &fs.PathError{Op: "open", Path: name, Err: err}
		}
	}
	return nil
}

func (f faulty) Open(name string) (fs.File, error) {
	if err := f.fault(name); err != nil {
		return nil, err
	}
	return f.Files.Open(name)
}

func (f faulty) ReadFile(name string) ([]byte, error) {
	if err := f.fault(name); err != nil {
		return nil, err
	}
	return f.Files.ReadFile(name)
}

func TestMissed(t *testing.T) {
	for name, test := range map[string]struct {
		change func(hosttest.Files)
		fail   map[string]error
		want   string // missed
		count  int    // of processes
	}{
		"all is well": {count: 1},
		"another user's": {fail: map[string]error{"smaps_rollup": fs.ErrPermission},
			want:  "/proc/7/smaps_rollup: permission denied: only the user of the process, and root, may read it",
			count: 1},
		"ends before": {fail: map[string]error{"status": fs.ErrNotExist}},
		"ends during": {fail: map[string]error{"smaps": fs.ErrNotExist, "smaps_rollup": fs.ErrNotExist}, count: 1},
		"broken": {fail: map[string]error{"numa_maps": fmt.Errorf("input/output error")},
			want: "/proc/7/numa_maps: input/output error", count: 1},
		"Linux 4.4": {change: func(f hosttest.Files) { f.Set("proc/7/status", []byte("VmRSS:\t8 kB\n")) }, count: 1,
			want: "/proc/7/status: the resident memory has no kinds, as before Linux 4.5; " +
				"all of it is counted as anonymous"},
		"an older kernel": {change: func(f hosttest.Files) {
			f.Set("proc/7/smaps_rollup", []byte("Rss: 8 kB\nPss: 8 kB\n"))
		},
			want: "/proc/7/smaps_rollup: this kernel does not divide Pss by kind", count: 1},
		"a stat that is none": {change: func(f hosttest.Files) { f.Set("proc/7/stat", []byte("7 what")) },
			want: "/proc/7/stat: expected the name of a process in parentheses"},
		"no meminfo": {change: func(f hosttest.Files) { f.Set("proc/meminfo", nil) },
			want: "/proc/meminfo cannot be read", count: 1},
	} {
		files := machine(process{pid: 7, start: 100, anonymous: ledger.MiB})
		if test.change != nil {
			test.change(files)
		}
		s := sampler(t, faulty{Files: files, fail: func(name string) error { return test.fail[path.Base(name)] }},
			newFakeClock())
		got := s.Sample([]Root{root(7, 0)})
		if missed := strings.Join(got.Missed, "\n"); missed != test.want || len(got.Processes) != test.count {
			t.Errorf("%s: %d processes, want %d; missed %q, want %q", name, len(got.Processes), test.count, missed,
				test.want)
		}
		if age := s.Sample([]Root{root(7, 0)}); test.want != "" && strings.Contains(test.want, "rollup") &&
			age.Processes[0].ProportionalAge != -1 {
			t.Errorf("%s: the age of what was not read is %v", name, age.Processes[0].ProportionalAge)
		}
	}
}

// TestBudget samples 8 ranks for two hours. A walk costs as much as one of 4 KiB pages really does: see docs/watch.md.
// The share of the core is held, and no rank waits for longer than the others.
func TestBudget(t *testing.T) {
	if testing.Short() {
		t.Skip("two hours, six times, are long under the race detector")
	}
	const perGiB = 5500 * time.Microsecond
	for name, test := range map[string]struct {
		resident ledger.Bytes
		factor   float64 // what walks cost, to what they are expected to cost
		refused  bool
	}{
		"1 GiB":                       {resident: ledger.GiB, factor: 1},
		"100 GiB":                     {resident: 100 * ledger.GiB, factor: 1},
		"100 GiB on huge pages":       {resident: 100 * ledger.GiB, factor: 0.01},
		"40 GiB on a slower machine":  {resident: 40 * ledger.GiB, factor: 4},
		"100 GiB on a slower machine": {resident: 100 * ledger.GiB, factor: 4, refused: true},
		"500 GiB":                     {resident: 500 * ledger.GiB, factor: 1, refused: true},
	} {
		files := machine()
		roots := []Root{}
		for rank := range 8 {
			put(files, process{pid: 10 + rank, start: 100, anonymous: test.resident})
			roots = append(roots, root(10+rank, rank))
		}
		clock := newFakeClock()
		walked, passed := time.Duration(0), time.Duration(0)
		walks := map[string]int{}
		s := sampler(t, faulty{Files: files, clock: clock, cost: func(file string) time.Duration {
			switch path.Base(file) {
			case "smaps", "smaps_rollup", "numa_maps":
				cost := time.Duration(test.factor * float64(test.resident) / float64(ledger.GiB) * float64(perGiB))
				walked += cost
				walks[file]++
				return cost
			case "proc":
				passed += 30 * time.Millisecond // thousands of processes
				return 30 * time.Millisecond
			}
			return 0
		}}, clock)
		const hours = 2
		began := clock.now()
		missed := 0
		for clock.now().Sub(began) < hours*time.Hour {
			clock.pass(time.Second, 0)
			missed += len(s.Sample(roots).Missed)
		}
		share := float64(walked+passed) / float64(hours*time.Hour)
		most := walkShare + passShare + float64(2*firstWalks+longestWalk)/float64(hours*time.Hour)
		if share > most {
			t.Errorf("%s: readings took %.3f %% of a core, want at most %.3f %%", name, 100*share, 100*most)
		}
		if test.refused != (missed > 0) {
			t.Errorf("%s: %d walks are said to be missed", name, missed)
		}
		if test.refused {
			continue // after the one that taught what they cost
		}
		if share < 0.7*walkShare && walks["proc/10/smaps_rollup"] < 3600*hours {
			t.Errorf("%s: readings took %.3f %% of a core: the budget is not used", name, 100*share)
		}
		for _, kind := range []string{"smaps_rollup", "smaps", "numa_maps"} {
			counts := []int{}
			for rank := range 8 {
				counts = append(counts, walks[procFile(10+rank, kind)])
			}
			if slices.Min(counts) == 0 || slices.Max(counts)-slices.Min(counts) > 1 {
				t.Errorf("%s: the ranks' %s were read %v times", name, kind, counts)
			}
		}
		if rollups, maps := walks["proc/10/smaps_rollup"], walks["proc/10/smaps"]; maps > 5 && rollups < 8*maps {
			t.Errorf("%s: smaps_rollup was read %d times, smaps %d times", name, rollups, maps)
		}
	}
}

// TestHangingWalk: a process that changes its memory, or hangs, holds up no sample. What it told too late counts for
// the next sample.
func TestHangingWalk(t *testing.T) {
	clock := newFakeClock()
	release := make(chan struct{})
	files := faulty{Files: machine(process{pid: 7, start: 100, anonymous: ledger.MiB}),
		fail: func(name string) error {
			if path.Base(name) == "smaps_rollup" {
				<-release
			}
			return nil
		}}
	s := sampler(t, files, clock)
	sample := func() samples.Sample {
		t.Helper()
		clock.pass(time.Second, 0)
		return s.Sample([]Root{root(7, 0)}) // a sample that waits for the walk waits for ever
	}
	for i, want := range []string{"", "", "/proc/7/smaps_rollup has been read for 3s: the process is changing its " +
		"memory, or it hangs"} {
		got := sample()
		if missed := strings.Join(got.Missed, "\n"); i > 1 && missed != want || len(got.Processes) != 1 ||
			got.Processes[0].ProportionalAge != -1 || got.Processes[0].Resident.Anonymous != ledger.MiB {
			t.Errorf("sample %d: missed %q, want %q; %+v", i, missed, want, got.Processes)
		}
		clock.pass(time.Second/2, 0)
	}
	close(release)
	for begun := time.Now(); time.Since(begun) < time.Minute; {
		got := sample()
		if got.Processes[0].ProportionalAge >= 0 && got.Processes[0].Proportional.Anonymous == ledger.MiB {
			return
		}
	}
	t.Error("the late result never arrived")
}
