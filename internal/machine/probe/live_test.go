//go:build linux

package probe

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/arena"
)

// TestMain makes the test binary a process to sample, too.
func TestMain(m *testing.M) {
	if how := os.Getenv("PROBE_TEST_HOLD"); how != "" {
		fmt.Println(hold(how))
		bufio.NewReader(os.Stdin).ReadByte() // until the test ends
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// hold maps memory as a text says: "4096 MiB, 1000 pages, huge".
func hold(how string) error {
	if how == "gpus" {
		WatchGPUs()
		return nil
	}
	var size ledger.Bytes
	var pages int
	var kind string
	if _, err := fmt.Sscanf(how, "%d MiB, %d pages, %s", &size, &pages, &kind); err != nil {
		return err
	}
	size *= ledger.MiB
	memory, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return err
	}
	advice := unix.MADV_NOHUGEPAGE
	if kind == "huge" {
		advice = unix.MADV_HUGEPAGE
	}
	if err := unix.Madvise(memory, advice); err != nil {
		return err
	}
	for i := range pages {
		memory[int(size)/pages*i] = 1
	}
	return nil
}

// holding starts a process that holds memory.
func holding(t testing.TB, how string) Root {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "PROBE_TEST_HOLD="+how)
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := command.Wait(); err != nil {
			t.Error(err)
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "<nil>\n" {
		t.Fatalf("%s: %q, %v", how, line, err)
	}
	return Root{Identity: Identity{PID: command.Process.Pid}, Role: samples.RankProcess}
}

// until samples a process until a condition holds.
func until(t *testing.T, s *Sampler, roots []Root, what string, done func(samples.Process) bool) samples.Process {
	t.Helper()
	last := samples.Sample{}
	for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(50 * time.Millisecond) {
		if last = s.Sample(roots); len(last.Processes) > 0 && done(last.Processes[0]) {
			return last.Processes[0]
		}
	}
	text, _ := json.MarshalIndent(last, "", " ")
	t.Fatalf("%s: never\n%s", what, text)
	return samples.Process{}
}

func near(a, b, tolerance ledger.Bytes) bool { return max(a-b, b-a) <= tolerance }

// TestSumsAgree compares what the kernel counts with what its walks of the page tables find, and with procfs.
func TestSumsAgree(t *testing.T) {
	runtime.LockOSThread() // the other processes die with the thread that started them
	const size = 64 * ledger.MiB
	owner := holding(t, "64 MiB, 16384 pages, base")
	s := NewSampler(nil)
	defer s.Close()
	p := until(t, s, []Root{owner}, "everything is read", func(p samples.Process) bool {
		return p.ProportionalAge >= 0 && p.Mappings != nil
	})
	const slack = 2 * ledger.MiB // the Go runtime of the process goes on
	if p.Resident.Anonymous < size || p.Resident.Hugetlb != 0 || p.Resident.File == 0 {
		t.Errorf("resident: %+v", p.Resident)
	}
	if !near(p.Proportional.Anonymous, p.Resident.Anonymous, slack) || p.Proportional.File > p.Resident.File {
		t.Errorf("proportional %+v, resident %+v", p.Proportional, p.Resident)
	}
	kinds := map[samples.MappingKind]ledger.Bytes{}
	for _, m := range p.Mappings {
		kinds[m.Kind] += m.Resident
	}
	if !near(kinds[samples.AnonymousMapping], p.Resident.Anonymous, slack) ||
		!near(kinds[samples.FileMapping], p.Resident.File, slack) {
		t.Errorf("mappings %v, resident %+v", kinds, p.Resident)
	}
	if p.NUMANodes != nil {
		all := ledger.Bytes(0)
		for _, node := range p.NUMANodes {
			all += node.Bytes
		}
		if !near(all, p.Resident.Sum(), slack) {
			t.Errorf("NUMA nodes %v, resident %+v", p.NUMANodes, p.Resident)
		}
	}
	proc, err := procfs.NewProc(p.PID)
	if err != nil {
		t.Fatal(err)
	}
	status, err := proc.NewStatus()
	if err != nil {
		t.Fatal(err)
	}
	rollup, err := proc.ProcSMapsRollup()
	if err != nil {
		t.Fatal(err)
	}
	stat, err := proc.Stat()
	if err != nil {
		t.Fatal(err)
	}
	limits, err := proc.Limits()
	if err != nil {
		t.Fatal(err)
	}
	for what, pair := range map[string][2]ledger.Bytes{
		"VmRSS":    {p.Resident.Sum(), ledger.Bytes(status.VmRSS)},
		"RssAnon":  {p.Resident.Anonymous, ledger.Bytes(status.RssAnon)},
		"RssFile":  {p.Resident.File, ledger.Bytes(status.RssFile)},
		"RssShmem": {p.Resident.Shared, ledger.Bytes(status.RssShmem)},
		"VmLck":    {p.Locked, ledger.Bytes(status.VmLck)},
		"VmPin":    {p.Pinned, ledger.Bytes(status.VmPin)},
		"VmSize":   {p.Virtual, ledger.Bytes(status.VmSize)},
		"VmHWM":    {p.Peak, ledger.Bytes(status.VmHWM)},
		"VmSwap":   {p.Swap, ledger.Bytes(status.VmSwap)},
		"VmPTE":    {p.PageTables, ledger.Bytes(status.VmPTE)},
		"Pss":      {p.Proportional.Sum(), ledger.Bytes(rollup.Pss)},
		// The other library shows no limit as the largest number.
		"RLIMIT_MEMLOCK": {p.LockedLimit, ledger.Bytes(limits.LockedMemory)},
	} {
		if !near(pair[0], pair[1], slack) {
			t.Errorf("%s: %v, procfs says %v", what, pair[0], pair[1])
		}
	}
	if p.StartTime != stat.Starttime || p.Parent != stat.PPID || p.Name != stat.Comm {
		t.Errorf("%d %d %q, procfs says %d %d %q", p.StartTime, p.Parent, p.Name, stat.Starttime, stat.PPID, stat.Comm)
	}
}

// TestKindsOfThisProcess finds an arena by component, locked memory, huge pages and memory of /dev/shm.
func TestKindsOfThisProcess(t *testing.T) {
	const size = 6 * ledger.MiB
	a, err := arena.New("rank5/bf16/exp_avg", size, arena.BasePages)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	clear(a.Bytes())
	if err := unix.Mlock(a.Bytes()[:128<<10]); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join("/dev/shm", "plimsoll-probe-"+strconv.Itoa(os.Getpid())))
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if err := file.Truncate(int64(size)); err != nil {
		t.Fatal(err)
	}
	shared, err := unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(shared)
	clear(shared)
	s := NewSampler(nil)
	defer s.Close()
	p := until(t, s, []Root{{Identity: Identity{PID: os.Getpid()}, Rank: 5, Role: samples.RankProcess}},
		"the mappings are read", func(p samples.Process) bool { return p.Mappings != nil })
	find := func(name string) samples.Mapping {
		i := slices.IndexFunc(p.Mappings, func(m samples.Mapping) bool { return m.Name == name })
		if i < 0 {
			t.Fatalf("no mapping %s: %+v", name, p.Mappings)
		}
		return p.Mappings[i]
	}
	m := find("memfd:plimsoll/rank5/bf16/exp_avg")
	if m.Arena != ledger.ExpAvg || m.Part != "bf16" || m.Kind != samples.SharedMapping || m.Resident != size ||
		m.Proportional != size || m.Locked != 128*ledger.KiB {
		t.Errorf("arena: %+v", m)
	}
	if m := find(file.Name()); m.Kind != samples.SharedMapping || m.Resident != size {
		t.Errorf("/dev/shm: %+v", m)
	}
	if p.Locked != 128*ledger.KiB {
		t.Errorf("locked: %v", p.Locked)
	}
	if p.Resident.Shared < 2*size || p.Proportional.Shared < 2*size {
		t.Errorf("shared memory: %v resident, %v proportional", p.Resident.Shared, p.Proportional.Shared)
	}
	if used := s.Sample(nil).Node.SharedFiles; used.Used < size || used.Size < used.Used {
		t.Errorf("/dev/shm: %+v", used)
	}
}

