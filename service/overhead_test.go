package service

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/arena"
	"plimsoll/engine"
	"plimsoll/host"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
)

// of changes a document to one of so many elements.
func of(elements int64) func(*Document) {
	return func(d *Document) {
		d.Groups, d.Parameters = 1, []Piece{{Name: "mlp", Shape: []int64{elements}, Count: elements}}
	}
}

// rivals are a shard that a service holds, and the same shard attached here, so
// that both make steps over the same pages: others would be faster or slower by
// where they happen to be.
type rivals struct {
	session *Session
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
	config, err := d.config(set, arena.BasePages, r.overview(t).Sessions[0].CPUs)
	if err != nil {
		t.Fatal(err)
	}
	config.Pages = engine.ChoosePages(h, []engine.ShardConfig{config})
	shard, err := engine.AttachShard(config, memfds(t, r.Process()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shard.Close() })
	return &rivals{session: s, shard: shard}
}

// memfds are the files of this project that a process has open, by arena.
func memfds(t testing.TB, process int) map[string]*os.File {
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]*os.File{}
	for _, path := range paths {
		target, _ := os.Readlink(path) // what is closed by now is none of them
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

// step makes a step with both, one after the other, and says what each took.
func (r *rivals) step(t testing.TB) (service, engine time.Duration) {
	t.Helper()
	begin := time.Now()
	if err := r.session.Step(r.last+1, 1, true, adamw[0]); err != nil {
		t.Fatal(err)
	}
	service = time.Since(begin)
	optimizers := []optim.Optimizer{testDocument().optimizer(adamw[0])}
	begin = time.Now()
	if err := r.shard.Begin(r.last+2, 1, optimizers); err != nil {
		t.Fatal(err)
	}
	r.shard.Wait()
	r.last += 2
	return service, time.Since(begin)
}

// sizes are those of a small and of larger models.
var sizes = []struct {
	name     string
	elements int64
	steps    int
}{{"64Ki", 64 << 10, 400}, {"1Mi", 1 << 20, 200}, {"16Mi", 16 << 20, 40}}

// TestOverhead holds a step of the service against one of the engine in this
// process, step by step in turn. What the service costs is two messages, at any
// size of the model. Others use this machine, too: so the quickest step of the
// service must not be far behind those of the engine. A copy of the gradients
// alone would put it there.
func TestOverhead(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector takes most of the time")
	}
	for _, size := range sizes {
		t.Run(size.name, func(t *testing.T) {
			r := newRivals(t, size.elements)
			var service, engine, more []time.Duration
			for range size.steps {
				a, b := r.step(t)
				service, engine, more = append(service, a), append(engine, b), append(more, a-b)
			}
			t.Logf("medians: the service %v, the engine %v, difference of two steps in turn %v; quickest: %v and %v", median(service), median(engine), median(more), slices.Min(service), slices.Min(engine))
			if overhead := slices.Min(service) - median(engine); overhead > 300*time.Microsecond {
				t.Errorf("a step takes %v longer over the service", overhead)
			}
		})
	}
}

func median(of []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(of))[len(of)/2]
}

// BenchmarkStep measures the same, for a person to read.
func BenchmarkStep(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.name, func(b *testing.B) {
			r := newRivals(b, size.elements)
			var service, engine, more []time.Duration
			for b.Loop() {
				x, y := r.step(b)
				service, engine, more = append(service, x), append(engine, y), append(more, x-y)
			}
			b.ReportMetric(float64(median(service).Microseconds()), "µs/step-service")
			b.ReportMetric(float64(median(engine).Microseconds()), "µs/step-engine")
			b.ReportMetric(float64(median(more).Microseconds()), "µs/more")
		})
	}
}

// TestJournalIsUsed says that the service makes steps that another can finish.
func TestJournalIsUsed(t *testing.T) {
	r := startService(t)
	s := mustOpen(t, r.Socket, testDocument(small))
	components := fmt.Sprint(memoryOf(r.Process()))
	if want := "rank0/bf16/" + engine.ComponentJournal; !strings.Contains(components, want) {
		t.Errorf("no %s among %s", want, components)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestHeapDoesNotGrow makes 1,000 steps with a service in this process: neither
// it nor its client keeps anything of a step.
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
