// Package lever is the one list of changes that mend a job: one that lacks memory, or leaves it unused. A change is
// made in the user's own files, or in the flags of the request, and a plan of the result weighs it.
package lever

import (
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// Need is what a job lacks.
type Need string

// The needs.
const (
	GPUMemory  Need = "memory of a GPU"
	HostMemory Need = "memory of a host"
	Speed      Need = "speed, with memory that is free"
)

// Device returns the kind of device whose memory counts.
func (n Need) Device() ledger.Kind {
	if n == HostMemory {
		return ledger.Host
	}
	return ledger.GPU
}

// Cost is what a change costs beside the edit.
type Cost int

// The costs, in the order in which a ladder takes them.
const (
	Nothing  Cost = iota // the same training in the same time
	Time                 // the same training, slower
	Training             // another training
	Hardware             // more machines
)

// MarshalText writes the cost as a word.
func (c Cost) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a word of MarshalText.
func (c *Cost) UnmarshalText(text []byte) error {
	at := slices.Index(costNames, string(text))
	if at < 0 {
		return fault.Inputf("%q is no cost of a change: expected %s", text, fault.OneOf(costNames...))
	}
	*c = Cost(at)
	return nil
}

var costNames = []string{"nothing", "time", "training", "hardware"}

func (c Cost) String() string { return costNames[c] }

// Lever is a change of a job, with one way for each of its values.
type Lever struct {
	For  Need
	Cost Cost
	Why  string
	Ways func(*job.Job) [][]amend.Setting // none for a job that does not allow the change
}

// Reasons that several levers have.
const (
	recomputes = "the backward pass recomputes activations instead of keeping them"
	shrinks    = "activations shrink with the micro batch, and accumulation keeps the batch of all ranks"
	shards     = "ranks then hold a shard each of what all of them hold in full"
	offloads   = "states and master weights then lie in host memory"
	shortens   = "sequences have fewer tokens" // the last resort: it trains on less
	halves     = "the passes compute in 16 bits instead of fp32; weights are cast, too, where the program does that"
	buckets    = "the bucket is smaller, so that more and smaller messages go"
)

// levers are all changes that are weighed, for each need in the order in which a ladder takes them. Those that cost
// another training are a ladder's last rungs, and no advice by themselves.
var levers = []Lever{
	{GPUMemory, Nothing, "the loss does not keep the logits of all tokens", fusedLossOfLiger},
	{GPUMemory, Nothing, "the fused step keeps no temporaries of the size of the parameters", fusedStep},
	{GPUMemory, Nothing, "the loss keeps one copy of the logits", fusedLoss},
	{GPUMemory, Nothing, "an evaluation has a batch size of its own", smallerEvaluation},
	{GPUMemory, Nothing, shrinks, smallerBatches},
	{GPUMemory, Nothing, "tensor parallel ranks then share activations between their layers, too", sequenceParallel},
	{GPUMemory, Nothing, shards, distributedOptimizer},
	{GPUMemory, Nothing, "a stage has fewer micro batches under way", smallerSchedule},
	{GPUMemory, Nothing, buckets, smallerReduceBucket},
	{GPUMemory, Nothing, buckets, smallerPrefetchBucket},
	{GPUMemory, Nothing, "fewer gathered parameters stay for later use", fewerLiveParameters},
	{GPUMemory, Nothing, "the allocator grows segments in place, and memory does not break into pieces", expandable},

	{GPUMemory, Nothing, "the logits of some tokens are made at a time", chunkedLogProbs},
	{GPUMemory, Training, "samples of several turns end at so many tokens", boundedSamples},
	{GPUMemory, Time, "fewer answers are judged at a time", fewerJudged},
	{GPUMemory, Nothing, "the engine's weights and KV cache leave the GPU while the trainer works", sleeping},
	{GPUMemory, Time, "the KV cache has room for fewer tokens at once", smallerFraction},
	{GPUMemory, Time, "the frozen model waits on the host between its passes", referenceOnHost},
	{GPUMemory, Time, "the trainer's memory waits on the host while the engine generates", trainerOnHost},

	{GPUMemory, Time, shards, fsdpForDDP},
	{GPUMemory, Time, shards, higherStages},
	{GPUMemory, Time, "parameters are gathered once more in the backward pass, and not kept for it", resharding},
	{GPUMemory, Time, recomputes, recomputing},
	{GPUMemory, Time, "the backward pass recomputes attention", recomputingAttention},
	{GPUMemory, Time, "states and master weights then lie in host memory between two steps", statesBetweenSteps},
	{GPUMemory, Time, offloads, optimizerOnHost},
	{GPUMemory, Time, offloads, megatronOptimizerOnHost},
	{GPUMemory, Time, "shards, gradients and states of FSDP then lie in host memory", fsdpOnHost},
	{GPUMemory, Time, "parameters then lie in host memory while they are not used", parametersOnHost},
	{GPUMemory, Time, "twice as many ranks share each layer", moreTensorParallel},
	{GPUMemory, Time, "twice as many ranks share each sequence", moreContextParallel},
	{GPUMemory, Time, "twice as many ranks share the layers", morePipelineStages},

	{GPUMemory, Hardware, "the engine has GPUs of its own", engineElsewhere},

	{GPUMemory, Training, halves, halfPrecision},
	{GPUMemory, Training, halves + "; parameters, gradients and states then lie in host memory", allOnHostInHalf},
	{GPUMemory, Training, "moments take a byte each, and are rounded", eightBitOptimizer},
	{GPUMemory, Training, "only an adapter has gradients and states", adapter},
	{GPUMemory, Training, "only an adapter has gradients and states, and the weights take 4 bits", quantizedAdapter},
	{GPUMemory, Training, shortens, shorterSequences},

	{HostMemory, Nothing, "the engine's weights are dropped while it sleeps; the weight sync brings them", sleeping},
	{HostMemory, Nothing, "the trainer then stays on the GPUs while the engine generates", withoutBackups},
	{HostMemory, Nothing, "PyTorch rounds pinned blocks up to powers of two", pageable},
	{HostMemory, Nothing, "parameters then stay on the GPUs", parametersOnGPU},
	{HostMemory, Nothing, "optimizer states then stay on the GPUs", optimizerOnGPU},
	{HostMemory, Nothing, shards, shardedOnHost},
	{HostMemory, Nothing, "states take fewer bytes on the host", smallerFormat},
	{HostMemory, Time, "states are in files on a disk, and a window of memory holds those in use", statesOnDisk},
	{HostMemory, Hardware, "twice the nodes hold half each of what is sharded, and make the same batch", moreNodes},
	{HostMemory, Nothing, "states then stay on the GPUs", megatronStatesOnGPU},
	{HostMemory, Nothing, "each rank then saves its shard, and none gathers the model", shardedCheckpoint},
	{HostMemory, Nothing, "checkpoints then lack optimizer states, so that no job goes on from them", modelCheckpoint},

	{Speed, Nothing, "larger products take less time for each token", largerBatches},
	{Speed, Nothing, "nothing is computed twice", keepingActivations},
	{Speed, Nothing, "the GPUs have room for the states", onlyOptimizerOnGPU},
	{Speed, Nothing, "the GPUs have room for the parameters", parametersOnGPU},
	{Speed, Nothing, "less is gathered", lowerStages},
}

// onLadders are changes that are no advice by themselves: a program has to be changed for them.
var onLadders = []Lever{
	{GPUMemory, Time, "states rest on the host, and come to the GPU for the step", statesOnHost},
	{GPUMemory, Time, "what the backward pass needs waits on the host", activationsOnHost},
	{GPUMemory, Time, "parameters, gradients and states then lie in host memory", allOnHost},
	{GPUMemory, Time, "states are on the host, and the CPU updates them there", updateOnHost},
}

// pairs are changes of two levers that are advised as one.
var pairs = []Lever{
	{GPUMemory, Time, shrinks + "; " + recomputes, both(smallerBatches, recomputing)},
	{GPUMemory, Time, shards + "; " + offloads, both(higherStages, optimizerOnHost)},
}

// Settings that no file of a training says.
const (
	sharded      recipe.Setting = "FSDP" // in place of DistributedDataParallel
	nodes        recipe.Setting = "nodes"
	gpus         recipe.Setting = "GPUs of a node"
	allocConf    recipe.Setting = "settings of the allocator"
	hostStates   recipe.Setting = "states on the host"
	hostUpdate   recipe.Setting = "optimizer on the host"
	stateDisk    recipe.Setting = "optimizer states on a disk"
	activations  recipe.Setting = "activations on the host"
	adapterRank  recipe.Setting = "rank of an adapter"
	adapted      recipe.Setting = "modules of an adapter"
	quantization recipe.Setting = "quantization"
	sequence     recipe.Setting = "tokens of a sequence"
)

func to(name recipe.Setting, value any) amend.Setting { return amend.Setting{Name: name, To: value} }

// when returns one way if a condition holds, and none otherwise.
func when(holds bool, settings ...amend.Setting) [][]amend.Setting {
	if !holds {
		return nil
	}
	return [][]amend.Setting{settings}
}

// both returns every way of one change together with every way of another.
func both(one, other func(*job.Job) [][]amend.Setting) func(*job.Job) [][]amend.Setting {
	return func(j *job.Job) (ways [][]amend.Setting) {
		for _, first := range one(j) {
			for _, second := range other(j) {
				ways = append(ways, slices.Concat(first, second))
			}
		}
		return ways
	}
}

// batch returns the settings of another micro batch with the same batch of all ranks. A pipeline makes its micro
// batches of the batch that a file says, or of those between two optimizer steps.
func batch(j *job.Job, micro int) []amend.Setting {
	if j.DividesBatch {
		return []amend.Setting{to(recipe.PipelineMicroBatch, micro)}
	}
	return Batch(micro, int(j.MicroBatch)*j.Micros()/micro, j.DataRanks())
}

// Batch returns what files say of micro batches and accumulation on ranks that have sequences of their own.
func Batch(micro, accumulation, ranks int) []amend.Setting {
	return []amend.Setting{to(recipe.MicroBatch, micro), to(recipe.Accumulation, accumulation),
		to(recipe.TrainBatch, micro*accumulation*ranks)}
}

func recomputing(j *job.Job) [][]amend.Setting {
	if j.Megatron != nil {
		return when(j.Megatron.Recompute != "full", to(recipe.RecomputeGranularity, "full"),
			to(recipe.RecomputeMethod, "uniform"), to(recipe.RecomputeLayers, 1))
	}
	return when(j.Recompute == nil || j.Recompute.Selective > 0 || j.RecomputeEvery > 1,
		to(recipe.GradientCheckpointing, true))
}

func keepingActivations(j *job.Job) [][]amend.Setting {
	return when(j.Recompute != nil, to(recipe.GradientCheckpointing, false))
}

func smallerBatches(j *job.Job) (ways [][]amend.Setting) {
	if packs(j) {
		return fewerTokens(j)
	}
	micro := int(j.MicroBatch)
	for smaller := micro / 2; smaller >= 1; smaller /= 2 {
		if micro%smaller == 0 {
			ways = append(ways, batch(j, smaller))
		}
	}
	return ways
}

func largerBatches(j *job.Job) (ways [][]amend.Setting) {
	if packs(j) {
		return nil
	}
	for times := 2; times <= 8; times *= 2 {
		if j.Micros()%times == 0 {
			ways = append(ways, batch(j, int(j.MicroBatch)*times))
		}
	}
	return ways
}

// trainerFused is the name that transformers' Trainer has for the fused AdamW, the only fused step that files can say.
const trainerFused = "adamw_torch_fused"

func fusedStep(j *job.Job) [][]amend.Setting {
	name := any(j.Optimizer.Name + "/" + string(job.Fused))
	if name == fusedAdamW {
		name = trainerFused
	}
	return when(j.Optimizer.Variant == job.Foreach && j.DeepSpeed == nil, to(recipe.OptimizerName, name))
}

func fsdpOnHost(j *job.Job) [][]amend.Setting {
	return when(j.FSDP != nil && !j.FSDP.OffloadParameters, to(recipe.FSDPOffload, true))
}

func fsdpForDDP(j *job.Job) [][]amend.Setting {
	if j.Megatron != nil {
		return nil
	}
	return when(j.FSDP == nil && j.DeepSpeed == nil && j.World > int(j.Stages()), to(sharded, "2"))
}

func resharding(j *job.Job) [][]amend.Setting {
	return when(j.FSDP != nil && j.FSDP.Strategy == "shard_grad_op", to(recipe.Reshard, true))
}

// smallerSchedules are the schedules that hold less, for the same stages.
var smallerSchedules = map[string]string{"GPipe": "1F1B", "LoopedBFS": "Interleaved1F1B",
	"InterleavedZeroBubble": "Interleaved1F1B"}

func smallerSchedule(j *job.Job) [][]amend.Setting {
	if j.Pipeline == nil {
		return nil
	}
	smaller := smallerSchedules[j.Pipeline.Schedule]
	return when(smaller != "", to(recipe.PipelineSchedule, smaller))
}

// Where the optimizer and the parameters of a job with DeepSpeed are.

func offloadsOptimizer(j *job.Job) bool {
	return j.DeepSpeed != nil && j.DeepSpeed.OffloadOptimizer.Device == "cpu"
}

func offloadsParameters(j *job.Job) bool {
	return j.DeepSpeed != nil && j.DeepSpeed.OffloadParameters.Device == "cpu"
}

func optimizerOnHost(j *job.Job) [][]amend.Setting {
	return when(j.DeepSpeed != nil && !offloadsOptimizer(j), to(recipe.OptimizerDevice, "cpu"))
}

func optimizerOnGPU(j *job.Job) [][]amend.Setting {
	return when(offloadsOptimizer(j), to(recipe.OptimizerDevice, "none"))
}

func onlyOptimizerOnGPU(j *job.Job) [][]amend.Setting {
	return when(offloadsOptimizer(j) && !offloadsParameters(j), to(recipe.OptimizerDevice, "none"))
}

func parametersOnGPU(j *job.Job) [][]amend.Setting {
	return when(offloadsParameters(j), to(recipe.ParameterDevice, "none"))
}

// parametersOnHost takes ZeRO-3, with the optimizer on the CPU.
func parametersOnHost(j *job.Job) [][]amend.Setting {
	if j.DeepSpeed == nil || offloadsParameters(j) {
		return nil
	}
	settings := []amend.Setting{to(recipe.ParameterDevice, "cpu")}
	if !offloadsOptimizer(j) {
		settings = append(settings, to(recipe.OptimizerDevice, "cpu"))
	}
	if j.DeepSpeed.ZeROStage < 3 {
		settings = append(settings, to(recipe.Stage, 3))
	}
	return [][]amend.Setting{settings}
}

// stages lists stages of ZeRO.
func stages(j *job.Job, from, until int) (ways [][]amend.Setting) {
	for stage := from; j.DeepSpeed != nil && stage < until; stage++ {
		ways = append(ways, []amend.Setting{to(recipe.Stage, stage)})
	}
	return ways
}

// zeroStage returns the stage of ZeRO, 0 without DeepSpeed.
func zeroStage(j *job.Job) int {
	if j.DeepSpeed == nil {
		return 0
	}
	return j.DeepSpeed.ZeROStage
}

func higherStages(j *job.Job) [][]amend.Setting { return stages(j, zeroStage(j)+1, 4) }

func lowerStages(j *job.Job) [][]amend.Setting { return stages(j, 1, zeroStage(j)) }

// shardedOnHost shards what the host has of the parameters: with the optimizer, or while a checkpoint is saved.
func shardedOnHost(j *job.Job) [][]amend.Setting {
	return when((offloadsOptimizer(j) || j.Saving.Clones) && zeroStage(j) < 3, to(recipe.Stage, 3))
}

func shardedCheckpoint(j *job.Job) [][]amend.Setting {
	return when(j.FSDP != nil && j.FSDP.StateDictType == "full_state_dict",
		to(recipe.SavedStateDict, "SHARDED_STATE_DICT"))
}

func modelCheckpoint(j *job.Job) [][]amend.Setting {
	only := j.Saving.ModelOnly || j.Megatron != nil && j.Megatron.Saving.ModelOnly
	return when(!only, to(recipe.SavesModelOnly, true))
}

// smallerBucket lists smaller sizes of one of DeepSpeed's buckets.
func smallerBucket(name recipe.Setting, is int64) (ways [][]amend.Setting) {
	for _, size := range []int64{200_000_000, 50_000_000} {
		ways = append(ways, when(is > size, to(name, int(size)))...)
	}
	return ways
}

func smallerReduceBucket(j *job.Job) [][]amend.Setting {
	if j.DeepSpeed == nil {
		return nil
	}
	return smallerBucket(recipe.ReduceBucket, j.DeepSpeed.Sizes.ReduceBucket)
}

func smallerPrefetchBucket(j *job.Job) [][]amend.Setting {
	if j.DeepSpeed == nil {
		return nil
	}
	return smallerBucket(recipe.PrefetchBucket, j.DeepSpeed.Sizes.PrefetchBucket)
}

func fewerLiveParameters(j *job.Job) [][]amend.Setting {
	const fewer = 100_000_000
	return when(zeroStage(j) == 3 && j.DeepSpeed.Sizes.LiveParameters > fewer, to(recipe.LiveParameters, fewer))
}

func pageable(j *job.Job) [][]amend.Setting {
	return when(j.DeepSpeed != nil && j.DeepSpeed.OffloadOptimizer.PinMemory, to(recipe.PinnedOptimizer, false))
}

// moreNodes takes twice the nodes for the same batch of all ranks: with half the micro batches between two optimizer
// steps, or half of a micro batch. A job of one sequence a step on each rank cannot keep its batch.
func moreNodes(j *job.Job) [][]amend.Setting {
	micro := int(j.MicroBatch)
	twice, same := to(nodes, 2*j.Nodes), to(gpus, j.RanksPerNode)
	switch {
	case j.World == 1 && j.DeepSpeed == nil, j.Pipeline != nil:
		return nil
	case j.Accumulation%2 == 0:
		return when(true, twice, same, to(recipe.Accumulation, j.Accumulation/2))
	default:
		return when(micro%2 == 0, twice, same, to(recipe.MicroBatch, micro/2))
	}
}

// NeedOf returns what a planned job needs, or "" for nothing. A job that fills two thirds of its GPU wastes none of it.
func NeedOf(p *plan.Plan) Need {
	v := p.Verdict
	switch {
	case v.Result == plan.Unknown || p.Job.OnCPU:
		return ""
	case v.Result != plan.Fits && v.Device == ledger.Host:
		return HostMemory
	case v.Result != plan.Fits:
		return GPUMemory
	case v.Device != ledger.GPU || v.Needed > v.Capacity/3*2:
		return ""
	}
	return Speed
}
