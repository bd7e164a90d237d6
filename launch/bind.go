package launch

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/binding"
)

// bindThread binds the calling thread to CPUs and gives it a memory policy.
// Processes that it starts inherit both, from their first instruction on: a
// program that is bound later keeps the threads and the memory that it had
// before where they were.
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

// noPolicy is an error that a job can do without its policy with: containers
// often forbid the system call.
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
		// The kernel takes one bit less than it is told.
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
		return nil // what a process has anyway
	}
	return &noPolicy{err}
}
