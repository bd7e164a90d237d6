package lever

import (
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// isPlain reports whether torch's own loop trains the job: nothing offloads its states yet.
func isPlain(j *job.Job) bool {
	return j.Megatron == nil && j.DeepSpeed == nil && j.Pipeline == nil && j.Offload == nil && !j.OnCPU &&
		!j.StepsInBackward && (j.FSDP == nil || !j.FSDP.OffloadParameters)
}

func fusedLossOfLiger(j *job.Job) [][]amend.Setting {
	keeps := j.Loss == forward.ShiftLabels || j.Loss == forward.ShiftLogits || j.Loss == forward.NativeLoss
	return when(j.Megatron == nil && keeps && job.HasLiger(j.Model), to(recipe.Liger, true))
}

func smallerEvaluation(j *job.Job) [][]amend.Setting {
	return when(j.Evaluation != nil && j.Evaluation.MicroBatch > 1, to(recipe.EvaluationBatch, 1))
}

// expandable adds the setting to those that the job has.
func expandable(j *job.Job) [][]amend.Setting {
	const name = "expandable_segments"
	if strings.Contains(j.Allocator, name) || !j.Versions.Torch.AtLeast(2, 1, 0) || j.GPU.Memory == 0 {
		return nil
	}
	settings := slices.DeleteFunc([]string{j.Allocator, name + ":True"}, func(s string) bool { return s == "" })
	return when(true, to(allocConf, strings.Join(settings, ",")))
}

func statesOnHost(j *job.Job) [][]amend.Setting {
	return when(isPlain(j), to(hostStates, job.OffloadStates))
}

// updateOnHost takes the format that loses nothing first, and a disk last.
func updateOnHost(j *job.Job) (ways [][]amend.Setting) {
	if !isPlain(j) || j.FSDP != nil || j.Adapter != nil || !strings.HasPrefix(j.Optimizer.Name, "adam") {
		return nil
	}
	for _, format := range []string{"split", "int8", "split24"} {
		ways = append(ways, []amend.Setting{to(hostUpdate, job.ServiceOptimizer+"/"+format),
			to(recipe.OptimizerName, nil)}) // both are the name of the optimizer
	}
	if j.HostMemory > 0 { // a disk, where no format leaves the host enough memory
		ways = append(ways, append(slices.Clone(ways[0]), to(stateDisk, aDisk)))
	}
	return ways
}

// aDisk is a folder on a disk of its own.
const aDisk = "/mnt/nvme"

func smallerFormat(j *job.Job) (ways [][]amend.Setting) {
	if j.Offload == nil || j.Offload.Format == nil {
		return nil
	}
	for _, format := range []string{"bf16", "int8", "split24"} {
		ways = append(ways, []amend.Setting{to(hostUpdate, job.ServiceOptimizer+"/"+format)})
	}
	return ways
}

func statesOnDisk(j *job.Job) [][]amend.Setting {
	return when(j.Offload != nil && j.Offload.Format != nil && j.Offload.Tier == nil, to(stateDisk, aDisk))
}

func activationsOnHost(j *job.Job) [][]amend.Setting {
	return when(j.Megatron == nil && j.DeepSpeed == nil && j.Pipeline == nil && !j.OnCPU &&
		j.OffloadActivations == nil && !j.Compile && (j.Recompute == nil || !j.Recompute.Reentrant),
		to(activations, true))
}

// allOnHost is ZeRO-3 in place of torch's own loop, and of the rungs that ZeRO-3 does not go with.
func allOnHost(j *job.Job) [][]amend.Setting {
	settings := []amend.Setting{to(recipe.Stage, 3), to(recipe.OptimizerDevice, "cpu"),
		to(recipe.ParameterDevice, "cpu"), to(sharded, nil), to(recipe.FSDPOffload, nil), to(hostStates, nil),
		to(hostUpdate, nil), to(stateDisk, nil), to(activations, nil)}
	return when(j.Megatron == nil && j.DeepSpeed == nil && j.Pipeline == nil && !j.OnCPU && !j.StepsInBackward,
		settings...)
}

// inFull reports whether a job computes in fp32.
func inFull(j *job.Job) bool {
	return j.ParameterType == dtype.F32 && j.AutocastType == dtype.Invalid && j.CastType == dtype.Invalid
}

// half says a type of 16 bits for the passes, by its name in --precision. GPUs before Ampere do not compute in bf16.
func half(j *job.Job, prefix string) amend.Setting {
	if c := j.GPU.Capability; c > 0 && c < ampere {
		return to(recipe.FP16, prefix+"fp16")
	}
	return to(recipe.BF16, prefix+"bf16")
}

const ampere = 80

// halfPrecision leaves master weights and states in fp32, by autocast or by DeepSpeed. Without its stage, the same
// precision would leave no master weights.
func halfPrecision(j *job.Job) [][]amend.Setting {
	if j.DeepSpeed != nil {
		return when(inFull(j), to(recipe.Stage, j.DeepSpeed.ZeROStage), half(j, ""))
	}
	return when(inFull(j), half(j, "amp-"))
}

// allOnHostInHalf is ZeRO-3 for passes in 16 bits over master weights in fp32, which DeepSpeed makes without autocast.
func allOnHostInHalf(j *job.Job) (ways [][]amend.Setting) {
	if !inFull(j) && (j.ParameterType != dtype.F32 || j.AutocastType == dtype.Invalid) {
		return nil
	}
	for _, settings := range allOnHost(j) {
		ways = append(ways, append(settings, half(j, "")))
	}
	return ways
}

func eightBitOptimizer(j *job.Job) [][]amend.Setting {
	return when(isPlain(j) && j.Optimizer.Name == "adamw", to(recipe.OptimizerName, "adamw_bnb_8bit"))
}

// trainsAll reports whether the job trains the model itself, in a loop that can train an adapter in its place.
func trainsAll(j *job.Job) bool {
	return j.Megatron == nil && j.Adapter == nil && j.Quantization == nil && j.Pipeline == nil && j.QAT == nil &&
		j.Parallel.Tensor <= 1 && j.HostExperts == nil
}

func adapter(j *job.Job) [][]amend.Setting {
	return when(trainsAll(j), to(adapterRank, job.UsualRank), to(adapted, "all-linear"))
}

func quantizedAdapter(j *job.Job) [][]amend.Setting {
	settings := []amend.Setting{to(quantization, "nf4")}
	if j.Adapter == nil {
		settings = append(settings, to(adapterRank, job.UsualRank), to(adapted, "all-linear"))
	}
	return when(j.Megatron == nil && j.Quantization == nil && j.Pipeline == nil && j.Parallel.Tensor <= 1 &&
		j.HostExperts == nil, settings...)
}

// shorterSequences halves sequences down to what still holds a conversation.
func shorterSequences(j *job.Job) (ways [][]amend.Setting) {
	const least = 256
	if j.Megatron != nil {
		return nil
	}
	for half := j.Sequence / 2; half >= least; half /= 2 {
		ways = append(ways, []amend.Setting{to(sequence, int(half))})
	}
	return ways
}
