package job

import (
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// flashNames are other names of versions of flash attention.
var flashNames = map[string]string{"flash_attention_2": "flash", "flash-attention-2": "flash", "flash2": "flash",
	"flash_attention_3": "flash3", "flash-attention-3": "flash3", "flash_attention_4": "flash4"}

// attention sets how attention is computed.
func (r *resolver) attention() error {
	j := r.job
	r.scores()
	name := r.Attention
	if p, _ := r.divided(); name == "" && p != nil && p.Sequence > 1 {
		name = p.Attention
	}
	if name == "" {
		name = string(forward.SDPA)
		ownKernels := r.Inputs.framework != nil && r.Inputs.framework.OwnAttention
		if !ownKernels && (!j.Versions.Transformers.AtLeast(4, 36, 0) || !j.Versions.Torch.AtLeast(2, 1, 1)) {
			name = string(forward.Eager) // SDPA has been the default since these releases
		}
		r.assume("%s attention: --attention was not given", name)
	}
	if known, is := flashNames[name]; is {
		name = known
	}
	if !slices.Contains(Attentions, name) {
		return fault.Inputf("unknown attention %q", r.Attention).
			WithHint("expected one of " + strings.Join(Attentions, ", "))
	}
	j.Attention = forward.AttentionKind(name)
	if number, is := strings.CutPrefix(name, string(forward.Flash)); is {
		j.Attention = forward.Flash
		j.FlashVersion, _ = strconv.Atoi(number) // 0 where no version is said
	}
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
		c := r.training.Checkpointing
		if c.Reentrant || c.ByRelease && !j.Versions.Transformers.AtLeast(5, 0, 0) {
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
	if d := j.DeepSpeed; way == "" && r.PipelineParallel > 1 && d != nil && d.PipelineCheckpoints > 0 {
		way = "full"
		if d.PipelineReentrant {
			way = "reentrant"
		}
	}
	switch way {
	case "", "none", "false": // as programs write that they recompute nothing
	case "full", "true":
		j.Recompute = &autograd.Checkpoint{}
	case "reentrant":
		j.Recompute = &autograd.Checkpoint{Reentrant: true}
	case "selective":
		j.Recompute = &autograd.Checkpoint{Selective: 2}
	default:
		if n, every := everyBlock(way); every {
			j.Recompute, j.RecomputeEvery = &autograd.Checkpoint{}, n
			break
		}
		return fault.Inputf("unknown way to recompute activations: %q", way).
			WithHint("expected one of " + strings.Join(Recomputes, ", "))
	}
	if o := j.OffloadActivations; o != nil && (way == "reentrant" && !o.InputsOnly || r.Compile) {
		return fault.Inputf("activations wait on the host, which is not planned yet with reentrant checkpoints or " +
			"torch.compile").WithHint("set use_reentrant to false, and leave --compile out")
	}
	return nil
}

// everyBlock returns n of "every-n", from 2 on.
func everyBlock(way string) (n int, is bool) {
	number, is := strings.CutPrefix(way, "every-")
	n, err := strconv.Atoi(number)
	return n, is && err == nil && n > 1
}

// defaultLoss returns the loss of transformers.
func (r *resolver) defaultLoss() forward.LossKind {
	f := r.Inputs.framework
	if r.job.Versions.Transformers.AtLeast(4, 49, 0) || f != nil && f.ShiftsLabels {
		return forward.ShiftLabels // ForCausalLMLoss in transformers/loss/loss_utils.py
	}
	if slices.Contains(narrowLosses, r.job.Model.Type) {
		return forward.ShiftNarrow
	}
	return forward.ShiftLogits
}

// narrowLosses are the types of models whose classes computed the loss of shifted logits in their own type before
// transformers 4.49 (modeling_gpt2.py and the others in 4.48.1), and modeling_qwen.py of the first Qwen.
var narrowLosses = strings.Fields("bloom falcon gpt2 gpt_bigcode gpt_neox mpt opt qwen")

// loss sets how the loss is computed, and what torch.compile fuses.
func (r *resolver) loss() error {
	j := r.job
	j.HoldsOutputs = r.training == nil
	j.Loss = r.defaultLoss()
	j.Compile = r.Compile || r.training != nil && r.training.TorchCompile || compiles(r.launch)
	if j.Compile {
		j.Loss = forward.CompiledLoss
		if j.Recompute != nil {
			j.Recompute.Compiled = true
		}
	}
	if err := r.modules(); err != nil {
		return err
	}
	if r.training != nil && r.training.UseLigerKernel {
		r.liger()
	}
	if f := r.Inputs.framework; f != nil && f.LigerModules {
		loss := j.Loss
		r.liger()
		j.Loss = loss
	}
	if r.training != nil && r.training.LabelSmoothing > 0 && !j.Compile {
		j.Loss = forward.SmoothedLoss
	}
	if f := r.Inputs.framework; f != nil && f.Diverges {
		if j.Compile {
			return fault.File(f.File).Inputf("torch.compile is on: a compiled divergence is not planned yet").
				WithHint("turn it off to plan the job without it")
		}
		j.Loss = forward.DivergentLoss
		return nil
	}
	return r.namedLoss()
}

// namedLoss sets the loss that a flag names.
func (r *resolver) namedLoss() error {
	name := r.Loss
	if name == "" && r.FusedLoss {
		name = "fused"
	}
	switch name {
	case "":
		r.chunkedLoss()
	case "fp32":
		r.job.Loss = forward.ShiftLabels
	case "native":
		r.job.Loss = forward.NativeLoss
	case "chunked":
		r.job.Loss = forward.ChunkedLoss
	case "fused":
		r.job.Loss = forward.FusedLoss
	default:
		return fault.Inputf("unknown loss %q", name).WithHint("expected one of " + strings.Join(Losses, ", ") +
			"; that of Liger is fused")
	}
	return nil
}

// chunkedLoss sets the parts that a program computes the loss in. A compiled loss, and that of modules of Liger, go
// before.
func (r *resolver) chunkedLoss() {
	f := r.Inputs.framework
	if f == nil || f.Chunks == "" {
		return
	}
	r.job.CompilesParts = r.job.Loss == forward.CompiledLoss && (f.Chunks == recipe.Outputs ||
		f.Chunks == recipe.Linear)
	r.job.Loss = map[recipe.Chunks]forward.LossKind{recipe.Outputs: forward.ChunkedOutputsLoss,
		recipe.Linear: forward.LinearLoss, recipe.InTiles: forward.TiledLoss,
		recipe.Recomputed: forward.RecomputedLoss, recipe.BySequence: forward.SelectedLogProbabilities,
		recipe.Kernel: forward.KernelLoss, recipe.WideKernel: forward.WideKernelLoss,
		recipe.InPlace: forward.NarrowInPlaceLoss}[f.Chunks]
}

// ligerModels are the model types with kernels in liger-kernel 0.6
// (MODEL_TYPE_TO_APPLY_LIGER_FN in liger_kernel/transformers/monkey_patch.py).
var ligerModels = strings.Fields("gemma gemma2 gemma3_text gemma3 glm4 llama llama4 mistral mixtral olmo2 phi3 qwen2 " +
	"qwen3 qwen3_moe qwen3_next smollm3 granite")

// HasLiger reports whether liger-kernel has a loss for a model that makes no logits.
func HasLiger(m *model.Model) bool {
	return slices.Contains(ligerModels, m.Type) && m.Type != "granite"
}

// liger replaces modules by those of liger-kernel. The Trainer leaves a model
// alone that liger-kernel does not know.
func (r *resolver) liger() {
	if len(r.job.Model.Network.Towers) > 0 {
		r.assume("use_liger_kernel is not planned for models that read images: the job takes less")
		return
	}
	if !slices.Contains(ligerModels, r.job.Model.Type) {
		r.assume("use_liger_kernel has no effect: liger-kernel has no kernels for %s", r.job.Model.Type)
		return
	}
	r.job.Liger = true
	r.job.Loss = forward.FusedLoss
	if r.job.Model.Type == "granite" { // whose logits are scaled
		r.job.Loss = forward.InPlaceLoss
	}
}

// Libraries of modules.
const (
	transformersModules = "transformers"
	litgptModules       = "litgpt"
)

// kernelsOf returns which kernels the GPU has, and what they work in.
func (j *Job) kernelsOf() forward.GPU {
	if j.OnCPU {
		return forward.GPU{}
	}
	of := forward.GPU{Processors: int64(j.GPU.Processors()), Threads: int64(j.GPU.Threads())}
	if j.Versions.Torch.AtLeast(2, 15, 0) {
		of.ProductWorkspace = int64(j.GPU.Workspace())
	}
	// The wheels of 2.11 are the first with a cuDNN that PyTorch prefers (huggingface/transformers pull request 48163).
	of.PrefersCuDNN = (j.GPU.Capability == 90 || j.GPU.Capability == 100) && j.Versions.Torch.AtLeast(2, 11, 0)
	return of
}

// OfTransformers reports whether the model consists of transformers' modules.
func (j *Job) OfTransformers() bool { return j.Modules == "" || j.Modules == transformersModules }

// Settle sets how the passes run, as far as that follows from releases and from other settings. Whoever changes a
// decided job calls it again.
func (j *Job) Settle() {
	j.settleAttention()
	v := j.Versions
	j.RoutersTogether = !v.Transformers.AtLeast(5, 23, 0)
	j.AttachesQuantizedInput = !v.BitsAndBytes.AtLeast(0, 43, 2)
	j.FindsUnused = j.SplitsDecay && (j.Adapter != nil || j.Recompute == nil)
	if j.UnusedGiven != "" {
		j.FindsUnused = j.UnusedGiven == "true"
	}
	j.CastsInside = j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3 && j.DeepSpeed.EfficientLinear
	j.ChunksHead = j.FusedQKV && j.Adapter != nil
	j.CompilesLogits = j.Compile && j.OfTransformers()
	j.Compares = j.Answers != nil
	j.NoDropout = j.Answers != nil && j.Answers.NoDropout
	j.HalfLoss = j.Answers != nil && j.Answers.HalfLoss
	j.HooksImages = j.Recompute != nil && j.hooksImages()
	j.InputGradients = j.UnfreezesEmbeddings() || j.HooksImages || j.Recompute != nil && j.Adapter != nil
}

// settleAttention sets what releases do in attention.
func (j *Job) settleAttention() {
	v, of := j.Versions, j.OfTransformers()
	j.FusesBias = v.Transformers.AtLeast(5, 0, 0)
	j.SavesSoftmaxInput = !v.Torch.AtLeast(1, 11, 0)
	j.MasksCausally = j.Compile && of
	n := j.Model.Network
	// A loop of its own leaves use_cache on, and holds the outputs. The Trainer turns it off, but for a text_config.
	written := j.HoldsOutputs && len(n.Stacks) > 0 && !n.Head.NarrowLoss && !n.Head.PerSequence && n.Opaque == nil
	j.HoldsCache = of && j.Recompute == nil && (n.Generates() || written)
	// integrations/sdpa_attention.py shares keys since 4.54, with torch 2.5, and the attention classes before it never
	// did.
	j.RepeatsKeys = of && !(v.Transformers.AtLeast(4, 54, 0) && v.Torch.AtLeast(2, 5, 0))
	j.ContiguousHeads = of && v.Transformers.AtLeast(4, 48, 0) && !v.Transformers.AtLeast(4, 56, 0)
	// _update_causal_mask made one mask. Since masking_utils.py every block converts a mask of booleans.
	j.SharesWindow = of && !v.Transformers.AtLeast(4, 53, 0)
	j.ClampsScores, j.SharedAttention = false, false
	switch j.Model.Type {
	case "llama":
		j.ClampsScores = of && v.Transformers.AtLeast(4, 28, 0) && !v.Transformers.AtLeast(4, 31, 0)
	case "gptj":
		j.SharedAttention = of && v.Transformers.AtLeast(5, 24, 0)
	case "opt":
		j.ClampsScores = of && !v.Transformers.AtLeast(4, 49, 0)
	}
}

// hooksImages reports whether gradient checkpointing makes the patches of images or the rows of sound need a gradient,
// frozen or not (enable_input_require_grads in transformers/modeling_utils.py).
func (j *Job) hooksImages() bool {
	reads := len(j.Model.Network.Towers) > 0 || j.Model.Network.Sound() != nil && j.Adapter != nil
	return reads && j.OfTransformers() && j.Versions.Transformers.AtLeast(5, 0, 0)
}

// UnfreezesEmbeddings reports whether patterns of trained parameters name the embeddings or the head, whose output then
// needs a gradient.
func (t *Trained) UnfreezesEmbeddings() bool { return t.Unfrozen != nil && t.Unfrozen.Embeds }

// modules sets the library of the model's modules and the settings that follow
// from it.
func (r *resolver) modules() error {
	j := r.job
	j.Modules = r.Modules
	switch r.Modules {
	case "", transformersModules:
	case litgptModules: // litgpt/model.py, litgpt/utils.py
		j.FusedActivations, j.FusedQKV, j.HoldsOutputs = true, true, true // its loops are written by hand
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