// TestHugetlbOfThisProcess needs a page in the host's pool.
func TestHugetlbOfThisProcess(t *testing.T) {
	memory, err := unix.Mmap(-1, 0, int(arena.HugetlbSize), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|unix.MAP_HUGE_2MB)
	if err != nil {
		t.Skipf("no page in the pool of huge pages: %v", err)
	}
	defer unix.Munmap(memory)
	memory[0] = 1
	s := NewSampler(nil)
	defer s.Close()
	p := until(t, s, []Root{{Identity: Identity{PID: os.Getpid()}}}, "the mappings are read",
		func(p samples.Process) bool { return p.Mappings != nil })
	if p.Resident.Hugetlb != arena.HugetlbSize || p.Proportional.Hugetlb != arena.HugetlbSize ||
		p.Huge < arena.HugetlbSize {
		t.Errorf("%+v", p)
	}
	if !slices.ContainsFunc(p.Mappings, func(m samples.Mapping) bool {
		return m.Kind == samples.HugetlbMapping && m.Resident == arena.HugetlbSize
	}) {
		t.Errorf("%+v", p.Mappings)
	}
}

// ranks starts processes of 500 GiB each, of which some pages are touched.
func ranks(t testing.TB, count int) []Root {
	roots := []Root{}
	for rank := range count {
		root := holding(t, [...]string{"512000 MiB, 1000 pages, base", "512000 MiB, 100 pages, huge"}[rank%2])
		root.Rank = rank
		roots = append(roots, root)
	}
	return roots
}

