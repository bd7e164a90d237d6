//go:build linux

package host_test

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"golang.org/x/tools/txtar"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

func TestTwoSocket(t *testing.T) {
	h := hosttest.ReadText(t, recordedMachines+"two-socket.txtar").Discover(t)
	checkInvariants(t, h)
	equal(t, "name", h.Name, "Two Socket Server CPU @ 2.00GHz")
	equal(t, "kernel", h.Kernel, "6.8.0-generic")
	equal(t, "packages", len(h.Packages), 2)
	equal(t, "cores", len(h.Cores), 6)
	equal(t, "siblings", h.Cores[4].Siblings.String(), "4,10")
	equal(t, "cache of core 4", h.Caches[h.Cores[4].Cache].CPUs.String(), "3-5,9-11")
	equal(t, "cache size", h.Caches[0].Size, 36*ledger.MiB)
	equal(t, "nodes", len(h.Nodes), 2)
	equal(t, "node memory", h.Nodes[1].MemTotal, 64*ledger.GiB)
	equal(t, "pages of node 1", h.Nodes[1].HugePages[0], host.HugePagePool{Size: 2 * ledger.MiB, Total: 512, Free: 500})
	equal(t, "pools", len(h.HugePages.Pools), 2)
	equal(t, "1 GiB pool", h.HugePages.Pools[1], host.HugePagePool{Size: ledger.GiB})
	equal(t, "transparent", h.HugePages.Transparent, "madvise")
	equal(t, "shared", h.HugePages.Shared, "never")
	equal(t, "GPUs", len(h.GPUs), 2) // without the management controller
	equal(t, "second GPU", h.GPUs[1].Address+" "+h.GPUs[1].CPUs.String(), "0000:b1:00.0 3-5,9-11")
	equal(t, "adapter", h.NICs[0].Names[0], "mlx5_0")
	equal(t, "quota", h.Quota, 0)
	checkHeadroom(t, h, 112*ledger.GiB, "MemAvailable")
}

func TestSlurm(t *testing.T) {
	h := hosttest.ReadText(t, recordedMachines+"two-socket.txtar", recordedMachines+"slurm.txtar").Discover(t)
	checkInvariants(t, h)
	equal(t, "usable", h.CPUs.String(), "1,3-5,9-10")
	equal(t, "cpuset of the job", h.Cpuset.String(), "1,3-5,7,9-11")
	equal(t, "usable cores", len(h.UsableCores()), 4)
	equal(t, "core 1 is whole", h.Cores[1].Whole(), false)
	equal(t, "core 3 is whole", h.Cores[3].Whole(), true)
	equal(t, "quota", h.Quota, 2.5)
	equal(t, "quota from", h.QuotaFrom, "cgroup /slurm/job_7 cpu.cfs_quota_us")
	// 16 GiB less 6 GiB in use, of which 2 GiB are droppable cache.
	checkHeadroom(t, h, 12*ledger.GiB, "cgroup /slurm/uid_1000/job_7 memory.limit_in_bytes")
}

func TestContainer(t *testing.T) {
	h := hosttest.ReadText(t, recordedMachines+"two-socket.txtar", recordedMachines+"container.txtar").Discover(t)
	checkInvariants(t, h)
	equal(t, "quota", h.Quota, 3.5)
	equal(t, "quota from", h.QuotaFrom, "cgroup /pod cpu.max")
	equal(t, "memory nodes", cpuset.New(h.MemoryNodes()...).String(), "1")
	// 32 GiB less 12 GiB in use, of which 2 GiB are droppable cache.
	checkHeadroom(t, h, 22*ledger.GiB, "cgroup / memory.max")
	names := []string{}
	for _, limit := range h.Memory.Limits {
		names = append(names, limit.Name)
	}
	same(t, "limits", names, []string{"cgroup / memory.max", "memory of NUMA nodes 1"})
}

func TestVirtualMachine(t *testing.T) {
	h := hosttest.ReadText(t, recordedMachines+"virtual-machine.txtar").Discover(t)
	checkInvariants(t, h)
	equal(t, "cores", len(h.UsableCores()), 2)
	equal(t, "caches", len(h.Caches), 0)
	equal(t, "NIC", h.NICs[0].Node, -1)
	equal(t, "limit", h.Memory.Limits[0], host.Limit{
		Name: "cgroup /jobs/a:b memory.limit_in_bytes", Limit: 8 * ledger.GiB, Used: ledger.GiB,
	})
	checkHeadroom(t, h, 7*ledger.GiB, "cgroup /jobs/a:b memory.limit_in_bytes")
	h.Memory.Limits = h.Memory.Limits[1:]
	checkHeadroom(t, h, (12342044-60504)*ledger.KiB, "CommitLimit (vm.overcommit_memory is 2)")
}

func checkHeadroom(t *testing.T, h *host.Host, want ledger.Bytes, from string) {
	t.Helper()
	room, name := h.Memory.Headroom()
	equal(t, "headroom", room, want)
	equal(t, "headroom from", name, from)
}

func TestHeadroomUnknown(t *testing.T) {
	room, name := host.Memory{}.Headroom()
	equal(t, "room", room, 0)
	equal(t, "name", name, "")
	room, name = host.Memory{Limits: []host.Limit{{Name: "limit", Limit: 10, Used: 12}}}.Headroom()
	equal(t, "room past a limit", room, 0)
	equal(t, "name", name, "limit")
}

