package host

import (
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
)

// machine returns a small host of four CPUs, with more files.
func machine(more map[string]string) fstest.MapFS {
	files := map[string]string{
		"sys/devices/system/cpu/online": "0-3\n",
		"proc/meminfo":                  "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
	}
	maps.Copy(files, more)
	root := fstest.MapFS{}
	for name, text := range files {
		root[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return root
}

func discover(t *testing.T, more map[string]string) *Host {
	t.Helper()
	h, err := Discover(machine(more), cpuset.New(0, 1, 2, 3))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestHiddenMembership reads the limits where /proc/self/cgroup is missing.
func TestHiddenMembership(t *testing.T) {
	unified := "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	for name, c := range map[string]struct {
		files     map[string]string
		directory string
	}{
		"the cpuset names it": {map[string]string{"proc/self/mountinfo": unified, "proc/self/cpuset": "/job\n"},
			"sys/fs/cgroup/job/"},
		"only the mount": {map[string]string{"proc/self/mountinfo": unified}, "sys/fs/cgroup/"},
		"only the directory": {map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory pids\n"},
			"sys/fs/cgroup/"},
	} {
		for file, text := range map[string]string{
			"cpuset.cpus.effective": "1-2", "cpu.max": "150000 100000", "memory.max": "1073741824",
			"memory.current": "0", "pids.max": "100", "pids.current": "40",
		} {
			c.files[c.directory+file] = text + "\n"
		}
		h := discover(t, c.files)
		room, by := h.Memory.Headroom()
		threads, _ := h.ThreadRoom()
		if h.Cpuset.String() != "1-2" || h.Quota != 1.5 || room != ledger.GiB ||
			!strings.Contains(by, "memory.max") || threads != 60 {
			t.Errorf("%s: cpuset %s, quota %v, %v by %q, %d threads", name, h.Cpuset, h.Quota, room, by, threads)
		}
	}
	// Version 1 in a container shows only its own cgroup.
	h := discover(t, map[string]string{
		"proc/self/mountinfo": "31 23 0:27 /docker/x /sys/fs/cgroup/memory rw " +
			"- cgroup cgroup rw,memory\n",
		"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
	})
	if room, by := h.Memory.Headroom(); room != ledger.GiB {
		t.Errorf("version 1: %v by %q", room, by)
	}
}

const limits = `Limit                     Soft Limit           Hard Limit           Units
Max file size             1073741824           unlimited            bytes
Max processes             100                  200                  processes
Max address space         3221225472           unlimited            bytes
`

func TestResourceLimits(t *testing.T) {
	h := discover(t, map[string]string{"proc/self/limits": limits, "proc/self/status": "VmSize:\t 1048576 kB\n"})
	room, by := h.Memory.Headroom()
	if want := 2*ledger.GiB - addressReserve; room != want || !strings.Contains(by, "RLIMIT_AS") {
		t.Errorf("%v by %q, want %v by RLIMIT_AS", room, by, want)
	}
	// A pool of huge pages does not make the address space larger.
	if with, by := h.Memory.HeadroomWith(16 * ledger.GiB); with != room || !strings.Contains(by, "RLIMIT_AS") {
		t.Errorf("with a pool: %v by %q", with, by)
	}
	if says := h.Shortage(1, ledger.GiB+1); !strings.Contains(says, "RLIMIT_FSIZE") {
		t.Errorf("a large file: %q", says)
	}
	if says := h.Shortage(1, ledger.GiB); says != "" {
		t.Errorf("a file that fits: %q", says)
	}
	free := discover(t, map[string]string{"proc/self/limits": strings.NewReplacer("1073741824", "unlimited",
		"3221225472", "unlimited").Replace(limits)})
	if free.Memory.AddressSpace != nil || free.FileSize != 0 {
		t.Errorf("no limits: %+v, %v", free.Memory.AddressSpace, free.FileSize)
	}
}

// TestThreadsOfAUser counts the threads of all processes of the user, unless the kernel exempts the user from the
// limit.
func TestThreadsOfAUser(t *testing.T) {
	const user, root = "Uid:\t1000\t1000\t1000\t1000\n", "Uid:\t0\t0\t0\t0\n"
	for name, c := range map[string]struct {
		self, namespace string
		used            int64 // -1 for no limit
	}{
		"a user":                       {user + "CapEff:\t0000000000000000\n", "0 0 4294967295", 12},
		"a user who may":               {user + "CapEff:\t0000000001000000\n", "0 0 4294967295", -1},
		"root":                         {root + "CapEff:\t0000000000000000\n", "0 0 4294967295", -1},
		"root of a rootless container": {root + "CapEff:\t000001ffffffffff\n", "0 1000 1", 3},
	} {
		t.Run(name, func(t *testing.T) {
			limit, limited := tree{machine(map[string]string{
				"proc/self/limits": limits, "proc/self/status": c.self, "proc/self/uid_map": c.namespace,
				"proc/7/status": user + "Threads:\t5\n", "proc/1234567/status": user + "Threads:\t7\n",
				"proc/9/status": root + "Threads:\t3\n",
			})}.userThreads()
			if limited != (c.used >= 0) || limited && (limit.Used != c.used || limit.Limit != 100) {
				t.Errorf("%+v, %v", limit, limited)
			}
			h := &Host{ThreadLimits: []ThreadLimit{limit}}
			if says := h.Shortage(99, 0); limited && !strings.Contains(says, "RLIMIT_NPROC") {
				t.Errorf("says %q", says)
			}
		})
	}
}
