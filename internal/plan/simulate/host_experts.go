package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// hostExperts is what KTransformers holds on the host of the first rank: the experts, their adapters, and the buffers
// of kernels. Sizes are those of kt-kernel of August 2026 (commit 95009ea6): operators/amx/sft_moe.hpp, moe_base.hpp,
// operators/moe-sft-tp.hpp and python/sft. Buffers are as long as the tokens that the ranks send: nothing touches the
// rest of them. A nil *hostExperts holds nothing.
type hostExperts struct {
	*simulation
	kernel  expertKernel
	factors []*autograd.Parameter // of the adapters
	forward bool                  // the buffers of the forward pass are there
	back    bool                  // those of the backward pass
	outputs []hold                // of the layers, which the second run of a checkpoint takes
}

// expertKernel has the sizes of a kernel's matrices, of the type that the weights have.
type expertKernel struct {
	weights func(rows, columns int64) int64 // BufferB
	inputs  func(rows, columns int64) int64 // BufferA
	result  int64                           // bytes of an element of BufferC
	step    int64                           // K_STEP: adapters are padded to its multiples
	adapts  bool                            // the adapters have a form for the kernel
}

// expertKernels are in operators/amx/la: GemmKernel224BF16, GemmKernel224Int8 and GemmKernel224FP8.
var expertKernels = map[string]expertKernel{
	"bf16": {weights: inBF16, inputs: inBF16, result: 4, step: 32, adapts: true},
	"int8": {weights: scaledRows, inputs: scaledRows, result: 4, step: 64, adapts: true},
	"fp8":  {weights: scaledBlocks, inputs: inBF16, result: 8, step: 32},
}

func inBF16(rows, columns int64) int64     { return 2 * rows * columns }
func scaledRows(rows, columns int64) int64 { return rows*columns + 4*rows }
func scaledBlocks(rows, columns int64) int64 {
	const block = 128
	scales := (rows + block - 1) / block * ((columns + block - 1) / block)
	return roundUp(rows*columns+4*scales, 64)
}

func ceilDivide(n, by int64) int64 { return (n + by - 1) / by }

func roundUp(n, to int64) int64 { return ceilDivide(n, to) * to }

func newHostExperts(s *simulation) *hostExperts {
	if s.HostExperts == nil {
		return nil
	}
	e := &hostExperts{simulation: s, kernel: expertKernels[s.HostExperts.Format]}
	rank, hidden := s.HostExperts.Rank, s.HostExperts.Hidden
	for i, x := range s.HostExperts.Layers {
		count, inner := int64(len(x.Experts)), x.Experts[0].Inner
		for _, f := range []struct {
			name          string
			rows, columns int64
		}{{"gate_lora_a", rank, hidden}, {"gate_lora_b", inner, rank}, {"up_lora_a", rank, hidden},
			{"up_lora_b", inner, rank}, {"down_lora_a", rank, inner}, {"down_lora_b", hidden, rank}} {
			e.factors = append(e.factors, &autograd.Parameter{Name: fmt.Sprintf("kt.layers.%d.experts.%s", i, f.name),
				DType: dtype.BF16, Trainable: true, Elements: count * f.rows * f.columns, Matrices: count,
				Rows: f.rows})
		}
	}
	return e
}

// layer is the sizes of a layer's part in one pool of threads.
type layer struct {
	experts, chosen, hidden, inner, rank int64
}

func (e *hostExperts) layers() []layer {
	var list []layer
	for _, x := range e.HostExperts.Layers {
		list = append(list, e.layerOf(x))
	}
	return list
}

func (e *hostExperts) layerOf(x *model.Mixture) layer {
	h := e.HostExperts
	return layer{int64(len(x.Experts)), x.Chosen, h.Hidden, x.Experts[0].Inner / h.Pools, h.Rank}
}

// largest returns the most bytes of any layer in all pools.
func (e *hostExperts) largest(of func(layer) int64) int64 {
	var most int64
	for _, l := range e.layers() {
		most = max(most, of(l))
	}
	return most * e.HostExperts.Pools
}

