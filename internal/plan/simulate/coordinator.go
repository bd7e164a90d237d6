package simulate

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// coordinator is ZeRO-3's coordinator of parameters. It gathers the parameters of
// a module before the module runs. After the first pass it also prefetches those
// of the next modules (zero/partitioned_param_coordinator.py).
type coordinator struct {
	engine *deepSpeed
	// partition is called before a gathered parameter is freed.
	partition func(*autograd.Parameter)
	modules   map[string]*module
	status    []parameterStatus // by index of the parameter
	order     []use             // uses of modules in the first pass, in order
	seen      bool              // the first pass is done
	untraced  bool              // a pass is under way that the order does not have
	at        int               // the current use, an index of order
	live      int64             // elements of the live parameters
	// next is the first parameter that was not prefetched: an index of order, and an index of the module's
	// parameters.
	next struct{ step, index int }
}

// module is a module with parameters of its own.
type module struct {
	parameters []*autograd.Parameter
	steps      []int // its uses, as indices of order
	inUse      bool
}

// parameterStatus is the state of a parameter.
type parameterStatus struct {
	modules    []*module // modules that have the parameter
	persistent bool      // the parameter is persistent
	live       bool      // gathered, or in flight
	hold       hold
	inFlight   *allGather // nil once gathered
	ahead      int        // the last use that it was prefetched for, counted from 1
}

// allGather is an in-flight all-gather of several parameters into one tensor. The
// parameters are copied out of it when the first of them is used.
type allGather struct {
	flat       hold
	parameters []*autograd.Parameter
}

type use struct {
	module *module
	before int64 // elements of all uses before it
}

func newCoordinator(e *deepSpeed, persistent []*autograd.Parameter) *coordinator {
	c := &coordinator{engine: e, modules: map[string]*module{}, status: make([]parameterStatus, len(e.parameters))}
	for _, p := range persistent {
		c.statusOf(p).persistent = true
	}
	blocks := make([]string, len(e.parameters)) // weights of experts are fetched with their block
	for _, b := range e.Model.Network.Blocks() {
		if m := b.FeedForward.Mixture; m == nil || m.Fused() { // fused experts are one module
			continue
		}
		x := e.modules.Experts[b.FeedForward.Mixture]
		for _, weights := range [][]*autograd.Parameter{x.Gate, x.Up, x.Down} {
			for _, p := range weights {
				blocks[p.Index] = b.Path
			}
		}
	}
	for _, p := range e.Model.Parameters {
		if made := e.modules.ByName[p.Name]; made != nil {
			path := blocks[made.Index]
			if path == "" {
				path = p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
			}
			c.add(path, made)
		}
	}
	for path, a := range e.modules.Adapters {
		for _, p := range a.Parameters() {
			c.add(path, p)
		}
	}
	return c
}

func (c *coordinator) statusOf(p *autograd.Parameter) *parameterStatus { return &c.status[p.Index] }

// add adds a parameter to a module.
func (c *coordinator) add(path string, p *autograd.Parameter) {
	m := c.modules[path]
	if m == nil {
		m = &module{}
		c.modules[path] = m
	}
	m.parameters = append(m.parameters, p)
	c.statusOf(p).modules = append(c.statusOf(p).modules, m)
}

// use gathers the parameters of a module, waits for them, and prefetches those of
// the next modules.
func (c *coordinator) use(path string) {
	m := c.modules[path]
	if m == nil {
		return
	}
	c.fetch(m.parameters)
	m.inUse = true
	if c.untraced {
		return
	}
	if !c.seen {
		u := use{module: m}
		if n := len(c.order); n > 0 {
			u.before = c.order[n-1].before + elementsOf(c.order[n-1].module.parameters)
		}
		m.steps = append(m.steps, len(c.order))
		c.order = append(c.order, u)
		return
	}
	c.prefetch(m.parameters)
	c.at++
}

// fetch gathers missing parameters and waits for all that are in flight.
func (c *coordinator) fetch(parameters []*autograd.Parameter) {
	missing := make([]*autograd.Parameter, 0, len(parameters))
	for _, p := range parameters {
		if c.mark(p) {
			missing = append(missing, p)
		}
	}
	c.gather(missing)
	for _, p := range parameters {
		c.wait(c.statusOf(p).inFlight)
	}
}

// mark marks a parameter as live. It reports whether the caller has to gather
// it.
func (c *coordinator) mark(p *autograd.Parameter) bool {
	s := c.statusOf(p)
	if s.live {
		return false
	}
	s.live = true
	c.live += p.Elements
	return true
}

// gather begins an all-gather of parameters. A single parameter is gathered into
// its own tensor.
func (c *coordinator) gather(missing []*autograd.Parameter) {
	switch {
	case len(missing) == 0 || c.engine.gathers() == 0:
	case len(missing) == 1 && !c.engine.narrows(missing[0]) && !c.engine.quantizes() || c.engine.Parallel.Shard == 1,
		c.engine.recipe.Sizes.Group > 0: // MiCS gathers every parameter into its own tensor (zero/mics.py)
		for _, p := range missing {
			c.statusOf(p).hold = c.engine.gpu.hold(c.gatheredBytes(p), ledger.GatheredParameters, c.whyGathered)
		}
	default:
		together := &allGather{parameters: missing}
		var bytes int64
		for _, p := range missing {
			c.statusOf(p).inFlight = together
			bytes += c.gatheredBytes(p)
		}
		together.flat = c.engine.gpu.hold(bytes, ledger.GatheredParameters, c.whyGathered)
	}
}

