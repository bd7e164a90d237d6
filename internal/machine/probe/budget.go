//go:build linux

package probe

import (
	"time"

	"golang.org/x/sys/unix"
)

// A budget is a share of a core that expensive readings may take. Time earns credit; a reading spends what it has
// really cost. So a reading is made less often the more it costs, and no kind of reading needs a period of its own.
type budget struct {
	share   float64       // of one core
	most    time.Duration // credit is not saved beyond this
	credit  time.Duration // CPU time; negative after a reading that took longer than expected
	updated time.Time
}

// affords reports whether there is credit for a reading that is expected to take that much CPU time.
func (b *budget) affords(now time.Time, expected time.Duration) bool {
	if !b.updated.IsZero() {
		earned := time.Duration(b.share * float64(now.Sub(b.updated)))
		b.credit = min(b.most, b.credit+max(0, earned))
	}
	b.updated = now
	return b.credit >= expected
}

func (b *budget) spend(cost time.Duration) { b.credit -= cost }

// clock tells the time of day and the CPU time of the calling thread.
type clock interface {
	now() time.Time
	cpu() time.Duration
}

type systemClock struct{}

func (systemClock) now() time.Time { return time.Now() }

func (systemClock) cpu() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}
