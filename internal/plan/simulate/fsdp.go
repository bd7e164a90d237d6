package simulate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// fsdp is PyTorch's Fully Sharded Data Parallel, of either version. It gathers
// the parameters of a unit before they are used (torch/distributed/fsdp). Every
// block is a unit; the root unit has the parameters outside the others.
type fsdp struct {
	*simulation
	units  map[string]*unit
	order  []*unit // in the order of the forward pass, without the root
	root   *unit
	shards []*autograd.Parameter // the rank's shards of the trainable parameters
	// reducing is the input of the last reduction. It lives until the next one.
	reducing hold
	// copied is FSDP2's last output of an all-gather that was copied out in the forward pass. It lives until the next
	// one arrives (all_gather_state in _fsdp_param_group.py).
	copied hold
}

// unit is a group of parameters that are gathered together.
type unit struct {
	path       string // of its first module in the forward pass
	at         int
	atEnd      bool // not a block
	stays      bool // gathered between the passes
	parameters []*autograd.Parameter
	arriving   hold // FSDP2's output of the all-gather, until it is copied out
	gathered   hold
	gradients  hold   // sharded
	flat       hold   // FSDP1's full gradient before it is reduced
	wide       []hold // full gradients in the type of the reduction, one for each parameter that has one
	replicated hold   // FSDP2's input of the all-reduce among replicas
	inUse      bool
}

func newFSDP(s *simulation) *fsdp {
	e := &fsdp{simulation: s, units: map[string]*unit{}, root: &unit{at: -1}}
	wrapped := s.FSDP.WrapPolicy != "no_wrap"
	wrap := func(paths ...string) *unit {
		u := &unit{path: paths[0], at: len(e.order)}
		for _, path := range paths {
			e.units[path] = u
		}
		e.order = append(e.order, u)
		return u
	}
	network := s.Model.Network
	embedding, tail := endsOf(s)
	if embedding != "" {
		wrap(embedding).atEnd = true
	}
	var blocks []model.Block
	for _, t := range network.Towers {
		if classes := s.FSDP.WrapLayers; slices.Contains(classes, t.BlockClass) || len(classes) == 0 && !t.Unwrapped {
			blocks = append(blocks, t.Network.Blocks()...)
		}
	}
	for _, b := range append(blocks, network.Blocks()...) {
		if wrapped {
			wrap(b.Path)
		}
	}
	if len(tail) > 0 {
		u := wrap(tail...)
		u.atEnd, u.stays = true, true
	}
	for _, p := range s.parameters {
		u := e.unitOf(p.Name)
		u.parameters = append(u.parameters, p)
	}
	for _, p := range s.trained {
		shard := *p
		shard.Elements, shard.DType = e.shardOf(p, e.padded(p)), e.stored(p)
		switch {
		case p.Matrices > 0 && s.FSDP.Version == 2 && !e.shardsRows(p):
			shard.Matrices = e.shardOf(p, p.Matrices)
		case p.Rows > 0:
			shard.Rows = e.shardOf(p, p.Rows)
		}
		e.shards = append(e.shards, &shard)
	}
	return e
}

// endsOf returns the embedding and the modules behind the blocks that are units of their own, nothing where the root
// has them. A tied embedding is in one unit with the head. Like the root it is gathered from the beginning of the
// forward pass to the end of the backward pass.
func endsOf(s *simulation) (embedding string, tail []string) {
	network := s.Model.Network
	tied := func(p model.Parameter) bool { return p.TiedTo != "" && p.Name == network.Head.Projection+".weight" }
	if len(network.Stacks) != 1 || slices.ContainsFunc(s.Model.Parameters, tied) {
		return "", nil
	}
	if s.UnitsAtEnds.Embedding {
		embedding = network.Stacks[0].TokenEmbedding
	}
	if !s.UnitsAtEnds.Tail {
		return embedding, nil
	}
	// _find_final_norm of accelerate looks at the children of the base model. A tower or an adapter is in between.
	if norm := network.Stacks[0].FinalNorm.Path; norm != "" && len(network.Towers) == 0 && s.Adapter == nil {
		tail = append(tail, norm)
	}
	if head := &network.Head; head.Projection != "" && !head.PerSequence && !head.Classes {
		tail = append(tail, head.Projection)
	}
	return embedding, tail
}

