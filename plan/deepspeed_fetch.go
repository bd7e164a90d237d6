package plan

import (
	"plimsoll/ledger"
	"slices"
	"strings"

	"plimsoll/autograd"
)

// fetcher gathers the parameters of modules before they are used, and of those
// that follow once it has seen a pass (zero/partitioned_param_coordinator.py).
type fetcher struct {
	*deepSpeed
	modules map[string]*module
	fetched []fetched // by the index of a parameter
	order   []use     // modules as they were used in the first pass
	seen    bool      // the first pass is done
	at      int       // in order
	there   int64     // elements that are gathered
	// next is the place in order, and among its parameters, of what was not sent
	// for yet.
	next struct{ step, index int }
}

// module is a module with parameters of its own.
type module struct {
	parameters []*autograd.Parameter
	steps      []int // in order, that use it
	inUse      bool
}

// fetched is how much of a parameter is there.
type fetched struct {
	modules []*module // that have it
	keeps   bool      // it is persistent
	whole   bool      // it is there or on its way
	hold    hold
	flight  *flight // nil if it is there
	ahead   int     // the last use that it was fetched for, counted from 1
}

// flight is a gathering of several parameters in one tensor, which they are
// copied out of when the first is used.
type flight struct {
	flat       hold
	parameters []*autograd.Parameter
}

type use struct {
	module *module
	before int64 // elements of all uses before it
}

func newFetcher(e *deepSpeed, persistent []*autograd.Parameter) *fetcher {
	f := &fetcher{deepSpeed: e, modules: map[string]*module{}, fetched: make([]fetched, len(e.parameters))}
	for _, p := range persistent {
		f.of(p).keeps = true
	}
	blocks := make([]string, len(e.parameters)) // of weights of experts, which are fetched with their block
	for _, b := range e.Model.Network.Blocks() {
		if m := b.FeedForward.Mixture; m == nil || m.Fused() { // which is a module that is used as a whole
			continue
		}
		x := e.simulation.modules.Experts[b.FeedForward.Mixture]
		for _, weights := range [][]*autograd.Parameter{x.Gate, x.Up, x.Down} {
			for _, p := range weights {
				blocks[p.Index] = b.Path
			}
		}
	}
	for _, p := range e.Model.Parameters {
		if made := e.simulation.modules.ByName[p.Name]; made != nil {
			path := blocks[made.Index]
			if path == "" {
				path = p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
			}
			f.add(path, made)
		}
	}
	for path, a := range e.simulation.modules.Adapters {
		for _, p := range a.Parameters() {
			f.add(path, p)
		}
	}
	return f
}

func (f *fetcher) of(p *autograd.Parameter) *fetched { return &f.fetched[p.Index] }

// add says that a module has a parameter.
func (f *fetcher) add(path string, p *autograd.Parameter) {
	m := f.modules[path]
	if m == nil {
		m = &module{}
		f.modules[path] = m
	}
	m.parameters = append(m.parameters, p)
	f.of(p).modules = append(f.of(p).modules, m)
}

func (f *fetcher) BeforeForward(path string)  { f.use(path) }
func (f *fetcher) AfterForward(path string)   { f.release(path) }
func (f *fetcher) BeforeBackward(path string) { f.use(path) }
func (f *fetcher) AfterBackward(path string)  { f.release(path) }

// use fetches what a module needs, waits for it, and sends for what follows.
func (f *fetcher) use(path string) {
	m := f.modules[path]
	if m == nil {
		return
	}
	f.fetch(m.parameters)
	m.inUse = true
	if !f.seen {
		u := use{module: m}
		if n := len(f.order); n > 0 {
			u.before = f.order[n-1].before + elementsOf(f.order[n-1].module.parameters)
		}
		m.steps = append(m.steps, len(f.order))
		f.order = append(f.order, u)
		return
	}
	f.prefetch(m.parameters)
	f.at++
}

// fetch gathers what is missing and waits for what is on its way.
func (f *fetcher) fetch(parameters []*autograd.Parameter) {
	missing := make([]*autograd.Parameter, 0, len(parameters))
	for _, p := range parameters {
		if f.claim(p) {
			missing = append(missing, p)
		}
	}
	f.gather(missing)
	for _, p := range parameters {
		f.land(f.of(p).flight)
	}
}

