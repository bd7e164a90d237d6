//go:build linux

package bench

import (
	"math"
	"math/rand/v2"
	"time"

	"plimsoll/internal/measure/summary"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
)

// turnTime is about how long a turn of updates takes. The speed of a shared memory changes within seconds, and a turn
// and those beside it must see the same memory. A turn is long beside waking the workers, some 20 us.
const turnTime = time.Millisecond

// blocksOfSample is how many turns of each pass a sample has. The updates of a sample together are long beside the
// kernel's clock tick of 10 ms, the unit in which the kernel counts other processes.
const blocksOfSample = 100

// passes of which each block of turns has one turn.
const (
	trafficPass = iota
	updatePass
	normPass
	loggedPass
	passes // their number
)

// turns measures passes over the state turn by turn. A block is one turn of each pass, in random order: no pass always
// comes first, or always after the same other. Every worker walks through its own chunks, and a turn goes on where the
// last one ended. So each turn finds its bytes where a step does: in memory, unless a cache holds all of the state.
type turns struct {
	kernel    kernel.Set
	format    kernel.Format
	constants kernel.Constants
	shards    []*engine.Shard
	walkers   [][]*walker // by rank and worker
	measured  []int       // the passes
	chunks    int         // in a turn of a worker
	shared    bool        // workers share CPUs
	now       func() time.Time
}

// walker is a worker's way through its own chunks.
type walker struct {
	chunks []kernel.Chunk
	next   int     // the chunk with which the next turn begins
	own    float64 // elements of all chunks
	undo   kernel.Undo
	walked float64 // elements of the last turn
	pace   float64 // seconds for each of them
	_      [64]byte
}

func newTurns(c Case, shards []*engine.Shard) *turns {
	t := &turns{kernel: c.Shards[0].Kernel, format: c.Format(), shards: shards, chunks: 1,
		shared: c.SharedCores, now: time.Now}
	c.Optimizer.Constants(&t.constants, 1000, 1)
	for _, s := range shards {
		var walkers []*walker
		for _, chunks := range s.Shares() {
			w := &walker{chunks: chunks, undo: kernel.UndoIn(make([]byte, t.format.UndoBytes()))}
			for _, chunk := range chunks {
				w.own += float64(chunk.Gradient.Len())
			}
			walkers = append(walkers, w)
		}
		t.walkers = append(t.walkers, walkers)
	}
	t.measured = []int{trafficPass, updatePass}
	if !c.InCore {
		t.measured = append(t.measured, normPass)
		if c.Journaled {
			t.measured = append(t.measured, loggedPass)
		}
	}
	t.calibrate()
	return t
}

// calibrate warms up and chooses how many chunks make a turn.
func (t *turns) calibrate() {
	for {
		t.turn(trafficPass)
		seconds := 0.0
		for range 3 {
			seconds = max(seconds, t.turn(updatePass)*t.part())
		}
		missing := turnTime.Seconds() / seconds
		if missing < 1.5 {
			return
		}
		t.chunks = int(math.Ceil(float64(t.chunks) * min(missing, 8)))
	}
}

// part returns how much of a worker's elements a turn walks, about: more than 1 where it walks them several times.
func (t *turns) part() float64 {
	w := t.walkers[0][0]
	return float64(t.chunks) / float64(len(w.chunks))
}

// turn makes a turn of a pass. It returns the seconds for all elements at that speed: those of the slowest worker, or
// of all together where some wait for each other's CPU.
func (t *turns) turn(pass int) (seconds float64) {
	begin := t.now()
	engine.OnWorkers(t.shards, func(rank, worker int) { t.walk(t.walkers[rank][worker], pass) })
	wall, walked, all := t.now().Sub(begin).Seconds(), 0.0, 0.0
	for _, rank := range t.walkers {
		for _, w := range rank {
			seconds = max(seconds, w.pace*w.own)
			walked, all = walked+w.walked, all+w.own
		}
	}
	if t.shared {
		return wall * all / walked
	}
	return seconds
}

// chunksOf returns how many chunks make a turn of a pass. A norm moves a fifth or less of the bytes of an update.
func (t *turns) chunksOf(pass int) int {
	if pass == normPass {
		return 5 * t.chunks
	}
	return t.chunks
}

func (t *turns) walk(w *walker, pass int) {
	if len(w.chunks) == 0 {
		return // there are fewer chunks than workers
	}
	begin := t.now()
	w.walked = 0
	for range t.chunksOf(pass) {
		chunk := w.chunks[w.next]
		w.next = (w.next + 1) % len(w.chunks)
		w.walked += float64(chunk.Gradient.Len())
		switch pass {
		case trafficPass:
			t.kernel.Traffic(t.format, chunk)
		case updatePass:
			t.kernel.Update(t.format, &t.constants, chunk)
		case normPass:
			t.kernel.SumSquares(chunk.Gradient)
		case loggedPass:
			w.undo.Begin()
			t.kernel.UpdateLogged(t.format, &t.constants, chunk, 0, w.undo)
		}
	}
	w.pace = t.now().Sub(begin).Seconds() / w.walked
}

// sample makes all turns of a sample.
func (t *turns) sample() Sample {
	var took [passes][]float64
	var shares []float64
	for range blocksOfSample {
		for _, i := range rand.Perm(len(t.measured)) {
			pass := t.measured[i]
			took[pass] = append(took[pass], t.turn(pass))
		}
		block := len(shares)
		shares = append(shares, took[trafficPass][block]/took[updatePass][block])
	}
	return Sample{
		Traffic: summary.Median(took[trafficPass]), Update: summary.Median(took[updatePass]),
		Fraction: summary.Median(shares), Norm: summary.Median(took[normPass]),
		Journaled: summary.Median(took[loggedPass]), TrafficTurns: took[trafficPass],
	}
}
