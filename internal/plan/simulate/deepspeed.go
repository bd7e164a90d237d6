package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/plan/autograd"
)

// deepSpeed is the common part of the engines of DeepSpeed's ZeRO stages. Files
// named in comments lie in deepspeed/runtime.
type deepSpeed struct {
	*simulation
	recipe       *deepspeed.Config
	groups       [][]*autograd.Parameter // parameter groups of the optimizer
	pinnedMemory *pinnedMemory
	loaded       []hold     // parameters with storage of their own, by index
	master       dtype.Type // of master weights and their gradients
	// flat has the flat tensors that the optimizer steps, one for each group or sub-group.
	flat []*autograd.Parameter
	// compressed is the step of an optimizer that exchanges one bit for each number; nil for others.
	compressed *oneBit
	linear     []bool // parameters of linear modules, by index
}

// newDeepSpeed returns the engine that DeepSpeed chooses for the stage and the
// types (engine.py, _configure_optimizer).
func newDeepSpeed(s *simulation) sharding {
	d := s.Job.DeepSpeed
	if s.Stage != nil && d.OverlapReduction { // "Pipeline parallelism does not support overlapped communication"
		inTurn := *d
		inTurn.OverlapReduction = false
		d = &inTurn
	}
	e := &deepSpeed{simulation: s, recipe: d, pinnedMemory: newPinnedMemory(s.Job, s.host),
		loaded: make([]hold, len(s.parameters)), master: dtype.F32}
	if d.LowPrecisionMaster {
		e.master = s.ParameterType
	}
	for _, p := range s.parameters {
		if p.Quantized == autograd.Unquantized {
			p.DType = s.ParameterType // module.half() or module.bfloat16()
		}
	}
	e.group()
	e.linear = e.linearParameters()
	if s.Optimizer.Compresses() {
		e.compressed = &oneBit{deepSpeed: e}
	}
	wide := d.GradientAccumulationDType == dtype.F32
	switch {
	case d.ZeROStage == 3:
		return newZeRO3(e)
	case d.ZeROStage == 0 && s.ParameterType == dtype.BF16 && (!e.since(0, 17, 6) || s.Stage != nil),
		d.ZeROStage == 1 && s.ParameterType == dtype.BF16 && wide && !e.offloads():
		return &bf16Optimizer{deepSpeed: e, accumulated: e.accumulationType()}
	case d.ZeROStage == 0:
		return &fp16Optimizer{deepSpeed: e}
	}
	return newZeRO12(e)
}

// accumulationType returns the type that BF16_Optimizer accumulates gradients in.
func (e *deepSpeed) accumulationType() dtype.Type {
	if e.recipe.ZeROStage == 0 && e.since(0, 17, 6) {
		return e.ParameterType
	}
	return dtype.F32
}

// group makes the parameter groups of the optimizer.
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
func (e *deepSpeed) endForward()           {}
func (e *deepSpeed) zeroGradients()        {}

// offloads reports whether the optimizer runs on the host.
func (e *deepSpeed) offloads() bool { return e.recipe.OffloadOptimizer.Device != "none" }

// pinsOffload reports whether the memory of an offload section is pinned. Since
// 0.19.5 it is pinned by default (#8207).
func (e *deepSpeed) pinsOffload(o deepspeed.Offload) bool {
	return o.PinMemory && (o.PinGiven || e.since(0, 19, 5))
}

// pinsOptimizer reports whether the memory of the offloaded optimizer is pinned. Before
// 0.10.1 ZeRO-1 and ZeRO-2 pinned it whatever the file said.
func (e *deepSpeed) pinsOptimizer() bool {
	always := e.recipe.ZeROStage < 3 && !e.since(0, 10, 1)
	return e.offloads() && (always || e.pinsOffload(e.recipe.OffloadOptimizer))
}

// since reports whether the version of DeepSpeed is at least the given one.
// Without a version it assumes the newest.
func (e *deepSpeed) since(major, minor, patch int) bool {
	return e.Versions.DeepSpeed.IsZero() || e.Versions.DeepSpeed.AtLeast(major, minor, patch)
}

func (e *deepSpeed) load() { e.loadFull(e.whyFull) }

// loadStage puts the layers of a stage on the GPU. PipelineModule makes them in fp32, and the engine casts them there.
func (e *deepSpeed) loadStage(why func() string) {
	e.host.briefly(4*elementsOf(e.parameters), ledger.LoadStaging, whyStaged)
	wide := make([]hold, len(e.parameters))
	for i, p := range e.parameters {
		wide[i] = e.gpu.hold(4*p.Elements, ledger.LoadStaging, because("layers in fp32, as PipelineModule makes them, "+
			"until the engine casts them (runtime/pipe/module.py)"))
	}
	for i, p := range e.parameters {
		if p.DType == dtype.F32 {
			e.loaded[p.Index] = wide[i]
			continue
		}
		e.loaded[p.Index] = e.gpu.hold(p.Bytes(), e.weights(), why)
		wide[i].free()
	}
}

// loadFull puts the full model on the GPU, through the host. Why is the reason of
// the parameters.
func (e *deepSpeed) loadFull(why func() string) {
	if e.Stage != nil && e.ParameterType != dtype.F32 {
		e.loadStage(why)
		return
	}
	e.stage()
	for _, p := range e.parameters {
		e.loaded[p.Index] = e.gpu.hold(p.Bytes(), e.weights(), why)
	}
}

