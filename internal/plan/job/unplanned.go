package job

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
)

// unplanned refuses settings of files that would change the plan by much. It
// notes other settings that the plan ignores.
func (r *resolver) unplanned() error {
	j := r.job
	if f := j.FSDP; f != nil && f.WrapPolicy == "size_based_wrap" {
		return fault.Inputf("auto_wrap_policy is SIZE_BASED_WRAP, which makes units of any modules that are large " +
			"enough, and is not planned yet").WithHint("use TRANSFORMER_BASED_WRAP: the units are the blocks")
	}
	for _, u := range slices.Concat(r.unplannedOfTraining(), r.unplannedOfLaunch(), r.unplannedOfEngines()) {
		if u.is {
			r.assume("not planned: %s", u.what)
		}
	}
	return nil
}

// unplannedKey is a setting that the plan ignores, if it is given.
type unplannedKey struct {
	is   bool
	what string
}

func (r *resolver) unplannedOfTraining() []unplannedKey {
	t := r.training
	if t == nil {
		return nil
	}
	return []unplannedKey{
		{t.AutoFindBatchSize, "auto_find_batch_size: the plan has the first micro batch that the Trainer tries"},
		{t.Evaluation.Enabled && !t.Evaluation.LossOnly && t.Evaluation.AccumulationSteps == 0,
			"evaluation: without eval_accumulation_steps the GPU holds the predictions for the full evaluation set"},
		{t.Evaluation.Enabled && r.job.Evaluation == nil, "evaluation"},
		{t.DataLoader.Workers > 0,
			fmt.Sprintf("the %d data loader processes of each rank and the batches that they prefetch",
				t.DataLoader.Workers)},
		{t.TorchEmptyCacheSteps > 0,
			fmt.Sprintf("torch_empty_cache_steps: every %d steps the allocator frees its cache",
				t.TorchEmptyCacheSteps)},
	}
}

func (r *resolver) unplannedOfLaunch() []unplannedKey {
	l, j := r.launch, r.job
	if l == nil {
		return nil
	}
	gathers := len(l.MoELayers) > 0 && j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x == nil || x.Fused() {
			gathers = false
		}
	}
	backend := strings.ToLower(l.CompileBackend)
	return []unplannedKey{
		{l.Precision == recipe.MixedFP8, "mixed_precision fp8 (" + l.FP8Backend + "): the job is planned in bf16"},
		{gathers, "deepspeed_moe_layer_cls_names: ZeRO-3 gathers all experts of a layer at once"},
		{backend != "" && backend != "inductor",
			"dynamo_backend " + backend + ": the plan is for the model without compilation"},
	}
}

func (r *resolver) unplannedOfEngines() []unplannedKey {
	j := r.job
	var list []unplannedKey
	if d := j.DeepSpeed; d != nil {
		list = append(list, unplannedKey{d.CheckpointActivationsOnCPU,
			"cpu_checkpointing, which affects only models that call DeepSpeed's own checkpointing"})
		for _, key := range d.Beside {
			list = append(list, unplannedKey{true, key})
		}
	}
	if f := j.FSDP; f != nil {
		blocks := j.Model.BlockClasses()
		list = append(list, unplannedKey{len(blocks) > 0 && j.wrapsOthers(blocks), fmt.Sprintf("FSDP units of %s: "+
			"the plan takes the blocks of the model as units (%s)", strings.Join(f.WrapLayers, ", "),
			strings.Join(blocks, " and "))})
	}
	if q := j.Quantization; q != nil && q.Bits == 4 && q.Method == "" && q.File != "" {
		list = append(list, unplannedKey{q.ComputeDType != j.ComputeType() && q.ComputeDType != j.AutocastType,
			fmt.Sprintf("bnb_4bit_compute_dtype %v: the plan has linear modules compute in %v",
				q.ComputeDType, j.ComputeType())})
	}
	return list
}

// wrapsOthers reports whether FSDP's file names other units than the blocks of tokens, with or without those of
// encoders.
func (j *Job) wrapsOthers(blocks []string) bool {
	if len(j.FSDP.WrapLayers) == 0 {
		return false
	}
	ofEncoder := func(class string) bool {
		encodes := func(t *model.Tower) bool { return t.BlockClass == class }
		return !slices.Contains(blocks, class) && slices.ContainsFunc(j.Model.Network.Towers, encodes)
	}
	named := slices.DeleteFunc(slices.Sorted(slices.Values(j.FSDP.WrapLayers)), ofEncoder)
	return !slices.Equal(slices.Compact(named), blocks)
}
