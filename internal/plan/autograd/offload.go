package autograd

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
)

// Offload moves what operations save for the backward pass to the host, and back when the backward pass needs it: the
// hooks of OffloadActivations in TRL (trl/models/activation_offloading.py) and torchtune.
type Offload struct {
	// Streams copies on a stream of its own. The last Stash saved tensors then stay on the GPU, and what comes back
	// stays until a later operation of the backward pass has brought its own. Without, copies wait for each other.
	Streams bool
	Stash   int
	// Tracks keeps a tensor on the GPU whose storage is saved again while it is in the stash.
	Tracks     bool
	InputsOnly bool // only the inputs of checkpoints
	BeforeLoss bool // what the loss saves stays on the GPU
	// Weights moves a copy of every weight that a matrix product saves: the hooks do not know its transpose for a
	// parameter unless they have been told all parameters.
	Weights bool
}

// OffloadMemory is where offloaded tensors are.
type OffloadMemory interface {
	// Keep allocates memory on the host, and returns how to free it.
	Keep(bytes int64) (free func())
	// Restore allocates memory on the GPU, on a stream of its own or not.
	Restore(bytes int64, streams bool) int
}

// leastOffloaded is the size below which tensors stay: min_offload_size.
const leastOffloaded = 1024

// offloading is the state of the hooks in one forward and backward pass.
type offloading struct {
	Offload
	memory   OffloadMemory
	paused   int
	ids      int // of saved tensors, parameters among them
	stash    []stashed
	tracked  map[tracked]int
	restored []*storage // until a later operation has brought its own
}

type stashed struct {
	id      int
	storage *storage
	key     tracked
}

type tracked struct {
	storage *storage
	dtype   dtype.Type
}

// packed is a tensor that an operation has saved: on the GPU, or away on the host.
type packed struct {
	storage *storage
	away    *away
}

type away struct {
	id    int
	bytes int64
	free  func()
}

// OffloadTo starts the hooks for the operations that follow.
func (t *Tape) OffloadTo(memory OffloadMemory, o Offload) {
	t.offload = &offloading{Offload: o, memory: memory, tracked: map[tracked]int{}}
}

// KeepHere keeps what operations save on the GPU until leave is called.
func (t *Tape) KeepHere() (leave func()) {
	o := t.offload
	if o == nil {
		return func() {}
	}
	o.paused++
	return func() { o.paused-- }
}

// KeepLossHere is KeepHere for the loss, if its tensors stay.
func (t *Tape) KeepLossHere() (leave func()) {
	if t.offload == nil || !t.offload.BeforeLoss {
		return func() {}
	}
	return t.KeepHere()
}

// saver is what saves a tensor.
type saver int

const (
	anOperation saver = iota
	aProduct
	aCheckpoint
)

// save holds a tensor for the backward pass. A parameter has no storage of the tape.
func (t *Tape) save(x *Tensor, by saver) packed {
	o := t.offload
	if o == nil || o.paused > 0 || o.InputsOnly && by != aCheckpoint {
		return packed{storage: x.storage.retain()}
	}
	o.ids++
	if x.storage == nil && (by != aProduct || !o.Weights) || x.Bytes() < leastOffloaded {
		return packed{storage: x.storage.retain()}
	}
	source := x.storage.retain()
	if source == nil {
		source = t.allocate(x.Bytes(), ledger.OffloadedActivations, WhyOffloaded)
	}
	defer t.release(source)
	key := tracked{source, x.DType}
	if _, is := o.tracked[key]; is {
		o.tracked[key] = o.ids
		return packed{storage: source.retain()}
	}
	a := &away{id: o.ids, bytes: x.Bytes()}
	if o.Streams {
		for len(o.stash) > 0 && o.stash[0].id <= o.ids-o.Stash {
			t.unstash()
		}
	}
	a.free = o.memory.Keep(a.bytes)
	if o.Streams {
		o.stash = append(o.stash, stashed{a.id, source.retain(), key})
		if o.Tracks {
			o.tracked[key] = a.id
		}
	}
	return packed{away: a}
}

// unstash releases the oldest tensor of the stash.
func (t *Tape) unstash() {
	o := t.offload
	oldest := o.stash[0]
	o.stash = o.stash[1:]
	if o.tracked[oldest.key] == oldest.id {
		delete(o.tracked, oldest.key)
	}
	t.release(oldest.storage)
}

// restore brings the saved tensors of a node back if it runs, and returns what to call once it has.
func (t *Tape) restore(n *node, runs bool) (ran func()) {
	o := t.offload
	if !runs {
		for i, k := range n.saved {
			if k.away != nil {
				k.away.free()
				n.saved[i] = packed{}
			}
		}
		return func() {}
	}
	if o == nil || !slices.ContainsFunc(n.saved, func(k packed) bool { return k.away != nil }) {
		return func() {}
	}
	before := len(o.restored)
	for i := range n.saved {
		if a := n.saved[i].away; a != nil {
			n.saved[i] = packed{storage: t.bring(a, n.custom != nil)}
		}
	}
	return func() {
		for len(o.stash) > 0 {
			t.unstash()
		}
		for _, s := range o.restored[:before] {
			t.release(s)
		}
		o.restored = slices.Clone(o.restored[before:])
	}
}

// bring returns a tensor from the stash or the host. What a checkpoint computes from its input holds the input, so the
// hooks do not.
func (t *Tape) bring(a *away, checkpoint bool) *storage {
	o := t.offload
	defer a.free()
	if at := slices.IndexFunc(o.stash, func(s stashed) bool { return s.id == a.id }); at >= 0 {
		return o.stash[at].storage.retain()
	}
	s := &storage{id: o.memory.Restore(a.bytes, o.Streams), references: 1}
	if o.Streams && !checkpoint {
		o.restored = append(o.restored, s.retain())
	}
	return s
}

// endOffload ends the hooks with the backward pass.
func (t *Tape) endOffload() {
	o := t.offload
	if o == nil {
		return
	}
	for len(o.stash) > 0 {
		t.unstash()
	}
	for _, s := range o.restored {
		t.release(s)
	}
	t.offload = nil
}

// WhyOffloaded is the reason of offloaded tensors.
func WhyOffloaded() string {
	return "what operations save for the backward pass, in pinned memory from the forward pass until the backward " +
		"pass needs it (OffloadActivations)"
}

// WhyRestored is the reason of tensors that have come back.
func WhyRestored() string {
	return "what operations have saved, on its way back from the host to the backward pass (OffloadActivations)"
}
