package autograd

import (
	"slices"

	"plimsoll/internal/base/ledger"
)

// Divided is a backward pass in two halves, as schedules without bubbles run it: stage_backward_input and
// stage_backward_weight of torch/distributed/pipelining/_backward.py. The first half makes the gradient of the input
// and keeps the graph, with the gradients that reach operations on weights. The second half goes through the weights
// one group after the other, and frees what only earlier groups needed.
type Divided struct {
	tape     *Tape
	nodes    []node
	from     map[*gradient]int // the node that made a tensor, by its gradient
	reaches  []bool            // nodes on the way from the input to the loss
	groups   []*weightGroup
	last     []int // the last group that holds a node, by node
	received *storage
	input    *storage // its gradient, which the input holds
	holds    *Tensor  // the input
	attached []*storage
	previous []*storage // gradients of the group before, which the loop over groups still holds
}

// weightGroup are weights that meet the way of the input in the same operations.
type weightGroup struct {
	weights []*Parameter
	meets   []int              // nodes on the way of the input
	held    map[int][]*storage // gradients that reached them
}

// frame is a checkpoint in a divided backward pass: its operations are recorded, but hold nothing of what they save.
// Every run of the engine that needs it computes all of it again, and what that run does not read stays until the
// operation is freed (_CheckpointFrame in torch/utils/checkpoint.py).
type frame struct {
	input   *storage
	others  []*storage
	again   func() [][]packed // runs the body, and returns what its operations save
	count   int               // operations in it
	holders int               // operations that save something and are not freed
	run     int               // of the engine, the last that has run it again
	now     [][]packed        // saved by that run, by operation
	left    [][]packed        // of earlier runs
	freed   []bool            // operations, which runs save nothing for
}

// DividesBackwardPass makes the tape record checkpoints for BackwardInput.
func (t *Tape) DividesBackwardPass() { t.divides = true }

// BackwardInput runs the half of the backward pass that makes the gradient of the input. The output keeps its gradient
// until the other half has run if it has been received.
func (t *Tape) BackwardInput(output, input *Tensor, received bool) *Divided {
	d := &Divided{tape: t, nodes: t.nodes, holds: input, attached: t.attached, from: map[*gradient]int{}}
	t.nodes, t.attached = nil, nil
	d.chart(input)
	first := t.allocateGradient(output.Bytes())
	output.gradient.sum = first.retain()
	t.recording = false
	t.engineRun++
	for i := len(d.nodes) - 1; i >= 0; i-- {
		d.stepInput(i)
	}
	t.recording = true
	d.input, input.gradient.sum = input.gradient.sum, nil
	if received {
		d.received = first
	} else {
		t.release(first)
	}
	d.freeAfter(-1)
	return d
}

// chart finds the operations on the way of the input, the groups of weights, and how long each operation is held.
func (d *Divided) chart(input *Tensor) {
	d.reaches, d.last = make([]bool, len(d.nodes)), make([]int, len(d.nodes))
	for i := range d.nodes {
		n := &d.nodes[i]
		for _, g := range n.outputs {
			d.from[g] = i
			d.reaches[i] = d.reaches[i] || g == input.gradient
		}
		d.reaches[i] = d.reaches[i] || slices.ContainsFunc(n.inputs, d.onTheWay)
		d.last[i] = -1
	}
	d.findGroups()
	for g := len(d.groups) - 1; g >= 0; g-- {
		for _, at := range d.groups[g].meets {
			d.holdBelow(at, g)
		}
	}
}

func (d *Divided) onTheWay(e edge) bool {
	at, ok := d.from[e.to]
	return ok && e.to.leaf == nil && d.reaches[at]
}

// holdBelow notes that a group holds an operation, and with it all operations that its inputs come from.
func (d *Divided) holdBelow(at, group int) {
	if d.last[at] >= 0 {
		return
	}
	d.last[at] = group
	for _, e := range d.nodes[at].inputs {
		if below, ok := d.from[e.to]; ok && e.to.leaf == nil {
			d.holdBelow(below, group)
		}
	}
}

// findGroups makes the groups, in the order of their first weights.
func (d *Divided) findGroups() {
	meets := map[*Parameter][]int{}
	var weights []*Parameter
	for i := range d.nodes {
		if d.reaches[i] {
			for _, w := range d.weightsBeside(i) {
				if meets[w] == nil {
					weights = append(weights, w)
				}
				meets[w] = append(meets[w], i)
			}
		}
	}
	slices.SortFunc(weights, func(a, b *Parameter) int { return a.Index - b.Index })
	of := map[int]*weightGroup{}
	for _, w := range weights {
		var group *weightGroup
		for _, at := range meets[w] {
			if group == nil {
				group = of[at]
			}
		}
		if group == nil {
			group = &weightGroup{held: map[int][]*storage{}}
			d.groups = append(d.groups, group)
		}
		group.weights = append(group.weights, w)
		for _, at := range meets[w] {
			if of[at] == nil {
				of[at] = group
				group.meets = append(group.meets, at)
			}
		}
	}
	for _, g := range d.groups {
		slices.Sort(g.meets)
	}
}

