package plan

import (
	"plimsoll/autograd"
	"plimsoll/ledger"
)

// overlapped says that ZenFlow's process steps while the GPU goes on.
func (e *deepSpeed) overlapped() bool {
	return e.recipe.ZenFlow != nil && e.recipe.ZenFlow.OverlapStep && e.offloads()
}

// hostMaster is the component of master weights on the host.
func (e *deepSpeed) hostMaster() ledger.Component {
	if e.overlapped() {
		return ledger.SharedMasterWeights
	}
	return ledger.MasterWeights
}

// hostGradients makes the gradients that the optimizer on the host reads. For
// an overlapped step there are two, and the parameters before the step. Moving
// to shared memory leaves the page-locked block behind, which PyTorch keeps.
func (e *deepSpeed) hostGradients(bytes int64) locked {
	if !e.overlapped() {
		return e.place(bytes, ledger.MasterGradients, e.pinned())
	}
	e.place(bytes, ledger.PinningCopies, e.pinned()).free()
	allocate(e.host, 2*bytes, ledger.SharedMasterGradients)
	allocate(e.host, bytes, ledger.SharedStaleParameters)
	return locked{}
}

// hostStates makes the states of the optimizer on the host: two of each for
// overlapped steps, which use them in turn.
func (e *deepSpeed) hostStates(flat []*autograd.Parameter) {
	bytes := e.moments(flat)
	if e.overlapped() {
		bytes *= 2
	}
	allocate(e.host, bytes, ledger.OptimizerStates)
}

// selective is what ZenFlow's optimizer on the GPU holds: vectors, and a share
// of the columns of matrices, on every rank (ops/adam/zenflow_torch_adam.py).
func (e *deepSpeed) selective() {
	z := e.recipe.ZenFlow
	if z == nil || !e.offloads() {
		return
	}
	var chosen int64
	for _, p := range e.trained {
		chosen += e.chosen(p, z.TopKRatio)
	}
	home := e.gpu
	if z.Offload {
		home = e.host
	}
	allocate(e.gpu, chosen*e.Weights.Size(), ledger.SelectedGradients)
	allocate(home, 2*chosen*e.Weights.Size(), ledger.SelectedGradients)
	e.explain(ledger.SelectedGradients,
		"ZenFlow: all vectors and %g of the columns of matrices, on every rank: gradients and two moments in %v",
		z.TopKRatio, e.Weights)
}

// explainShared says why ZenFlow shares memory.
func (e *deepSpeed) explainShared() {
	const shared = "ZenFlow's process steps while the GPU goes on, and shares memory (zenflow_stage_1_and_2.py, " +
		"ZenFlowZeroOptimizerParallel); a container's /dev/shm is 64 MB by default"
	part := ledger.Count(elementsOf(e.flat))
	e.explain(ledger.SharedMasterWeights, "%s x %d B: %s", part, e.master.Size(), shared)
	e.explain(ledger.SharedMasterGradients, "%s x %d B, twice: one is filled while the other is read. %s", part,
		e.master.Size(), shared)
	e.explain(ledger.SharedStaleParameters, "%s x %d B: what the GPU takes of the last step. %s", part, e.master.Size(),
		shared)
}

func (e *deepSpeed) chosen(p *autograd.Parameter, ratio float64) int64 {
	if p.Rows == 0 {
		return p.Elements
	}
	columns := p.Elements / p.Rows
	return int64(float64(columns)*ratio) * p.Rows
}
