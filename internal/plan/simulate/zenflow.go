package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// overlapped reports whether ZenFlow's process steps while the GPU goes on.
func (e *deepSpeed) overlapped() bool {
	return e.recipe.ZenFlow != nil && e.recipe.ZenFlow.OverlapStep && e.offloads()
}

// zenFlowShares is the reason for shared memory.
const zenFlowShares = "ZenFlow's process steps while the GPU goes on, and shares memory (zenflow_stage_1_and_2.py, " +
	"ZenFlowZeroOptimizerParallel); a container's /dev/shm is 64 MB by default"

// hostMaster returns the component of master weights on the host and its reason. The reason is why if ZenFlow's
// process does not share them.
func (e *deepSpeed) hostMaster(why func() string) (ledger.Component, func() string) {
	if e.overlapped() {
		return ledger.SharedMasterWeights, because("%s x %d B: %s", e.shardCount(), e.master.Size(), zenFlowShares)
	}
	return ledger.MasterWeights, why
}

// hostGradients allocates the gradients that the optimizer on the host reads. An
// overlapped step needs two sets of them, and the parameters before the step.
// PyTorch keeps the pinned block of a tensor that is moved to shared memory.
func (e *deepSpeed) hostGradients(bytes int64, why func() string) tensor {
	if !e.overlapped() {
		return e.holdOnHost(bytes, ledger.MasterGradients, why, e.pinsOptimizer())
	}
	e.holdOnHost(bytes, ledger.PinningCopies, whyPinningCopies, e.pinsOptimizer()).free()
	allocate(e.host, 2*bytes, ledger.SharedMasterGradients, because("%s x %d B, twice: one is filled while the "+
		"other is read. %s", e.shardCount(), e.master.Size(), zenFlowShares))
	allocate(e.host, bytes, ledger.SharedStaleParameters, because("%s x %d B: what the GPU takes of the last step. %s",
		e.shardCount(), e.master.Size(), zenFlowShares))
	return tensor{}
}

// hostStates allocates the optimizer states on the host. Overlapped steps have two of each, and alternate between
// them.
func (e *deepSpeed) hostStates(flat []*autograd.Parameter) {
	bytes := e.moments(flat)
	if e.overlapped() {
		bytes *= 2
	}
	allocate(e.host, bytes, ledger.OptimizerStates, e.whyShardStates)
}

// selective allocates the state of ZenFlow's optimizer on the GPU. Every rank has
// it for all vectors and for a share of the columns of matrices
// (ops/adam/zenflow_torch_adam.py).
func (e *deepSpeed) selective() {
	z := e.recipe.ZenFlow
	if z == nil || !e.offloads() {
		return
	}
	var chosen int64
	for _, p := range e.trained {
		chosen += e.chosen(p, z.TopKRatio)
	}
	device := e.gpu
	if z.Offload {
		device = e.host
	}
	why := because("ZenFlow: all vectors and %g of the columns of matrices, on every rank: gradients and two moments "+
		"in %v", z.TopKRatio, e.ParameterType)
	allocate(e.gpu, chosen*e.ParameterType.Size(), ledger.SelectedGradients, why)
	allocate(device, 2*chosen*e.ParameterType.Size(), ledger.SelectedGradients, why)
}

func (e *deepSpeed) chosen(p *autograd.Parameter, ratio float64) int64 {
	if p.Rows == 0 {
		return p.Elements
	}
	columns := p.Elements / p.Rows
	return int64(float64(columns)*ratio) * p.Rows
}
