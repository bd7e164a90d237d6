package job

import (
	"slices"
	"strings"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/forward"
	"plimsoll/recipe"
)

// attention sets how attention is computed.
func (r *resolver) attention() error {
	j := r.job
	name := r.Attention
	if name == "" {
		name = string(forward.SDPA)
		if !j.Versions.Transformers.AtLeast(4, 36, 0) || !j.Versions.Torch.AtLeast(2, 1, 1) {
			name = string(forward.Eager) // SDPA has been the default since these releases
		}
		r.assume("%s attention: --attention was not given", name)
	}
	if name == "flash_attention_2" || name == "flash-attention-2" || name == "flash2" {
		name = string(forward.Flash)
	}
	if !slices.Contains(Attentions, name) {
		return fault.Inputf("unknown attention %q", r.Attention).
			WithHint("expected one of " + strings.Join(Attentions, ", "))
	}
	j.Attention = forward.AttentionKind(name)
	if j.Attention == forward.Flash && j.ParameterType == dtype.F32 && j.AutocastType == dtype.Invalid {
		return fault.Inputf("flash attention computes only in bf16 and fp16, but the precision is fp32").
			WithHint("use --attention sdpa, or --precision bf16")
	}
	return nil
}

// recompute sets which blocks the backward pass recomputes.
func (r *resolver) recompute() error {
	j := r.job
	way := r.Recompute
	if way == "" && r.training != nil && r.training.Checkpointing.Enabled {
		way = "full"
		if r.training.Checkpointing.Reentrant {
			way = "reentrant"
		}
		if f := r.Inputs.framework; f != nil && f.FSDP2WithoutReentrant &&
			(r.Request.FSDP == "2" || j.FSDP != nil && j.FSDP.Version == 2) {
			way = "full"
		}
		if r.training.Checkpointing.Offload {
			return fault.File(r.training.File).Inputf(
				`gradient checkpointing with "offload" keeps the inputs of blocks on the host, which is not planned yet`).
				WithHint("remove the key, and expect the job to take less GPU memory and more host memory than the " +
					"plan says")
		}
		j.RecomputeEvery, j.RecomputeFirst = r.training.Checkpointing.EveryN, true
	}
	if way == "" && j.FSDP != nil && j.FSDP.ActivationCheckpointing {
		way = "full"
	}
	switch way {
	case "", "none":
	case "full":
		j.Recompute = &autograd.Checkpoint{}
	case "reentrant":
		j.Recompute = &autograd.Checkpoint{Reentrant: true}
	case "selective":
		j.Recompute = &autograd.Checkpoint{Selective: 2}
	case "every-2":
		j.Recompute, j.RecomputeEvery = &autograd.Checkpoint{}, 2
	default:
		return fault.Inputf("unknown way to recompute activations: %q", way).
			WithHint("expected one of " + strings.Join(Recomputes, ", "))
	}
	return nil
}

// loss sets how the loss is computed, and what torch.compile fuses.
func (r *resolver) loss() error {
	j := r.job
	j.HoldsOutputs = r.training == nil
	if !j.Versions.Transformers.AtLeast(4, 46, 0) {
		j.Loss = forward.ShiftLogits
	}
	j.Compile = r.Compile || r.training != nil && r.training.TorchCompile || compiles(r.launch)
	if j.Compile {
		// Inductor fuses pointwise operations between matmuls. In the backward
		// pass it recomputes them where that is cheaper than keeping them.
		j.Loss = forward.CompiledLoss
		if j.Recompute == nil {
			j.Recompute = &autograd.Checkpoint{Selective: 1}
		}
	}
	if err := r.modules(); err != nil {
		return err
	}
	if r.FusedLoss || r.training != nil && r.training.UseLigerKernel {
		j.Loss = forward.FusedLoss
	}
	return nil
}

const transformersModules = "transformers"

// modules sets the library of the model's modules and the settings that follow
// from it.
func (r *resolver) modules() error {
	j := r.job
	j.Modules = r.Modules
	switch r.Modules {
	case "", transformersModules:
	case "litgpt": // litgpt/model.py, litgpt/utils.py
		j.FusedActivations, j.FusedQKV = true, true
		if j.Loss != forward.CompiledLoss {
			j.Loss = forward.ChunkedLoss
		}
	case "torchtitan": // the training loop deletes the outputs before the backward pass
		j.HoldsOutputs, j.KeepsLastBlock = false, true
		if j.Loss == forward.CompiledLoss && !j.Versions.Torch.AtLeast(2, 8, 0) {
			j.Loss = forward.ShiftLabels // only the blocks were compiled
		}
	default:
		return fault.Inputf("unknown model library %q", r.Modules).
			WithHint("expected " + fault.OneOf(ModelLibraries...))
	}
	return nil
}

// compiles reports whether the launcher compiles the model with torch.compile.
func compiles(l *recipe.Accelerate) bool {
	return l != nil && strings.EqualFold(l.CompileBackend, "inductor")
}