// sum returns the bytes of all layers in all pools.
func (e *hostExperts) sum(of func(layer) int64) int64 {
	var sum int64
	for _, l := range e.layers() {
		sum += of(l)
	}
	return sum * e.HostExperts.Pools
}

// allocate allocates a rank's part of what the node of the first rank holds.
func (e *hostExperts) allocate(bytes int64, component ledger.Component, why func() string) {
	e.hold(bytes, component, why)
}

func (e *hostExperts) hold(bytes int64, component ledger.Component, why func() string) hold {
	return e.host.hold(e.perNode(bytes), component, why)
}

// weightsOf returns the size of a layer's weights for the forward pass.
func (e *hostExperts) weightsOf(l layer) int64 {
	return l.experts * (2*e.kernel.weights(l.inner, l.hidden) + e.kernel.weights(l.hidden, l.inner))
}

// transposedOf returns the size of a layer's weights for the backward pass.
func (e *hostExperts) transposedOf(l layer) int64 {
	return l.experts * (2*e.kernel.weights(l.hidden, l.inner) + e.kernel.weights(l.inner, l.hidden))
}

// load reads the experts, layer by layer, before the rest of the model is sharded. Weights that are not in the form of
// the kernel are there twice: as the checkpoint has them, and put together.
func (e *hostExperts) load() {
	if e == nil {
		return
	}
	h := e.HostExperts
	for _, l := range e.layers() {
		read := h.Pools * l.experts * 3 * l.inner * l.hidden * 2
		switch {
		case h.FromKT:
			read = 0
		case h.Format == "fp8":
			read = 2 * h.Pools * e.weightsOf(l)
		default:
			read *= 2
		}
		staged := e.hold(read, ledger.LoadStaging, e.whyRead)
		e.allocate(h.Pools*e.weightsOf(l), ledger.Parameters, e.whyWeights)
		if h.KeepsTransposed {
			e.allocate(h.Pools*e.transposedOf(l), ledger.TransposedWeights, e.whyTransposed)
		}
		e.allocate(h.Pools*(e.padded(l)+l.experts*l.rank*(2*l.inner+l.hidden)*2), ledger.AdapterCopies, e.whyCopies)
		e.allocate(h.Pools*e.places(l), ledger.ExpertBuffers, e.whyBuffers)
		staged.free()
	}
}

func (e *hostExperts) whyRead() string {
	if e.HostExperts.Format == "fp8" {
		return "a layer's experts as the checkpoint has them, and their parts for each pool of threads"
	}
	return "a layer's experts as the checkpoint has them, and put together, until the kernels have them in their form"
}

func (e *hostExperts) whyWeights() string {
	h := e.HostExperts
	return fmt.Sprintf("%s parameters of the experts of %d layers in %s, and %s of their adapters in bf16, on the "+
		"host of the first rank, here a part of each rank", ledger.Count(h.Elements), len(h.Layers), h.Format,
		ledger.Count(elementsOf(e.factors)))
}

func (e *hostExperts) whyTransposed() string {
	if e.HostExperts.KeepsTransposed {
		return "transposed weights of the experts of all layers, for the backward pass"
	}
	return "transposed weights of the experts of one layer at a time, for the backward pass (kt_share_backward_bb)"
}

// padded returns the size of a pool's adapters in the form of the kernel: 12 matrices of each expert, most of which
// nothing writes any more. Their pages are resident where the kernel gives huge pages.
func (e *hostExperts) padded(l layer) int64 {
	if !e.kernel.adapts {
		return 0
	}
	rank, b := max(roundUp(l.rank, e.kernel.step), roundUp(l.rank, 32)), e.kernel.weights
	return l.experts * (3*b(rank, l.hidden) + 3*b(l.hidden, rank) + 3*b(rank, l.inner) + 3*b(l.inner, rank))
}