// sharers returns how many ranks share a parameter. Under expert parallelism a rank shares its experts only with the
// ranks that have the same ones (torchtitan's mesh "efsdp", distributed/parallel_dims.py).
func (e *fsdp) sharers(p *autograd.Parameter) int64 {
	if p.Expert {
		return e.Parallel.Shard / e.Parallel.Expert
	}
	return e.Parallel.Shard
}

// shardOf returns a rank's share of n elements, rows or bytes of a parameter, rounded up.
func (e *fsdp) shardOf(p *autograd.Parameter, n int64) int64 { return ceilDivide(n, e.sharers(p)) }

// padded returns the number of elements of a parameter on all ranks together.
// FSDP2 shards the first dimension and pads every rank to the rows of the first
// rank, which has the most.
func (e *fsdp) padded(p *autograd.Parameter) int64 {
	if e.FSDP.Version == 1 {
		return p.Elements
	}
	first := cmp.Or(p.Matrices, p.Rows, p.Elements)
	if e.shardsRows(p) {
		first = p.Rows
	}
	return e.shardOf(p, first) * (p.Elements / first) * e.sharers(p)
}

// shardsRows reports whether ranks share the rows of each expert, and not the experts: torchtitan does so if more ranks
// than experts share them (apply_fsdp in models/llama4/infra/parallelize.py).
func (e *fsdp) shardsRows(p *autograd.Parameter) bool {
	return p.Expert && e.Parallel.Expert > 1 && e.Modules == "torchtitan" && e.sharers(p) > p.Matrices && p.Matrices > 0
}

// stored returns the type of a parameter's shards.
func (e *fsdp) stored(p *autograd.Parameter) dtype.Type {
	if p.Wide {
		return dtype.F32
	}
	return e.ParameterType
}

// trainedType returns the type of the gradients of a unit. FSDP2 wants the same for all of them.
func (e *fsdp) trainedType(u *unit) dtype.Type {
	for _, p := range u.parameters {
		if p.Trainable {
			return e.stored(p)
		}
	}
	return e.ParameterType
}

// unitOf returns the unit of a parameter, by its name.
func (e *fsdp) unitOf(name string) *unit {
	for at := 0; at < len(name); at++ {
		if name[at] == '.' {
			if u, ok := e.units[name[:at]]; ok {
				return u
			}
		}
	}
	return e.root
}

