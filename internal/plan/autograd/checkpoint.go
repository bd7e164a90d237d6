package autograd

import (
	"slices"

	"plimsoll/internal/base/ledger"
)

// Checkpoint is a variant of activation checkpointing (torch.utils.checkpoint):
// it keeps the input of a function only, and the backward pass runs the function
// again. A reentrant checkpoint holds the result of the second run until its
// gradient is done. Otherwise the second run ends once it has made the last saved
// tensor.
type Checkpoint struct {
	Reentrant bool
	// Selective keeps the results of attention and of one of so many matmuls: of
	// all with 1; of every second, from the first on, with 2 (torchtitan's policy
	// "op"). 0 keeps nothing.
	Selective int
	// Compiled is a checkpoint inside torch.compile. It keeps no result that the
	// backward pass does not read, such as that of a block's last matmul.
	Compiled bool
}

// Checkpoint runs body as a checkpoint. Body needs the other tensors, too, which
// are kept like its input.
func (t *Tape) Checkpoint(c Checkpoint, input *Tensor, body func(*Tensor) *Tensor, others ...*Tensor) *Tensor {
	if !t.recording {
		return t.Scope(func() *Tensor { return body(input) })
	}
	if t.divides {
		return t.framed(input, body, others)
	}
	outer := t.replay
	forward := &replay{every: c.Selective, recording: true, graph: !c.Reentrant && !c.Compiled}
	t.recording, t.replay = false, forward
	inner := t.Scope(func() *Tensor { return body(input) })
	t.recording, t.replay = true, outer
	if c.Compiled {
		forward.forget(t)
	}

	// The checkpoint's result is a tensor of its own, on the storage of body's.
	result := &Tensor{Elements: inner.Elements, DType: inner.DType, storage: inner.storage.retain(), held: true}
	t.Drop(inner)
	t.locals[len(t.locals)-1] = result
	if forward.graph && inner.gradient == nil { // nothing in the block is trained: no graph holds its input
		forward.free(t)
		return result
	}
	result.gradient = &gradient{bytes: result.Bytes()}

	saved := []packed{t.save(input, aCheckpoint)}
	for _, x := range others {
		saved = append(saved, packed{storage: x.storage.retain()})
	}
	n := node{outputs: []*gradient{result.gradient}, saved: saved}
	if input.gradient != nil {
		n.inputs = []edge{t.edge(input, false)}
	}
	source := *input // the program may drop input before
	n.custom = func(incoming, made []*storage) {
		if len(incoming) == 0 { // nothing depends on the result
			forward.free(t)
			return
		}
		again := &Tensor{Elements: source.Elements, DType: source.DType, storage: saved[0].storage.retain(), held: true}
		t.RequireGradient(again)
		start, attached := len(t.nodes), len(t.attached)
		before := t.replay
		second := &replay{every: c.Selective, kept: forward.kept}
		t.recording, t.replay = true, second
		resume := t.KeepHere() // the checkpoint's own hooks take what the second run saves
		leave := t.In(ledger.RecomputedActivations, func() string {
			return "activations of one block, computed again from its input (torch.utils.checkpoint)"
		})
		output := t.Scope(func() *Tensor { return body(again) })
		leave()
		resume()
		t.recording, t.replay = false, before
		forward.free(t)
		output.gradient.sum = incoming[0]
		second.inherit(forward)
		if c.Reentrant { // CheckpointFunction.backward holds both
			incoming[0].retain()
		} else {
			t.Drop(output)
			t.detach(attached)
			incoming[0] = nil
		}
		t.run(start)
		t.Drop(output)
		t.detach(attached)
		t.locals = t.locals[:len(t.locals)-1]
		t.Drop(again)
		if len(made) > 0 {
			made[0] = again.gradient.sum
		} else {
			t.release(again.gradient.sum)
		}
	}
	t.nodes = append(t.nodes, n)
	return result
}

// replay is a run of a checkpoint's body. The first run keeps results for a
// selective checkpoint; the second takes them in the same order.
type replay struct {
	every     int
	products  int
	recording bool
	graph     bool // operations of this run hold what they attach
	kept      [][]*storage
	read      int // so many of kept come before the last operation that saves something
	at        int
	inner     []*Tensor // that escape, of this run
}

// inherit takes the gradients of tensors that escaped the first run.
func (r *replay) inherit(first *replay) {
	for i, x := range r.inner {
		escaped := first.inner[i].gradient
		if escaped != nil && x.gradient != nil {
			x.gradient.sum, escaped.sum = escaped.sum, nil
		}
	}
}

// keeps reports whether the results of an operation are kept.
func (r *replay) keeps(o Operation) bool {
	switch {
	case r == nil || r.every == 0 || !o.Kept:
		return false
	case o.Product:
		r.products++
		return r.products%r.every == 1%r.every
	}
	return true
}

func (r *replay) next(kept bool) []*storage {
	if !kept || r.recording || r.at == len(r.kept) {
		return nil
	}
	r.at++
	return r.kept[r.at-1]
}

func (r *replay) keep(kept bool, o Operation, results []*Tensor) {
	if r == nil || !r.recording {
		return
	}
	if len(o.Saved) > 0 {
		r.read = len(r.kept)
	}
	if !kept {
		return
	}
	if slices.ContainsFunc(o.Outputs, func(out Output) bool { return out.Saved }) {
		r.read = len(r.kept) + 1
	}
	storages := make([]*storage, len(results))
	for i, x := range results {
		storages[i] = x.storage.retain()
	}
	r.kept = append(r.kept, storages)
}

// forget releases the kept results that no later operation of the checkpoint
// saves, nor computes what it saves from.
func (r *replay) forget(t *Tape) {
	for _, storages := range r.kept[r.read:] {
		for _, s := range storages {
			t.release(s)
		}
	}
	r.kept = r.kept[:r.read]
}

// free releases the kept results. The second run has saved what it needs.
func (r *replay) free(t *Tape) {
	for _, storages := range r.kept {
		for _, s := range storages {
			t.release(s)
		}
	}
	r.kept = nil
}
