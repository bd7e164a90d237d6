package simulate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/origin"
	"plimsoll/internal/plan/roads"
)

// RankClass is the memory of each rank of a class. The ranks of a class are alike: those of a pipeline stage, or all
// ranks of a job without a pipeline.
type RankClass struct {
	First, Ranks, RanksPerNode int
	GPU                        *Memory // nil without GPUs
	Host                       Memory
	Engine                     string // as package origin names it
	Trained                    int64  // elements of a rank's trainable parameters
	// Ahead is what the engine gathers at a time, ahead of its use; 0 if it gathers nothing.
	Ahead  ledger.Bytes
	Pinned ledger.Bytes // of a rank's host memory at most in steps, of a job of Megatron-LM
	// Beyond is what a GPU reserves more in another order of lengths; nil where all sequences are as long.
	Beyond *ledger.Bytes
	// Earlier is what an earlier release of the program has of the rank on the host while the engine is awake, beyond
	// the plan.
	Earlier ledger.Bytes
	// Offloaded are the parameters that a rank updates, if the job offloads states.
	Offloaded []roads.Parameter
}

// Memory is the memory of a rank on one device. Every component has its reason.
type Memory struct {
	Phases  []ledger.Phase
	Outside []ledger.Holding // before the first tensor, in every phase
}

// Run simulates a job on GPUs with a limit. A job that needs more is an *allocator.OutOfMemory, unless the GPU grows.
func Run(j *job.Job, limit Limit) ([]RankClass, error) {
	if j.Megatron != nil {
		return runMegatron(j, everyStage(j.Megatron), limit)
	}
	if j.Pipeline == nil {
		class, err := runOrders(j, limit)
		return []RankClass{class}, err
	}
	return runStages(j, stagesOf(j), limit)
}

// RunHeaviest simulates a job as Run does. Of a pipeline it simulates the stages that may hold most.
func RunHeaviest(j *job.Job, limit Limit) ([]RankClass, error) {
	if j.Megatron != nil {
		return runMegatron(j, heaviestOfMegatron(j.Megatron), limit)
	}
	if j.Pipeline == nil {
		return Run(j, limit)
	}
	return runStages(j, heaviest(stagesOf(j)), limit)
}

// stagesOf returns the jobs of all pipeline stages.
func stagesOf(j *job.Job) (stages []*job.Job) {
	for stage := range j.Pipeline.Degree {
		stages = append(stages, j.OfStage(stage))
	}
	return stages
}

// heaviest leaves out stages that hold no more than one before.
func heaviest(stages []*job.Job) (list []*job.Job) {
	for _, j := range stages {
		if !slices.ContainsFunc(list, func(before *job.Job) bool { return holdsAsMuch(before, j) }) {
			list = append(list, j)
		}
	}
	return list
}

// holdsAsMuch reports whether a stage has at least the layers, parameters and micro batches under way of another, and
// sends and receives the same.
func holdsAsMuch(j, other *job.Job) bool {
	if len(j.Stage.Chunks) != len(other.Stage.Chunks) {
		return false
	}
	for i := range j.Stage.Chunks {
		a, b := &j.Stage.Chunks[i], &other.Stage.Chunks[i]
		if a.Receives != b.Receives || a.Sends != b.Sends || len(a.Network.Blocks()) < len(b.Network.Blocks()) {
			return false
		}
	}
	return j.Model.Elements() >= other.Model.Elements() &&
		j.Pipeline.UnderWay(j.Stage.Index) >= other.Pipeline.UnderWay(other.Stage.Index)
}

// runStages simulates a rank of each of these stages.
func runStages(j *job.Job, stages []*job.Job, limit Limit) (classes []RankClass, err error) {
	each := j.World / int(j.Pipeline.Degree)
	for _, stage := range stages {
		class, err := runClass(stage, limit, 0)
		if err != nil {
			return nil, err
		}
		class.First, class.Ranks = int(stage.Stage.Index)*each, each
		classes = append(classes, class)
	}
	return classes, nil
}

// runClass simulates a rank of a class.
func runClass(j *job.Job, limit Limit, order uint64) (class RankClass, err error) {
	cache, err := newCache(j, limit)
	if err != nil {
		return class, err
	}
	host := newTrace(&heap{Glibc: allocator.NewGlibc()})
	gpu := host
	if !j.OnCPU {
		gpu = newTrace(cache)
	}
	s := newSimulation(j, gpu, host)
	s.lengths.draws = rand.New(rand.NewPCG(order, 0))
	if s.rollout, err = newRollout(j, gpu, host); err != nil {
		return class, err
	}
	gpu.measures = s.measure()
	host.measures = gpu.measures
	s.run()
	for _, t := range []*trace{gpu, host} {
		if err := t.failure(limit); err != nil {
			return class, err
		}
	}
	class = RankClass{Ranks: j.World, RanksPerNode: j.RanksPerNode, Ahead: s.ahead(),
		Engine: s.engineClass(), Trained: s.trainedElements() + s.experts.trainedInExperts(),
		Host: Memory{host.phases(), processes(j)}}
	if s.states != nil {
		class.Offloaded = s.states.sizes
	}
	if !j.OnCPU {
		class.GPU = &Memory{gpu.phases(), outside(j)}
	}
	return class, nil
}

// engineClass returns the engine as package origin names it.
func (s *simulation) engineClass() string {
	switch e := s.engine.(type) {
	case *fsdp:
		return map[int]string{1: origin.FSDP1, 2: origin.FSDP2}[s.FSDP.Version]
	case *fp16Optimizer:
		if e.Optimizer.Variant != job.Fused {
			return origin.FP16Unfused
		}
		return origin.FP16
	case *bf16Optimizer:
		return origin.BF16
	case *zero12:
		return origin.ZeRO12
	case *zero3:
		return origin.ZeRO3
	}
	return origin.Plain
}

// ahead returns what the engine gathers at a time: the largest block with FSDP, the prefetched parameters with ZeRO-3.
func (s *simulation) ahead() ledger.Bytes {
	switch e := s.engine.(type) {
	case *fsdp:
		return e.largestBlock()
	case *zero3:
		return ledger.Bytes(e.recipe.Sizes.PrefetchBucket * s.ComputeType().Size())
	}
	return 0
}

// failure returns the error of an allocation that failed, or nil. Without a limit, only allocations fail whose size
// PyTorch refuses on every GPU.
func (t *trace) failure(limit Limit) error {
	var full *allocator.OutOfMemory
	switch {
	case t.failed == nil:
		return nil
	case errors.As(t.failed, new(*fault.Input)):
		return t.failed
	case !errors.As(t.failed, &full):
		return &fault.Internal{Err: fmt.Errorf("the plan's own trace is inconsistent: %w", t.failed)}
	case limit.Capacity > 0 && !limit.Grows:
		return t.failed
	}
	return fault.Inputf("the job holds more than %v on a GPU: %v are allocated, and %v more are wanted",
		full.Free+full.Reserved, full.Allocated, full.Requested).WithHint("give a smaller --seq-len or --micro-batch")
}
