//go:build linux

package tune

import (
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"
)

// launcher imitates a trainer that launches kernels on a GPU: one thread that computes all the time, and whose data
// fits the first cache. It may run on all cores of the trainer, as a Python program may.
type launcher struct {
	begin   chan struct{}
	seconds chan float64
}

func newLauncher(cpus cpuset.CPUSet) (*launcher, error) {
	l := &launcher{begin: make(chan struct{}), seconds: make(chan float64)}
	bound := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine: no other gets its binding
		bound <- bind(cpus)
		var queue [256]uint64
		for range l.begin {
			began := threadTime()
			for range launchesOfSample {
				launchKernel(&queue)
			}
			l.seconds <- (threadTime() - began).Seconds()
		}
	}()
	if err := <-bound; err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *launcher) close() { close(l.begin) }

// threadTime returns the CPU time of the calling thread. It does not grow while another process has the core, which
// would say nothing of the split.
func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err) // every Linux has this clock
	}
	return time.Duration(now.Nano())
}

// bind binds the calling thread.
func bind(cpus cpuset.CPUSet) error {
	ids := cpus.List()
	mask := unix.NewCPUSet(ids[len(ids)-1] + 1)
	for _, cpu := range ids {
		mask.Set(cpu)
	}
	if err := unix.SchedSetaffinityDynamic(0, mask); err != nil {
		return fmt.Errorf("binding to CPUs %s: %w", cpus, err)
	}
	return nil
}

// A launch takes PyTorch some 5 us of one core. A sample is some 20 ms.
const (
	launchesOfSample = 4000
	stepsOfLaunch    = 4000
)

// launchKernel computes for some 5 us, and writes a command into the queue.
func launchKernel(queue *[256]uint64) {
	x := queue[0] | 1
	for range stepsOfLaunch {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	queue[x%uint64(len(queue))] = x
}