// claim says whether a parameter has to be gathered, which its caller does.
func (f *fetcher) claim(p *autograd.Parameter) bool {
	w := f.of(p)
	if w.whole {
		return false
	}
	w.whole = true
	f.there += p.Elements
	return true
}

// gather sends for parameters. One alone comes into its own tensor.
func (f *fetcher) gather(missing []*autograd.Parameter) {
	switch {
	case len(missing) == 0 || f.gathers() == 0:
	case len(missing) == 1 || f.ShardRanks == 1:
		for _, p := range missing {
			f.of(p).hold = f.gpu.hold(f.gatheredBytes(p), ledger.GatheredParameters)
		}
	default:
		together := &flight{parameters: missing}
		var bytes int64
		for _, p := range missing {
			f.of(p).flight = together
			bytes += f.gatheredBytes(p)
		}
		together.flat = f.gpu.hold(bytes, ledger.GatheredParameters)
	}
}

// gatheredBytes are the parts of all ranks.
func (f *fetcher) gatheredBytes(p *autograd.Parameter) int64 {
	return f.partBytes(p) * int64(f.ShardRanks)
}

// land copies parameters out of the tensor that they were gathered in.
func (f *fetcher) land(g *flight) {
	if g == nil {
		return
	}
	for _, p := range g.parameters {
		w := f.of(p)
		w.hold, w.flight = f.gpu.hold(p.Bytes(), ledger.GatheredParameters), nil
	}
	drop(&g.flat)
}

// prefetch sends for parameters of the next modules: as many as
// prefetch_bucket_size and max_live_parameters allow.
func (f *fetcher) prefetch(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		for f.of(p).ahead <= f.at && f.pop() != nil {
		}
	}
	most := min(f.recipe.Sizes.LiveParameters-f.there, f.recipe.Sizes.PrefetchBucket)
	var next []*autograd.Parameter
	for elements := int64(0); elements < most; {
		p := f.pop()
		if p == nil {
			break
		}
		if f.claim(p) {
			next = append(next, p)
			elements += p.Elements
		}
	}
	f.gather(next)
}

// pop is the next parameter that was not sent for yet, nil after the last use of
// a pass.
func (f *fetcher) pop() *autograd.Parameter {
	n := &f.next
	if n.step == len(f.order) {
		return nil
	}
	parameters := f.order[n.step].module.parameters
	p := parameters[n.index]
	f.of(p).ahead = n.step + 1
	if n.index++; n.index == len(parameters) {
		n.step, n.index = n.step+1, 0
	}
	return p
}

// release gives a module's parameters back, but for those that are used again
// soon.
func (f *fetcher) release(path string) {
	m := f.modules[path]
	if m == nil {
		return
	}
	m.inUse = false
	for _, p := range m.parameters {
		if w := f.of(p); !w.keeps && !w.inUse() && !f.soon(w) {
			f.drop(p)
		}
	}
}

// inUse says that a module uses the parameter now.
func (w *fetched) inUse() bool {
	return slices.ContainsFunc(w.modules, func(m *module) bool { return m.inUse })
}

// soon says that a parameter was fetched for a later use, or is used within
// max_reuse_distance.
func (f *fetcher) soon(w *fetched) bool {
	if !f.seen {
		return false
	}
	return w.ahead > f.at+1 || slices.ContainsFunc(w.modules, func(m *module) bool {
		next, _ := slices.BinarySearch(m.steps, f.at)
		return next < len(m.steps) && f.order[m.steps[next]].before-f.order[f.at].before < f.recipe.Sizes.ReuseDistance
	})
}

func (f *fetcher) drop(p *autograd.Parameter) {
	w := f.of(p)
	if !w.whole {
		return
	}
	f.land(w.flight)
	drop(&w.hold)
	w.whole = false
	f.there -= p.Elements
}

// releaseAll gives everything back, as the step begins with.
func (f *fetcher) releaseAll() {
	for _, p := range f.parameters {
		f.drop(p)
	}
}

// reset ends a pass. The next one knows what is used when.
func (f *fetcher) reset() {
	f.seen, f.at, f.there = len(f.order) > 0, 0, 0
	f.next.step, f.next.index = 0, 0
	for i := range f.fetched {
		f.fetched[i].ahead = 0
	}
}
