package job

import (
	"cmp"
	"fmt"
	"math"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/forward"
)

// contradiction is a combination of settings that cannot run. If a program
// refuses it, the text quotes that program.
type contradiction struct {
	found      bool
	what, hint string
}

// refuse returns the first contradiction that was found as an error.
func refuse(list ...contradiction) error {
	for _, c := range list {
		if c.found {
			return fault.Inputf("%s", c.what).WithHint(c.hint)
		}
	}
	return nil
}

// contradictions refuses settings that do not go together. It runs when all
// other settings are decided.
func (r *resolver) contradictions() error {
	return cmp.Or(r.kernels(), r.engines(), r.parallelDegrees(), r.exchangesHeads(), r.job.refuseMuon(),
		r.job.refuseParts(), r.job.refusePacked(), r.job.refuseOffload(), r.besidePipeline(), r.besideDivided(),
		r.job.refuseHostExperts())
}

// kernels refuses settings that no kernel supports.
func (r *resolver) kernels() error {
	j := r.job
	halves := j.ParameterType != dtype.F32 && (j.Adapter == nil || j.AdapterType != dtype.F32)
	longest := positions(j.Model.Network, j.Model.Parameters)
	return refuse(
		contradiction{longest > 0 && j.Sequence > longest,
			fmt.Sprintf("sequences have %d tokens, but %s has learned positions for only %d",
				j.Sequence, j.Model.Name, longest),
			fmt.Sprintf("give --seq-len %d or less", longest)},
		contradiction{j.Sequences() > maxTokens/j.Sequence,
			fmt.Sprintf("a micro batch of %d sequences of %d tokens is more than %d tokens",
				j.Sequences(), j.Sequence, maxTokens),
			"give a smaller --micro-batch"},
		r.namedAttention(),
		contradiction{j.Model.Type == "t5" && j.ParameterType == dtype.F16 && j.DeepSpeed == nil &&
			j.Versions.Transformers.AtLeast(4, 26, 0),
			"transformers keeps the second projections of T5's feed-forward networks (wo) in fp32 where it loads the " +
				"model in fp16 (_keep_in_fp32_modules), which is not planned yet",
			"use --precision bf16 or amp-fp16"},
		contradiction{j.Attention == forward.Flash && j.OnCPU,
			"flash attention runs on GPUs, but the job is on the CPU", "use --attention sdpa"},
		contradiction{j.Attention == forward.Flash && j.GPU.Capability > 0 && j.GPU.Capability < 80,
			fmt.Sprintf("FlashAttention only supports Ampere GPUs or newer, but %s is older", j.GPU.Name),
			"use --attention sdpa"},
		contradiction{j.OnCPU && j.Optimizer.Managed,
			fmt.Sprintf("%s pages its state from a GPU, but the job is on the CPU", r.optimizerText()),
			"use --optimizer adamw"},
		contradiction{j.OnCPU && j.Optimizer.Name == "adamw-apex",
			"apex's FusedAdam is a kernel for GPUs, but the job is on the CPU", "use --optimizer adamw"},
		contradiction{j.OnCPU && j.Allocator != "",
			"--alloc-conf is for the allocator of GPUs, but the job is on the CPU", "leave it out"},
		contradiction{j.AutocastType == dtype.F16 && halves,
			fmt.Sprintf("fp16 under autocast needs weights in fp32 for torch's GradScaler (\"Attempting to unscale "+
				"FP16 gradients\"), but they are in %v", j.ParameterType),
			"use --precision amp-fp16, or leave fp16 out of the file"},
	)
}

// namedAttention refuses fused attention by name for a model that has none. Without a
// name transformers takes eager attention.
func (r *resolver) namedAttention() contradiction {
	j := r.job
	found, flash := false, false
	for _, b := range j.Model.Network.Blocks() {
		flash = flash || b.Attention.NoFlash
		// Gemma 2's limit of the scores: seen in transformers 5.23.
		found = found || b.Attention.Sinks != "" || b.Attention.NoSDPA && !j.SharedAttention ||
			b.Attention.Soft && j.Versions.Transformers.AtLeast(5, 23, 0)
	}
	if flash && j.Attention == forward.Flash {
		return contradiction{true, fmt.Sprintf("%s \"does not support Flash Attention 2 yet\" (transformers)",
			j.Model.Architecture), "use --attention eager, the only one of this model"}
	}
	return contradiction{found && r.Attention == string(forward.SDPA),
		fmt.Sprintf("%s \"does not support an attention implementation through torch.nn.functional."+
			"scaled_dot_product_attention yet\" (transformers)", j.Model.Architecture),
		"use --attention eager, which is the default of this model, or --attention flash"}
}