// weightsBeside lists the weights that an operation on the way reaches beside it: directly, or by operations on weights
// alone, such as a cast.
func (d *Divided) weightsBeside(at int) []*Parameter {
	var list []*Parameter
	for _, e := range d.nodes[at].inputs {
		below, made := d.from[e.to]
		switch {
		case e.to.leaf != nil:
			if !slices.Contains(list, e.to.leaf) {
				list = append(list, e.to.leaf)
			}
		case made && !d.reaches[below]:
			list = append(list, d.weightsBeside(below)...)
		}
	}
	return list
}

// stepInput runs an operation on the way of the input, and leaves out its weights.
func (d *Divided) stepInput(at int) {
	n := &d.nodes[at]
	t := d.tape
	if n.marker != nil {
		n.marker()
		return
	}
	if !d.reaches[at] {
		return
	}
	incoming := taken(n)
	if len(incoming) == 0 || len(n.inputs) == 0 {
		if len(n.inputs) == 0 && len(incoming) > 0 { // the input's own gradient
			n.outputs[0].sum = incoming[0]
		}
		return
	}
	for _, g := range d.groups {
		if slices.Contains(g.meets, at) {
			for _, s := range incoming {
				g.held[at] = append(g.held[at], s.retain())
			}
		}
	}
	d.runs(n, incoming, d.onTheWay)
	for _, s := range incoming {
		t.release(s)
	}
}

// taken returns the gradients that have reached an operation.
func taken(n *node) []*storage {
	var list []*storage
	for _, g := range n.outputs {
		if g.sum != nil {
			list = append(list, g.sum)
			g.sum = nil
		}
	}
	return list
}

// runs makes the gradients of some inputs of an operation, and delivers them.
func (d *Divided) runs(n *node, incoming []*storage, wanted func(edge) bool) {
	t := d.tape
	read := n.frame.read(t, n)
	scratch := t.scratch(n.scratch)
	made := make([]*storage, len(n.inputs))
	for i, e := range n.inputs {
		switch {
		case !wanted(e):
		case n.replace && i < len(n.saved) && n.saved[i].storage != nil:
			made[i] = n.saved[i].storage.retain()
		case e.shared:
			made[i] = incoming[0].retain()
		default:
			made[i] = t.allocateGradient(e.to.bytes)
			made[i].viewed = n.product
			t.work(e.workspace)
		}
	}
	t.release(scratch)
	t.releaseAll(read)
	for i, e := range n.inputs {
		if made[i] == nil {
			continue
		}
		sum := &e.to.sum
		if e.to.leaf != nil {
			sum = &e.to.leaf.sum
		}
		*sum = t.added(*sum, made[i], e.to.bytes)
	}
}

// Weights runs the other half.
func (d *Divided) Weights() {
	t := d.tape
	t.recording = false
	for i, g := range d.groups {
		t.engineRun++
		d.runGroup(g)
		d.freeAfter(i)
	}
	for _, s := range d.previous {
		t.release(s)
	}
	t.release(d.received)
	t.release(d.input)
	for _, s := range d.attached {
		t.release(s)
	}
	t.Drop(d.holds)
	t.recording = true
}

// runGroup makes the gradients of the weights of a group.
func (d *Divided) runGroup(g *weightGroup) {
	t := d.tape
	below := map[int]bool{}
	var reach func(at int) bool
	reach = func(at int) bool {
		found := false
		for _, e := range d.nodes[at].inputs {
			if e.to.leaf != nil {
				found = found || slices.Contains(g.weights, e.to.leaf)
			} else if next, ok := d.from[e.to]; ok && !d.reaches[next] && reach(next) {
				found = true
			}
		}
		if found && !d.reaches[at] {
			below[at] = true
		}
		return found
	}
	for _, at := range g.meets {
		reach(at)
	}
	wanted := func(e edge) bool {
		if e.to.leaf != nil {
			return slices.Contains(g.weights, e.to.leaf)
		}
		return below[d.from[e.to]]
	}
	for at := g.meets[len(g.meets)-1]; at >= 0; at-- {
		n := &d.nodes[at]
		incoming := g.held[at]
		if below[at] {
			incoming = taken(n)
		}
		if len(incoming) == 0 {
			continue
		}
		d.runs(n, incoming, wanted)
		d.free(n) // retain_graph=False
		if below[at] {
			for _, s := range incoming {
				t.release(s)
			}
		}
	}
	made := d.keepGradients(g)
	for _, s := range d.previous {
		t.release(s)
	}
	d.previous = made
	for _, list := range g.held {
		for _, s := range list {
			t.release(s)
		}
	}
}

