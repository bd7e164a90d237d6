package plan

import (
	"fmt"
	"maps"

	"plimsoll/allocator"
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/recipe"
)

// deepSpeed is what the engines of DeepSpeed's ZeRO stages have in common:
// files that are named in comments are in deepspeed/runtime.
type deepSpeed struct {
	*simulation
	recipe *recipe.DeepSpeed
	groups [][]*autograd.Parameter // what is trained, as the optimizer has it
	pins   *pins
	loaded []hold     // parameters of their own storage, by index
	master dtype.Type // of master weights and their gradients
	// flat are the flat tensors that the optimizer steps, one a group or sub-group.
	flat []*autograd.Parameter
	why  map[ledger.Component]string
}

// newDeepSpeed is the engine that DeepSpeed takes for the stage and the types
// (engine.py, _configure_optimizer).
func newDeepSpeed(s *simulation) sharding {
	d := s.Job.DeepSpeed
	e := &deepSpeed{simulation: s, recipe: d, pins: newPins(s), loaded: make([]hold, len(s.parameters)),
		master: dtype.F32, why: map[ledger.Component]string{}}
	if d.LowPrecisionMaster {
		e.master = s.Weights
	}
	for _, p := range s.parameters {
		if p.Quantized == autograd.Unquantized {
			p.DType = s.Weights // module.half() or module.bfloat16()
		}
	}
	e.group()
	wide := d.GradientAccumulationDType == dtype.F32
	switch {
	case d.ZeROStage == 3:
		return newDivided(e)
	case d.ZeROStage == 0 && s.Weights == dtype.BF16 && !e.since(0, 17, 6),
		d.ZeROStage == 1 && s.Weights == dtype.BF16 && wide && !e.offloads():
		return &accumulating{deepSpeed: e}
	case d.ZeROStage == 0:
		return &replicated{deepSpeed: e}
	}
	return newPartitioned(e)
}

// group divides what is trained as the optimizer does.
func (e *deepSpeed) group() {
	var decayed, others []*autograd.Parameter
	for _, p := range e.trained {
		if e.SplitsDecay && p.Rows == 0 {
			others = append(others, p)
		} else {
			decayed = append(decayed, p)
		}
	}
	for _, g := range [][]*autograd.Parameter{decayed, others} {
		if len(g) > 0 {
			e.groups = append(e.groups, g)
		}
	}
}

func (e *deepSpeed) BeforeForward(string)  {}
func (e *deepSpeed) AfterForward(string)   {}
func (e *deepSpeed) BeforeBackward(string) {}
func (e *deepSpeed) AfterBackward(string)  {}
func (e *deepSpeed) zeroGradients()        {}
func (e *deepSpeed) save()                 {}

// offloads says whether the optimizer runs on the host.
func (e *deepSpeed) offloads() bool { return e.recipe.OffloadOptimizer.Device != "none" }

// pinsOf says whether the memory of an offload section is page-locked: unless
// the file says otherwise, from 0.19.5 on (#8207).
func (e *deepSpeed) pinsOf(o recipe.Offload) bool {
	return o.PinMemory && (o.PinGiven || e.since(0, 19, 5))
}

// pinned says so of the optimizer. ZeRO-1 and ZeRO-2 pinned whatever the file
// said before 0.10.1.
func (e *deepSpeed) pinned() bool {
	always := e.recipe.ZeROStage < 3 && !e.since(0, 10, 1)
	return e.offloads() && (always || e.pinsOf(e.recipe.OffloadOptimizer))
}

// since says whether the version has what came with that one; the newest is
// assumed where none is given.
func (e *deepSpeed) since(major, minor, patch int) bool {
	return e.Versions.DeepSpeed.IsZero() || e.Versions.DeepSpeed.AtLeast(major, minor, patch)
}

// load puts the whole model on the GPU, through the host.
func (e *deepSpeed) load() {
	e.host.during(ledger.Bytes(e.storedBytes()), ledger.LoadStaging, func() {})
	for _, p := range e.parameters {
		e.loaded[p.Index] = e.gpu.hold(p.Bytes(), ledger.Parameters)
	}
}

// unload frees the storage that parameters had of their own.
func (e *deepSpeed) unload(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		drop(&e.loaded[p.Index])
	}
}

// shard adds a tensor that the optimizer steps.
func (e *deepSpeed) shard(elements int64) *autograd.Parameter {
	p := &autograd.Parameter{Elements: elements, DType: e.master, Trainable: true}
	e.flat = append(e.flat, p)
	return p
}

// place puts a tensor that was made on the host into its place there. To pin
// it, torch makes a page-locked copy, and both are there for a moment.
func (e *deepSpeed) place(bytes int64, component ledger.Component, pin bool) locked {
	if !pin {
		return locked{hold: e.host.hold(bytes, component)}
	}
	var l locked
	e.host.during(ledger.Bytes(bytes), ledger.PinningCopies, func() { l = e.pins.lock(bytes, component) })
	return l
}

// overflow is a search for what is not finite in a tensor: bytes an element
// beside it (zero/stage_1_and_2.py, _has_inf_or_nan; before 0.13.3 a sum).
func (e *deepSpeed) overflow(elements int64) {
	each := int64(4 + 1 + 1 + 1 + 4)
	if !e.since(0, 13, 3) {
		each = 4
	}
	e.gpu.during(ledger.Bytes(each*elements), ledger.ReductionTemporaries, func() {})
}

