package plan

import (
	"slices"

	"plimsoll/ledger"
)

// trace follows what one device holds through the phases of a job, by
// component. It is the autograd.Memory of a GPU's tape.
type trace struct {
	names  []ledger.Component
	blocks []block // by id
	unused []int   // ids that may be given out again

	live ledger.Bytes
	held []ledger.Bytes // by component

	allocator Allocator // nil: requested bytes only
	stream    int       // CUDA's, that allocations are made on
	phases    []ledger.Phase
	peak      ledger.Bytes // of the phase that is open
	atPeak    []ledger.Bytes
	atTop     bool // nothing has changed since the peak, and atPeak is not written yet
	failed    error
}

type block struct {
	bytes     ledger.Bytes
	component int
}

// Allocator is where a trace is replayed: the caching allocator of a GPU, the
// malloc of a host, or none. Blocks have the ids of the trace.
type Allocator interface {
	Allocate(id int, bytes ledger.Bytes, stream int) error
	Free(id int) error
	// Use is what is allocated, in the allocator's rounding, and what is
	// reserved from the device: now, and at most since the last Reset.
	Use() Use
	ResetPeaks()
}

// Use is what an allocator holds.
type Use struct {
	Allocated, Reserved         ledger.Bytes
	PeakAllocated, PeakReserved ledger.Bytes
}

func newTrace(a Allocator) *trace { return &trace{allocator: a} }

func (t *trace) component(name ledger.Component) int {
	i := slices.Index(t.names, name)
	if i < 0 {
		i = len(t.names)
		t.names = append(t.names, name)
		t.held = append(t.held, 0)
	}
	return i
}

// Allocate begins a block.
func (t *trace) Allocate(bytes ledger.Bytes, component ledger.Component) int {
	b := block{bytes: bytes, component: t.component(component)}
	id := len(t.blocks)
	if n := len(t.unused); n > 0 {
		id = t.unused[n-1]
		t.unused = t.unused[:n-1]
		t.blocks[id] = b
	} else {
		t.blocks = append(t.blocks, b)
	}
	if t.allocator != nil && t.failed == nil {
		t.failed = t.allocator.Allocate(id, bytes, t.stream)
	}
	t.held[b.component] += bytes
	t.live += bytes
	if t.live > t.peak {
		t.peak, t.atTop = t.live, true
	}
	return id
}

// leave notes what is held at the peak before that changes.
func (t *trace) leave() {
	if t.atTop {
		t.atPeak, t.atTop = append(t.atPeak[:0], t.held...), false
	}
}

// Relabel says that a block is for something else from now on.
func (t *trace) Relabel(id int, component ledger.Component) {
	t.leave()
	b := &t.blocks[id]
	t.held[b.component] -= b.bytes
	b.component = t.component(component)
	t.held[b.component] += b.bytes
}

// Free ends a block.
func (t *trace) Free(id int) {
	t.leave()
	b := &t.blocks[id]
	t.held[b.component] -= b.bytes
	t.live -= b.bytes
	if t.allocator != nil && t.failed == nil {
		t.failed = t.allocator.Free(id)
	}
	t.unused = append(t.unused, id)
}

// on has body allocate on a stream: memory is not shared among streams.
func (t *trace) on(stream int, body func()) {
	before := t.stream
	t.stream = stream
	body()
	t.stream = before
}

// during is a block for as long as body runs.
func (t *trace) during(bytes ledger.Bytes, component ledger.Component, body func()) {
	if bytes <= 0 {
		body()
		return
	}
	id := t.Allocate(bytes, component)
	body()
	t.Free(id)
}

// phase runs body as a phase of the job.
func (t *trace) phase(name ledger.PhaseName, iteration ledger.Iteration, body func()) {
	t.peak, t.atTop = t.live, true
	if t.allocator != nil {
		t.allocator.ResetPeaks()
	}
	body()
	p := ledger.Phase{Name: name, Iteration: iteration, PeakRequested: t.peak, EndRequested: t.live}
	p.PeakAllocated, p.PeakReserved, p.EndAllocated, p.EndReserved = t.peak, t.peak, t.live, t.live
	if t.allocator != nil {
		u := t.allocator.Use()
		p.PeakAllocated, p.PeakReserved, p.EndAllocated, p.EndReserved = u.PeakAllocated,
			u.PeakReserved, u.Allocated, u.Reserved
	}
	t.leave()
	p.Components = t.components(t.atPeak)
	p.End = t.components(t.held)
	t.add(p)
}

// add joins a phase to the one of the same name and iteration: the passes over
// several micro batches are one phase, as high as the highest of them.
func (t *trace) add(p ledger.Phase) {
	for i := range t.phases {
		before := &t.phases[i]
		if before.Name != p.Name || before.Iteration != p.Iteration {
			continue
		}
		if before.PeakRequested > p.PeakRequested {
			p.PeakRequested, p.Components = before.PeakRequested, before.Components
		}
		p.PeakAllocated = max(p.PeakAllocated, before.PeakAllocated)
		p.PeakReserved = max(p.PeakReserved, before.PeakReserved)
		*before = p
		return
	}
	t.phases = append(t.phases, p)
}

// components are those that hold something, largest first.
func (t *trace) components(held []ledger.Bytes) []ledger.Holding {
	var list []ledger.Holding
	for i, bytes := range held {
		if bytes > 0 {
			list = append(list, ledger.Holding{Component: t.names[i], Bytes: bytes})
		}
	}
	slices.SortStableFunc(list, func(a, b ledger.Holding) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	return list
}
