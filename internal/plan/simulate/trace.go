package simulate

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
)

// trace records what one device holds, by component, through the phases of a
// job. It is the autograd.Memory of a GPU's tape.
type trace struct {
	names   []ledger.Component
	reasons []string // by component
	blocks  []block  // by id
	unused  []int    // ids of freed blocks

	live  ledger.Bytes
	held  []ledger.Bytes // by component
	tally tally

	allocator replayer // nil counts requested bytes only
	stream    int      // the CUDA stream of the next allocations
	recorded  []phase
	peak      ledger.Bytes // of the current phase
	atPeak    []ledger.Bytes
	counts    []int           // of blocks at the peak, by size
	atTop     bool            // held is as at the peak, and not yet copied to atPeak and counts
	cached    *ledger.Holding // mapped files of the current phase
	failed    error
	measures  *measures                             // what formulas count in; nil counts bytes
	renamed   map[ledger.Component]ledger.Component // while a companion of the policy runs
	strict    bool                                  // every allocation of a component must give the same reason
}

type block struct {
	bytes     ledger.Bytes
	component int
	size      int // in the tally
}

// phase is a phase of a trace. Components are made of its moments when somebody asks: a pipeline has thousands of
// passes, and all passes of one name are one phase.
type phase struct {
	ledger.Phase
	peak, end moment
}

// moment is what a device holds at a time.
type moment struct {
	held   []ledger.Bytes // by component
	counts []int          // of blocks, by index in the tally
}

// set copies what is held. It uses the memory of the moment before.
func (m *moment) set(held []ledger.Bytes, counts []int) {
	m.held, m.counts = append(m.held[:0], held...), append(m.counts[:0], counts...)
}

// replayer is the model of an allocator that a trace is replayed on: the caching
// allocator of a GPU or the malloc of a host. Block ids are those of the trace.
type replayer interface {
	Allocate(id int, bytes ledger.Bytes, stream int) error
	Free(id int) error
	// EmptyCache returns what is not allocated to the device or to the system.
	EmptyCache()
	// Use returns the allocated bytes, rounded by the allocator, and the bytes
	// reserved from the device: now, and at the peak since the last ResetPeaks.
	Use() usage
	ResetPeaks()
}

// usage is the memory that an allocator holds.
type usage struct {
	Allocated, Reserved         ledger.Bytes
	PeakAllocated, PeakReserved ledger.Bytes
}

func newTrace(a replayer) *trace { return &trace{allocator: a} }

// component returns the index of a component. Only the first allocation of a component calls why: a job may make a
// million of them.
func (t *trace) component(name ledger.Component, why func() string) int {
	if other := t.renamed[name]; other != "" {
		name = other
	}
	i := slices.Index(t.names, name)
	if i < 0 {
		i = len(t.names)
		t.names = append(t.names, name)
		t.reasons = append(t.reasons, why())
		t.held = append(t.held, 0)
	}
	if t.strict && t.failed == nil && why() != t.reasons[i] {
		t.failed = fmt.Errorf("two reasons for %s: %q and %q", name, t.reasons[i], why())
	}
	return i
}

// because returns a reason with values. Every call of because computes the values, so an allocation that is made for
// every parameter has a method as its reason.
func because(format string, values ...any) func() string {
	return func() string { return fmt.Sprintf(format, values...) }
}

