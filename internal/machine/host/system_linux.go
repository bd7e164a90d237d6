package host

import (
	"fmt"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"
)

// Affinity returns the mask of a thread. The id of a process names its main thread, and 0 the calling one. The kernel
// refuses a buffer shorter than its own masks. The usual 1024 bits are too few for some machines, so the buffer grows
// until it fits.
func Affinity(thread int) (cpuset.CPUSet, error) {
	for bits := 1024; ; bits *= 2 {
		mask := unix.NewCPUSet(bits)
		err := unix.SchedGetaffinityDynamic(thread, mask)
		if err == unix.EINVAL && bits <= maxID {
			continue
		}
		if err != nil {
			return cpuset.New(), fmt.Errorf("read the affinity of thread %d: %w", thread, err)
		}
		cpus := []int{}
		for cpu := range bits {
			if mask.IsSet(cpu) {
				cpus = append(cpus, cpu)
			}
		}
		return cpuset.New(cpus...), nil
	}
}

// Actions of syslog(2).
const (
	readWholeLog = 3
	sizeOfLog    = 10
)

// readKernelLog returns the kernel's log, or nothing where this process may not read it.
func readKernelLog() []byte {
	size, err := unix.Klogctl(sizeOfLog, nil)
	if err != nil || size <= 0 {
		return nil
	}
	log := make([]byte, size)
	n, err := unix.Klogctl(readWholeLog, log)
	if err != nil {
		return nil
	}
	return log[:n]
}