// maxTokens is the limit of tokens in a micro batch. It keeps the size of every
// tensor below 2^63 bytes.
const maxTokens = 1 << 25

// positions returns the length of the longest sequence that learned positions allow, or 0 if there is no limit.
func positions(n *model.Network, parameters []model.Parameter) int64 {
	for _, s := range n.Stacks {
		if s.PositionEmbedding == "" {
			continue
		}
		for _, p := range parameters {
			if p.Name == s.PositionEmbedding+".weight" {
				if s.OwnPositions { // counted from behind the number of the padding, which is 1
					return max(1, p.Shape[0]-2)
				}
				return p.Shape[0]
			}
		}
	}
	return 0
}

// frameworks returns what contradicts settings that only files of frameworks have.
func (j *Job) frameworks() (list []contradiction) {
	if j.QAT != nil {
		list = append(list, contradiction{j.Compile, "torch.compile is not planned with quantization-aware training",
			"turn compilation off"}, contradiction{j.Quantization != nil && j.Quantization.Bits > 0,
			"quantization-aware training needs weights that are not quantized", "remove one of the two"})
	}
	if j.StepsInBackward {
		list = append(list, contradiction{j.Accumulation > 1,
			fmt.Sprintf("the optimizer steps in the backward pass, so it cannot accumulate gradients over %d micro "+
				"batches", j.Accumulation), "give --grad-accum 1"},
			contradiction{j.FSDP != nil || j.World > 1,
				"the optimizer steps in the backward pass, which is planned on one GPU only",
				"give --gpus 1, or an optimizer that steps once for all parameters"})
	}
	return list
}

// optimizersOfDeepSpeed says what the optimizers need that only DeepSpeed has.
func (j *Job) optimizersOfDeepSpeed() []contradiction {
	d, name := j.DeepSpeed, j.Optimizer.Name
	if !j.Optimizer.IsOfDeepSpeed() {
		return nil
	}
	if d == nil {
		return []contradiction{{true, name + " is an optimizer of DeepSpeed, but the job has none",
			"add --deepspeed, or use another optimizer"}}
	}
	bits, release := j.Optimizer.Compresses(), j.Versions.DeepSpeed
	return []contradiction{
		{d.OffloadOptimizer.Device != "none",
			fmt.Sprintf("DeepSpeed's %s runs on the GPU, but the optimizer is offloaded", name),
			"use --optimizer adamw, or leave offload_optimizer out"},
		{bits && d.ZeROStage > 0, name + " does not work with ZeRO: DeepSpeed stops",
			"use --optimizer adamw, or set \"stage\" to 0"},
		{bits && release.AtLeast(0, 19, 7), fmt.Sprintf("DeepSpeed %v does not have %s: 0.19.6 is the last release "+
			"with it", release, name), "give --deepspeed-version 0.19.6, or use another optimizer"},
		{bits && j.ParameterType == dtype.BF16 && !release.AtLeast(0, 17, 6),
			fmt.Sprintf("DeepSpeed %v has BF16_Optimizer for bf16 without ZeRO, which shards master weights, but %s "+
				"needs them in full", release, name), "use fp16, or give --deepspeed-version 0.17.6"},
	}
}

