package plan

import (
	"plimsoll/ledger"
	"slices"
	"strings"

	"plimsoll/autograd"
)

// fetcher is the coordinator of ZeRO-3. It gathers the parameters of a module
// before the module runs. After the first pass it also prefetches those of the
// next modules (zero/partitioned_param_coordinator.py).
type fetcher struct {
	*deepSpeed
	modules map[string]*module
	fetched []fetched // by index of the parameter
	order   []use     // uses of modules in the first pass, in order
	seen    bool      // the first pass is done
	at      int       // the current use, an index of order
	there   int64     // elements of the live parameters
	// next is the first parameter that was not prefetched yet: an index of order,
	// and an index of the module's parameters.
	next struct{ step, index int }
}

// module is a module with parameters of its own.
type module struct {
	parameters []*autograd.Parameter
	steps      []int // its uses, as indices of order
	inUse      bool
}

// fetched is the state of a parameter.
type fetched struct {
	modules []*module // modules that have the parameter
	keeps   bool      // the parameter is persistent
	whole   bool      // gathered, or in flight
	hold    hold
	flight  *flight // nil once gathered
	ahead   int     // the last use that it was prefetched for, counted from 1
}

// flight is an in-flight all-gather of several parameters into one tensor. The
// parameters are copied out of it when the first of them is used.
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
	blocks := make([]string, len(e.parameters)) // weights of experts are fetched with their block
	for _, b := range e.Model.Network.Blocks() {
		if m := b.FeedForward.Mixture; m == nil || m.Fused() { // fused experts are one module
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

// add adds a parameter to a module.
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

// use gathers the parameters of a module, waits for them, and prefetches those of
// the next modules.
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

// fetch gathers missing parameters and waits for all that are in flight.
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

// claim marks a parameter as live. It reports whether the caller has to gather
// it.
func (f *fetcher) claim(p *autograd.Parameter) bool {
	w := f.of(p)
	if w.whole {
		return false
	}
	w.whole = true
	f.there += p.Elements
	return true
}

// gather begins an all-gather of parameters. A single parameter is gathered into
// its own tensor.
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

// gatheredBytes returns the size of the shards of all ranks.
func (f *fetcher) gatheredBytes(p *autograd.Parameter) int64 {
	return f.partBytes(p) * int64(f.ShardRanks)
}

// land waits for an all-gather: it copies the parameters out of their tensor.
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

// prefetch begins the all-gather of parameters of the next modules: as many as
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

// pop returns the next parameter to prefetch, nil after the last use of a pass.
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

// release frees the parameters of a module, except those that are persistent, in
// use or used again soon.
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

// inUse reports whether a module uses the parameter now.
func (w *fetched) inUse() bool {
	return slices.ContainsFunc(w.modules, func(m *module) bool { return m.inUse })
}

// soon reports whether a parameter was prefetched for a later use, or is used
// again within max_reuse_distance.
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

// releaseAll frees all gathered parameters. The step begins with it.
func (f *fetcher) releaseAll() {
	for _, p := range f.parameters {
		f.drop(p)
	}
}

// reset ends a pass. The next pass knows the order of the modules.
func (f *fetcher) reset() {
	f.seen, f.at, f.there = len(f.order) > 0, 0, 0
	f.next.step, f.next.index = 0, 0
	for i := range f.fetched {
		f.fetched[i].ahead = 0
	}
}
