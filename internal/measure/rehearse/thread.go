//go:build linux

package rehearse

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// OnThread calls a function on a thread of its own, which wakes up within microseconds, and waits for it.
func OnThread(body func()) {
	var done sync.WaitGroup
	done.Go(func() {
		runtime.LockOSThread() // for good: the thread ends with the function
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
		body()
	})
	done.Wait()
}

// SleepUntil sleeps in the kernel: a timer of Go's runtime waits for a thread that the workers may all have.
func SleepUntil(instant time.Time) {
	for {
		left := time.Until(instant)
		if left <= 0 {
			return
		}
		wait := unix.NsecToTimespec(int64(left))
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &wait, nil) // a signal ends it early
	}
}
