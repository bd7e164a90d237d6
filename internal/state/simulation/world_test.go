//go:build linux

package simulation

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	"plimsoll/internal/state/checked"
)

// kind is what a call is about, as the scheduler sees it.
type kind uint8

const (
	makeFile kind = iota
	openFile
	nameFile // renaming, removing, and bringing names to the disk
	readFile
	writeFile
	syncFile
	storeNumber // of the journal
	changeChunk // a worker has updated it, and has not marked it
	copyChunk   // a snapshot is about to copy the next chunk
	nextRequest // of the trainer
	kinds
)

var kindNames = [kinds]string{"make", "open", "name", "read", "write", "sync", "store", "change", "copy", "request"}

// call is what a goroutine of the code under test wants to do next.
type call struct {
	kind   kind
	what   string // the file, or the arena
	offset int64
	apply  func(part float64) // does a part of a write, as a killed process leaves it; nil for other calls
	answer chan error
}

func (c *call) compare(other *call) int {
	return cmp.Or(cmp.Compare(c.kind, other.kind), strings.Compare(c.what, other.what),
		cmp.Compare(c.offset, other.offset))
}

func (c *call) String() string {
	return fmt.Sprintf("%s %s at %d", kindNames[c.kind], c.what, c.offset)
}

// errEnded is the error of every call of a process that has ended.
var errEnded = errors.New("the process has ended")

// life is one process: from its start to its end, or to a fault that kills it.
type life struct {
	world *world
	fault fault
	where func(w *checked.Word) (arena string, offset int64) // finds a number in the arenas

	mutex    sync.Mutex
	waiting  []*call
	counting bool // whether calls and stores are counted yet
	stores   int
	calls    int
	over     atomic.Bool // killed: nothing that it does counts any more
	struck   bool        // the fault has come
	phase    string      // what the trainer is doing
}

// watched is called before every store of a number. One schedule runs at a time in a process.
var watched atomic.Pointer[func(w *checked.Word)]

func init() {
	checked.BeforeStore = func(w *checked.Word) {
		if before := watched.Load(); before != nil {
			(*before)(w)
		}
	}
}

// watch has a function called before every store of a number, until the function that it returns is called.
func watch(before func(w *checked.Word)) (end func()) {
	watched.Store(&before)
	return func() { watched.Store(nil) }
}

// beforeStore lets the scheduler decide before a number is written: at the instant of the fault, and everywhere if
// several workers run, whose stores must come in an order that the seed decides.
func (l *life) beforeStore(w *checked.Word) {
	if l.over.Load() {
		return
	}
	l.mutex.Lock()
	number := l.stores
	if l.counting {
		l.stores++
	}
	l.mutex.Unlock()
	if l.world.finely || l.counting && l.fault.atStore && number == l.fault.at {
		arena, offset := l.where(w)
		_ = l.pass(&call{kind: storeNumber, what: arena, offset: offset})
	}
}

// pass returns when the scheduler lets a call go on, with the error that the call is to have.
func (l *life) pass(c *call) error {
	l.mutex.Lock()
	if l.over.Load() {
		l.mutex.Unlock()
		return errEnded
	}
	c.answer = make(chan error, 1)
	l.waiting = append(l.waiting, c)
	l.mutex.Unlock()
	return <-c.answer
}

// run runs a process until all its calls have ended. It decides which call goes on whenever all goroutines wait. It is
// called in a bubble of synctest.
func (l *life) run(body func()) error {
	var done atomic.Bool
	go func() {
		defer done.Store(true)
		body()
	}()
	slept := false
	for {
		synctest.Wait()
		switch {
		case len(l.waiting) > 0:
			slept = false
			l.next()
		case done.Load():
			return nil
		case slept:
			return fmt.Errorf("nothing can go on while %s", l.phase)
		default:
			time.Sleep(time.Hour) // for a timer of the code under test
			slept = true
		}
	}
}

// next lets one call go on, or the fault come.
func (l *life) next() {
	w := l.world
	slices.SortFunc(l.waiting, (*call).compare)
	number := w.random.IntN(len(l.waiting))
	chosen := l.waiting[number]
	due := !l.fault.atStore && l.calls >= l.fault.at
	if l.fault.atStore && chosen.kind == storeNumber && l.stores > l.fault.at {
		due = true
	}
	if l.counting {
		l.calls++
	}
	if due && !l.struck && l.fault.kind != noFault && l.fault.kind != noDescriptor && l.counting {
		l.struck = true
		w.logf("%s, %v: %s", l.phase, chosen, l.fault.kind)
		w.met(l.phase, chosen.kind, l.fault.kind)
		if ends := l.fault.kind.strike(l, chosen); ends {
			l.end()
			return
		}
	}
	l.waiting = slices.Delete(l.waiting, number, number+1)
	w.logf("%s: %v", l.phase, chosen)
	err := w.nextError
	w.nextError = nil
	chosen.answer <- err
}

// end ends the process: nothing that waits is done, and nothing that comes later.
func (l *life) end() {
	l.over.Store(true)
	for _, c := range l.waiting {
		c.answer <- errEnded
	}
	l.waiting = nil
}

// world is one schedule.
type world struct {
	seed      uint64
	random    *rand.Rand
	steady    bool // nothing is left to chance: the run that others are compared with
	finely    bool // every store of a number waits for the scheduler
	nextError error
	disk      *disk
	mutex     sync.Mutex // guards trace: a service tells of what it does from several goroutines
	trace     []string
	tracing   bool
	covered   coverage
	captured  func() // keeps the memory of the process that is being killed
	powerless bool   // the power is off
	flipped   string // what was flipped
	flip      func() string
}

func newWorld(seed uint64, tracing bool, covered coverage) *world {
	return &world{seed: seed, random: rand.New(rand.NewPCG(seed, 0)), tracing: tracing, covered: covered}
}

func (w *world) logf(format string, values ...any) {
	if w.tracing {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		w.trace = append(w.trace, fmt.Sprintf(format, values...))
	}
}

// met counts a state that a fault has met.
func (w *world) met(phase string, kind kind, fault faultKind) {
	w.covered[meeting{phase, kind, fault}]++
}

func (w *world) chance(of float64) bool { return !w.steady && w.random.Float64() < of }