// device returns the device of the shards.
func (e *fsdp) device() *trace {
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

// shardedBytes returns the size of a unit's shard. Quantized weights are sharded
// as they are stored, all others in the type of the weights.
func (e *fsdp) shardedBytes(u *unit) int64 {
	return u.elements(nil, func(p *autograd.Parameter) int64 {
		if p.Quantized != autograd.Unquantized {
			return e.shardOf(p, p.Bytes())
		}
		return e.shardOf(p, e.padded(p)) * max(e.stored(p).Size(), p.DType.Size())
	})
}

func (e *fsdp) initialize() { e.holdStates(e.shards) }

// The streams of FSDP beside the compute stream.
const (
	gatherStream = iota + 1
	reduceStream
)

// gather begins to gather the full parameters of a unit, in the compute type. FSDP1 computes with what it gathers,
// and FSDP2 copies every parameter out of it.
func (e *fsdp) gather(u *unit) {
	if u == nil || u.gathered.held() || u.arriving.held() || len(u.parameters) == 0 {
		return
	}
	to, bytes := &u.gathered, u.elements(nil, (*autograd.Parameter).Bytes)
	if e.FSDP.Version == 2 {
		to, bytes = &u.arriving, e.gatheredBytes(u)
	}
	e.gpu.on(gatherStream, func() { *to = e.gpu.hold(bytes, ledger.GatheredParameters, e.whyGathered) })
}

// gatheredBytes returns the size of a unit of FSDP2 with its padding.
func (e *fsdp) gatheredBytes(u *unit) int64 {
	return u.elements(nil, func(p *autograd.Parameter) int64 {
		if p.Quantized != autograd.Unquantized {
			return p.Bytes()
		}
		return e.padded(p) * p.DType.Size()
	})
}

// use gathers a unit and waits for it. In the forward pass FSDP2 keeps what it has copied the parameters out of, so
// that the copy overlaps the next all-gather.
func (e *fsdp) use(u *unit, forward bool) {
	e.gather(u)
	if !u.arriving.held() {
		return
	}
	if forward {
		drop(&e.copied)
	}
	u.gathered = e.gpu.hold(e.gatheredBytes(u), ledger.GatheredParameters, e.whyGathered)
	if forward {
		e.copied, u.arriving = u.arriving, hold{}
	}
	drop(&u.arriving)
}

// largestBlock returns the size of the largest block, gathered.
func (e *fsdp) largestBlock() ledger.Bytes {
	largest := int64(0)
	for _, u := range e.order {
		if !u.atEnd {
			largest = max(largest, u.elements(nil, (*autograd.Parameter).Bytes))
		}
	}
	return ledger.Bytes(largest)
}

func (e *fsdp) whyGathered() string {
	if e.Stage != nil && !e.reshards(&unit{}) {
		return fmt.Sprintf("all units of the stage, gathered in %v until the last micro batch of the pipeline",
			e.ComputeType())
	}
	stays := "the root, which stays"
	if e.UnitsAtEnds.Tail {
		stays = "the last norm with the head, which stay"
	}
	return fmt.Sprintf("units gathered in %v: %s, and two blocks at a time of up to %v: the one in use, and the next "+
		"or what it was copied out of", e.ComputeType(), stays, e.largestBlock())
}

func (e *fsdp) neighbour(u *unit, step int) *unit {
	if at := u.at + step; u != e.root && at >= 0 && at < len(e.order) {
		return e.order[at]
	}
	return nil
}

// reshards reports whether a unit is freed after its forward pass. The root is
// kept, as the backward pass begins with it.
func (e *fsdp) reshards(u *unit) bool {
	if u.stays {
		return false
	}
	if e.KeepsLastBlock && u.at == len(e.order)-1 {
		return false
	}
	return u != e.root && strings.HasPrefix(e.FSDP.Strategy, "full_shard") ||
		u != e.root && e.FSDP.Strategy == "hybrid_shard"
}

func (e *fsdp) BeforeForward(path string) {
	e.use(e.root, true)
	u, ok := e.units[path]
	if !ok {
		return
	}
	e.use(u, !u.inUse)
	// The host runs ahead of the GPU: FSDP1 gathers the next unit before this one is done.
	if !u.inUse && e.FSDP.Version == 1 {
		e.gather(e.neighbour(u, 1))
	}
}

func (e *fsdp) AfterForward(path string) {
	if u, ok := e.units[path]; ok && !u.inUse && e.reshards(u) {
		drop(&u.gathered)
	}
}

func (e *fsdp) BeforeBackward(path string) {
	u, ok := e.units[path]
	if !ok {
		return
	}
	u.inUse = true
	e.use(u, false)
	if e.FSDP.BackwardPrefetch != "none" {
		e.gather(e.neighbour(u, -1))
	}
}

func (e *fsdp) AfterBackward(path string) {
	if u, ok := e.units[path]; ok && path == u.path {
		u.inUse = false
		if e.Stage != nil {
			e.widen(u)
			return
		}
		if e.FSDP.Version == 2 { // which reshards before it reduces
			drop(&u.gathered)
		}
		if e.reduces() {
			e.reduce(u)
		} else {
			e.accumulate(u)
		}
		drop(&u.gathered)
	}
}

// widen keeps the full gradients of a unit until the last micro batch of a pipeline, in the type of the reduction
// (to_accumulated_grad_if_needed in _fsdp_param.py). The stage keeps the gathered parameters, too
// (backward_maybe_with_nosync in torch/distributed/pipelining/stage.py).
func (e *fsdp) widen(u *unit) {
	if e.ReduceType == e.ComputeType() {
		return // autograd adds them up in place
	}
	if u.wide == nil {
		u.wide = make([]hold, len(u.parameters))
	}
	for i, p := range u.parameters {
		if !p.HasGradient() {
			continue
		}
		if !u.wide[i].held() {
			u.wide[i] = e.gpu.hold(e.padded(p)*e.ReduceType.Size(), ledger.Gradients, e.whyGradients)
		}
		p.DropGradient()
	}
}

// endForward is the end of the root's forward pass.
func (e *fsdp) endForward() { drop(&e.copied) }

func (e *fsdp) gradient(*autograd.Parameter) {}

func (e *fsdp) whyGradients() string {
	if e.Stage != nil {
		return fmt.Sprintf("full gradients of the stage in %v for all micro batches of the pipeline, then a shard on "+
			"each of %d ranks in %v", e.ReduceType, e.Parallel.Shard, e.ParameterType)
	}
	return fmt.Sprintf("full gradients of a unit in %v until they are reduced, then a shard on each of %d ranks in %v",
		e.ComputeType(), e.Parallel.Shard, e.ParameterType)
}

// reduces reports whether gradients are reduced after this backward pass.
// Accelerate and Lightning use no_sync: before the last micro batch the full
// gradients are kept.
func (e *fsdp) reduces() bool { return e.SyncEachBatch || e.micro == e.micros-1 }

// accumulate keeps the full gradient of a unit. FSDP1 has one gradient for the
// flat parameter, frozen parameters included. The backward pass concatenates it of those of its views, and adds it to
// that of the micro batches before.
func (e *fsdp) accumulate(u *unit) {
	if e.FSDP.Version != 1 ||
		u.elements(func(p *autograd.Parameter) bool { return p.HasGradient() }, (*autograd.Parameter).Bytes) == 0 {
		return
	}
	joined := e.gpu.hold(u.elements(
		func(p *autograd.Parameter) bool {
			return p.Quantized == autograd.Unquantized && (p.Trainable || !e.WrapsTrained)
		},
		func(p *autograd.Parameter) int64 { return p.Elements * p.DType.Size() },
	), ledger.Gradients, e.whyGradients)
	for _, p := range u.parameters {
		p.DropGradient()
	}
	if u.flat.held() {
		joined.free()
	} else {
		u.flat = joined
	}
}

// reduce reduces the gradients of a unit to the rank's shard. They are copied
// into a buffer in the reduction's type, which lives until the next unit needs
// one.
func (e *fsdp) reduce(u *unit) {
	var experts, others int64
	for i, p := range u.parameters {
		switch {
		case !p.HasGradient() && (u.wide == nil || !u.wide[i].held()):
		case p.Expert:
			experts += e.padded(p)
		default:
			others += e.padded(p)
		}
	}
	unsharded := experts + others
	if unsharded == 0 {
		return
	}
	shard := ceilDivide(experts, e.Parallel.Shard/e.Parallel.Expert) + ceilDivide(others, e.Parallel.Shard)
	stream := reduceStream
	if e.FSDP.Version == 2 {
		stream = 0
	}
	drop(&e.reducing)
	var input hold
	why := because("gradients of a unit put together in %v for the reduce-scatter; the buffer lives until the next "+
		"unit's (FSDP2's ReduceScatterState)", e.ReduceType)
	e.gpu.on(stream, func() {
		input = e.gpu.hold(unsharded*e.ReduceType.Size(), ledger.CommunicationBuckets, why)
	})
	for _, p := range u.parameters {
		p.DropGradient()
	}
	for i := range u.wide {
		drop(&u.wide[i])
	}
	drop(&u.flat)
	e.reducing = input
	e.gpu.on(reduceStream, func() { e.receive(u, shard) })
}

// receive allocates the rank's shard of the reduced gradients of a unit.
func (e *fsdp) receive(u *unit, shard int64) {
	of := e.trainedType(u)
	output := e.gpu.hold(shard*e.ReduceType.Size(), ledger.Gradients, e.whyGradients)
	switch {
	case u.gradients.held() || e.FSDP.OffloadParameters || e.ReduceType != of:
		if !u.gradients.held() {
			u.gradients = e.device().hold(shard*of.Size(), ledger.Gradients, e.whyGradients)
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

func (e *fsdp) endBackward(last bool) {
	if e.Stage != nil && !last {
		e.widen(e.root)
		return
	}
	if e.Stage != nil {
		for _, u := range e.order {
			e.reduce(u)
			drop(&u.gathered)
		}
	}
	if e.FSDP.Version == 2 && e.FSDP.Strategy != "no_shard" {
		drop(&e.root.gathered)
	}
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

func (e *fsdp) step() { e.update(e.device(), e.shards) }

func (e *fsdp) zeroGradients() {
	for _, u := range append(e.order, e.root) {
		drop(&u.gradients)
	}
}
