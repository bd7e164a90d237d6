package parallel

import "slices"

// Half is the part of a backward pass that a Pass runs.
type Half int

// The halves. Schedules without bubbles run the gradient of a chunk's input first, as other stages wait for it, and
// the gradients of its weights later.
const (
	Whole Half = iota
	InputHalf
	WeightHalf
)

// Begun returns 1 for a pass that begins to hold activations, -1 for one that gives them up, and 0 for one that keeps
// them for the weights.
func (p Pass) Begun() int {
	switch {
	case !p.Backward:
		return 1
	case p.Half == InputHalf:
		return 0
	}
	return -1
}

// ZeroBubble returns the passes of a stage in the interleaved schedule that fills its bubbles with the weight halves
// (ScheduleInterleavedZeroBubble of torch/distributed/pipelining/schedules.py).
func ZeroBubble(d Degrees, stage int64, micros, group int) []Pass {
	chunks := int(d.Virtual)
	total := micros * chunks
	warm := min((chunks-1)*group+int(d.Pipeline-stage-1), total)
	forward, backward := order(micros, chunks, group, false), order(micros, chunks, group, true)
	list := slices.Clone(forward[:warm])
	weights := 0
	for i := range total {
		if warm+i < total {
			list = append(list, forward[warm+i])
		}
		list = append(list, half(backward[i], InputHalf))
		if i >= int(stage) {
			list = append(list, half(backward[weights], WeightHalf))
			weights++
		}
	}
	for _, p := range backward[weights:] {
		list = append(list, half(p, WeightHalf))
	}
	return list
}

func half(p Pass, h Half) Pass {
	p.Half = h
	return p
}

// vee collects the passes of a stage whose two chunks are in the descending and in the ascending arm of a V. Each kind
// of pass takes the micro batches in their order.
type vee struct {
	list     []Pass
	next     [2][3]int // micro batches by chunk: forward, backward for the input, and for the weights
	waiting  []Pass    // weight halves that are not run yet
	micros   int       // passes of later micro batches are left out
	deferred int       // weight halves of waiting that have been run
}

func (v *vee) add(p Pass) {
	if p.Micro < v.micros {
		v.list = append(v.list, p)
	}
}

func (v *vee) count(chunk, kind int) int {
	v.next[chunk][kind]++
	return v.next[chunk][kind] - 1
}

func (v *vee) forward(chunk int) { v.add(Pass{Chunk: chunk, Micro: v.count(chunk, 0)}) }

func (v *vee) input(chunk int) {
	p := Pass{Backward: true, Chunk: chunk, Micro: v.count(chunk, 1), Half: InputHalf}
	v.add(p)
	v.waiting = append(v.waiting, half(p, WeightHalf))
}

func (v *vee) weight(chunk int) {
	v.add(Pass{Backward: true, Chunk: chunk, Micro: v.count(chunk, 2), Half: WeightHalf})
}

func (v *vee) whole(chunk int) { v.add(Pass{Backward: true, Chunk: chunk, Micro: v.count(chunk, 1)}) }

// oldest runs the weight half that has waited longest, if one waits.
func (v *vee) oldest() {
	if v.deferred < len(v.waiting) {
		v.add(v.waiting[v.deferred])
		v.deferred++
	}
}

// ZBV returns the passes of a stage in the V-shaped schedule without bubbles (ScheduleZBVZeroBubble).
func ZBV(stages, stage, micros int) []Pass {
	v := &vee{micros: micros}
	enough := max(2*stages-1, micros)
	both := func(chunk int) {
		v.input(chunk)
		v.weight(chunk)
	}
	for range 2*(stages-stage) - 1 {
		v.forward(0)
	}
	for range stage {
		v.forward(1)
		v.forward(0)
	}
	for range stages - stage {
		v.forward(1)
		both(1)
	}
	for v.next[1][0] < v.next[0][0] || v.next[0][0] < enough {
		if v.next[0][0] < enough {
			v.forward(0)
		}
		both(0)
		v.forward(1)
		both(1)
	}
	for range stage {
		v.input(0)
		v.input(1)
	}
	for range stages - stage {
		v.input(0)
		v.weight(0)
	}
	for v.next[1][2] < v.next[1][1] {
		v.weight(1)
	}
	for v.next[0][2] < v.next[0][1] {
		v.weight(0)
	}
	return v.list
}

// DualPipeV returns the passes of a stage in DeepSeek's schedule, which divides only some backward passes
// (ScheduleDualPipeV). Passes that it overlaps come in the order in which PyTorch runs them.
func DualPipeV(stages, stage, micros int) []Pass {
	v := &vee{micros: micros}
	after := stages - stage - 1
	for range 2 * after {
		v.forward(0)
	}
	for range stage + 1 {
		v.forward(0)
		v.forward(1)
	}
	for range after {
		v.input(1)
		v.oldest()
		v.forward(1)
	}
	for range micros - 2*stages + stage + 1 {
		v.forward(0)
		v.whole(1)
		v.forward(1)
		v.whole(0)
	}
	for range after {
		v.whole(1)
		v.forward(1)
		v.whole(0)
	}
	v.drain(stage, after)
	return v.list
}

// drain ends DualPipeV: the second half of the last backward passes leaves its weights for the end.
func (v *vee) drain(stage, after int) {
	divides := false
	back := func(chunk int) {
		if divides {
			v.input(chunk)
		} else {
			v.whole(chunk)
		}
	}
	for i := range stage + 1 {
		divides = divides || i == (stage+1)/2 && stage%2 == 1
		back(1)
		divides = divides || i == (stage+1)/2 && stage%2 == 0
		back(0)
	}
	for range after {
		v.oldest()
		back(0)
	}
	for range stage + 1 {
		v.oldest()
	}
}

// NewVee deals counts of layers out to stages in a V: the first half of the counts goes down the stages, the second
// half comes back, so the first stage has the embedding and the head.
func NewVee(stages int64, counts []int64) Table {
	t := make(Table, stages)
	var first int64
	for i, n := range counts {
		stage := int64(i)
		if stage >= stages {
			stage = 2*stages - 1 - stage
		}
		t[stage] = append(t[stage], Chunk{First: first, Layers: n, Embedding: i == 0, Loss: i == len(counts)-1})
		first += n
	}
	return t
}