// keepGradients adds the gradients of a group to those of earlier micro batches, and returns those that were added.
func (d *Divided) keepGradients(g *weightGroup) (added []*storage) {
	t := d.tape
	for _, w := range g.weights {
		made := w.sum
		if made == nil {
			continue
		}
		w.sum, w.tape = nil, t
		if w.gradient != nil {
			added = append(added, made)
		} else {
			t.memory.Relabel(made.id, ledger.Gradients, t.whyGradients)
			w.gradient = made
		}
		if w.OnGradient != nil {
			w.OnGradient(w)
		}
	}
	return added
}

// freeAfter frees the operations that no later group holds.
func (d *Divided) freeAfter(group int) {
	for i := range d.nodes {
		if d.last[i] == group {
			d.free(&d.nodes[i])
		}
	}
}

// free releases what an operation has saved.
func (d *Divided) free(n *node) {
	d.tape.releaseAll(n.saved)
	n.saved = nil
	n.frame.free(d.tape, n)
	n.frame = nil
}

func (t *Tape) releaseAll(list []packed) {
	for _, k := range list {
		t.release(k.storage)
	}
}

// read returns what an operation in a checkpoint has saved, and computes it again if this run of the engine has not.
func (f *frame) read(t *Tape, n *node) []packed {
	if f == nil || !n.saves {
		return nil
	}
	if f.run != t.engineRun {
		f.run = t.engineRun
		for place, saved := range f.now {
			f.left[place] = append(f.left[place], saved...)
		}
		f.now = f.again()
		for place, saved := range f.now {
			if f.freed[place] {
				t.releaseAll(saved)
				f.now[place] = nil
			}
		}
	}
	saved := f.now[n.place]
	f.now[n.place] = nil
	return saved
}

// free releases what runs have left for an operation, and the input with the last operation.
func (f *frame) free(t *Tape, n *node) {
	if f == nil || !n.saves {
		return
	}
	left := f.left[n.place]
	if f.now != nil {
		left, f.now[n.place] = append(left, f.now[n.place]...), nil
	}
	t.releaseAll(left)
	f.left[n.place], f.freed[n.place] = nil, true
	if f.holders--; f.holders == 0 {
		t.release(f.input)
		for _, s := range f.others {
			t.release(s)
		}
	}
}

// enter adds an operation to a checkpoint.
func (f *frame) enter(n *node, o Operation) {
	n.frame, n.place = f, f.count
	n.saves = len(o.Saved) > 0 || slices.ContainsFunc(o.Outputs, func(out Output) bool { return out.Saved })
	f.count++
	if n.saves {
		f.holders++
	}
}

// framed runs the body of a checkpoint for a divided backward pass.
func (t *Tape) framed(input *Tensor, body func(*Tensor) *Tensor, others []*Tensor) *Tensor {
	if t.frame != nil || t.again {
		panic("autograd: a checkpoint inside a checkpoint of a divided backward pass")
	}
	f := &frame{input: input.storage.retain()}
	for _, x := range others {
		f.others = append(f.others, x.storage.retain())
	}
	f.again = func() [][]packed { return t.runAgain(input, body) }
	t.frame = f
	result := t.Scope(func() *Tensor { return body(input) })
	t.frame = nil
	f.left, f.freed = make([][]packed, f.count), make([]bool, f.count)
	return result
}

// runAgain runs the body of a checkpoint again and returns what its operations save.
func (t *Tape) runAgain(input *Tensor, body func(*Tensor) *Tensor) [][]packed {
	again := &Tensor{Elements: input.Elements, DType: input.DType, storage: input.storage.retain(), held: true,
		gradient: &gradient{bytes: input.Bytes()}}
	uses := t.uses
	t.uses, t.recording, t.replay, t.again = map[*Parameter]int{}, true, &replay{}, true
	leave := t.In(ledger.RecomputedActivations, func() string {
		return "activations of one block, computed again from its input for every group of weights: each run leaves " +
			"what it does not read (torch.utils.checkpoint in a divided backward pass)"
	})
	t.Drop(t.Scope(func() *Tensor { return body(again) }))
	t.locals = t.locals[:len(t.locals)-1]
	leave()
	t.Drop(again)
	var saved [][]packed
	for _, n := range t.nodes {
		if n.marker == nil {
			saved = append(saved, n.saved)
		}
	}
	t.nodes, t.uses, t.recording, t.replay, t.again = nil, uses, false, nil, false
	return saved
}
