package advice

import (
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// fused is the optimizer whose step is one kernel.
const fused = "adamw/fused"

// trainerFused is its name in transformers' Trainer.
const trainerFused = "adamw_torch_fused"

// sharded is FSDP in place of DistributedDataParallel, which no file of a training says.
const sharded recipe.Setting = "FSDP"

func on(why string, settings ...amend.Setting) idea { return idea{why, settings} }

func to(name recipe.Setting, value any) amend.Setting { return amend.Setting{Name: name, To: value} }

// batch returns the settings of another micro batch with the same batch of all ranks. A pipeline makes its micro
// batches of the batch that a file says, or of those between two optimizer steps.
func batch(j *job.Job, micro int) []amend.Setting {
	if j.DividesBatch {
		return []amend.Setting{to(recipe.PipelineMicroBatch, micro)}
	}
	all := int(j.MicroBatch) * micros(j)
	ranks := j.World / int(j.Parallel.Tensor*j.Parallel.Context*j.Stages())
	return []amend.Setting{to(recipe.MicroBatch, micro), to(recipe.Accumulation, all/micro),
		to(recipe.TrainBatch, all*ranks)}
}

// micros returns the number of micro batches of an optimizer step.
func micros(j *job.Job) int {
	if j.Pipeline == nil {
		return j.Accumulation
	}
	return j.Accumulation * j.Pipeline.Micros
}

// forGPU lists what frees memory of a GPU.
func forGPU(j *job.Job) []idea {
	var list []idea
	checkpointing := to(recipe.GradientCheckpointing, true)
	const recomputes = "the backward pass recomputes activations instead of keeping them"
	keeps := j.Recompute == nil || j.Recompute.Selective > 0 || j.RecomputeEvery > 1
	if keeps {
		list = append(list, on(recomputes, checkpointing))
	}
	micro := int(j.MicroBatch)
	for smaller := micro / 2; smaller >= 1; smaller /= 2 {
		if micro%smaller != 0 {
			continue
		}
		const why = "activations shrink with the micro batch, and accumulation keeps the batch of all ranks"
		list = append(list, on(why, batch(j, smaller)...))
		if keeps {
			list = append(list, on(why+"; "+recomputes, append(batch(j, smaller), checkpointing)...))
		}
	}
	if j.Optimizer.Name == "adamw" && j.Optimizer.Variant == job.Foreach && j.DeepSpeed == nil {
		list = append(list, on("the fused step keeps no temporaries of the size of the parameters",
			to(recipe.OptimizerName, trainerFused)))
	}
	switch f := j.FSDP; {
	case f != nil && !f.OffloadParameters:
		list = append(list, on("shards, gradients and states of FSDP then lie in host memory",
			to(recipe.FSDPOffload, true)))
	case f == nil && j.DeepSpeed == nil && j.World > int(j.Stages()):
		list = append(list, on("ranks then hold a shard each of what all of them hold in full", to(sharded, "2")))
	}
	if f := j.FSDP; f != nil && f.Strategy == "shard_grad_op" {
		list = append(list, on("parameters are gathered once more in the backward pass, and not kept for it",
			to(recipe.Reshard, true)))
	}
	if p := j.Pipeline; p != nil && smallerSchedules[p.Schedule] != "" {
		list = append(list, on("a stage has fewer micro batches under way",
			to(recipe.PipelineSchedule, smallerSchedules[p.Schedule])))
	}
	return append(list, forZeRO(j)...)
}

// smallerSchedules are the schedules that hold less, for the same stages.
var smallerSchedules = map[string]string{"GPipe": "1F1B", "LoopedBFS": "Interleaved1F1B",
	"InterleavedZeroBubble": "Interleaved1F1B"}

// forZeRO lists what DeepSpeed's keys free on a GPU.
func forZeRO(j *job.Job) []idea {
	d := j.DeepSpeed
	if d == nil {
		return nil
	}
	var list []idea
	offload := to(recipe.OptimizerDevice, "cpu")
	const offloads = "states and master weights then lie in host memory"
	offloaded := d.OffloadOptimizer.Device == "cpu"
	if d.ZeROStage > 0 && !offloaded {
		list = append(list, on(offloads, offload))
	}
	for stage := d.ZeROStage + 1; stage <= 3; stage++ {
		const why = "ranks then hold a shard each of what all of them hold in full"
		list = append(list, on(why, to(recipe.Stage, stage)))
		if !offloaded {
			list = append(list, on(why+"; "+offloads, to(recipe.Stage, stage), offload))
		}
	}
	if d.OffloadParameters.Device != "cpu" {
		settings := []amend.Setting{to(recipe.ParameterDevice, "cpu")}
		if !offloaded {
			settings = append(settings, offload)
		}
		if d.ZeROStage < 3 {
			settings = append(settings, to(recipe.Stage, 3))
		}
		list = append(list, on("parameters then lie in host memory while they are not used", settings...))
	}
	const smaller = "the bucket is smaller, so that more and smaller messages go"
	for _, bucket := range []struct {
		name recipe.Setting
		is   int64
	}{{recipe.ReduceBucket, d.Sizes.ReduceBucket}, {recipe.PrefetchBucket, d.Sizes.PrefetchBucket}} {
		for _, size := range []int64{200_000_000, 50_000_000} {
			if bucket.is > size {
				list = append(list, on(smaller, to(bucket.name, int(size))))
			}
		}
	}
	if d.ZeROStage == 3 && d.Sizes.LiveParameters > 100_000_000 {
		list = append(list, on("fewer gathered parameters stay for later use", to(recipe.LiveParameters, 100_000_000)))
	}
	return list
}

// forHost lists what frees memory of a host.
func forHost(j *job.Job) []idea {
	d := j.DeepSpeed
	if d == nil {
		return nil
	}
	var list []idea
	if d.OffloadOptimizer.PinMemory {
		list = append(list, on("PyTorch rounds pinned blocks up to powers of two", to(recipe.PinnedOptimizer, false)))
	}
	if d.OffloadParameters.Device == "cpu" {
		list = append(list, on("parameters then stay on the GPUs", to(recipe.ParameterDevice, "none")))
	}
	if d.OffloadOptimizer.Device == "cpu" {
		list = append(list, on("optimizer states then stay on the GPUs", to(recipe.OptimizerDevice, "none")))
	}
	if d.OffloadOptimizer.Device == "cpu" && d.ZeROStage < 3 {
		list = append(list, on("ranks then hold a shard each of what all of them hold in full", to(recipe.Stage, 3)))
	}
	return list
}

// wasted lists what makes steps faster with memory that is free. A job that fills two thirds of its GPU wastes none.
func wasted(p *plan.Plan) []idea {
	j := p.Job
	if v := p.Verdict; v.Device != "gpu" || v.Needed > v.Capacity/3*2 {
		return nil
	}
	var list []idea
	const larger = "larger products take less time for each token"
	for times := 2; times <= 8; times *= 2 {
		if micros(j)%times == 0 {
			list = append(list, on(larger, batch(j, int(j.MicroBatch)*times)...))
		}
	}
	if j.Recompute != nil {
		list = append(list, on("nothing is computed twice", to(recipe.GradientCheckpointing, false)))
	}
	if d := j.DeepSpeed; d != nil {
		if d.OffloadOptimizer.Device == "cpu" && d.OffloadParameters.Device != "cpu" {
			list = append(list, on("the GPUs have room for the states", to(recipe.OptimizerDevice, "none")))
		}
		if d.OffloadParameters.Device == "cpu" {
			list = append(list, on("the GPUs have room for the parameters", to(recipe.ParameterDevice, "none")))
		}
		for stage := 1; stage < d.ZeROStage; stage++ {
			list = append(list, on("less is gathered", to(recipe.Stage, stage)))
		}
	}
	return list
}
