// Package autograd models the memory of a forward and a backward pass in PyTorch:
// which operation makes which tensor, what it saves for its gradient, and when
// the last reference to a storage is released. It computes no elements.
//
// The rules are those of PyTorch's autograd engine (torch/csrc/autograd:
// engine.cpp, input_buffer.cpp, accumulate_grad.h). PyTorch's derivatives.yaml
// lists what each operation saves.
package autograd

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
)

// Memory receives every allocation and free, in their order. Why says why the
// component is as large as it is.
type Memory interface {
	// Allocate allocates a storage for a component of the ledger.
	Allocate(bytes ledger.Bytes, component ledger.Component, why func() string) int
	// Relabel moves a storage to another component: the gradient of an operation
	// becomes the gradient of a parameter.
	Relabel(id int, component ledger.Component, why func() string)
	Free(id int)
}

// Tape records operations for the backward pass.
type Tape struct {
	memory       Memory
	component    ledger.Component // of the results of operations
	why          func() string    // the reason of component
	whyGradients func() string
	recording    bool
	nodes        []node
	locals       []*Tensor
	replay       *replay    // the current checkpoint, or nil
	attached     []*storage // held by the current graph
	offload      *offloading
	// RetainsGraph keeps what operations have saved until the backward pass ends (retain_graph).
	RetainsGraph bool
	retained     []*storage
	uses         map[*Parameter]int // of parameters, whose gradients the backward pass has not completed
	divides      bool               // the backward pass runs in two halves
	frame        *frame             // the checkpoint that is recorded for them, or nil
	again        bool               // that checkpoint is computed again
	engineRun    int                // calls of the engine for the halves
}

// NewTape returns a tape that records operations. WhyGradients says why the
// gradients of parameters are as large as they are.
func NewTape(memory Memory, whyGradients func() string) *Tape {
	return &Tape{memory: memory, whyGradients: whyGradients, recording: true, uses: map[*Parameter]int{}}
}

// Reuse takes over the room of a tape whose passes are over, for another micro batch of the same parameters.
func (t *Tape) Reuse(over *Tape) {
	t.nodes, t.locals = over.nodes[:0], over.locals[:0]
	over.nodes, over.locals = nil, nil
}

// In sets the component of the results of operations, and why it is as large as it
// is. The function that it returns restores the component before.
func (t *Tape) In(component ledger.Component, why func() string) (leave func()) {
	before, whyBefore := t.component, t.why
	t.component, t.why = component, why
	return func() { t.component, t.why = before, whyBefore }
}

// storage is memory that tensors, nodes and gradients share.
type storage struct {
	id         int
	references int
	// viewed means that only a view of the storage is held.
	viewed bool
}

func (t *Tape) allocate(bytes int64, component ledger.Component, why func() string) *storage {
	return &storage{id: t.memory.Allocate(ledger.Bytes(bytes), component, why), references: 1}
}

// scratch allocates the temporaries of a kernel, nil if there are none.
func (t *Tape) scratch(bytes int64) *storage {
	if bytes <= 0 {
		return nil
	}
	return t.allocate(bytes, ledger.OperationScratch, WhyScratch)
}

// WhyScratch is the reason for what operations have of memory beside their results.
func WhyScratch() string {
	return "what kernels need beside their results: expanded weights, partial sums of attention, and of the " +
		"gradients of biases and norms (aten/src/ATen/native/cuda/Reduce.cuh, global_memory_size)"
}

// Workspace is memory that a kernel works in. It is taken when the room for the kernel's result is there, and given
// back at once.
type Workspace struct {
	Bytes     int64
	Component ledger.Component
	Why       func() string
}

// work allocates what a kernel works in, and frees it.
func (t *Tape) work(in Workspace) {
	if in.Bytes > 0 {
		t.release(t.allocate(in.Bytes, in.Component, in.Why))
	}
}

func (t *Tape) release(s *storage) {
	if s == nil {
		return
	}
	s.references--
	if s.references == 0 {
		t.memory.Free(s.id)
	}
}

func (s *storage) retain() *storage {
	if s != nil {
		s.references++
	}
	return s
}

