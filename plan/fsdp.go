package plan

import (
	"cmp"
	"fmt"
	"maps"
	"strings"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// sharded is PyTorch's Fully Sharded Data Parallel, of either version. A unit
// is a block, or the root, which has what is outside of blocks; a unit's
// parameters are gathered before they are used (torch/distributed/fsdp).
type sharded struct {
	*simulation
	units  map[string]*unit
	order  []*unit // as the forward pass goes; the root is not in it
	root   *unit
	shards []*autograd.Parameter // what the optimizer has: a part of what is trained
	// reducing is the input of the last reduction, which lives until the next.
	reducing hold
}

// unit is what is gathered at a time.
type unit struct {
	path       string
	at         int
	parameters []*autograd.Parameter
	gathered   hold
	gradients  hold // sharded
	flat       hold // whole, of FSDP1 before it is reduced
	replicated hold // what FSDP2 adds up among replicas
	inUse      bool
}

// hold is a block that is held, on the GPU or on the host; the zero hold is none.
type hold struct {
	trace *trace
	id    int
}

func (t *trace) hold(bytes int64, component ledger.Component) hold {
	if bytes <= 0 {
		return hold{}
	}
	return hold{t, t.Allocate(ledger.Bytes(bytes), component)}
}

// held says whether there is a block.
func (h hold) held() bool { return h.trace != nil }

func (h hold) free() {
	if h.held() {
		h.trace.Free(h.id)
	}
}

// drop frees what a variable holds and empties it.
func drop(h *hold) {
	h.free()
	*h = hold{}
}

func newSharded(s *simulation) *sharded {
	e := &sharded{simulation: s, units: map[string]*unit{}, root: &unit{at: -1}}
	wrapped := s.FSDP.WrapPolicy != "no_wrap"
	wrap := func(path string) {
		u := &unit{path: path, at: len(e.order)}
		e.units[path] = u
		e.order = append(e.order, u)
	}
	network := s.Model.Network
	for _, b := range network.Blocks() {
		if wrapped {
			wrap(b.Path)
		}
	}
	for _, p := range s.parameters {
		u := e.unitOf(p.Name)
		u.parameters = append(u.parameters, p)
	}
	for _, p := range s.trained {
		shard := *p
		shard.Elements, shard.DType = e.part(e.spread(p)), s.Weights
		switch {
		case p.Matrices > 0 && s.FSDP.Version == 2:
			shard.Matrices = e.part(p.Matrices)
		case p.Rows > 0:
			shard.Rows = e.part(p.Rows)
		}
		e.shards = append(e.shards, &shard)
	}
	return e
}

// part is a rank's share.
func (e *sharded) part(n int64) int64 {
	ranks := int64(e.ShardRanks)
	return (n + ranks - 1) / ranks
}

// spread is how many elements all ranks have of a parameter. With FSDP2 that is
// as many as if they all had the rows of the first, which has the most: the
// first dimension is divided, and what others lack is padding.
func (e *sharded) spread(p *autograd.Parameter) int64 {
	if e.FSDP.Version == 1 {
		return p.Elements
	}
	first := cmp.Or(p.Matrices, p.Rows, p.Elements)
	return e.part(first) * (p.Elements / first) * int64(e.ShardRanks)
}

// unitOf finds the unit of a parameter by its name.
func (e *sharded) unitOf(name string) *unit {
	for at := 0; at < len(name); at++ {
		if name[at] == '.' {
			if u, ok := e.units[name[:at]]; ok {
				return u
			}
		}
	}
	return e.root
}

// home is where shards are.
func (e *sharded) home() *trace {
	if e.FSDP.OffloadParameters {
		return e.host
	}
	return e.gpu
}

func (u *unit) elements(only func(*autograd.Parameter) bool, bytes func(*autograd.Parameter) int64) int64 {
	var sum int64
	for _, p := range u.parameters {
		if only == nil || only(p) {
			sum += bytes(p)
		}
	}
	return sum
}

// shardedBytes is what a unit's shard takes: quantized weights as they are, the
// rest in the type of the weights.
func (e *sharded) shardedBytes(u *unit) int64 {
	return u.elements(nil, func(p *autograd.Parameter) int64 {
		if p.Quantized != autograd.Unquantized {
			return e.part(p.Bytes())
		}
		return e.part(e.spread(p)) * e.Weights.Size()
	})
}

func (e *sharded) initialize() {}

// The streams of FSDP beside the one that computes.
const (
	gatherStream = iota + 1
	reduceStream
)

// gather makes the whole of a unit's parameters, in the type of the
// computation.
func (e *sharded) gather(u *unit) {
	if u == nil || u.gathered.held() || len(u.parameters) == 0 {
		return
	}
	bytes := u.elements(nil, (*autograd.Parameter).Bytes)
	if e.FSDP.Version == 1 {
		e.gpu.on(gatherStream, func() { u.gathered = e.gpu.hold(bytes, ledger.GatheredParameters) })
		return
	}
	// FSDP2 copies every parameter out of what was gathered, padding and all.
	bytes = u.elements(nil, func(p *autograd.Parameter) int64 {
		if p.Quantized != autograd.Unquantized {
			return p.Bytes()
		}
		return e.spread(p) * p.DType.Size()
	})
	var flat hold
	e.gpu.on(gatherStream, func() { flat = e.gpu.hold(bytes, ledger.GatheredParameters) })
	u.gathered = e.gpu.hold(bytes, ledger.GatheredParameters)
	flat.free()
}

func (e *sharded) neighbour(u *unit, step int) *unit {
	if at := u.at + step; u != e.root && at >= 0 && at < len(e.order) {
		return e.order[at]
	}
	return nil
}

// reshards says whether a unit is given back after its forward pass. The root
// is not: the backward pass begins with it.
func (e *sharded) reshards(u *unit) bool {
	if e.KeepsLastBlock && u.at == len(e.order)-1 {
		return false
	}
	return u != e.root && strings.HasPrefix(e.FSDP.Strategy, "full_shard") ||
		u != e.root && e.FSDP.Strategy == "hybrid_shard"
}

func (e *sharded) BeforeForward(path string) {
	e.gather(e.root)
	u, ok := e.units[path]
	if !ok {
		return
	}
	e.gather(u)
	// The host runs ahead of the GPU: the next unit is on its way before this
	// one is done.
	if !u.inUse {
		e.gather(e.neighbour(u, 1))
	}
}

func (e *sharded) AfterForward(path string) {
	if u, ok := e.units[path]; ok && !u.inUse && e.reshards(u) {
		drop(&u.gathered)
	}
}

func (e *sharded) BeforeBackward(path string) {
	u, ok := e.units[path]
	if !ok {
		return
	}
	u.inUse = true
	e.gather(u)
	if e.FSDP.BackwardPrefetch != "none" {
		e.gather(e.neighbour(u, -1))
	}
}

func (e *sharded) AfterBackward(path string) {
	if u, ok := e.units[path]; ok {
		u.inUse = false
		if e.reduces() {
			e.reduce(u)
		} else {
			e.accumulate(u)
		}
		drop(&u.gathered)
	}
}

func (e *sharded) gradient(*autograd.Parameter) {}

// reduces says whether gradients are reduced after this backward pass: they are
// not before the last micro batch, under no_sync, which accelerate and Lightning
// use. Whole gradients are held until then.
func (e *sharded) reduces() bool { return e.micro == e.micros-1 }

// accumulate has the whole gradient of a unit held. FSDP1 has one for the flat
// parameter, frozen parts and all.
func (e *sharded) accumulate(u *unit) {
	if e.FSDP.Version != 1 || u.flat.held() {
		if u.flat.held() {
			for _, p := range u.parameters {
				p.DropGradient()
			}
		}
		return
	}
	if u.elements(func(p *autograd.Parameter) bool { return p.HasGradient() }, (*autograd.Parameter).Bytes) == 0 {
		return
	}
	u.flat = e.gpu.hold(u.elements(func(p *autograd.Parameter) bool {
		return p.Quantized == autograd.Unquantized
	},
		func(p *autograd.Parameter) int64 {
			return p.Elements * p.DType.Size()
		}),
		ledger.Gradients)
	for _, p := range u.parameters {
		p.DropGradient()
	}
}

// reduce makes a rank's part of the gradients of a unit. They are put together
// in the type of the reduction, and that buffer lives until the next unit
// needs one.
func (e *sharded) reduce(u *unit) {
	whole := u.elements(func(p *autograd.Parameter) bool { return p.HasGradient() }, e.spread)
	if whole == 0 {
		return
	}
	stream := reduceStream
	if e.FSDP.Version == 2 {
		stream = 0
	}
	var input hold
	e.gpu.on(stream, func() { input = e.gpu.hold(whole*e.ReduceType.Size(), ledger.CommunicationBuckets) })
	for _, p := range u.parameters {
		p.DropGradient()
	}
	drop(&u.flat)
	drop(&e.reducing)
	e.reducing = input
	part := e.part(whole)
	e.gpu.on(reduceStream, func() { e.receive(u, part) })
}

// receive makes a rank's part of the reduced gradients of a unit.
func (e *sharded) receive(u *unit, part int64) {
	output := e.gpu.hold(part*e.ReduceType.Size(), ledger.Gradients)
	switch {
	case u.gradients.held() || e.FSDP.OffloadParameters || e.ReduceType != e.Weights:
		if !u.gradients.held() {
			u.gradients = e.home().hold(part*e.Weights.Size(), ledger.Gradients)
		}
		if e.FSDP.Version == 2 && e.Replicas() > 1 {
			u.replicated = output // until the backward pass ends (AllReduceState in _fsdp_param_group.py)
			return
		}
		output.free()
	default:
		u.gradients = output
	}
}

func (e *sharded) endBackward(bool) {
	if !e.reduces() {
		e.accumulate(e.root)
	} else {
		e.reduce(e.root)
	}
	drop(&e.reducing)
	for _, u := range append(e.order, e.root) {
		drop(&u.replicated)
	}
	if e.FSDP.Strategy != "no_shard" {
		drop(&e.root.gathered)
	}
}

func (e *sharded) step() { e.optimizeOn(e.home(), e.shards) }

func (e *sharded) zeroGradients() {
	for _, u := range append(e.order, e.root) {
		drop(&u.gradients)
	}
}

// save gathers the whole model on the host of the first rank for a full
// state_dict, a parameter at a time through the GPU. The other ranks of its
// node hold none of it (rank0_only).
func (e *sharded) save() {
	if e.FSDP.StateDictType != "full_state_dict" {
		return
	}
	var largest, sum int64
	for _, p := range e.parameters {
		largest = max(largest, p.Elements*e.Weights.Size())
		sum += p.Elements * e.Weights.Size()
	}
	e.gpu.during(ledger.Bytes(largest), ledger.GatheredParameters, func() {
		e.host.during(ledger.Bytes(e.perNode(sum)), ledger.FullStateDict, func() {})
	})
}

func (e *sharded) reasons() map[ledger.Component]string {
	var elements int64
	for _, p := range e.parameters {
		elements += p.Elements
	}
	largest := int64(0)
	for _, u := range e.order {
		largest = max(largest, u.elements(nil, (*autograd.Parameter).Bytes))
	}
	r := map[ledger.Component]string{
		ledger.Parameters: fmt.Sprintf("a part of each of %d ranks: %s parameters x %d B (%v)", e.ShardRanks,
			ledger.Count(elements), e.Weights.Size(), e.Weights),
		ledger.GatheredParameters: fmt.Sprintf("units gathered in %v: the root, which stays, and two blocks at a "+
			"time of up to %v: the one in use and the next", e.compute(), ledger.Bytes(largest)),
		ledger.CommunicationBuckets: fmt.Sprintf("gradients of a unit put together in %v for the reduce-scatter; the "+
			"buffer lives until the next unit's (FSDP2's ReduceScatterState)", e.ReduceType),
		ledger.Gradients: fmt.Sprintf("whole gradients of a unit in %v until they are reduced, then a "+
			"part of each of %d ranks in %v", e.compute(), e.ShardRanks, e.Weights),
	}
	maps.Copy(r, e.explainLoading())
	return r
}

// compute is the type that the passes see.
func (j *Job) compute() dtype.Type {
	if j.Compute != dtype.Invalid {
		return j.Compute
	}
	return j.Weights
}