func (e *hostExperts) whyCopies() string {
	return "adapters of experts for the kernels: transposed, cut for the pools of threads, and padded, of which only " +
		"a part is written (init_lora_amx_buffers); without huge pages less is resident"
}

// places returns the size of the places of tokens, which every layer has for itself and for each slot of its cache.
func (e *hostExperts) places(l layer) int64 {
	return (1 + e.HostExperts.Slots) * e.Capacity() * (24 + max(32, roundUp(4*l.chosen+8, 16)))
}

// initialize makes the adapters of the experts and their gradients (kt_adapt_peft_lora).
func (e *hostExperts) initialize() {
	if e == nil {
		return
	}
	copies := int64(1)
	if e.HostExperts.Modules {
		copies = int64(max(1, e.RanksPerNode))
	}
	for _, p := range e.factors {
		e.allocate(copies*p.Bytes(), ledger.Parameters, e.whyWeights)
		e.allocate(copies*p.Bytes(), ledger.Gradients, e.whyGradients)
	}
	e.allocate(e.sum(func(l layer) int64 { return 3 * l.experts * l.inner * l.rank * 2 }), ledger.AdapterCopies,
		e.whyCopies) // the part of each pool, also of one (update_lora_weights)
}

func (e *hostExperts) whyGradients() string {
	return fmt.Sprintf("%s parameters of the adapters of experts in bf16, which kernels write in place",
		ledger.Count(elementsOf(e.factors)))
}

// tokens returns the tokens of all ranks in a pass.
func (e *hostExperts) tokens() int64 { return e.Sequences() * e.sequence * int64(e.World) }

// routed returns the rows of the experts of a layer, with the padding of each.
func (e *hostExperts) routed(l layer) int64 { return e.tokens()*l.chosen + 32*l.experts }

// result returns the size of a kernel's result.
func (e *hostExperts) result(rows, columns int64) int64 { return e.kernel.result * rows * columns }

// beforeForward makes what the forward pass holds: the buffers with the first pass, and in every pass results that the
// second run of checkpoints takes.
func (e *hostExperts) beforeForward() {
	if e == nil {
		return
	}
	tokens, h := e.tokens(), e.HostExperts
	if !e.forward {
		e.forward = true
		e.allocate(tokens*(4*2*h.Hidden+e.most(16)), ledger.ExpertBuffers, e.whyBuffers) // KExpertsSFTBuffer
		e.allocate((h.Pools+1)*4*tokens*h.Hidden, ledger.ExpertBuffers, e.whyBuffers)
		e.allocate(e.largest(e.shared), ledger.ExpertBuffers, e.whyBuffers)
		e.allocate(e.largest(e.adapting), ledger.ExpertBuffers, e.whyBuffers)
		if h.Retains {
			e.allocate(e.sum(e.cached), ledger.ExpertActivations, e.whyCached)
		}
	}
	if h.Retains && e.Recompute != nil {
		for range h.Layers {
			e.outputs = append(e.outputs, e.hold(2*tokens*h.Hidden, ledger.ExpertActivations, e.whyCached))
		}
	}
}

// most returns the most bytes of the routing of a token, at so many for each choice.
func (e *hostExperts) most(each int64) int64 {
	var most int64
	for _, l := range e.layers() {
		most = max(most, each*l.chosen)
	}
	return most
}

// shared returns a pool's buffers that all layers share (AMX_MOE_BASE::init).
func (e *hostExperts) shared(l layer) int64 {
	rows, a := e.routed(l), e.kernel.inputs
	return 2*2*e.tokens()*l.chosen*(l.hidden+l.inner) + a(rows, l.hidden) + a(rows, l.inner) +
		2*e.result(rows, l.inner) + e.result(rows, l.hidden) + 5*64*rows
}

// adapting returns a pool's buffers of the adapters' products (alloc_forward_buffers).
func (e *hostExperts) adapting(l layer) int64 {
	rows, rank := e.routed(l), max(roundUp(l.rank, e.kernel.step), roundUp(l.rank, 32))
	if !e.kernel.adapts {
		return 2 * rows * rank * 2
	}
	return 2*e.kernel.inputs(rows, rank) + 2*e.result(rows, rank) + 2*e.result(rows, l.inner) +
		e.result(rows, l.hidden) + 2*rows*rank*2
}

