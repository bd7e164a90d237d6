package plan

import (
	"slices"
	"strings"

	"plimsoll/autograd"
)

// fetcher gathers the parameters of modules before they are used, and of those
// that follow once it has seen a pass (zero/partitioned_param_coordinator.py).
type fetcher struct {
	*deepSpeed
	modules map[string][]*autograd.Parameter
	whole   map[*autograd.Parameter]*gathered
	keeps   map[*autograd.Parameter]bool  // persistent parameters
	order   []use                         // modules as they were used in the first pass
	seen    bool                          // the first pass is done
	at      int                           // in order
	steps   map[*autograd.Parameter][]int // in order, that use a parameter
	queue   []queued                      // parameters as they will be used
	ahead   map[*autograd.Parameter]int   // the last use that a parameter was fetched for
	there   int64                         // elements that are gathered
}

// gathered is a whole parameter, there or on its way.
type gathered struct {
	*hold
	flight *flight
	users  map[string]bool // modules
}

// flight is a gathering of several parameters in one tensor, which they are
// copied out of when the first is used.
type flight struct {
	flat       *hold
	parameters []*autograd.Parameter
}

type use struct {
	parameters []*autograd.Parameter
	before     int64 // elements of all uses before it
}

type queued struct {
	parameter *autograd.Parameter
	step      int
}

func newFetcher(e *deepSpeed, persistent []*autograd.Parameter) *fetcher {
	f := &fetcher{deepSpeed: e, modules: map[string][]*autograd.Parameter{}, whole: map[*autograd.Parameter]*gathered{}, keeps: map[*autograd.Parameter]bool{}, steps: map[*autograd.Parameter][]int{}, ahead: map[*autograd.Parameter]int{}}
	for _, p := range persistent {
		f.keeps[p] = true
	}
	block := map[string]string{} // of the modules of experts, which are fetched with their block
	for _, b := range e.Model.Network.Blocks() {
		if m := b.FeedForward.Mixture; m != nil {
			for _, x := range m.Experts {
				block[x.Gate], block[x.Up], block[x.Down] = b.Path, b.Path, b.Path
			}
		}
	}
	for _, p := range e.Model.Parameters {
		if made := e.simulation.modules.ByName[p.Name]; made != nil {
			path := p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
			if b, ok := block[path]; ok {
				path = b
			}
			f.modules[path] = append(f.modules[path], made)
		}
	}
	for path, a := range e.simulation.modules.Adapters {
		for _, p := range append([]*autograd.Parameter{a.A, a.B}, a.Vectors...) {
			if p != nil {
				f.modules[path] = append(f.modules[path], p)
			}
		}
	}
	return f
}

func (f *fetcher) BeforeForward(path string)  { f.use(path) }
func (f *fetcher) AfterForward(path string)   { f.release(path) }
func (f *fetcher) BeforeBackward(path string) { f.use(path) }
func (f *fetcher) AfterBackward(path string)  { f.release(path) }

// use fetches what a module needs, waits for it, and sends for what follows.
func (f *fetcher) use(path string) {
	parameters := f.modules[path]
	if len(parameters) == 0 {
		return
	}
	f.fetch(parameters)
	for _, p := range parameters {
		f.whole[p].users[path] = true
	}
	if !f.seen {
		u := use{parameters: parameters}
		if n := len(f.order); n > 0 {
			u.before = f.order[n-1].before + elementsOf(f.order[n-1].parameters)
		}
		for _, p := range parameters {
			f.steps[p] = append(f.steps[p], len(f.order))
		}
		f.order = append(f.order, u)
		return
	}
	f.prefetch(parameters)
	f.at++
}

// fetch gathers what is missing and waits for what is on its way.
func (f *fetcher) fetch(parameters []*autograd.Parameter) {
	f.gather(parameters)
	for _, p := range parameters {
		f.land(f.whole[p].flight)
	}
}

// gather sends for parameters that are not there. One alone comes into its own
// tensor.
func (f *fetcher) gather(parameters []*autograd.Parameter) {
	var missing []*autograd.Parameter
	var bytes int64
	for _, p := range parameters {
		if f.whole[p] == nil {
			f.whole[p] = &gathered{users: map[string]bool{}}
			missing = append(missing, p)
			bytes += f.partBytes(p) * int64(f.ShardRanks)
			f.there += p.Elements
		}
	}
	if len(missing) == 0 {
		return
	}
	together := &flight{parameters: missing}
	for _, p := range missing {
		switch {
		case f.gathers() == 0:
		case len(missing) == 1 || f.ShardRanks == 1:
			f.whole[p].hold = f.gpu.hold(f.partBytes(p)*int64(f.ShardRanks), Gathered)
		default:
			f.whole[p].flight = together
		}
	}
	if f.whole[missing[0]].flight != nil {
		together.flat = f.gpu.hold(bytes, Gathered)
	}
}

// land copies parameters out of the tensor that they were gathered in.
func (f *fetcher) land(g *flight) {
	if g == nil {
		return
	}
	for _, p := range g.parameters {
		f.whole[p].hold = f.gpu.hold(p.Bytes(), Gathered)
		f.whole[p].flight = nil
	}
	drop(&g.flat)
}

// prefetch sends for parameters of the next modules: as many as
// prefetch_bucket_size and max_live_parameters allow.
func (f *fetcher) prefetch(parameters []*autograd.Parameter) {
	waiting := map[*autograd.Parameter]bool{}
	for _, p := range parameters {
		if f.ahead[p] < f.at+1 {
			waiting[p] = true
		}
	}
	for n := len(waiting); n > 0 && len(f.queue) > 0; {
		q := f.queue[0]
		f.queue = f.queue[1:]
		if waiting[q.parameter] {
			delete(waiting, q.parameter)
			n--
		}
		f.ahead[q.parameter] = q.step + 1
	}
	most := min(f.recipe.Sizes.LiveParameters-f.there, f.recipe.Sizes.PrefetchBucket)
	var next []*autograd.Parameter
	for elements := int64(0); elements < most && len(f.queue) > 0; {
		q := f.queue[0]
		f.queue = f.queue[1:]
		f.ahead[q.parameter] = max(f.ahead[q.parameter], q.step+1)
		if f.whole[q.parameter] == nil && !slices.Contains(next, q.parameter) {
			next = append(next, q.parameter)
			elements += q.parameter.Elements
		}
	}
	f.gather(next)
}

// release gives a module's parameters back, but for those that are used again
// soon.
func (f *fetcher) release(path string) {
	for _, p := range f.modules[path] {
		w := f.whole[p]
		if w == nil {
			continue
		}
		delete(w.users, path)
		if len(w.users) == 0 && !f.keeps[p] && !f.soon(p) {
			f.drop(p)
		}
	}
}

// soon says that a parameter was fetched for a later use, or is used within
// max_reuse_distance.
func (f *fetcher) soon(p *autograd.Parameter) bool {
	if !f.seen {
		return false
	}
	if f.ahead[p] > f.at+1 {
		return true
	}
	steps := f.steps[p]
	next, _ := slices.BinarySearch(steps, f.at)
	return next < len(steps) && f.order[steps[next]].before-f.order[f.at].before < f.recipe.Sizes.ReuseDistance
}

func (f *fetcher) drop(p *autograd.Parameter) {
	w := f.whole[p]
	if w == nil {
		return
	}
	f.land(w.flight)
	w.free()
	f.there -= p.Elements
	delete(f.whole, p)
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
	clear(f.ahead)
	f.queue = f.queue[:0:0]
	for step, u := range f.order {
		for _, p := range u.parameters {
			f.queue = append(f.queue, queued{p, step})
		}
	}
}