// Tensor is a tensor that the program holds. The tensor of a parameter has no
// storage: the owner of the parameters allocates it.
type Tensor struct {
	Elements int64
	DType    dtype.Type
	storage  *storage
	gradient *gradient // nil if no gradient is needed
	held     bool
	graph    []*storage // of a loss after its backward pass: what the graph still holds; of a list: its tensors
}

// Bytes returns the size of the tensor's elements.
func (x *Tensor) Bytes() int64 { return x.Elements * x.DType.Size() }

// NeedsGradient reports whether the backward pass reaches the tensor.
func (x *Tensor) NeedsGradient() bool { return x.gradient != nil }

// gradient accumulates the contributions to a tensor's gradient.
type gradient struct {
	bytes int64
	leaf  *Parameter
	sum   *storage
}

// Parameter is a trainable or frozen parameter. The tape does not manage its
// storage, only its gradient.
type Parameter struct {
	Name     string
	Index    int // among the parameters of a model
	Elements int64
	Rows     int64 // of a matrix; 0 for others
	Matrices int64 // stacked matrices of so many Rows, the experts of a layer; 0 for others
	DType    dtype.Type
	// Wide means that it is stored in fp32 where FSDP casts it to DType for the passes.
	Wide      bool
	Trainable bool
	Embedding bool
	Expert    bool // a weight of an expert of a mixture
	// Hidden means that it is a matrix of a hidden layer, or a stack of such matrices.
	Hidden bool
	// Quantized is the quantization. Every operation on a quantized parameter
	// dequantizes it (bitsandbytes).
	Quantized Quantization
	// StoredBytes is the size in memory if it differs from that of the elements,
	// otherwise 0.
	StoredBytes int64
	// OnGradient is called once a backward pass has completed the gradient.
	OnGradient func(*Parameter)

	tensor   Tensor // returned by Tensor
	leaf     gradient
	tape     *Tape
	gradient *storage
	sum      *storage // gradient of this backward pass, until all uses have contributed
}

// Tensor returns the parameter as an input of operations.
func (p *Parameter) Tensor() *Tensor {
	p.tensor = Tensor{Elements: p.Elements, DType: p.DType}
	if p.Trainable {
		p.leaf = gradient{bytes: p.tensor.Bytes(), leaf: p}
		p.tensor.gradient = &p.leaf
	}
	return &p.tensor
}

// HasGradient reports whether the parameter holds a gradient.
func (p *Parameter) HasGradient() bool { return p.gradient != nil }

// DropGradient frees the gradient, as zero_grad(set_to_none=True) does.
func (p *Parameter) DropGradient() {
	if p.gradient != nil {
		p.tape.release(p.gradient)
		p.gradient = nil
	}
}

// node is an operation of the backward pass.
type node struct {
	inputs  []edge
	outputs []*gradient
	saved   []packed
	scratch int64
	product bool
	replace bool
	marker  func() // called by Mark's nodes, which do nothing else
	// custom makes the gradients of the inputs of a checkpoint.
	custom func(incoming, made []*storage)
	// Of a checkpoint in a divided backward pass: its frame, the place in it, and whether the operation saves anything.
	frame *frame
	place int
	saves bool
}

// edge is an input that needs a gradient. A shared gradient is the incoming
// gradient or a view of it.
type edge struct {
	to        *gradient
	shared    bool
	workspace Workspace
}

func (t *Tape) edge(input *Tensor, shared bool) edge {
	if leaf := input.gradient.leaf; leaf != nil {
		t.uses[leaf]++
		leaf.tape = t
	}
	return edge{to: input.gradient, shared: shared}
}

// Output is a result of an operation.
type Output struct {
	Elements int64
	DType    dtype.Type
	// View means that the result is a view of the first input's storage.
	View  bool
	Saved bool // the result is saved for the backward pass
}

