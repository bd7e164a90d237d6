package service

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/engine"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
)

// of changes a document to one of so many elements.
func of(elements int64) func(*Document) {
	return func(d *Document) {
		d.Groups, d.Parameters = 1, []Piece{{Name: "mlp", Shape: []int64{elements}, Count: elements}}
	}
}

// rivals are the same shard twice: held by a service, and by this process.
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
	shard := engineOf(t, d, r.overview(t).Sessions[0].CPUs)
	putGradients(s, 1, 0, elements)
	copy(shard.Arena(kernel.ComponentGradient).Bytes(), s.Gradients.Bytes())
	return &rivals{session: s, shard: shard}
}

// step makes a step with both, and says what each took.
func (r *rivals) step(t testing.TB) (service, engine time.Duration) {
	t.Helper()
	r.last++
	begin := time.Now()
	if err := r.session.Step(r.last, 1, true, adamw[0]); err != nil {
		t.Fatal(err)
	}
	service = time.Since(begin)
	optimizers := []optim.Optimizer{testDocument().optimizer(adamw[0])}
	begin = time.Now()
	if err := r.shard.Begin(r.last, 1, optimizers); err != nil {
		t.Fatal(err)
	}
	r.shard.Wait()
	return service, time.Since(begin)
}

// sizes are those of a small and of a larger model.
var sizes = []struct {
	name     string
	elements int64
	steps    int
}{{"64Ki", 64 << 10, 400}, {"16Mi", 16 << 20, 15}}

// TestOverhead holds a step of the service against one of the engine in this
// process, step by step in turn. What the service costs is two messages, at any
// size of the model. Others use this machine, too: so the quickest steps are
// compared, and the bound is generous.
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
			if overhead := slices.Min(service) - slices.Min(engine); overhead > 300*time.Microsecond+slices.Min(engine)/10 {
				t.Errorf("a step takes %v longer over the service", overhead)
			}
			if size.elements < 1<<20 {
				sameState(t, r.session, r.shard)
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
