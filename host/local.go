package host

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"
)

// Local is the host that this process runs on.
func Local() (*Host, error) { return Of("") }

// Of is the host that this process runs on for an empty name, else one whose
// files are there: see [Root].
func Of(name string) (*Host, error) {
	root, affinity, err := Root(name)
	if err != nil {
		return nil, err
	}
	h, err := Discover(root, affinity)
	if err == nil && name == "" {
		h.HugePages.Joins = joins()
	}
	return h, err
}

// joins tries whether the kernel makes a huge page of a page of shared memory.
func joins() bool {
	const huge = 2 << 20
	file, err := unix.MemfdCreate("plimsoll/trial", unix.MFD_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(file)
	if err := unix.Ftruncate(file, huge); err != nil {
		return false
	}
	// Twice as much has an aligned place for one in it.
	whole, err := unix.MmapPtr(-1, 0, nil, 2*huge, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	defer func() { _ = unix.MunmapPtr(whole, 2*huge) }()
	place := unsafe.Add(whole, -uintptr(whole)%huge)
	if _, err := unix.MmapPtr(file, 0, place, huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return false
	}
	page := unsafe.Slice((*byte)(place), huge)
	page[0] = 1
	return unix.Madvise(page, unix.MADV_COLLAPSE) == nil
}

// Affinity is the mask of a thread; the id of a process names its main thread.
// The kernel refuses a buffer shorter than its own masks, so the buffer grows
// until it fits: the usual 1024 bits are too few for some machines.
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
