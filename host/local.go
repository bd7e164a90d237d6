package host

import (
	"fmt"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/arena"
)

// Local returns the host that this process runs on.
func Local() (*Host, error) { return Of("") }

// Of returns the host that this process runs on for an empty name. Otherwise it reads a host from the files of that
// name: see [Root].
func Of(name string) (*Host, error) {
	root, affinity, err := Root(name)
	if err != nil {
		return nil, err
	}
	h, err := Discover(root, affinity)
	if err == nil && name == "" {
		h.HugePages.Joins = arena.Joins()
		if limit, limited := (tree{root}).userThreads(); limited {
			h.ThreadLimits = append(h.ThreadLimits, limit)
		}
	}
	return h, err
}

// Affinity returns the mask of a thread; the id of a process names its main thread. The kernel refuses a buffer
// shorter than its own masks. The usual 1024 bits are too few for some machines, so the buffer grows until it fits.
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