// cached returns what a pool keeps of a layer for the backward pass. A layer has one forward pass before its backward
// pass, and so one slot.
func (e *hostExperts) cached(l layer) int64 {
	tokens := e.tokens()
	return tokens*l.hidden*2 + tokens*l.chosen*(3*2*l.inner+4*l.rank+2*l.hidden)
}

func (e *hostExperts) whyCached() string {
	if e.HostExperts.Retains {
		return "inputs, projections and results of the experts of all layers, for the backward pass " +
			"(kt_cpu_activation: retain), of the tokens of all ranks"
	}
	return "inputs, projections and results of the experts of one layer at a time, for the backward pass, of the " +
		"tokens of all ranks"
}

func (e *hostExperts) whyBuffers() string {
	return "buffers of the kernels of experts, for the tokens of all ranks, and the places of tokens in each layer"
}

// beforeBackward makes what the first backward pass needs.
func (e *hostExperts) beforeBackward() {
	if e == nil || e.back {
		return
	}
	e.back = true
	if !e.HostExperts.Retains {
		e.allocate(e.largest(e.cached), ledger.ExpertActivations, e.whyCached)
	}
	if !e.HostExperts.KeepsTransposed {
		e.allocate(e.largest(e.transposedOf), ledger.TransposedWeights, e.whyTransposed)
	}
	e.allocate(e.largest(e.backward), ledger.ExpertBuffers, e.whyBuffers)
}

// backward returns a pool's buffers of the backward pass (alloc_backward_buffers, and TP_MOE_SFT::backward).
func (e *hostExperts) backward(l layer) int64 {
	tokens, rows := e.tokens(), e.routed(l)
	kernels := 3*2*tokens*l.chosen*l.inner + e.kernel.inputs(rows, l.hidden) + e.result(rows, l.inner) +
		e.result(rows, l.hidden) + 2*2*rows*l.hidden + 4*rows*l.hidden + 2*4*rows*l.rank +
		4*l.experts*l.rank*(l.hidden+l.inner)
	active := min(l.experts, tokens*l.chosen)
	return kernels + 3*4*active*l.rank*l.hidden + 2*tokens*l.hidden + 4*tokens*l.chosen + 2*4*active*l.rank*l.inner
}

// endBackward frees the results that checkpoints have taken.
func (e *hostExperts) endBackward() {
	if e == nil {
		return
	}
	for i := range e.outputs {
		drop(&e.outputs[i])
	}
	e.outputs = nil
}

// step updates the adapters of experts on the host. The first step makes the states.
func (e *hostExperts) step(first bool) {
	if e == nil {
		return
	}
	var largest int64
	for _, p := range e.factors {
		largest = max(largest, p.Bytes())
		if !first {
			continue
		}
		for _, state := range e.Optimizer.States(p) {
			e.allocate(state.Bytes, ledger.OptimizerStates, e.whyStates)
		}
	}
	e.hold(2*largest, ledger.OptimizerTemporaries, because("the step of one of the adapters of experts")).free()
}

func (e *hostExperts) whyStates() string {
	return fmt.Sprintf("%s of %s parameters of the adapters of experts, made in the first step", e.Optimizer.Name,
		ledger.Count(elementsOf(e.factors)))
}

// save copies the adapters before they are written (_save_fused_expert_lora).
func (e *hostExperts) save() {
	if e == nil {
		return
	}
	e.hold(bytesOf(e.factors, dtype.BF16), ledger.FullStateDict,
		because("the adapters of experts, which are copied before they are written")).free()
}

// trainedInExperts returns the elements of the adapters of experts.
func (e *hostExperts) trainedInExperts() int64 {
	if e == nil {
		return 0
	}
	return elementsOf(e.factors)
}