func (c *coordinator) whyGathered() string {
	sizes := &c.engine.recipe.Sizes
	return fmt.Sprintf("full parameters of the modules in use, of those that prefetch_bucket_size %s sends for, of "+
		"those used again within max_reuse_distance %s, and of those up to %s elements; several are gathered in one "+
		"tensor and copied out of it (partitioned_param_coordinator.py)", ledger.Count(sizes.PrefetchBucket),
		ledger.Count(sizes.ReuseDistance), ledger.Count(sizes.PersistentParameter))
}

// gatheredBytes returns the size of the shards of all ranks.
func (c *coordinator) gatheredBytes(p *autograd.Parameter) int64 {
	e := c.engine
	if e.quantizes() { // in int8, beside scales in fp32
		return (e.shardOf(p.Elements) + e.shardOf(p.Elements)/quantizedGroup*4) * e.Parallel.Shard
	}
	if e.narrows(p) {
		return e.shardOf(p.Elements) * e.recipe.Autocast.Size() * e.Parallel.Shard
	}
	return e.shardBytes(p) * e.Parallel.Shard
}

// wait waits for an all-gather: it copies the parameters out of their tensor. With torch_autocast it then casts them.
func (c *coordinator) wait(g *allGather) {
	if g == nil {
		return
	}
	var widened hold // zero_quantized_weights: all of it is dequantized, then copied
	if c.engine.quantizes() && len(g.parameters) > 1 {
		var bytes int64
		for _, p := range g.parameters {
			bytes += c.engine.shardOf(p.Elements) * dtype.F16.Size() * c.engine.Parallel.Shard
		}
		widened = c.engine.gpu.hold(bytes, ledger.GatheredParameters, c.whyGathered)
	}
	for _, p := range g.parameters {
		s := c.statusOf(p)
		var narrow hold
		if c.engine.narrows(p) && len(g.parameters) > 1 {
			narrow = c.engine.gpu.hold(p.Elements*c.engine.recipe.Autocast.Size(), ledger.GatheredParameters,
				c.whyGathered)
		}
		if c.engine.quantizes() && p.DType != dtype.F16 { // the kernel writes fp16
			narrow = c.engine.gpu.hold(p.Elements*dtype.F16.Size(), ledger.GatheredParameters, c.whyGathered)
		}
		s.hold, s.inFlight = c.engine.gpu.hold(p.Bytes(), ledger.GatheredParameters, c.whyGathered), nil
		narrow.free()
	}
	widened.free()
	drop(&g.flat)
}

// prefetch begins the all-gather of parameters of the next modules: as many as
// prefetch_bucket_size and max_live_parameters allow.
func (c *coordinator) prefetch(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		for c.statusOf(p).ahead <= c.at && c.pop() != nil {
		}
	}
	most := min(c.engine.recipe.Sizes.LiveParameters-c.live, c.engine.recipe.Sizes.PrefetchBucket)
	var next []*autograd.Parameter
	for elements := int64(0); elements < most; {
		p := c.pop()
		if p == nil {
			break
		}
		if c.mark(p) {
			next = append(next, p)
			elements += p.Elements
		}
	}
	c.gather(next)
}

// pop returns the next parameter to prefetch, or nil after the last use of a pass.
func (c *coordinator) pop() *autograd.Parameter {
	n := &c.next
	if n.step == len(c.order) {
		return nil
	}
	parameters := c.order[n.step].module.parameters
	p := parameters[n.index]
	c.statusOf(p).ahead = n.step + 1
	if n.index++; n.index == len(parameters) {
		n.step, n.index = n.step+1, 0
	}
	return p
}

// release frees the parameters of a module, except those that are persistent, in
// use or used again soon.
func (c *coordinator) release(path string) {
	m := c.modules[path]
	if m == nil {
		return
	}
	m.inUse = false
	for _, p := range m.parameters {
		if s := c.statusOf(p); !s.persistent && !s.inUse() && !c.soon(s) {
			c.drop(p)
		}
	}
}

// inUse reports whether a module uses the parameter now.
func (s *parameterStatus) inUse() bool {
	return slices.ContainsFunc(s.modules, func(m *module) bool { return m.inUse })
}

// soon reports whether a parameter was prefetched for a later use, or is used
// again within max_reuse_distance.
func (c *coordinator) soon(s *parameterStatus) bool {
	if !c.seen || c.untraced {
		return false
	}
	reuse := c.engine.recipe.Sizes.ReuseDistance
	return s.ahead > c.at+1 || slices.ContainsFunc(s.modules, func(m *module) bool {
		next, _ := slices.BinarySearch(m.steps, c.at)
		return next < len(m.steps) && c.order[m.steps[next]].before-c.order[c.at].before < reuse
	})
}

func (c *coordinator) drop(p *autograd.Parameter) {
	s := c.statusOf(p)
	if !s.live {
		return
	}
	c.wait(s.inFlight)
	c.partition(p)
	drop(&s.hold)
	s.live = false
	c.live -= p.Elements
}

// releaseAll frees all gathered parameters. The step begins with it.
func (c *coordinator) releaseAll() {
	for _, p := range c.engine.parameters {
		c.drop(p)
	}
}

// apart runs a pass without gradients of the trained model, which is not in the order of its training: DeepSpeed ends
// its trace with such a pass, and begins a new one where the next pass differs (reset_step and trace_prologue in
// partitioned_param_coordinator.py).
func (c *coordinator) apart(pass func()) {
	c.untraced = true
	pass()
	c.untraced = false
}

// reset ends a pass. The next pass knows the order of the modules.
func (c *coordinator) reset() {
	c.seen, c.at, c.live = len(c.order) > 0, 0, 0
	c.next.step, c.next.index = 0, 0
	for i := range c.status {
		c.status[i].ahead = 0
	}
}