// TestCgroupPaths: the path of a cgroup and the mounted directory may relate in several ways.
func TestCgroupPaths(t *testing.T) {
	tests := []struct {
		name                string
		member, root        string
		limitAt, wantNaming string
	}{
		{"below the root", "/a/b", "/", "/a", "cgroup /a memory.max"},
		{"own namespace", "/", "/", "/", "cgroup / memory.max"},
		{"part mounted", "/docker/x/y", "/docker/x", "/", "cgroup /docker/x memory.max"},
		{"part mounted, deeper", "/docker/x/y", "/docker/x", "/y", "cgroup /docker/x/y memory.max"},
		{"not the part mounted", "/docker/xy", "/docker/x", "/", "cgroup /docker/x memory.max"},
		{"out of the namespace", "/../..", "/", "/", "cgroup / memory.max"},
		{"into another", "/../other/b", "/", "/", "cgroup / memory.max"},
		{"mounted from above", "/", "/../..", "/", "cgroup / memory.max"},
		{"no leading slash", "a", "/", "/a", "cgroup /a memory.max"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			files := hosttest.Grid(1, 1, 1).Files
			files.Set("proc/self/cgroup", []byte("0::"+test.member+"\n"))
			files.Set("proc/self/mountinfo", []byte("30 23 0:26 "+test.root+
				` /mnt/c\040g rw shared:9 - cgroup2 none rw`+"\n"))
			files.Set("mnt/c g"+strings.TrimSuffix(test.limitAt, "/")+"/memory.max", []byte("4096\n"))
			h, err := host.Discover(files, cpuset.New(0))
			if err != nil || len(h.Memory.Limits) != 1 {
				t.Fatalf("limits %v, error %v", h.Memory.Limits, err)
			}
			equal(t, "name", h.Memory.Limits[0].Name, test.wantNaming)
		})
	}
}

func TestNoUsableCPU(t *testing.T) {
	m := hosttest.Grid(1, 2, 1)
	_, err := host.Discover(m.Files, cpuset.New(7))
	input, ok := err.(*fault.Input)
	if !ok || !strings.Contains(input.What, `"7"`) || !strings.Contains(input.What, `"0-1"`) {
		t.Errorf("error %v names neither mask nor online CPUs", err)
	}
}

// Without sysfs the affinity mask is all there is.
func TestNothingMounted(t *testing.T) {
	h, err := host.Discover(hosttest.NewFiles(nil), cpuset.New(3, 4))
	if err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, h)
	equal(t, "cores", len(h.UsableCores()), 2)
}

func TestLocal(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, h)
	equal(t, "usable CPUs", h.CPUs.Size(), runtime.NumCPU())
	if room, name := h.Memory.Headroom(); room <= 0 || room > h.Memory.Total {
		t.Errorf("headroom %v (%s) of %v", room, name, h.Memory.Total)
	}
}

func TestAffinity(t *testing.T) {
	runtime.LockOSThread() // stays locked: the thread ends with its mask
	before, err := host.Affinity(unix.Gettid())
	if err != nil {
		t.Fatal(err)
	}
	last := before.List()[before.Size()-1]
	mask := unix.NewCPUSet(last + 1)
	mask.Set(last)
	if err := unix.SchedSetaffinityDynamic(0, mask); err != nil {
		t.Skipf("affinity cannot be set here: %v", err)
	}
	after, err := host.Affinity(unix.Gettid())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "affinity", after.String(), cpuset.New(last).String())
	if _, err := host.Affinity(-1); err == nil {
		t.Error("a thread that does not exist has an affinity")
	}
}

// TestLocalWithABoundMainThread: a worker may run on the main thread and bind it. Go's runtime keeps that thread bound
// after the worker has ended. The process may still use all CPUs.
func TestLocalWithABoundMainThread(t *testing.T) {
	before, err := host.Affinity(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if before.Size() < 2 {
		t.Skip("needs two CPUs")
	}
	set := func(cpus cpuset.CPUSet) {
		mask := unix.NewCPUSet(slices.Max(cpus.List()) + 1)
		for _, cpu := range cpus.List() {
			mask.Set(cpu)
		}
		if err := unix.SchedSetaffinityDynamic(os.Getpid(), mask); err != nil {
			t.Error(err)
		}
	}
	set(cpuset.New(before.List()[0]))
	defer set(before)
	besideMainThread(func() {
		if h, err := host.Local(); err != nil || !h.CPUs.Equals(before) {
			t.Errorf("the usable CPUs are %v, expected %v: %v", h.CPUs, before, err)
		}
	})
}

// besideMainThread calls a function on another thread than the main one.
func besideMainThread(body func()) {
	var called sync.WaitGroup
	called.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if unix.Gettid() == os.Getpid() {
			besideMainThread(body)
			return
		}
		body()
	})
	called.Wait()
}

// TestLarge discovers 2,048 CPUs, more than the usual affinity mask holds. A test of package binding bounds the time.
func TestLarge(t *testing.T) {
	h := hosttest.Grid(32, 32, 2).Discover(t)
	equal(t, "cores", len(h.UsableCores()), 1024)
	checkInvariants(t, h)
}

func BenchmarkDiscover2048(b *testing.B) {
	m := hosttest.Grid(32, 32, 2)
	for b.Loop() {
		m.Discover(b)
	}
}

// FuzzDiscover takes a machine as a txtar archive. Whatever its files hold, discovery must neither fail nor
// contradict itself.
func FuzzDiscover(f *testing.F) {
	names := []string{"two-socket", "slurm", "container", "virtual-machine"}
	for _, name := range names {
		data, err := os.ReadFile(recordedMachines + name + ".txtar")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		files := hosttest.NewFiles(nil)
		for _, file := range txtar.Parse(data).Files {
			files.Set(file.Name, file.Data)
		}
		h, err := host.Discover(files, cpuset.New(0, 1, 2, 3, 70))
		if err != nil {
			return
		}
		checkInvariants(t, h)
		h.Memory.Headroom()
		h.MemoryNodes()
	})
}