// Operation describes one operation of the forward pass.
type Operation struct {
	Inputs []*Tensor
	// Shared means, by input, that its gradient is the incoming gradient.
	Shared []bool
	// Saved are the inputs that the backward pass needs.
	Saved []*Tensor
	// Attached are tensors that the operation keeps in an attribute of its context
	// (ctx.tensors = ...) instead of by ctx.save_for_backward. Only the end of the
	// graph frees them: that of the loss. A non-reentrant checkpoint does not see
	// them, and so they outlive its first run.
	Attached []*Tensor
	Outputs  []Output
	// Scratch and BackwardScratch are the bytes of temporaries in the kernels.
	Scratch, BackwardScratch int64
	// Workspace is what the kernel works in that makes the result, and GradientWorkspaces what those do that make the
	// gradients of the inputs.
	Workspace          Workspace
	GradientWorkspaces []Workspace
	// Product means that the operation is a matmul. The gradients of its inputs
	// are views.
	Product bool
	// Replaces means that the gradients of the inputs are written into the saved tensors, in their order.
	Replaces bool
	// Kept means that a selective checkpoint may keep the result. It keeps the
	// results of attention, and of some or all matmuls.
	Kept bool
}

// Do runs the operation. The program holds the results until the scope ends or
// drops them.
func (t *Tape) Do(o Operation) []*Tensor {
	results := make([]*Tensor, len(o.Outputs))
	kept := t.replay.keeps(o)
	cached := t.replay.next(kept)
	var scratch *storage
	if cached == nil {
		scratch = t.scratch(o.Scratch)
	}
	for i, out := range o.Outputs {
		r := &Tensor{Elements: out.Elements, DType: out.DType, held: true}
		switch {
		case out.View:
			r.storage = o.Inputs[0].storage.retain()
		case cached != nil:
			r.storage = cached[i].retain()
		case r.Bytes() > 0:
			r.storage = t.allocate(r.Bytes(), t.component, t.why)
		}
		results[i] = r
		t.locals = append(t.locals, r)
	}
	if cached == nil {
		t.work(o.Workspace)
	}
	t.release(scratch)
	t.replay.keep(kept, o, results)
	if !t.recording {
		t.remember(o, results)
		return results
	}
	n := node{scratch: o.BackwardScratch, product: o.Product, replace: o.Replaces}
	for i, in := range o.Inputs {
		if in.gradient != nil {
			if n.inputs == nil {
				n.inputs = make([]edge, 0, len(o.Inputs)-i)
			}
			e := t.edge(in, i < len(o.Shared) && o.Shared[i])
			if i < len(o.GradientWorkspaces) {
				e.workspace = o.GradientWorkspaces[i]
			}
			n.inputs = append(n.inputs, e)
		}
	}
	if len(n.inputs) == 0 {
		return results
	}
	by := anOperation
	if o.Product {
		by = aProduct
	}
	t.attach(o)
	for _, r := range results {
		r.gradient = &gradient{bytes: r.Bytes()}
		n.outputs = append(n.outputs, r.gradient)
	}
	if t.frame != nil {
		t.frame.enter(&n, o)
	} else {
		t.saveFor(&n, o, results, by)
	}
	t.nodes = append(t.nodes, n)
	return results
}

// saveFor holds what an operation saves.
func (t *Tape) saveFor(n *node, o Operation, results []*Tensor, by saver) {
	for _, x := range o.Saved {
		if k := t.save(x, by); k != (packed{}) { // parameters have no storage
			n.saved = append(n.saved, k)
		}
	}
	for i, r := range results {
		if o.Outputs[i].Saved {
			n.saved = append(n.saved, t.save(r, anOperation))
		}
	}
}

// remember attaches tensors in the first run of a non-reentrant checkpoint, which makes a graph, too.
func (t *Tape) remember(o Operation, results []*Tensor) {
	if t.replay == nil || !t.replay.graph || !slices.ContainsFunc(o.Inputs, (*Tensor).NeedsGradient) {
		return
	}
	t.attach(o)
	for _, r := range results {
		r.gradient = &gradient{bytes: r.Bytes()}
	}
}

func (t *Tape) attach(o Operation) {
	for _, x := range o.Attached {
		t.attached = append(t.attached, x.storage.retain())
	}
}

// detach releases the attached tensors from start on.
func (t *Tape) detach(start int) {
	for _, s := range t.attached[start:] {
		t.release(s)
	}
	t.attached = t.attached[:start]
}