// Allocate allocates a block and returns its id. why gives the reason for the component's size.
func (t *trace) Allocate(bytes ledger.Bytes, component ledger.Component, why func() string) int {
	b := block{bytes: bytes, component: t.component(component, why)}
	b.size = t.tally.add(b.component, bytes)
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

// leave copies the components at the peak. Every change calls it first.
func (t *trace) leave() {
	if t.atTop {
		t.atPeak, t.atTop = append(t.atPeak[:0], t.held...), false
		t.counts = append(t.counts[:0], t.tally.counts...)
	}
}

// Relabel moves a block to another component.
func (t *trace) Relabel(id int, component ledger.Component, why func() string) {
	t.leave()
	b := &t.blocks[id]
	t.held[b.component] -= b.bytes
	t.tally.remove(b.size)
	b.component = t.component(component, why)
	b.size = t.tally.add(b.component, b.bytes)
	t.held[b.component] += b.bytes
}

// Free frees a block. Its id is used again.
func (t *trace) Free(id int) {
	t.leave()
	b := &t.blocks[id]
	t.held[b.component] -= b.bytes
	t.tally.remove(b.size)
	t.live -= b.bytes
	if t.allocator != nil && t.failed == nil {
		t.failed = t.allocator.Free(id)
	}
	t.unused = append(t.unused, id)
}

// evict moves blocks off the device, and returns their ids and their bytes. Nobody may free them before they are
// restored.
func (t *trace) evict(goes func(ledger.Component) bool) (ids []int, bytes ledger.Bytes) {
	t.leave()
	unused := make(map[int]bool, len(t.unused))
	for _, id := range t.unused {
		unused[id] = true
	}
	for id := range t.blocks {
		b := &t.blocks[id]
		if unused[id] || !goes(t.names[b.component]) {
			continue
		}
		ids, bytes = append(ids, id), bytes+b.bytes
		t.held[b.component] -= b.bytes
		t.tally.remove(b.size)
		t.live -= b.bytes
		if t.allocator != nil && t.failed == nil {
			t.failed = t.allocator.Free(id)
		}
	}
	t.emptyCache()
	return ids, bytes
}

// restore brings evicted blocks back.
func (t *trace) restore(ids []int) {
	t.leave()
	for _, id := range ids {
		b := &t.blocks[id]
		b.size = t.tally.add(b.component, b.bytes)
		t.held[b.component] += b.bytes
		t.live += b.bytes
		if t.allocator != nil && t.failed == nil {
			t.failed = t.allocator.Allocate(id, b.bytes, t.stream)
		}
	}
	if t.live > t.peak {
		t.peak, t.atTop = t.live, true
	}
}

// on runs body with its allocations on a stream. Streams do not share memory.
func (t *trace) on(stream int, body func()) {
	before := t.stream
	t.stream = stream
	body()
	t.stream = before
}

// emptyCache is torch.cuda.empty_cache().
func (t *trace) emptyCache() {
	if t.allocator != nil && t.failed == nil {
		t.allocator.EmptyCache()
	}
}

// phase runs body as a phase of the job.
func (t *trace) phase(name ledger.PhaseName, iteration ledger.Iteration, body func()) {
	t.peak, t.atTop, t.cached = t.live, true, nil
	if t.allocator != nil {
		t.allocator.ResetPeaks()
	}
	body()
	p := ledger.Phase{Name: name, Iteration: iteration, PageCache: t.cached}
	p.PeakRequested, p.EndRequested = t.peak, t.live
	p.PeakAllocated, p.PeakReserved, p.EndAllocated, p.EndReserved = t.peak, t.peak, t.live, t.live
	if t.allocator != nil {
		u := t.allocator.Use()
		p.PeakAllocated, p.PeakReserved, p.EndAllocated, p.EndReserved = u.PeakAllocated,
			u.PeakReserved, u.Allocated, u.Reserved
	}
	t.leave()
	t.add(p)
}

// maps notes files that the program maps in the current phase. The kernel can take their pages back.
func (t *trace) maps(bytes int64, why func() string) {
	if t.cached == nil {
		t.cached = &ledger.Holding{Component: ledger.MappedFiles, Why: why()}
	}
	t.cached.Bytes += ledger.Bytes(bytes)
}

// add adds a phase that ends now, or merges it into the phase of the same name and iteration. The passes of several
// micro batches are one phase, with the highest peak.
func (t *trace) add(p ledger.Phase) {
	at := slices.IndexFunc(t.recorded, func(q phase) bool { return q.Name == p.Name && q.Iteration == p.Iteration })
	if at < 0 {
		at = len(t.recorded)
		t.recorded = append(t.recorded, phase{Phase: ledger.Phase{PeakRequested: -1}})
	}
	of := &t.recorded[at]
	if p.PeakRequested >= of.PeakRequested {
		of.peak.set(t.atPeak, t.counts)
	}
	of.end.set(t.held, t.tally.counts)
	if p.PageCache == nil {
		p.PageCache = of.PageCache
	}
	p.PeakRequested = max(p.PeakRequested, of.PeakRequested)
	p.PeakAllocated = max(p.PeakAllocated, of.PeakAllocated)
	p.PeakReserved = max(p.PeakReserved, of.PeakReserved)
	of.Phase = p
}

// phases returns the phases so far.
func (t *trace) phases() []ledger.Phase {
	list := make([]ledger.Phase, len(t.recorded))
	for i := range t.recorded {
		p := &t.recorded[i]
		list[i] = p.Phase
		list[i].Components, list[i].End = t.components(&p.peak), t.components(&p.end)
	}
	return list
}

// components returns the components that hold memory at a moment, largest first.
func (t *trace) components(at *moment) []ledger.Holding {
	var list []ledger.Holding
	blocks := t.tally.blocks(at.counts, len(at.held))
	for i, bytes := range at.held {
		if bytes > 0 {
			list = append(list, ledger.Holding{Component: t.names[i], Bytes: bytes, Why: t.reasons[i],
				Formula: t.measures.formula(t.names[i], blocks[i])})
		}
	}
	slices.SortStableFunc(list, func(a, b ledger.Holding) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	return list
}