// moments are what DeepSpeed's CPU Adam holds for an element.
func (e *deepSpeed) moments(flat []*autograd.Parameter) int64 {
	var sum int64
	low := e.recipe.LowPrecisionState || e.recipe.Optimizer != nil && e.recipe.Optimizer.LowPrecisionState
	for _, p := range flat {
		q := *p
		if !low { // else those of the master weights (fp32_optimizer_states of DeepSpeedCPUAdam)
			q.DType = dtype.F32
		}
		for _, state := range e.Optimizer.states(&q) {
			sum += state.bytes
		}
	}
	return sum
}

// deviceStates makes the states of the optimizer on the GPU.
func (e *deepSpeed) deviceStates(flat []*autograd.Parameter) {
	for _, p := range flat {
		for _, state := range e.Optimizer.states(p) {
			allocate(e.gpu, state.bytes, ledger.OptimizerStates)
		}
	}
}

// update steps flat tensors on the GPU; the first time it makes their states.
// DeepSpeed's fused Adam counts its steps outside of tensors.
func (e *deepSpeed) update(flat []*autograd.Parameter) {
	if !e.stepped {
		e.stepped = true
		e.deviceStates(flat)
	}
	e.copies(e.gpu, flat)
}

// tiles are what the extension for CPU Adam took with cudaMallocHost for every
// process, to copy parameters in the background (csrc/adam/cpu_adam.cpp until
// #5409).
func (e *deepSpeed) tiles() {
	switch {
	case e.since(0, 14, 3):
	case e.since(0, 3, 15):
		allocate(e.host, 2*128<<20*4, ledger.AdamTiles)
	default:
		allocate(e.host, 2*1024<<20*4, ledger.AdamTiles)
	}
}

func elementsOf(parameters []*autograd.Parameter) int64 {
	var sum int64
	for _, p := range parameters {
		sum += p.Elements
	}
	return sum
}

func largestOf(parameters []*autograd.Parameter) int64 {
	var most int64
	for _, p := range parameters {
		most = max(most, p.Elements)
	}
	return most
}

// explain says why a component is as large as it is.
func (e *deepSpeed) explain(component ledger.Component, format string, values ...any) {
	e.why[component] = fmt.Sprintf(format, values...)
}

func (e *deepSpeed) reasons() map[ledger.Component]string {
	r := map[ledger.Component]string{
		ledger.Parameters: fmt.Sprintf("%s parameters in %v, whole on every rank",
			ledger.Count(elementsOf(e.parameters)), e.Weights),
		ledger.Gradients: "gradients of parameters, as the backward pass makes them",
		ledger.LoadStaging: "from_pretrained makes the model on the host, and it goes to the GPU from there; " +
			"every rank does so",
		ledger.PinningCopies: "Tensor.pin_memory() copies: the pageable tensor and its page-locked copy are there " +
			"together",
		ledger.PinnedRounding: "PyTorch's allocator of page-locked memory takes powers of two and keeps what is " +
			"freed (CachingHostAllocator.h, pytorch issue 95823)",
		ledger.DtypeConversions: "a copy between devices that changes the type makes a tensor of the whole " +
			"(aten/src/ATen/native/cuda/Copy.cu)",
		ledger.AdamTiles: "two tiles of cudaMallocHost in the extension of CPU Adam, 4 B x 1 Gi elements " +
			"before 0.3.15 and x 128 Mi before 0.14.3 (DeepSpeed #879, #5409)",
	}
	maps.Copy(r, e.why)
	return r
}

// pins is the page-locked memory of a rank, which PyTorch's allocator gives in
// blocks.
type pins struct {
	allocator *allocator.Pinned
	host      *trace
	beyond    hold // what blocks have beyond what was asked for, and free blocks
}

func newPins(s *simulation) *pins {
	c, err := allocator.ParseConfiguration(s.Allocator, s.Versions.Torch)
	if err != nil {
		c = allocator.Configuration{} // refused where the GPU's allocator is made
	}
	return &pins{allocator: allocator.NewPinned(c, s.Versions.Torch), host: s.host}
}

// locked is a tensor on the host, page-locked if it has a block.
type locked struct {
	hold
	pins  *pins
	block allocator.Block
	fixed bool // page-locked
}

func (p *pins) lock(bytes int64, component ledger.Component) locked {
	drop(&p.beyond)
	block, err := p.allocator.Allocate(ledger.Bytes(bytes))
	if err != nil && p.host.failed == nil {
		p.host.failed = err
	}
	l := locked{p.host.hold(bytes, component), p, block, true}
	p.count()
	return l
}

func (p *pins) count() {
	s := p.allocator.Statistics()
	p.beyond = p.host.hold(int64(s.Pinned.Now-s.Requested.Now), ledger.PinnedRounding)
}

// free ends the tensor. A block stays with the allocator.
func (l locked) free() {
	if !l.fixed {
		l.hold.free()
		return
	}
	drop(&l.pins.beyond)
	l.hold.free()
	if err := l.pins.allocator.Free(l.block); err != nil && l.pins.host.failed == nil {
		l.pins.host.failed = err
	}
	l.pins.count()
}
