//go:build linux

package cycle

import (
	"sync/atomic"
	"time"

	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/state/engine"
)

// link is a direction between host and device. It copies real bytes, and no faster than its rate.
type link struct {
	rate    float64 // bytes a second; 0 for the speed of this host's memory
	workers *engine.Workers
	move    func(to, from []byte) // moves a worker's share of a piece

	now   time.Time // when the last piece had arrived: the next is sent then at the earliest
	busy  time.Duration
	moved atomic.Int64 // bytes
}

// newLink returns a link with workers of a rank.
func newLink(rate float64, rank int, cpus []int) (*link, error) {
	l := &link{rate: rate}
	l.move = l.copy
	var err error
	l.workers, err = engine.NewWorkers(rank, cpus)
	return l, err
}

// close ends the workers.
func (l *link) close() {
	if l != nil && l.workers != nil {
		l.workers.Close()
	}
}

// reset begins a step.
func (l *link) reset(now time.Time) {
	l.now, l.busy = now, 0
	l.moved.Store(0)
}

// portion is how much a worker copies before Go's scheduler may stop it.
const portion = 4 << 20

// copy copies a share of a piece.
func (l *link) copy(to, from []byte) {
	for len(from) > 0 {
		n := copy(to[:min(portion, len(to))], from)
		to, from = to[n:], from[n:]
		l.moved.Add(int64(n))
	}
}

// transfer copies a piece once it is ready, and returns when it was sent. It has arrived now.
func (l *link) transfer(to, from []byte, ready time.Time) (sent time.Time) {
	sent = later(l.now, ready)
	workers := l.workers.Count()
	l.workers.Start(func(worker int) {
		if begin, end := share(len(from), worker, workers); end > begin {
			l.move(to[begin:end], from[begin:end])
		}
	})
	l.workers.Wait()
	takes := l.takes(len(from))
	due := sent.Add(takes)
	rehearse.SleepUntil(due)
	l.now = later(due, time.Now().Add(-min(pieces*takes, patience)))
	l.busy += l.now.Sub(sent)
	return sent
}

// patience is how late a copy or an update may be without the next one beginning later: its thread may have waited for
// a core, which a link or a device does not. For a copy it is no more than the time of a chunk.
const patience = 5 * time.Millisecond

// takes returns how long a number of bytes take at the rate of the link.
func (l *link) takes(bytes int) time.Duration {
	if l.rate == 0 {
		return 0
	}
	return time.Duration(float64(bytes) / l.rate * float64(time.Second))
}

// speed returns how fast the copies of the step were.
func (l *link) speed() float64 { return float64(l.moved.Load()) / max(l.busy.Seconds(), 1e-9) }

// share returns a worker's share of a piece. It begins at a stamp.
func share(bytes, worker, workers int) (begin, end int) {
	stamps := (bytes + stampEvery - 1) / stampEvery
	return min(stamps*worker/workers*stampEvery, bytes), min(stamps*(worker+1)/workers*stampEvery, bytes)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