// New returns a tensor that no operation made, such as a batch of the data
// loader.
func (t *Tape) New(elements int64, d dtype.Type) *Tensor {
	x := &Tensor{Elements: elements, DType: d, held: true}
	x.storage = t.allocate(x.Bytes(), t.component, t.why)
	t.locals = append(t.locals, x)
	return x
}

// RequireGradient makes the backward pass reach the tensor.
func (t *Tape) RequireGradient(x *Tensor) {
	if x.gradient != nil {
		return
	}
	x.gradient = &gradient{bytes: x.Bytes()}
	if t.recording { // no operation made the tensor: the gradient ends here
		// AccumulateGrad holds the tensor.
		held := packed{storage: x.storage.retain()}
		t.nodes = append(t.nodes, node{outputs: []*gradient{x.gradient}, saved: []packed{held}})
	}
}

// Drop releases tensors that the program holds. A loss holds its graph.
func (t *Tape) Drop(tensors ...*Tensor) {
	for _, x := range tensors {
		if x.held {
			x.held = false
			t.release(x.storage)
			for _, s := range x.graph {
				t.release(s)
			}
		}
	}
}

// List takes tensors over that the program holds in a list. The list is dropped as a whole.
func (t *Tape) List(tensors ...*Tensor) *Tensor {
	list := &Tensor{held: true}
	for _, x := range tensors {
		list.graph = append(list.graph, x.storage.retain())
	}
	t.Drop(tensors...)
	t.locals = append(t.locals, list)
	return list
}

// Hold keeps a tensor beyond the scope that made it, until it is dropped.
func (t *Tape) Hold(x *Tensor) {
	for i := len(t.locals) - 1; i >= 0; i-- {
		if t.locals[i] == x {
			t.locals = append(t.locals[:i], t.locals[i+1:]...)
			return
		}
	}
}

// Scope runs a function, and then drops all tensors that it made except its
// result.
func (t *Tape) Scope(body func() *Tensor) *Tensor {
	start := len(t.locals)
	result := body()
	kept := t.locals[:start]
	for _, x := range t.locals[start:] {
		if x == result {
			kept = append(kept, x)
		} else {
			t.Drop(x)
		}
	}
	t.locals = kept
	return result
}

// Escape returns a tensor for use outside of the checkpoint that makes it, such as
// one that a hook has seen. The program holds it until it is dropped. In the second
// run of a checkpoint it returns nil: the tensor of the first run is in use.
func (t *Tape) Escape(x *Tensor) *Tensor {
	if t.replay != nil && !t.replay.recording {
		t.replay.inner = append(t.replay.inner, x)
		return nil
	}
	outer := &Tensor{Elements: x.Elements, DType: x.DType, storage: x.storage.retain(), held: true,
		gradient: x.gradient}
	if t.replay != nil {
		outer.gradient = nil
		if t.replay.graph {
			outer.gradient = &gradient{bytes: outer.Bytes()}
		}
		t.replay.inner = append(t.replay.inner, outer)
	}
	return outer
}

// Mark calls a function when the backward pass reaches this place of the tape.
func (t *Tape) Mark(call func()) {
	if t.recording {
		t.nodes = append(t.nodes, node{marker: call})
	}
}

// WithoutGradients runs body as torch.no_grad() does: nothing is recorded, and no tensor is kept.
func (t *Tape) WithoutGradients(body func()) {
	recording, outer := t.recording, t.replay
	t.recording, t.replay = false, nil
	body()
	t.recording, t.replay = recording, outer
}

// Recording reports whether operations are recorded. In the forward pass of a
// checkpoint they are not.
func (t *Tape) Recording() bool { return t.recording }

// Quantization is the quantization of a stored parameter.
type Quantization int

// The quantizations.
const (
	Unquantized Quantization = iota
	FourBit
	EightBit
	GPTQ // dequantized in the forward pass: the backward pass needs that copy
	AWQ  // dequantized in both passes
	AQLM // as AWQ, in one piece
)

// Bytes returns the size of the parameter in memory.
func (p *Parameter) Bytes() int64 {
	if p.StoredBytes > 0 {
		return p.StoredBytes
	}
	return p.Elements * p.DType.Size()
}
