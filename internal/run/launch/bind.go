//go:build linux

package launch

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
)

// bindThread binds the calling thread to CPUs and gives it a memory policy. Processes
// that the thread starts inherit both from their first instruction on. If a program
// were bound later, its existing threads and memory would stay where they are.
func bindThread(cpus cpuset.CPUSet, policy string, nodes []int) error {
	ids := cpus.List()
	if len(ids) == 0 {
		return errors.New("no CPUs to bind to")
	}
	mask := unix.NewCPUSet(ids[len(ids)-1] + 1)
	for _, cpu := range ids {
		mask.Set(cpu)
	}
	if err := unix.SchedSetaffinityDynamic(0, mask); err != nil {
		return fmt.Errorf("binding to CPUs %s: %w", cpus, err)
	}
	return setMemoryPolicy(policy, nodes)
}

// bindThreads binds the threads of this process to CPUs, as far as the kernel allows it. Threads that start later
// inherit that. One thread that does nothing keeps what the launcher gave this process: the other ranks of this host
// may look later (see [Peers]).
func bindThreads(cpus cpuset.CPUSet) {
	mask := unix.NewCPUSet(0)
	if ids := cpus.List(); len(ids) > 0 {
		mask = unix.NewCPUSet(ids[len(ids)-1] + 1)
		for _, cpu := range ids {
			mask.Set(cpu)
		}
	}
	for bound := map[int]bool{idleThread(): true}; ; {
		threads, _ := os.ReadDir("/proc/self/task")
		before := len(bound)
		for _, thread := range threads {
			if id, err := strconv.Atoi(thread.Name()); err == nil && !bound[id] {
				bound[id] = true
				_ = unix.SchedSetaffinityDynamic(id, mask)
			}
		}
		if len(bound) == before { // nor has any thread started another meanwhile
			return
		}
	}
}

// idleThread returns a thread that never runs again.
func idleThread() int {
	thread := make(chan int)
	go func() {
		runtime.LockOSThread()
		_ = os.WriteFile("/proc/thread-self/comm", []byte("idle"), 0) // for those who look at the threads
		thread <- unix.Gettid()
		select {}
	}()
	return <-thread
}

// noPolicy is an error of set_mempolicy that the job can ignore: containers often
// forbid the system call.
type noPolicy struct{ err error }

func (e *noPolicy) Error() string { return "no memory policy: set_mempolicy: " + e.err.Error() }

func setMemoryPolicy(policy string, nodes []int) error {
	var modes []int
	switch policy {
	case binding.PolicyPreferred:
		modes = []int{unix.MPOL_PREFERRED_MANY}
		if len(nodes) == 1 {
			modes = append(modes, unix.MPOL_PREFERRED) // before Linux 5.15
		}
	case binding.PolicyInterleave:
		modes = []int{unix.MPOL_INTERLEAVE}
	case binding.PolicyBind:
		modes = []int{unix.MPOL_BIND}
	default:
		modes, nodes = []int{unix.MPOL_DEFAULT}, nil
	}
	var mask []uint64
	for _, node := range nodes {
		for len(mask) <= node/64 {
			mask = append(mask, 0)
		}
		mask[node/64] |= 1 << (node % 64)
	}
	var err error
	for _, mode := range modes {
		// The kernel reads one bit less than the size it is given.
		_, _, number := unix.Syscall(unix.SYS_SET_MEMPOLICY, uintptr(mode),
			uintptr(unsafe.Pointer(unsafe.SliceData(mask))), uintptr(64*len(mask)+1))
		if number == 0 {
			return nil
		}
		if err = number; number != unix.EINVAL {
			break
		}
	}
	if policy == binding.PolicyDefault {
		return nil // the default of a process
	}
	return &noPolicy{err}
}
