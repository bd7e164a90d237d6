package reconcile

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// budget is the memory of a rank's process that no component has claimed yet, by kind.
type budget struct{ anonymous, shared, hugetlb ledger.Bytes }

// claim takes bytes for a component: anonymous memory first. What is beyond all kinds was counted, but is not
// resident; it makes the anonymous rest negative.
func (b *budget) claim(bytes ledger.Bytes) {
	for _, kind := range []*ledger.Bytes{&b.anonymous, &b.shared, &b.hugetlb} {
		taken := min(bytes, max(*kind, 0))
		*kind -= taken
		bytes -= taken
	}
	b.anonymous -= bytes
}

// rest returns what is left, by kind.
func (b *budget) rest() []ledger.Holding {
	var list []ledger.Holding
	for _, kind := range []struct {
		component ledger.Component
		bytes     ledger.Bytes
		why       string
	}{
		{ledger.UnexplainedAnonymous, b.anonymous, "anonymous memory that no component accounts for"},
		{ledger.UnexplainedShared, b.shared, "shared memory that no component accounts for"},
		{ledger.UnexplainedHugetlb, b.hugetlb, "huge pages that no component accounts for"},
	} {
		why := kind.why
		if kind.bytes < 0 {
			why = "the client counts more bytes than are resident: pages that were never written"
		}
		if kind.bytes != 0 {
			list = append(list, ledger.Holding{Component: kind.component, Bytes: kind.bytes, Why: why})
		}
	}
	return list
}

// holdings returns the components of a rank at its peak. Their sum is the peak.
func (p *peak) holdings() []ledger.Holding {
	at := p.at
	// A mark sees a higher peak than the sample near it: of memory that the process has allocated in between.
	between := p.need - at.need()
	left := budget{at.process.anonymous + between, at.process.shared, at.process.hugetlb}
	list := []ledger.Holding{{Component: ledger.PageTables, Bytes: at.process.pageTables,
		Why: "the kernel's tables of the process's pages"}}
	program := ledger.Holding{Component: ledger.PythonProcess, Bytes: at.process.program,
		Why: "file pages of the program and its libraries"}
	for _, a := range at.arenas {
		list = hold(list, ledger.Holding{Component: a.component, Bytes: a.bytes, Why: "an arena of plimsoll"})
	}
	for _, h := range p.counted() {
		if h.Component == ledger.PythonProcess {
			// The client counts the process before the model was made, with its file pages.
			more := max(h.Bytes-at.process.programResident, 0)
			left.claim(more)
			program.Bytes += more
			program.Why = "the process before the model was made"
			continue
		}
		h.Bytes -= min(h.Bytes, at.inArenas(h.Component))
		left.claim(h.Bytes)
		if h.Why == "" {
			h.Why = "tensors that the client has counted"
		}
		list = hold(list, h)
	}
	list = hold(list, program)
	if at.children != (held{}) {
		list = append(list, ledger.Holding{Component: ledger.ChildProcesses, Bytes: at.children.need(),
			Why: "processes that the rank has started, such as data loaders"})
	}
	if p.ended != nil && p.ended.PeakFreeHeap > 0 && left.anonymous > 0 {
		free := min(p.ended.PeakFreeHeap, left.anonymous)
		left.anonymous -= free
		list = append(list, ledger.Holding{Component: ledger.FreeHeap, Bytes: free,
			Why: "memory that malloc keeps for its next use"})
	}
	return slices.DeleteFunc(append(list, left.rest()...), func(h ledger.Holding) bool { return h.Bytes == 0 })
}

// counted returns what the client has counted at the peak, or at the end of the phase where it knows no more.
func (p *peak) counted() []ledger.Holding {
	switch {
	case p.ended == nil:
		return nil
	case len(p.ended.PeakHoldings) > 0:
		return p.ended.PeakHoldings
	}
	return p.ended.Holdings
}

// inArenas returns the resident bytes of a component that lie in arenas, which a client counts, too.
func (m *rankMoment) inArenas(component ledger.Component) ledger.Bytes {
	var sum ledger.Bytes
	for _, a := range m.arenas {
		if a.component == component || a.component.PartOf() == component {
			sum += a.bytes
		}
	}
	return sum
}

// hold adds a component to a list, or to its place in the list.
func hold(list []ledger.Holding, h ledger.Holding) []ledger.Holding {
	for i := range list {
		if list[i].Component == h.Component && list[i].Part == h.Part {
			list[i].Bytes += h.Bytes
			return list
		}
	}
	return append(list, h)
}

// otherHoldings returns what the service and plimsoll itself hold, without the arenas.
func (m *moment) otherHoldings() []ledger.Holding {
	list := []ledger.Holding{
		{Component: ledger.ServiceProcess, Bytes: m.service.need() - m.service.pageTables,
			Why: "the optimizer service without its arenas"},
		{Component: ledger.ServicePageTables, Bytes: m.service.pageTables,
			Why: "the kernel's tables of the service's pages"},
		{Component: ledger.Process, Bytes: m.keeper.need(), Why: "plimsoll run"},
	}
	return slices.DeleteFunc(list, func(h ledger.Holding) bool { return h.Bytes == 0 })
}

// gpuHoldings returns what torch and the driver say of a rank's GPUs in a phase. Their sum is the peak.
func gpuHoldings(gpus []samples.TorchMemory, driver ledger.Bytes) (list []ledger.Holding, need ledger.Bytes) {
	for _, g := range gpus {
		var counted ledger.Bytes
		for _, h := range g.Holdings {
			counted += h.Bytes
			list = hold(list, h)
		}
		list = hold(list, ledger.Holding{Component: ledger.UnexplainedGPU, Bytes: g.PeakAllocated - counted,
			Why: "allocated by torch beyond the tensors that the client has counted"})
		list = hold(list, ledger.Holding{Component: ledger.AllocatorReserve, Bytes: g.PeakReserved - g.PeakAllocated,
			Why: "reserved by torch's allocator and not allocated at the peak"})
		outside, why := driver-g.Reserved, "what the driver counts for the process beyond torch's reserved memory"
		if driver <= 0 {
			outside, why = g.Total-g.Free-g.Reserved, "used on the GPU beyond torch's reserved memory, by all processes"
		}
		list = hold(list, ledger.Holding{Component: ledger.OutsideAllocator, Bytes: max(outside, 0), Why: why})
	}
	if len(gpus) == 0 {
		list = append(list, ledger.Holding{Component: ledger.UnexplainedGPU, Bytes: driver,
			Why: fmt.Sprintf("the driver counts %v for the process, and torch's numbers are missing", driver)})
	}
	list = slices.DeleteFunc(list, func(h ledger.Holding) bool { return h.Bytes == 0 })
	for _, h := range list {
		need += h.Bytes
	}
	return list, need
}
