// Package parallel describes how the ranks of a job share a model and its data: the degrees, where a rank stands, which
// layers a pipeline stage has, and in which order a stage runs its micro batches.
package parallel

import (
	"slices"

	"plimsoll/internal/base/fault"
)

// Degrees are the numbers of ranks that share one thing. A degree is 1 if ranks do not share it.
type Degrees struct {
	Tensor   int64 // the width of a layer
	Pipeline int64 // the layers
	Virtual  int64 // chunks of layers of each pipeline stage
	Context  int64 // a sequence
	Data     int64 // the batch: ranks with the same parameters, without those of Context

	Expert       int64 // the experts of a layer
	ExpertTensor int64 // the width of an expert
	ExpertData   int64 // ranks with the same experts
}

// World returns the number of ranks.
func (d Degrees) World() int64 { return d.Tensor * d.Pipeline * d.Context * d.Data }

// NewDegrees completes the degrees of a world: those of data parallelism follow from the others.
func NewDegrees(d Degrees, world int64) (Degrees, error) {
	each := d.Tensor * d.Pipeline * d.Context
	experts := d.ExpertTensor * d.Pipeline * d.Expert
	switch {
	case world%each != 0:
		return d, fault.Inputf("%d ranks are no multiple of %d: tensor %d x pipeline %d x context parallel %d", world,
			each, d.Tensor, d.Pipeline, d.Context).WithHint("give another number of GPUs or other degrees")
	case world%experts != 0:
		return d, fault.Inputf("%d ranks are no multiple of %d: expert tensor %d x pipeline %d x expert parallel %d",
			world, experts, d.ExpertTensor, d.Pipeline, d.Expert).
			WithHint("give another number of GPUs or other degrees")
	}
	d.Data, d.ExpertData = world/each, world/experts
	return d, nil
}

// Chunk is a range of layers that a stage runs at a time. A stage has Virtual of them.
type Chunk struct {
	First, Layers int64
	Embedding     bool // the chunk begins with the embedding
	Loss          bool // the chunk ends with the head and the loss
}

// Table says which chunks each pipeline stage has: the layers of chunk v of stage p.
type Table [][]Chunk

// NewTable deals counts of layers out to stages: the first count is that of the first chunk of the first stage, the
// second that of the first chunk of the second stage, and so on.
func NewTable(stages int64, counts []int64) Table {
	t := make(Table, stages)
	var first int64
	for i, n := range counts {
		stage := int64(i) % stages
		t[stage] = append(t[stage], Chunk{First: first, Layers: n, Embedding: i == 0, Loss: i == len(counts)-1})
		first += n
	}
	return t
}

// Pass is a forward or a backward pass of one micro batch through one chunk of a stage.
type Pass struct {
	Backward bool
	Chunk    int
	Micro    int
	Half     Half
}

// Schedule returns the passes of a stage in their order. With one chunk a stage it is 1F1B, else the interleaved
// schedule: micro batches go through the chunks in groups.
func Schedule(d Degrees, stage int64, micros, group int) []Pass {
	chunks, stages := int(d.Virtual), int(d.Pipeline)
	total := micros * chunks
	warm := stages - int(stage) - 1
	if chunks > 1 {
		warm = 2*warm + (chunks-1)*group
	}
	warm = min(warm, total)
	forward, backward := order(micros, chunks, group, false), order(micros, chunks, group, true)
	list := slices.Clone(forward[:warm])
	for i := range total - warm {
		list = append(list, forward[warm+i], backward[i])
	}
	return append(list, backward[total-warm:]...)
}

// order returns the passes of all micro batches through all chunks in one direction.
func order(micros, chunks, group int, backward bool) []Pass {
	var list []Pass
	for first := 0; first < micros; first += group {
		for c := range chunks {
			chunk := c
			if backward {
				chunk = chunks - 1 - c
			}
			for m := first; m < min(first+group, micros); m++ {
				list = append(list, Pass{Backward: backward, Chunk: chunk, Micro: m})
			}
		}
	}
	return list
}

// GPipe returns the passes of a stage that runs all forward passes before the first backward pass.
func GPipe(chunks, micros int) []Pass {
	return append(order(micros, chunks, micros, false), order(micros, chunks, micros, true)...)
}

// LoopedBFS returns the passes of a stage that runs all forward passes before the first backward pass. The last micro
// batch comes back first (ScheduleLoopedBFS of torch/distributed/pipelining/schedules.py).
func LoopedBFS(chunks, micros int) []Pass {
	list := order(micros, chunks, micros, false)
	for chunk := chunks - 1; chunk >= 0; chunk-- {
		for micro := micros - 1; micro >= 0; micro-- {
			list = append(list, Pass{Backward: true, Chunk: chunk, Micro: micro})
		}
	}
	return list
}
