package simulate

import (
	"fmt"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/roads"
)

// heldStates are optimizer states that rest on the host and come to the GPU for the update, as
// plimsoll.torch.StateOffload moves them.
type heldStates struct {
	*simulation
	layout  *roads.Layout
	updated []*autograd.Parameter // as the optimizer sees them: in fp32 where they have master weights
	sizes   []roads.Parameter
	window  hold
}

// holdStates makes the arenas of the states of the parameters, if they are to rest on the host. The sizes are known
// before the first step.
func (s *simulation) holdStates(parameters []*autograd.Parameter) {
	o := s.Offload
	if o == nil {
		return
	}
	h := &heldStates{simulation: s, sizes: o.States(s.Job, parameters)}
	h.layout = roads.NewLayout(h.sizes, o.Settings)
	for _, p := range parameters {
		updated := *p
		if o.Master != dtype.Invalid {
			updated.DType = dtype.F32
		}
		h.updated = append(h.updated, &updated)
	}
	s.states = h
	s.host.hold(int64(h.layout.Arena()), ledger.OptimizerStates, because("arena \"states\", pinned: %v of states and "+
		"master weights, %v of parameters for recovery, and a gap as large as the largest region, %v, which keeps old "+
		"and new regions apart", h.layout.State(), h.layout.Own(), h.layout.Gap()))
	s.host.hold(int64(h.layout.Gradients()), ledger.Gradients, because("arena \"gradients\", pinned: those of the "+
		"step, with which another process can finish it"))
	s.host.hold(int64(h.layout.Control()), ledger.StepJournal, because("arena \"control\": which chunks are committed, "+
		"two tables of %d numbers, and the hyperparameters of a step", h.layout.Scalars))
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
	held := 0
	for _, c := range h.layout.Chunks {
		held = c.End
	}
	switch {
	case h.Offload.Whole:
		h.updateWhole(held)
	case first:
		h.makeChunks()
	default:
		if !h.window.held() {
			h.window = h.gpu.hold(int64(h.layout.Window(false)), ledger.StatesWindow, h.whyWindow)
		}
		for _, c := range h.layout.Chunks {
			h.change(c.First, c.End)
		}
	}
	if rest := len(h.updated); held < rest {
		if first {
			allocate(h.gpu, int64(h.layout.Resident), ledger.OptimizerStates, because("the states that --offload-fraction "+
				"leaves on the GPU"))
		}
		h.change(held, rest)
	}
}

// makeChunks is the first step in mode chunked: the optimizer makes its own states, which leave chunk by chunk. No more
// than two chunks are on the GPU.
func (h *heldStates) makeChunks() {
	var before hold
	for _, c := range h.layout.Chunks {
		made := h.gpu.hold(int64(c.State), ledger.StatesWindow, h.whyWindow)
		h.change(c.First, c.End)
		before.free()
		before = made
	}
	before.free()
}

func (h *heldStates) whyWindow() string {
	if h.Offload.Whole {
		return "all states that rest on the host, from the beginning of the step until the copies out have ended"
	}
	return fmt.Sprintf("2 slots of %v, the state of the largest chunk: one is updated while the other is emptied and "+
		"filled; in the first step, the states of two chunks that the optimizer has made", h.layout.Slot())
}

// updateWhole is a step in mode whole: the window is there until the copies out have ended, at the latest when the next
// forward pass is over.
func (h *heldStates) updateWhole(held int) {
	h.window = h.gpu.hold(int64(h.layout.Window(true)), ledger.StatesWindow, h.whyWindow)
	h.change(0, held)
}

// left frees the window of mode whole.
func (h *heldStates) left() {
	if h != nil && h.Offload.Whole {
		drop(&h.window)
	}
}

// change updates a range of the parameters. Beside the states the GPU holds gradients and parameters in fp32, where
// there are master weights, and the temporaries of the optimizer.
func (h *heldStates) change(first, end int) {
	var beside int64
	for _, p := range h.sizes[first:end] {
		beside += p.Temporary
	}
	h.gpu.during(beside, ledger.DtypeConversions, because("gradients and parameters of a chunk in fp32, for an update of "+
		"master weights"), func() { h.copies(h.gpu, h.updated[first:end]) })
}
