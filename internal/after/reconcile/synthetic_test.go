package reconcile

import (
	"math"
	"math/rand/v2"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// training is a made-up run of one rank.
type training struct {
	steps     int
	perStep   int // samples of a step
	noise     float64
	states    ledger.Bytes // that appear in the first optimizer step
	marks     bool
	noPhases  bool
	late      int                         // steps at the beginning at the beginning whose forward pass is not sampled
	anonymous func(step int) ledger.Bytes // beside states and activations
	shared    func(step int) ledger.Bytes
	file      func(step int) ledger.Bytes
	child     func(step int) ledger.Bytes
	freeHeap  func(step int) ledger.Bytes
	gpu       func(step int) ledger.Bytes
	holdings  []ledger.Holding
	mapping   string // of the shared memory
	random    *rand.Rand
}

const (
	baseline    = 700 * ledger.MiB
	activations = 300 * ledger.MiB
)

func value(f func(int) ledger.Bytes, step int) ledger.Bytes {
	if f == nil {
		return 0
	}
	return f(step)
}

// record returns the recording of the run.
func (t training) record() *Recording {
	if t.random == nil {
		t.random = rand.New(rand.NewPCG(1, 2))
	}
	r := &Recording{File: "synthetic", Start: samples.Start{Schema: samples.Schema,
		Host: samples.Host{Memory: 64 * ledger.GiB, PageSize: 4096}}}
	now := time.Duration(0)
	last := ledger.Bytes(0)
	for step := 1; step <= t.steps; step++ {
		iteration := ledger.Steady
		if step == 1 {
			iteration = ledger.First
		}
		for i := range t.perStep {
			phase := []ledger.PhaseName{ledger.Forward, ledger.Backward, ledger.Step}[3*i/t.perStep]
			held := baseline + value(t.anonymous, step) + value(t.freeHeap, step)
			if phase == ledger.Forward {
				held += value(t.anonymous, step-1) - value(t.anonymous, step) // a leak of the backward pass
			}
			if step > 1 || phase == ledger.Step {
				held += t.states
			}
			at := held
			if phase != ledger.Step && t.late == 0 {
				at += ledger.Bytes(t.random.Float64() * float64(activations))
			}
			at += ledger.Bytes(t.noise * t.random.NormFloat64())
			if t.marks && i%max(t.perStep/3, 1) == 0 && now > 0 {
				before := []ledger.PhaseName{ledger.Step, ledger.Forward, ledger.Backward}[3*i/t.perStep]
				r.Marks = append(r.Marks, samples.Record{Time: now, Mark: &samples.Mark{Phase: phase,
					Source: samples.FromClient, Iteration: iteration, Step: int64(step),
					Ended: &samples.Ended{Phase: before, Iteration: iteration, Step: int64(step), Resident: last,
						Peak: last + activations, FreeHeap: value(t.freeHeap, step), Holdings: t.holdings}}})
			}
			last = held
			if phase != ledger.Forward || step > t.late {
				r.Samples = append(r.Samples,
					compacted(samples.Record{Time: now, Sample: t.sample(step, phase, iteration, at)})...)
			}
			now += 100 * time.Millisecond
		}
	}
	r.End = &samples.Record{Time: now, End: &samples.End{}}
	return r
}

func (t training) sample(step int, phase ledger.PhaseName, iteration ledger.Iteration,
	anonymous ledger.Bytes) *samples.Sample {
	if t.noPhases {
		phase, iteration, step = "", "", 0
	}
	kinds := samples.Kinds{Anonymous: anonymous, Shared: value(t.shared, step),
		File: 200*ledger.MiB + value(t.file, step)}
	rank := samples.Process{PID: 10, Role: samples.RankProcess, Phase: phase, Iteration: iteration, Step: int64(step),
		Resident: kinds, Proportional: kinds, PageTables: 2 * ledger.MiB}
	if t.mapping != "" {
		rank.Mappings = []samples.Mapping{{Name: t.mapping, Kind: samples.SharedMapping, Resident: kinds.Shared,
			Proportional: kinds.Shared}}
	}
	s := &samples.Sample{Processes: []samples.Process{rank}}
	if t.child != nil {
		kinds := samples.Kinds{Anonymous: 100*ledger.MiB + t.child(step)}
		s.Processes = append(s.Processes, samples.Process{PID: 11, Parent: 10, Role: samples.Child, Resident: kinds,
			Proportional: kinds})
	}
	if t.gpu != nil {
		s.GPUs = []samples.GPU{{Processes: []samples.GPUProcess{{PID: 10, Used: ledger.GiB + t.gpu(step)}}}}
	}
	return s
}

// compacted returns records as a comparison keeps them.
func compacted(records ...samples.Record) []sample {
	c := newCompactor()
	var list []sample
	for i := range records {
		list = append(list, c.sample(&records[i]))
	}
	return list
}

// leaks returns the growth that goes on.
func leaks(list []Growth) []Growth {
	var found []Growth
	for _, g := range list {
		if g.IsLeak() {
			found = append(found, g)
		}
	}
	return found
}

func near(got, want ledger.Bytes, share float64) bool {
	return math.Abs(float64(got-want)) <= share*math.Abs(float64(want))
}