// whyFull is the reason for parameters that are not sharded.
func (e *deepSpeed) whyFull() string {
	return fmt.Sprintf("%s parameters in %v, in full on every rank%s", ledger.Count(elementsOf(e.parameters)),
		e.ParameterType, e.whyDecompressed())
}

func (e *deepSpeed) whyGradients() string {
	return "gradients of parameters, as the backward pass makes them"
}

// unload frees the storage of single parameters.
func (e *deepSpeed) unload(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		drop(&e.loaded[p.Index])
	}
}

// addFlat adds a flat tensor that the optimizer steps.
func (e *deepSpeed) addFlat(elements int64) *autograd.Parameter {
	p := &autograd.Parameter{Elements: elements, DType: e.master, Trainable: true}
	e.flat = append(e.flat, p)
	return p
}

// holdOnHost holds a tensor that was made on the host. To pin a tensor, torch makes a
// pinned copy; for a moment both exist.
func (e *deepSpeed) holdOnHost(bytes int64, component ledger.Component, why func() string, pin bool) tensor {
	if !pin {
		return tensor{hold: e.host.hold(bytes, component, why)}
	}
	pageable := e.host.hold(bytes, ledger.PinningCopies, whyPinningCopies)
	pinned := e.pinnedMemory.allocate(bytes, component, why)
	pageable.free()
	return pinned
}

func whyPinningCopies() string {
	return "Tensor.pin_memory() copies: the pageable tensor and its pinned copy exist together"
}

// whyConversion is the reason for the copies of tensors that change their type on
// their way to another device.
func whyConversion() string {
	return "a copy between devices with a dtype conversion makes a full tensor " +
		"(aten/src/ATen/native/cuda/Copy.cu)"
}

// overflow holds the temporaries of an inf/nan check of a tensor
// (zero/stage_1_and_2.py, _has_inf_or_nan).
func (e *deepSpeed) overflow(elements int64, why func() string) {
	if each := e.overflowBytes(); each > 0 {
		e.gpu.briefly(each*elements, ledger.ReductionTemporaries, why)
	}
}

// overflowBytes returns the bytes that an inf/nan check takes for each element. Before 0.13.3 the check was a sum, and
// since 0.19.6 it is of the largest and the smallest element (runtime/utils.py, has_inf_or_nan).
func (e *deepSpeed) overflowBytes() int64 {
	switch {
	case e.since(0, 19, 6):
		return 0
	case e.since(0, 13, 3):
		return 4 + 1 + 1 + 1 + 4
	}
	return 4
}

// moments returns the size of the states that DeepSpeed's CPU Adam holds.
func (e *deepSpeed) moments(flat []*autograd.Parameter) int64 {
	var sum int64
	low := e.recipe.LowPrecisionState || e.recipe.Optimizer != nil && e.recipe.Optimizer.LowPrecisionState
	for _, p := range flat {
		q := *p
		if !low { // low states have the master weights' type (fp32_optimizer_states of DeepSpeedCPUAdam)
			q.DType = dtype.F32
		}
		for _, state := range e.Optimizer.States(&q) {
			sum += state.Bytes
		}
	}
	return sum
}

// deviceStates allocates the optimizer states on the GPU.
func (e *deepSpeed) deviceStates(flat []*autograd.Parameter, why func() string) {
	for _, p := range flat {
		for _, state := range e.Optimizer.States(p) {
			allocate(e.gpu, state.Bytes, ledger.OptimizerStates, why)
		}
	}
}

// whyShardStates is the reason for the states of a rank's shard.
func (e *deepSpeed) whyShardStates() string {
	return fmt.Sprintf("%s: %s x %d B, made in the first step (before 0.13.2 when the engine is made)",
		e.Optimizer.Name, e.shardCount(), e.moments(e.flat)/max(1, elementsOf(e.flat)))
}

// shardCount returns, as text, the number of elements that the rank's optimizer steps.
func (e *deepSpeed) shardCount() string { return ledger.Count(elementsOf(e.flat)) }

// update steps flat tensors on the GPU. The first step makes their states.
// DeepSpeed's fused Adam does not count its steps in tensors.
func (e *deepSpeed) update(flat []*autograd.Parameter) {
	if e.compressed != nil {
		e.compressed.step(flat)
		return
	}
	if !e.stepped {
		e.stepped = true
		e.deviceStates(flat, e.whyStates)
	}
	e.copies(e.gpu, flat)
}

// tiles allocates the tiles of the CPU Adam extension. Until #5409 every process
// took them with cudaMallocHost, to copy parameters in the background
// (csrc/adam/cpu_adam.cpp).
func (e *deepSpeed) tiles() {
	if e.since(0, 14, 3) {
		return
	}
	elements := int64(1024 << 20)
	if e.since(0, 3, 15) {
		elements = 128 << 20
	}
	allocate(e.host, 2*elements*4, ledger.AdamTiles, because("two tiles of cudaMallocHost in the extension of CPU "+
		"Adam, 4 B x 1 Gi elements before 0.3.15 and x 128 Mi before 0.14.3 (DeepSpeed #879, #5409)"))
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
