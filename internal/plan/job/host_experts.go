package job

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
)

// HostExperts is how KTransformers runs the experts of the model on the host.
type HostExperts struct {
	*recipe.HostExperts
	Layers   []*model.Mixture
	Hidden   int64
	Elements int64 // of the experts' weights
	// Modules means that every expert has modules of its own: every rank then has the adapters and their gradients.
	Modules bool
}

// hostedArchitectures are parts of the names of architectures whose experts KTransformers finds: get_moe_arch_config in
// kt_kernel/sft/arch.py. It looks for Mixtral's where transformers 5 does not have them.
var hostedArchitectures = strings.Fields("DeepseekV2 DeepseekV3 Qwen2Moe Qwen3Moe Qwen3VLMoe Qwen3_5Moe Glm4Moe")

// hostExperts takes the experts out of the model if KTransformers runs them on the host.
func (r *resolver) hostExperts() error {
	f, j := r.Inputs.framework, r.job
	if f == nil || f.HostExperts == nil {
		return nil
	}
	h := &HostExperts{HostExperts: f.HostExperts, Hidden: j.Model.Network.Hidden}
	found := slices.ContainsFunc(hostedArchitectures, func(name string) bool {
		return strings.Contains(j.Model.Architecture, name)
	})
	if !found {
		return h.Place.Inputf("use_kt is true, but KTransformers finds no experts in %s (%s)", j.Model.Name,
			j.Model.Architecture).WithHint("give --model with a model of one of these architectures: " +
			strings.Join(hostedArchitectures, ", "))
	}
	if !j.Versions.Transformers.AtLeast(5, 0, 0) {
		return h.Place.Inputf("use_kt is true, and LLaMA-Factory then wants transformers-kt, a fork of transformers 5").
			WithHint("leave --transformers out, or give 5.6.0")
	}
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil {
			h.Layers, h.Modules = append(h.Layers, x), !x.Fused() && !h.ForcesFused
		}
	}
	x := h.Layers[0]
	switch inner := x.Experts[0].Inner; {
	case inner%h.Pools != 0:
		return h.Place.Inputf("kt_threadpool_count is %d, which does not divide the width of an expert, %d", h.Pools,
			inner).WithHint("give a divisor")
	case h.Format == "fp8" && (h.Hidden%fp8Block != 0 || inner/h.Pools%fp8Block != 0):
		return h.Place.Inputf("fp8 has scales for blocks of %d, which do not divide the widths %d and %d of an expert",
			fp8Block, h.Hidden, inner/h.Pools).WithHint("use kt_expert_weight_format: bf16")
	case h.Format != "bf16" && h.Modules:
		return h.Place.Inputf("the experts have modules of their own, and KTransformers then wants "+
			"kt_force_fused_expert_lora for %s", h.Format).WithHint("add it to kt_config")
	}
	if strings.Contains(j.Model.Architecture, "DeepseekV2") {
		r.assume("routers of DeepSeek-V2 as releases of kt-kernel take them: that of August 2026 (95009ea6) wants " +
			"e_score_correction_bias, which they do not have")
	}
	j.Model, h.Elements = j.Model.HostsExperts()
	j.HostExperts = h
	return nil
}

// fp8Block is the number of rows and columns that share a scale in fp8.
const fp8Block = 128

// Capacity returns the tokens of all ranks that KTransformers makes buffers for: _get_kt_runtime_capacity in
// LLaMA-Factory's hparams/parser.py, and _aligned_max_len in kt_kernel/sft/amx.py.
func (j *Job) Capacity() int64 {
	of := max((j.Sequence+7)/8*8*j.Sequences(), j.HostExperts.Tokens) * int64(j.World)
	return (of + 31) / 32 * 32
}

// refuseHostExperts refuses what KTransformers does not run with.
func (j *Job) refuseHostExperts() error {
	if j.HostExperts == nil {
		return nil
	}
	const how = "KTransformers runs on one GPU or with FSDP2 (validate_distributed_setup in accelerate-kt)"
	name := j.Optimizer.Name
	return refuse(
		contradiction{j.OnCPU, "use_kt is true, but the job has no GPU", "leave --cpu out"},
		contradiction{j.DeepSpeed != nil || j.FSDP != nil && j.FSDP.Version == 1 || j.FSDP == nil && j.World > 1, how,
			"give accelerate's configuration of FSDP2, such as fsdp2_kt_bf16.yaml, or --fsdp 2, or --gpus 1"},
		contradiction{j.Quantization != nil && j.Quantization.Bits > 0, "use_kt is true beside a quantized model, " +
			"which is not planned yet", "leave the quantization out"},
		contradiction{j.Parallel.Tensor > 1 || j.Parallel.Context > 1 || j.Parallel.Expert > 1 || j.Offload != nil,
			"use_kt is true beside another way to divide the job, which is not planned yet", "leave it out"},
		contradiction{j.Optimizer.kind.variants == nil || name == badam || name == muon,
			fmt.Sprintf("use_kt is true, and %s has no step on the host, where the adapters of experts are", name),
			"use adamw"},
	)
}