// engines refuses settings that the engine or the optimizer refuses.
func (r *resolver) engines() error {
	j := r.job
	list := []contradiction{
		{math.IsNaN(j.Clip) || math.IsInf(j.Clip, 0) || j.Clip < 0,
			fmt.Sprintf("--clip is %v, expected 0 or more", j.Clip), "leave it out, or give 0 for no clipping"},
		{r.OffloadParameters && j.FSDP == nil, "--fsdp-offload is given without FSDP", "add --fsdp 2"},
	}
	lomo := j.Optimizer.StepsInBackward()
	list = append(list, contradiction{lomo && j.Accumulation > 1,
		fmt.Sprintf("LOMO steps in the backward pass, so it cannot accumulate gradients over %d micro batches",
			j.Accumulation),
		"give --grad-accum 1"})
	list = append(list, j.frameworks()...)
	list = append(list, j.optimizersOfDeepSpeed()...)
	if f := j.FSDP; f != nil {
		torch := j.Versions.Torch
		q := j.Quantization
		list = append(list,
			contradiction{f.Version == 2 && !torch.AtLeast(2, 4, 0),
				fmt.Sprintf("FSDP2 needs torch 2.4 or later, but the job has %v", torch),
				"use --fsdp 1, or give a later --torch"},
			contradiction{!torch.AtLeast(1, 11, 0),
				fmt.Sprintf("FSDP needs torch 1.11 or later, but the job has %v", torch),
				"give a later --torch"},
			contradiction{f.Version == 1 && q != nil && q.Bits == 8,
				"FSDP1 cannot flatten integer dtype tensors, but the weights are in int8",
				"use 4 bits, or leave --fsdp out"},
			r.mixedTypes(),
			contradiction{lomo, "LOMO steps in the backward pass, before FSDP has reduced the gradients",
				"use another optimizer, or leave FSDP out"},
		)
	}
	if d := j.DeepSpeed; d != nil {
		if t := r.training; t != nil && t.DeepSpeed != r.deepSpeed {
			trained := mixedType(t.Precision)
			precision := contradiction{trained != dtype.Invalid && d.Precision != dtype.Invalid &&
				trained != d.Precision,
				fmt.Sprintf("%s trains in %v, but %s in %v: transformers refuses DeepSpeed values \"that mismatch "+
					"TrainingArguments values\"", d.File, d.Precision, t.File, trained),
				"change one of the two"}
			if err := cmp.Or(refuse(precision), t.Mismatch(d)); err != nil {
				return err
			}
		}
		fused := len(j.FusedExperts()) > 0
		list = append(list,
			contradiction{fused && d.ZenFlow != nil,
				fmt.Sprintf("ZenFlow chooses columns of matrices, but transformers %v keeps the experts of a layer "+
					"in three-dimensional tensors", j.Versions.Transformers),
				"remove \"zenflow\", or give --transformers 4.57 if the job uses that version"},
			contradiction{fused && j.Parallel.Tensor > 1,
				fmt.Sprintf("DeepSpeed's tensor parallelism divides linear modules, but transformers %v keeps the "+
					"experts of a layer in two tensors: this is not planned yet", j.Versions.Transformers),
				"remove \"tensor_parallel\", or give --transformers 4.57 if the job uses that version"})
		second := d.Sizes.SecondaryPartition
		list = append(list,
			contradiction{d.ZeROStage == 3 && second > 1 && int64(j.World)%min(second, int64(j.World)) != 0,
				fmt.Sprintf("zero_hpz_partition_size %d does not divide the %d ranks: DeepSpeed stops, as groups of "+
					"ranks would differ", second, j.World), "set it to the number of GPUs of a node"},
			contradiction{d.ZeROStage == 3 && second > 1 && d.OffloadParameters.Device == "nvme",
				"zero_hpz_partition_size keeps second partitions where the parameters are, and DeepSpeed makes no " +
					"tensor on NVMe for them", "offload parameters to the CPU, or set zero_hpz_partition_size to 1"})
		list = append(list, contradiction{d.ZeROStage == 3 && j.Parallel.Tensor > 1,
			"DeepSpeed's tensor parallelism does not go with ZeRO-3: \"the compatibility between 'autotp' and " +
				"'zero_stage = 3' has not been validated\"", "use \"stage\": 2, or leave --tensor-parallel out"})
	}
	return refuse(list...)
}

