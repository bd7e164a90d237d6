package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// heldStates are optimizer states that rest on the host and come to the GPU for the update, as
// plimsoll.torch.StateOffload moves them.
type heldStates struct {
	*simulation
	layout  *roads.Layout
	updated []*autograd.Parameter // as the optimizer sees them: in fp32 where they have master weights
	sizes   []roads.Parameter
	staying []*autograd.Parameter // as they are: without master weights where their states stay on the GPU
	window  hold                  // the first slot, or the window of mode whole
	second  hold                  // slot
}

// holdStates makes the arenas of the states of the parameters, if they are to rest on the host. The sizes are known
// before the first step.
func (s *simulation) holdStates(parameters []*autograd.Parameter) {
	o := s.Offload
	if o == nil {
		return
	}
	h := &heldStates{simulation: s, sizes: o.States(s.Job, parameters), staying: parameters}
	h.layout = roads.NewLayout(h.sizes, o.Settings)
	for _, p := range parameters {
		updated := *p
		if o.Master != dtype.Invalid {
			updated.DType = dtype.F32
		}
		h.updated = append(h.updated, &updated)
	}
	s.states = h
	switch o.Rest {
	case job.OnGPU:
		return
	case job.InService:
		bytes, err := o.ServiceBytes(s.Job, s.trainedElements())
		if err != nil && s.host.failed == nil {
			s.host.failed = err
		}
		s.host.hold(int64(bytes), ledger.HeldStates, func() string { return whyService(o) })
		return
	}
	s.host.hold(int64(h.layout.Arena()), ledger.HeldStates, because("arena \"states\", pinned: %v of states and "+
		"master weights, %v of parameters for recovery, and a gap as large as the largest region, %v, which keeps old "+
		"and new regions apart", h.layout.State(), h.layout.Own(), h.layout.Gap()))
	s.host.hold(int64(h.layout.Gradients()), ledger.Gradients, because("arena \"gradients\", pinned: those of the "+
		"step, with which another process can finish it"))
	s.host.hold(int64(h.layout.Control()), ledger.HeldControl, because("arena \"control\": which chunks are "+
		"committed, two tables of %d numbers, and the hyperparameters of a step", h.layout.Scalars))
}

func whyService(o *job.StateOffload) string {
	if o.Tier != nil {
		return "arenas of the optimizer service: parameters, gradients, journal, and a window for states, which are " +
			"in files"
	}
	if o.Tenants > 1 {
		return fmt.Sprintf("all arenas of the optimizer service, of %d tenants", o.Tenants)
	}
	return "all arenas of the optimizer service"
}

// update runs a step of a torch optimizer over parameters on a device.
func (s *simulation) update(device *trace, parameters []*autograd.Parameter) {
	if s.states != nil {
		s.states.step()
		return
	}
	s.optimizeOn(device, parameters)
}

// step updates the parameters: those whose states rest on the host, and with a fraction the others at once.
func (h *heldStates) step() {
	first := !h.stepped
	h.stepped = true
	switch h.Offload.Rest {
	case job.OnGPU:
		h.updateHere(first)
		return
	case job.InService:
		return
	}
	if first {
		allocate(h.gpu, counter, ledger.StatesWindow, h.whyWindow)
	}
	held := 0
	for _, c := range h.layout.Chunks {
		held = c.End
	}
	switch {
	case h.Offload.Whole:
		h.updateWhole(first, held)
	case first:
		h.makeChunks()
	default:
		if missing := h.layout.Window(false) - h.layout.Slot(); !h.second.held() {
			h.second = h.gpu.hold(int64(missing), ledger.StatesWindow, h.whyWindow)
		}
		for _, c := range h.layout.Chunks {
			h.change(c.First, c.End, false, func() {})
		}
	}
	if held < len(h.staying) {
		if first {
			allocate(h.gpu, int64(h.layout.Resident), ledger.OptimizerStates, because("the states that "+
				"--offload-fraction leaves on the GPU"))
		}
		h.copies(h.gpu, h.staying[held:])
	}
}

