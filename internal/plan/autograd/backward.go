package autograd

import "plimsoll/internal/base/ledger"

// Backward runs the backward pass from the loss and empties the tape. The loss
// holds on to the graph.
func (t *Tape) Backward(loss *Tensor) {
	var first *storage // held by the caller of the engine until the end
	if loss.gradient != nil {
		first = t.allocateGradient(loss.Bytes())
		loss.gradient.sum = first.retain()
	}
	t.run(0)
	t.endOffload()
	t.release(first)
	loss.graph, t.attached = t.attached, nil
	for _, s := range t.retained {
		t.release(s)
	}
	t.retained = nil
}

// run pops and runs the nodes from start on, the last one first.
func (t *Tape) run(start int) {
	recording := t.recording
	t.recording = false
	for len(t.nodes) > start {
		last := len(t.nodes) - 1
		n := t.nodes[last]
		t.nodes[last] = node{}
		t.nodes = t.nodes[:last]
		t.step(n)
	}
	t.recording = recording
}

func (t *Tape) step(n node) {
	if n.marker != nil {
		n.marker()
		return
	}
	incoming := make([]*storage, 0, 1)
	for _, g := range n.outputs {
		if g.sum != nil {
			incoming = append(incoming, g.sum)
			g.sum = nil
		}
	}
	made := make([]*storage, len(n.inputs))
	ran := t.restore(&n, len(incoming) > 0)
	switch {
	case n.custom != nil:
		n.custom(incoming, made)
	case len(incoming) > 0:
		t.differentiate(n, incoming, made)
	}
	ran()
	// The engine releases both before it delivers the new gradients.
	for _, k := range n.saved {
		if t.RetainsGraph && k.storage != nil {
			t.retained = append(t.retained, k.storage)
		} else {
			t.release(k.storage)
		}
	}
	for _, s := range incoming {
		t.release(s)
	}
	for i, e := range n.inputs {
		t.deliver(e.to, made[i])
	}
}

// differentiate allocates the gradients of the inputs.
func (t *Tape) differentiate(n node, incoming, made []*storage) {
	scratch := t.scratch(n.scratch)
	for i, e := range n.inputs {
		if n.replace && i < len(n.saved) {
			made[i], n.saved[i] = n.saved[i].storage, packed{}
			t.memory.Relabel(made[i].id, ledger.ActivationGradients, whyGradientsOfOperations)
		} else if e.shared {
			made[i] = incoming[0].retain()
		} else {
			made[i] = t.allocateGradient(e.to.bytes)
			made[i].viewed = n.product
			t.work(e.workspace)
		}
	}
	t.release(scratch)
}

// allocateGradient allocates a gradient that operations pass on.
func (t *Tape) allocateGradient(bytes int64) *storage {
	return t.allocate(bytes, ledger.ActivationGradients, whyGradientsOfOperations)
}

func whyGradientsOfOperations() string {
	return "gradients between operations of the backward pass, until both of their uses are done"
}

// deliver adds a contribution to a gradient and takes over its reference. The
// contribution is nil if nothing depends on the result of the operation.
func (t *Tape) deliver(g *gradient, s *storage) {
	sum := &g.sum
	if g.leaf != nil {
		sum = &g.leaf.sum
	}
	if s != nil {
		*sum = t.added(*sum, s, g.bytes)
	}
	if g.leaf != nil {
		t.used(g.leaf)
	}
}

// added returns the sum of two contributions. The sum is in place if the first
// has no other reference and is no view; otherwise it is a new tensor
// (input_buffer.cpp, can_accumulate_inplace).
func (t *Tape) added(sum, s *storage, bytes int64) *storage {
	switch {
	case sum == nil:
		return s
	case sum.references == 1 && !sum.viewed:
		t.release(s)
		return sum
	}
	made := t.allocateGradient(bytes)
	t.release(sum)
	t.release(s)
	return made
}

// used counts down the uses of a parameter. After the last use its gradient is
// complete. AccumulateGrad adds it in place to the gradient of earlier passes; a
// first gradient it takes as it is, or copies if another reference exists.
func (t *Tape) used(p *Parameter) {
	t.uses[p]--
	if t.uses[p] > 0 || p.sum == nil {
		return
	}
	sum := p.sum
	p.sum = nil
	switch {
	case p.gradient != nil:
		t.release(sum)
	case sum.references > 1:
		p.gradient = t.allocate(p.Elements*p.DType.Size(), ledger.Gradients, t.whyGradients)
		t.release(sum)
	default:
		t.memory.Relabel(sum.id, ledger.Gradients, t.whyGradients)
		p.gradient = sum
	}
	if p.OnGradient != nil {
		p.OnGradient(p)
	}
}