// mixedTypes says that FSDP needs weights of one type: FSDP1 those of a unit, FSDP2
// the trained ones.
func (r *resolver) mixedTypes() contradiction {
	j := r.job
	wide := ""
	trained := map[bool]bool{}
	for _, p := range j.Model.Parameters {
		trained[p.Wide] = trained[p.Wide] || !p.Frozen
	}
	for _, p := range j.Model.Parameters {
		if p.Wide && (!p.Frozen && j.Adapter == nil && trained[false] || j.FSDP.Version == 1) {
			wide = p.Name
			break
		}
	}
	text := "FSDP1 \"must flatten tensors with uniform dtype\""
	if j.FSDP.Version == 2 {
		text = "FSDP2 \"expects uniform original parameter dtype\""
	}
	return contradiction{wide != "" && j.ParameterType != dtype.F32,
		fmt.Sprintf("%s, but transformers keeps %s in fp32 where the model is loaded in %v", text, wide,
			j.ParameterType),
		"use --precision amp-bf16, which loads the weights in fp32"}
}

// parallelDegrees refuses degrees of parallelism that do not divide the model or the
// ranks evenly.
func (r *resolver) parallelDegrees() error {
	j := r.job
	list := []contradiction{
		{r.TensorParallel < 0, fmt.Sprintf("--tensor-parallel is %d, expected 1 or more", r.TensorParallel), ""},
		{r.ContextParallel < 0, fmt.Sprintf("--context-parallel is %d, expected 1 or more", r.ContextParallel), ""},
		{r.ExpertParallel < 0, fmt.Sprintf("--expert-parallel is %d, expected 1 or more", r.ExpertParallel), ""},
		{j.Parallel.Tensor > 1 && j.Modules == litgptModules && j.Quantization != nil,
			"LitGPT quantizes on one GPU only (NotImplementedError in litgpt/finetune/lora.py)",
			"leave --quantization or --tensor-parallel out"},
		{j.Parallel.Expert > int64(j.World),
			fmt.Sprintf("expert parallelism of %d needs as many ranks, but the job has %d", j.Parallel.Expert, j.World),
			"give more --gpus, or a smaller --expert-parallel"},
		{int64(j.World)%j.Parallel.Expert != 0,
			fmt.Sprintf("%d ranks cannot be divided evenly into expert-parallel groups of %d",
				j.World, j.Parallel.Expert),
			fmt.Sprintf("give a number of GPUs that is a multiple of %d", j.Parallel.Expert)},
		{j.Parallel.Expert > 1 && j.DeepSpeed != nil,
			"expert parallelism under DeepSpeed needs layers of deepspeed.moe, which are not planned yet",
			"leave --expert-parallel out, or shard with FSDP2 (--fsdp 2)"},
		{j.Parallel.Expert > 1 && j.FSDP != nil && j.FSDP.Version == 1,
			"FSDP1 joins the parameters of a unit in one flat tensor over all ranks, so experts cannot have ranks of " +
				"their own", "shard with FSDP2 (--fsdp 2)"},
		{j.FSDP != nil && j.Parallel.Shard%j.Parallel.Expert != 0,
			fmt.Sprintf("the %d ranks that share the parameters cannot be divided into expert-parallel groups of %d",
				j.Parallel.Shard, j.Parallel.Expert), "give an --expert-parallel that divides them"},
	}
	experts := 0
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil {
			experts = len(x.Experts)
		}
		a := &b.Attention
		for _, heads := range []struct {
			count int64
			of    string
		}{{a.Heads, "heads"}, {a.KeyValueHeads, "key and value heads"}} {
			list = append(list, contradiction{heads.count%j.Parallel.Tensor != 0,
				fmt.Sprintf("%s has %d %s, which cannot be divided among %d ranks",
					j.Model.Name, heads.count, heads.of, j.Parallel.Tensor),
				"give a --tensor-parallel that divides them"})
		}
	}
	sound := j.Model.Network.Sound() != nil
	list = append(list,
		contradiction{sound && (j.Parallel.Tensor > 1 || j.Parallel.Context > 1),
			"tensor and context parallelism are not planned for models that read sound",
			"leave --tensor-parallel and --context-parallel out"},
		contradiction{experts == 0 && j.Parallel.Expert > 1,
			fmt.Sprintf("--expert-parallel is %d, but %s has no experts", j.Parallel.Expert, j.Model.Name),
			"leave it out"},
		contradiction{experts%int(j.Parallel.Expert) != 0,
			fmt.Sprintf("%d experts cannot be divided among %d ranks", experts, j.Parallel.Expert),
			"give an --expert-parallel that divides them"},
	)
	return refuse(list...)
}
