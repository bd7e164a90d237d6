//go:build linux

package service

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// of gives a document a number of elements.
func of(elements int64) func(*protocol.Document) {
	return func(d *protocol.Document) {
		d.Groups, d.Parameters = 1, []protocol.Piece{{Name: "mlp", Shape: []int64{elements}, Count: elements}}
	}
}

// rivals are a shard that a service holds, and the same shard attached in this process.
// Both make steps over the same pages, as other pages could be faster or slower.
type rivals struct {
	session *servicetest.Session
	shard   *engine.Shard
	last    int64
}

func newRivals(t testing.TB, elements int64) *rivals {
	t.Helper()
	r := startService(t)
	d := testDocument(of(elements))
	s := mustOpen(t, r.Socket, d)
	if err := s.SetStep(0); err != nil {
		t.Fatal(err)
	}
	putGradients(s, 1, 0, elements)
	set, err := kernel.Select()
	if err != nil {
		t.Fatal(err)
	}
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	config, err := shardConfig(d, set, arena.BasePages, r.overview(t).Sessions[0].CPUs)
	if err != nil {
		t.Fatal(err)
	}
	config.Pages = engine.ChoosePages(h, config.Arenas())
	shard, err := engine.AttachShard(config, memfds(t, r.Process()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shard.Close() })
	return &rivals{session: s, shard: shard}
}

// memfds returns the memfds of this project that a process has open, by arena.
func memfds(t testing.TB, process int) map[string]*os.File {
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]*os.File{}
	for _, path := range paths {
		target, _ := os.Readlink(path) // a file closed meanwhile is none of them
		name, isOurs := strings.CutPrefix(strings.TrimSuffix(target, " (deleted)"), "/memfd:plimsoll/")
		if !isOurs {
			continue
		}
		file, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		found[name] = file
	}
	return found
}

// turn makes a step with both, in alternating order, and returns how long each took.
func (r *rivals) turn(t testing.TB) (service, engine time.Duration) {
	t.Helper()
	overService := func() {
		begin := time.Now()
		if err := r.session.Step(r.last+1, 1, true, adamw[0]); err != nil {
			t.Fatal(err)
		}
		service = time.Since(begin)
		r.last++
	}
	inProcess := func() {
		optimizers := []optim.Optimizer{optimizerOf(testDocument(), adamw[0])}
		begin := time.Now()
		if err := r.shard.Begin(r.last+1, 1, optimizers); err != nil {
			t.Fatal(err)
		}
		r.shard.Wait()
		engine = time.Since(begin)
		r.last++
	}
	if r.last%4 == 0 {
		overService()
		inProcess()
	} else {
		inProcess()
		overService()
	}
	return service, engine
}

// startEcho starts a process that sends every message back. The function it returns
// measures one round trip: no service can answer sooner.
func startEcho(t testing.TB) func() time.Duration {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "echo")
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), echoVariable+"=1")
	command.Stderr = os.Stderr
	command.ExtraFiles = []*os.File{theirs}
	if err := errors.Join(command.Start(), theirs.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Close(pair[0]), command.Wait()); err != nil {
			t.Error(err)
		}
	})
	message := make([]byte, 64)
	return func() time.Duration {
		begin := time.Now()
		if _, err := unix.Write(pair[0], message); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Read(pair[0], message); err != nil {
			t.Fatal(err)
		}
		return time.Since(begin)
	}
}

// echo is that process; it runs until its peer is gone.
func echo() error {
	message := make([]byte, 64)
	for {
		n, err := unix.Read(3, message)
		if n == 0 || err != nil {
			return err
		}
		if _, err := unix.Write(3, message[:n]); err != nil {
			return err
		}
	}
}

// TestOverhead compares steps of the service with steps of the engine in this process,
// in turn. The service costs one message each way, at any size of the model. The test
// measures such messages, too: they take longer after a step that moved much through
// the caches. As other programs use this machine, only the quickest step of the service
// must be close to those of the engine. One copy of the gradients would fail this test.
func TestOverhead(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector takes most of the time")
	}
	if testing.Short() {
		t.Skip("it measures, and that takes a while")
	}
	for _, size := range []struct {
		name            string
		elements, turns int64
	}{{"64Ki", 64 << 10, 400}, {"1Mi", 1 << 20, 200}, {"4Mi", 4 << 20, 100}, {"16Mi", 16 << 20, 100}} {
		t.Run(size.name, func(t *testing.T) {
			r, message := newRivals(t, size.elements), startEcho(t)
			var service, engine, more, messages []time.Duration
			for range size.turns {
				a, b := r.turn(t)
				service, engine, more, messages = append(service, a), append(engine, b), append(more, a-b),
					append(messages, message())
			}
			t.Logf("medians: the service %v, the engine %v, difference of two steps in turn %v, a message there and "+
				"back %v; quickest steps: %v and %v",
				median(service), median(engine), median(more), median(messages), slices.Min(service),
				slices.Min(engine))
			most := max(300*time.Microsecond, 10*median(messages)) // on a slow host, messages are slow, too
			if overhead := slices.Min(service) - median(engine); overhead > most {
				t.Errorf("a step takes %v longer over the service", overhead)
			}
		})
	}
}

func median(of []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(of))[len(of)/2]
}

// TestJournalIsUsed checks that another service can finish the service's steps.
func TestJournalIsUsed(t *testing.T) {
	r := startService(t)
	s := mustOpen(t, r.Socket, testDocument(small))
	components := fmt.Sprint(memoryOf(r.Process()))
	if want := "rank0/bf16/" + string(ledger.StepJournal); !strings.Contains(components, want) {
		t.Errorf("no %s among %s", want, components)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestHeapDoesNotGrow makes 1,000 steps with a service in this process. Neither the
// service nor its client keeps memory of a step.
func TestHeapDoesNotGrow(t *testing.T) {
	_, socket := serveHere(t)
	s := begun(t, socket, testDocument(small))
	mustStep(t, s, 50)
	before := heap()
	mustStep(t, s, 1050)
	after := heap()
	if grown := int64(after) - int64(before); grown > 32<<10 {
		t.Errorf("the heap has grown by %d bytes in 1,000 steps", grown)
	}
	t.Logf("%d bytes before, %d after", before, after)
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