// updateHere is a step with all states and master weights on the GPU. With master weights it is one kernel that takes
// 16-bit gradients and makes nothing for a moment, as the fused Adam of apex and of Transformer Engine is.
func (h *heldStates) updateHere(first bool) {
	if first {
		allocate(h.gpu, int64(h.layout.State()), ledger.OptimizerStates, because("states and master weights that "+
			"stay on the GPU"))
	}
	if h.Offload.Master == dtype.Invalid {
		h.copies(h.gpu, h.staying)
	}
}

// counter is what the number of chunks that are committed takes on the GPU, from which it is copied to the host.
const counter = 512

// makeChunks is the first step in mode chunked: the optimizer makes its own state for a chunk, which is copied into a
// slot, and leaves.
func (h *heldStates) makeChunks() {
	h.window = h.gpu.hold(int64(h.layout.Slot()), ledger.StatesWindow, h.whyWindow)
	for _, c := range h.layout.Chunks {
		made := h.gpu.hold(h.made(c.First, c.End), ledger.StatesWindow, h.whyWindow)
		h.change(c.First, c.End, true, func() {})
		made.free()
	}
}

// made returns the bytes of the states that the optimizer makes for a range of the parameters.
func (h *heldStates) made(first, end int) (sum int64) {
	for _, p := range h.updated[first:end] {
		for _, state := range h.Optimizer.States(p) {
			sum += roads.Allocated(state.Bytes)
		}
		if h.Optimizer.CountsOnGPU(p) {
			sum += roads.Allocated(dtype.F32.Size())
		}
	}
	return sum
}

func (h *heldStates) whyWindow() string {
	if h.Offload.Whole {
		return "all states that rest on the host, from the beginning of the step until the copies out have ended; in " +
			"the first step also those that the optimizer has made"
	}
	return fmt.Sprintf("2 slots of %v, the state of the largest chunk: one is updated while the other is emptied and "+
		"filled; in the first step one slot, and the states that the optimizer makes for a chunk", h.layout.Slot())
}

// updateWhole is a step in mode whole: the window is there until the copies out have ended, at the latest when the next
// forward pass is over.
func (h *heldStates) updateWhole(first bool, held int) {
	open := func() { h.window = h.gpu.hold(int64(h.layout.Window(true)), ledger.StatesWindow, h.whyWindow) }
	if !first {
		if !h.window.held() {
			open()
		}
		h.change(0, held, false, func() {})
		return
	}
	made := h.gpu.hold(h.made(0, held), ledger.StatesWindow, h.whyWindow)
	h.change(0, held, true, open)
	made.free()
}

// prefetch opens the window of mode whole ahead of the step.
func (h *heldStates) prefetch() {
	if h != nil && h.Offload.Prefetch && h.stepped {
		h.window = h.gpu.hold(int64(h.layout.Window(true)), ledger.StatesWindow, h.whyWindow)
	}
}

// left frees the window of mode whole.
func (h *heldStates) left() {
	if h != nil && h.Offload.Whole {
		drop(&h.window)
	}
}

// change updates a range of the parameters, and runs body before it frees what it needs beside the states: gradients
// and parameters in fp32, where there are master weights. New states are as the optimizer has made them, and new master
// weights in fp32, until they are in a slot.
func (h *heldStates) change(first, end int, fresh bool, body func()) {
	var beside, most int64
	for i, p := range h.updated[first:end] {
		single := roads.Allocated(dtype.F32.Size() * p.Elements)
		switch {
		case !fresh:
			if block := min(p.Elements, comparedAtATime); h.Offload.Master == dtype.F32 {
				most = max(most, beside+single+roads.Allocated(2*block)+roads.Allocated(block))
			}
			beside += h.sizes[first+i].Temporary
		case h.Offload.Master != dtype.Invalid:
			beside += 2 * single
		}
	}
	h.gpu.briefly(most, ledger.DtypeConversions, h.whyBeside)
	h.gpu.during(beside, ledger.DtypeConversions, h.whyBeside, func() {
		h.copies(h.gpu, h.updated[first:end])
		body()
	})
}

// comparedAtATime is the number of elements of a parameter that are compared with its fp32 master weights at a time, to
// find those that the program has changed: as bf16 and as a byte (masters.py).
const comparedAtATime = 1 << 20

func (h *heldStates) whyBeside() string {
	return "gradients and parameters of a chunk in fp32, for an update of master weights"
}
