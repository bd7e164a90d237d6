// Package autograd follows the memory of a forward and a backward pass as
// PyTorch holds it: which operation makes which tensor, what it saves for its
// gradient, and when the last one who needs a storage lets go of it. No
// element is computed. The rules are those of PyTorch's autograd engine
// (torch/csrc/autograd/engine.cpp, input_buffer.cpp, accumulate_grad.h) and of
// derivatives.yaml, which says what each operation saves.
package autograd

import (
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// Memory is told of every allocation and free, in their order.
type Memory interface {
	// Allocate begins a storage; what it is for is a component of the ledger.
	Allocate(bytes ledger.Bytes, component ledger.Component) int
	// Relabel says that a storage is for something else from now on: the
	// gradient of an operation becomes the gradient of a parameter.
	Relabel(id int, component ledger.Component)
	Free(id int)
}

// Tape records operations for the backward pass.
type Tape struct {
	memory    Memory
	component ledger.Component
	recording bool
	nodes     []node
	locals    []*Tensor
	replay    *replay // the checkpoint that is run now, or nil
}

// NewTape has gradients recorded.
func NewTape(memory Memory) *Tape { return &Tape{memory: memory, recording: true} }

// In names what the storages of the following operations are for, until the
// function that it returns is called.
func (t *Tape) In(component ledger.Component) (leave func()) {
	before := t.component
	t.component = component
	return func() { t.component = before }
}

// storage is memory that tensors, nodes and gradients share.
type storage struct {
	id         int
	references int
	// viewed says that only a view of the storage is held.
	viewed bool
}

func (t *Tape) allocate(bytes int64, component ledger.Component) *storage {
	return &storage{id: t.memory.Allocate(ledger.Bytes(bytes), component), references: 1}
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

// Tensor is a tensor that the program holds. Tensors of a parameter have no
// storage of their own: who manages the parameters allocates them.
type Tensor struct {
	Elements int64
	DType    dtype.Type
	storage  *storage
	gradient *gradient // nil when none is needed
	held     bool
}

// Bytes is the size of the tensor's elements.
func (x *Tensor) Bytes() int64 { return x.Elements * x.DType.Size() }

// NeedsGradient says whether the backward pass reaches the tensor.
func (x *Tensor) NeedsGradient() bool { return x.gradient != nil }

// gradient is where the contributions to a tensor's gradient gather.
type gradient struct {
	bytes int64
	leaf  *Parameter
	sum   *storage
}

// Parameter is a tensor that is trained or frozen. Its own storage is not the
// tape's business; its gradient is, until OnGradient takes it.
type Parameter struct {
	Name      string
	Index     int // among the parameters of a model
	Elements  int64
	Rows      int64 // of a matrix, otherwise 0
	Matrices  int64 // of so many Rows, one on the other: the experts of a layer; otherwise 0
	DType     dtype.Type
	Trainable bool
	Embedding bool
	// Quantized parameters are expanded by every operation that uses them
	// (bitsandbytes).
	Quantized Quantization
	// StoredBytes is the size in memory where it is not that of the elements.
	StoredBytes int64
	// OnGradient is called when the gradient of a backward pass is complete.
	OnGradient func(*Parameter)

	tensor   Tensor // what Tensor makes
	leaf     gradient
	tape     *Tape
	gradient *storage
	sum      *storage // of this backward pass, until all uses have contributed
	uses     int
}

// Tensor is the parameter as an input of operations.
func (p *Parameter) Tensor() *Tensor {
	p.tensor = Tensor{Elements: p.Elements, DType: p.DType}
	if p.Trainable {
		p.leaf = gradient{bytes: p.tensor.Bytes(), leaf: p}
		p.tensor.gradient = &p.leaf
	}
	return &p.tensor
}

// HasGradient says whether a gradient is held.
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
	saved   []*storage
	scratch int64
	product bool
	replace bool
	marker  func() // called instead, for a place on the tape
	// custom is called instead, for a checkpoint, to make the gradients of the
	// inputs.
	custom func(incoming, made []*storage)
}

// edge is an input that needs a gradient. A shared gradient is the incoming
// one, or a view of it.
type edge struct {
	to     *gradient
	shared bool
}

func (t *Tape) edge(input *Tensor, shared bool) edge {
	if leaf := input.gradient.leaf; leaf != nil {
		leaf.uses++
		leaf.tape = t
	}
	return edge{input.gradient, shared}
}

// Output is a result of an operation.
type Output struct {
	Elements int64
	DType    dtype.Type
	// View says that the result is a view of the first input's storage.
	View  bool
	Saved bool // the result is saved for the backward pass
}

// Operation describes one operation of the forward pass.
type Operation struct {
	Inputs []*Tensor
	// Shared tells of which inputs the gradient is the incoming one.
	Shared []bool
	// Saved are inputs that the backward pass needs.
	Saved   []*Tensor
	Outputs []Output
	// Scratch and BackwardScratch are bytes that the kernels need beside.
	Scratch, BackwardScratch int64
	// Product says that the gradients are products of matrices, of which the
	// backward pass hands on views.
	Product bool
	// Replaces says that gradients take the place of what was saved, piece by
	// piece.
	Replaces bool
	// Kept says that a selective checkpoint may keep the result: it keeps
	// attention's, and some or all products of matrices.
	Kept bool
}

// Do runs the operation. The results are held until the scope ends or they
// are dropped.
func (t *Tape) Do(o Operation) []*Tensor {
	results := make([]*Tensor, len(o.Outputs))
	kept := t.replay.keeps(o)
	cached := t.replay.next(kept)
	var scratch *storage
	if o.Scratch > 0 && cached == nil {
		scratch = t.allocate(o.Scratch, ledger.OperationScratch)
	}
	for i, out := range o.Outputs {
		r := &Tensor{Elements: out.Elements, DType: out.DType, held: true}
		switch {
		case out.View:
			r.storage = o.Inputs[0].storage.retain()
		case cached != nil:
			r.storage = cached[i].retain()
		case r.Bytes() > 0:
			r.storage = t.allocate(r.Bytes(), t.component)
		}
		results[i] = r
		t.locals = append(t.locals, r)
	}
	if scratch != nil {
		t.release(scratch)
	}
	t.replay.keep(kept, results)
	if !t.recording {
		return results
	}
	n := node{scratch: o.BackwardScratch, product: o.Product, replace: o.Replaces}
	for i, in := range o.Inputs {
		if in.gradient != nil {
			if n.inputs == nil {
				n.inputs = make([]edge, 0, len(o.Inputs)-i)
			}
			n.inputs = append(n.inputs, t.edge(in, i < len(o.Shared) && o.Shared[i]))
		}
	}
	if len(n.inputs) == 0 {
		return results
	}
	for _, x := range o.Saved {
		if x.storage != nil { // of a parameter there is none
			n.saved = append(n.saved, x.storage.retain())
		}
	}
	for i, r := range results {
		r.gradient = &gradient{bytes: r.Bytes()}
		n.outputs = append(n.outputs, r.gradient)
		if o.Outputs[i].Saved {
			n.saved = append(n.saved, r.storage.retain())
		}
	}
	t.nodes = append(t.nodes, n)
	return results
}

// New is a tensor that no operation made: a batch of the data loader.
func (t *Tape) New(elements int64, d dtype.Type) *Tensor {
	x := &Tensor{Elements: elements, DType: d, held: true}
	x.storage = t.allocate(x.Bytes(), t.component)
	t.locals = append(t.locals, x)
	return x
}

// RequireGradient makes the backward pass reach the tensor.
func (t *Tape) RequireGradient(x *Tensor) {
	if x.gradient != nil {
		return
	}
	x.gradient = &gradient{bytes: x.Bytes()}
	if t.recording { // nothing comes before it: the gradient ends here
		t.nodes = append(t.nodes, node{outputs: []*gradient{x.gradient}})
	}
}

// Drop says that the program does not hold the tensor any more.
func (t *Tape) Drop(tensors ...*Tensor) {
	for _, x := range tensors {
		if x.held {
			x.held = false
			t.release(x.storage)
		}
	}
}

// Hold has the program hold a tensor beyond the scope that made it, until it
// is dropped.
func (t *Tape) Hold(x *Tensor) {
	for i := len(t.locals) - 1; i >= 0; i-- {
		if t.locals[i] == x {
			t.locals = append(t.locals[:i], t.locals[i+1:]...)
			return
		}
	}
}

// Scope runs a function; of the tensors that it made, the program holds only
// those that it returns.
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

// Mark has a function called when the backward pass comes to this place.
func (t *Tape) Mark(call func()) {
	if t.recording {
		t.nodes = append(t.nodes, node{marker: call})
	}
}

// Recording says whether operations are recorded: they are not in the forward
// pass of a checkpoint.
func (t *Tape) Recording() bool { return t.recording }

// Quantization is how a parameter is held.
type Quantization int

// The quantizations.
const (
	Unquantized Quantization = iota
	FourBit
	EightBit
)

// Bytes is what the parameter takes in memory.
func (p *Parameter) Bytes() int64 {
	if p.StoredBytes > 0 {
		return p.StoredBytes
	}
	return p.Elements * p.DType.Size()
}