// quickClock is the real clock, but for seconds that tests pass.
type quickClock struct {
	systemClock
	fake *fakeClock
}

func (c quickClock) now() time.Time { return c.fake.now() }

// TestCost samples 8 ranks of 500 GiB each for two minutes, at once. It takes less than 1 % of a core.
func TestCost(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector costs more than sampling")
	}
	runtime.LockOSThread()
	roots := ranks(t, 8)
	clock := quickClock{fake: newFakeClock()}
	s := newSampler(os.DirFS("/"), clock)
	s.devShm = devShm
	defer s.Close()
	const seconds = 120
	cost := time.Duration(0)
	for range seconds {
		clock.fake.pass(time.Second, 0)
		sample := s.Sample(roots)
		cost += sample.Cost
		if len(sample.Processes) != len(roots) || len(sample.Missed) > 0 {
			t.Fatalf("%d processes; missed %q", len(sample.Processes), sample.Missed)
		}
	}
	share := cost.Seconds() / seconds
	t.Logf("%.2f %% of a core", 100*share)
	if share > 0.01 {
		t.Errorf("sampling takes %.2f %% of a core", 100*share)
	}
}

// BenchmarkSample measures a sample without and with the walks that the budget allows at 1 Hz.
func BenchmarkSample(b *testing.B) {
	runtime.LockOSThread()
	roots := ranks(b, 8)
	clock := quickClock{fake: newFakeClock()}
	s := newSampler(os.DirFS("/"), clock)
	defer s.Close()
	cost := time.Duration(0)
	for b.Loop() {
		clock.fake.pass(time.Second, 0)
		cost += s.Sample(roots).Cost
	}
	b.ReportMetric(cost.Seconds()/float64(b.N)*100, "%core")
}

// BenchmarkWalk measures the walks of a process that holds memory.
func BenchmarkWalk(b *testing.B) {
	runtime.LockOSThread()
	for _, how := range []string{
		"512000 MiB, 1000 pages, base", "512000 MiB, 1000 pages, huge",
		"4096 MiB, 1048576 pages, base", "4096 MiB, 2048 pages, huge",
	} {
		pid := holding(b, how).PID
		for _, file := range []string{"status", "smaps_rollup", "smaps", "numa_maps"} {
			b.Run(strings.ReplaceAll(how, ", ", "/")+"/"+file, func(b *testing.B) {
				for b.Loop() {
					if _, err := os.ReadFile("/" + procFile(pid, file)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
