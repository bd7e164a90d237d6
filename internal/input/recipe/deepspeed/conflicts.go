package deepspeed

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/strict"
)

// conflicts refuses what DeepSpeed refuses: DeepSpeedConfig (config.py),
// DeepSpeedEngine's sanity checks (engine.py) and the constructors of the ZeRO
// optimizers. It notes what DeepSpeed silently ignores.
func (r *reader) conflicts(d *Config) error {
	if err := r.removed(d.release); err != nil {
		return err
	}
	if err := r.sectionConflicts(d); err != nil {
		return err
	}
	// Accelerate chooses an "auto" stage, and the other checks need the stage.
	if r.IsAuto("zero_optimization.stage") {
		return nil
	}
	if err := r.Refuse(r.zeroConflicts(d)); err != nil {
		return err
	}
	if o := d.Optimizer; o != nil && o.isAdam() && !o.TorchAdam && d.OffloadOptimizer.Device == "none" &&
		r.params.Truth("amsgrad") {
		return r.params.Fault("amsgrad", "is true: DeepSpeed's fused Adam has no AMSGrad variant",
			`remove the key, or add "torch_adam": true`)
	}
	if err := r.Refuse(slices.Concat(r.precisionConflicts(d), r.zenFlowConflicts(d))); err != nil {
		return err
	}
	r.noteIgnored(d)
	return nil
}

// removed refuses keys that a release refuses by name, as it no longer has what they turn on
// (_reject_removed_config_keys in config.py).
func (r *reader) removed(release version.Version) error {
	const zero = "zero_optimization."
	for _, later := range []struct {
		patch int
		keys  []string
	}{
		{7, []string{"nebula", "compression_training", "quantize_training", "sparse_attention",
			zero + "mics_shard_size", zero + "mics_hierarchical_params_gather"}},
		{8, []string{"amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting", "curriculum_learning",
			"progressive_layer_drop", zero + "zeropp_loco_param"}},
	} {
		for _, key := range later.keys {
			if r.Has(key) && !release.IsZero() && release.AtLeast(0, 19, later.patch) {
				return r.Fault(key, fmt.Sprintf("was removed in DeepSpeed 0.19.%d, which ends with an error",
					later.patch), "remove it, or give an earlier --deepspeed-version")
			}
		}
	}
	return nil
}

// sectionConflicts refuses keys that contradict each other at any stage.
func (r *reader) sectionConflicts(d *Config) error {
	const zero = "zero_optimization."
	for _, pair := range [][2]string{{zero + "cpu_offload", zero + "offload_optimizer"},
		{zero + "cpu_offload_param", zero + "offload_param"}} {
		if r.Gives(pair[0]) && r.Gives(pair[1]) {
			return r.Fault(pair[0], fmt.Sprintf("and %s (line %d) are two names for one setting",
				pair[1], r.Place(pair[1]).Line), "remove the first")
		}
	}
	if !r.Truth("elasticity.enabled") {
		return nil
	}
	var list []strict.Conflict
	for _, key := range []string{"max_train_batch_size", "micro_batch_sizes"} {
		list = append(list, strict.Conflict{!r.Gives("elasticity." + key), "elasticity", "is enabled without " + key,
			fmt.Sprintf("add %q to it", key)})
	}
	most, least := r.Integer("elasticity.max_gpus"), r.Integer("elasticity.min_gpus")
	list = append(list, strict.Conflict{most < least, "elasticity.max_gpus",
		fmt.Sprintf("is %d, less than min_gpus, which is %d", most, least), ""})
	for _, key := range []string{TrainKey, MicroKey, AccumulationKey} {
		list = append(list, strict.Conflict{r.Has(key) && !r.Truth("elasticity.ignore_non_elastic_batch_info"), key,
			"is given, but elasticity is enabled and chooses the batch itself",
			`remove the key, or set elasticity's "ignore_non_elastic_batch_info" to true`})
	}
	return r.Refuse(list)
}

func (r *reader) zeroConflicts(d *Config) []strict.Conflict {
	const zero = "zero_optimization."
	sharded, offloaded := d.ZeROStage > 0, d.OffloadOptimizer.Device != "none"
	list := []strict.Conflict{
		{!sharded && offloaded, zero + "offload_optimizer",
			"needs ZeRO: DeepSpeed's CPU optimizer fails in its first step at stage 0, where the parameters are on " +
				"the GPU", `set "stage" to 1, 2 or 3`},
		{d.OffloadOptimizer.Ratio < 1 && d.ZeROStage != 3, zero + "offload_optimizer.ratio",
			fmt.Sprintf("is %v: only stage 3 can offload a part of the optimizer", d.OffloadOptimizer.Ratio),
			`set it to 1, or "stage" to 3`},
		{d.ZeROStage == 3 && d.OffloadOptimizer.Device == "nvme" &&
			!r.Gives(zero+"offload_optimizer.nvme_path"), zero + "offload_optimizer",
			`offloads to nvme without an "nvme_path"`, `add "nvme_path": "/local_nvme"`},
		{d.ZeROStage == 3 && d.OffloadParameters.Device == "nvme" && !r.Gives(zero+"offload_param.nvme_path"),
			zero + "offload_param", `offloads to nvme without an "nvme_path"`, `add "nvme_path": "/local_nvme"`},
		{sharded && r.Truth(zero+"legacy_stage1"), zero + "legacy_stage1",
			"is true: DeepSpeed dropped that version of stage 1", "remove the key"},
		{sharded && r.Truth("amp.enabled"), "amp.enabled",
			"is true: DeepSpeed does not combine Apex AMP with ZeRO", "use bf16 or fp16"},
		{d.ZeROStage >= 2 && r.Truth(zero+"reduce_scatter") && r.Number("gradient_predivide_factor") != 1,
			"gradient_predivide_factor",
			"is not 1: stages 2 and 3 with reduce_scatter do not support that",
			`remove the key, or set "reduce_scatter" to false`},
		{d.ZeROStage >= 2 && r.Truth(zero+"reduce_scatter") && r.Truth("prescale_gradients"),
			"prescale_gradients",
			"is true: stages 2 and 3 with reduce_scatter do not support that",
			`remove the key, or set "reduce_scatter" to false`},
		{d.ZeROStage < 2 && d.OverlapReduction && !r.Truth("managed_gradient_accumulation"),
			"managed_gradient_accumulation",
			"is false: overlap_comm then needs stage 2 or 3", `set "overlap_comm" to false`},
		{!r.Truth("managed_gradient_accumulation") && r.Truth("compile.deepcompile"),
			"managed_gradient_accumulation", "is false: DeepCompile does not support that", "remove the key"},
	}
	for _, sum := range []struct {
		is   bool
		with string
	}{
		{d.ZeROStage == 3, "stage 3"},
		{d.ZenFlow != nil, "ZenFlow"},
		{r.Truth("compile.deepcompile"), "DeepCompile"},
	} {
		list = append(list, strict.Conflict{sum.is && strings.EqualFold(r.Word("gradient_allreduce_op"), "sum"),
			"gradient_allreduce_op", `is "sum": DeepSpeed does not support that with ` + sum.with, `use "mean"`})
	}
	if d.Optimizer == nil {
		return list
	}
	t := optimizerNamed(d.Optimizer.Type)
	return append(list,
		strict.Conflict{sharded && t.never, "optimizer.type",
			d.Optimizer.Type + " does not work with ZeRO", `use AdamW, or set "stage" to 0`},
		strict.Conflict{sharded && !t.zero && !t.never && !r.Truth("zero_allow_untested_optimizer"), "optimizer.type",
			d.Optimizer.Type + " is not one that DeepSpeed has tested with ZeRO",
			`use AdamW, or add "zero_allow_untested_optimizer": true`},
		strict.Conflict{slices.Contains([]string{"Lamb", "OneBitLamb"}, d.Optimizer.Type) &&
			r.Number("fp16.loss_scale") != 0, "fp16.loss_scale",
			"is a fixed scale: " + d.Optimizer.Type + " needs a dynamic one", "set it to 0"},
	)
}

func (r *reader) precisionConflicts(d *Config) []strict.Conflict {
	bf16 := r.bf16
	half := r.Truth("fp16.enabled")
	dynamic := half && r.Number("fp16.loss_scale") == 0
	firstScale := math.Exp2(float64(r.Integer("fp16.initial_scale_power")))
	least := r.Number("fp16.min_loss_scale")
	parameters := r.Type("data_types.param_dtype")
	list := []strict.Conflict{
		{half && r.Truth(bf16+".enabled"), "fp16.enabled",
			fmt.Sprintf("and %s.enabled (line %d) are both true: a model trains in only one of them",
				bf16, r.Place(bf16+".enabled").Line), "set one of the two to false"},
		{r.Truth("torch_autocast.enabled") && d.Autocast == dtype.Invalid, "torch_autocast",
			"is enabled without a dtype, in which it would gather and reduce weights", `add "dtype": "bfloat16"`},
		{d.Autocast != dtype.Invalid && r.Truth("zero_optimization.zero_quantized_weights"), "torch_autocast",
			"is enabled beside zero_quantized_weights: DeepSpeed refuses that", "remove one of the two"},
		{dynamic && r.Integer("fp16.loss_scale_window") <= 0, "fp16.loss_scale_window",
			"must be positive with a dynamic loss scale", "remove the key: the default is 1000"},
		{least != math.Trunc(least) && (d.release.IsZero() || d.release.AtLeast(0, 17, 1)), "fp16.min_loss_scale",
			fmt.Sprintf("is %g, expected a whole number: DeepSpeed takes others only before 0.17.1", least),
			"remove the key, whose default is 1, or name an older release by --deepspeed-version"},
		{dynamic && least <= 0, "fp16.min_loss_scale",
			"must be positive with a dynamic loss scale", "remove the key: the default is 1"},
		{dynamic && r.Integer("fp16.hysteresis") <= 0, "fp16.hysteresis",
			"must be positive with a dynamic loss scale", "remove the key: the default is 2"},
		{dynamic && least > firstScale, "fp16.min_loss_scale",
			fmt.Sprintf("is above the first loss scale, %g, which an overflow would raise", firstScale),
			`lower it, or raise "initial_scale_power"`},
		{r.Truth("amp.enabled") && (d.Precision == dtype.F16 || d.Precision == dtype.BF16), "amp.enabled",
			"is true beside " + d.Precision.String() + ": the two exclude each other", "set one of the two to false"},
		{parameters != dtype.Invalid && d.Precision != dtype.Invalid && parameters != d.Precision,
			"data_types.param_dtype",
			fmt.Sprintf("is %v, but the model is trained in %v", parameters, d.Precision),
			"remove the key, or enable the section of that type"},
		{d.ZeROStage == 0 && d.Precision != dtype.Invalid && d.GradientAccumulationDType != dtype.Invalid &&
			d.GradientAccumulationDType != d.Precision, "data_types.grad_accum_dtype",
			fmt.Sprintf("is %v, but without ZeRO DeepSpeed accumulates gradients in the model's type, %v",
				d.GradientAccumulationDType, d.Precision), "remove the key, or set ZeRO's \"stage\" to 1"},
		{d.LowPrecisionState && !r.Truth(bf16+".bf16_master_weights_and_grads"), bf16 + ".bf16_optimizer_states",
			"needs bf16_master_weights_and_grads", `add "bf16_master_weights_and_grads": true`},
	}
	group := d.ZeROStage == 3 && d.Sizes.Group > 0
	list = append(list,
		strict.Conflict{group && (d.OffloadOptimizer.Device != "none" || d.OffloadParameters.Device != "none"),
			"zero_optimization.mics_shard_size", `is given, but MiCS "has no support for CPU offloading"`,
			"leave offload_optimizer and offload_param out"})
	onGPU := d.OffloadOptimizer.Device == "none"
	for _, master := range []struct {
		path     string
		offloads bool // the optimizer must be offloaded
	}{
		{bf16 + ".bf16_master_weights_and_grads", !d.LowPrecisionState},
		{"fp16.fp16_master_weights_and_grads", true},
	} {
		is := r.Truth(master.path)
		list = append(list,
			strict.Conflict{is && d.ZeROStage == 0, master.path, "needs ZeRO", `set "stage" to 1, 2 or 3`},
			strict.Conflict{is && master.offloads && onGPU, master.path, "needs the optimizer on the CPU",
				`add "offload_optimizer": {"device": "cpu"}`},
			strict.Conflict{is && !onGPU && d.Optimizer != nil &&
				!d.Optimizer.IsFusedAdam(), master.path,
				"works with DeepSpeed's CPU Adam only", `set the optimizer's "type" to "AdamW", without "torch_adam"`})
	}
	return list
}

func (r *reader) zenFlowConflicts(d *Config) []strict.Conflict {
	const zenflow = "zero_optimization.zenflow"
	if d.ZenFlow == nil {
		return nil
	}
	strategy := r.Word(zenflow + ".select_strategy")
	interval := r.Integer(zenflow + ".select_interval")
	given := r.Gives(zenflow + ".select_interval")
	return []strict.Conflict{
		{(d.ZeROStage == 1 || d.ZeROStage == 2) && d.OffloadOptimizer.Device == "none", zenflow,
			"needs the optimizer on the CPU", `add "offload_optimizer": {"device": "cpu"}`},
		{d.ZenFlow.Offload && d.ZeROStage > 0 && !d.OverlapReduction, zenflow + ".offload",
			"is true, which needs overlap_comm", `add "overlap_comm": true`},
		{strategy == "auto" && given, zenflow + ".select_interval",
			`is a number, but the strategy "auto" chooses it`,
			`remove the key, or set "select_strategy" to "step" or "epoch"`},
		{strategy != "auto" && !given, zenflow + ".select_strategy",
			fmt.Sprintf("is %q, which needs a select_interval", strategy), `add "select_interval": 1`},
		{strategy == "step" && interval != 0 && interval < int64(d.ZenFlow.UpdateInterval),
			zenflow + ".select_interval",
			fmt.Sprintf("is %d, less than update_interval, which is %d", interval, d.ZenFlow.UpdateInterval), ""},
	}
}

// noteIgnored notes keys that have no effect in DeepSpeed and resets their
// values.
func (r *reader) noteIgnored(d *Config) {
	const zero = "zero_optimization."
	if d.ZeROStage < 3 && d.OffloadParameters.Device != "none" {
		r.Note(zero+"offload_param",
			fmt.Sprintf("has no effect at stage %d: only stage 3 offloads parameters", d.ZeROStage))
		d.OffloadParameters.Device = "none"
	}
	if d.ZeROStage < 3 && d.OffloadOptimizer.SuperOffload {
		r.Note(zero+"offload_optimizer.super_offload",
			fmt.Sprintf("has no effect at stage %d: it needs stage 3", d.ZeROStage))
		d.OffloadOptimizer.SuperOffload = false
	}
	if (d.ZeROStage == 1 || d.ZeROStage == 2) && d.OffloadOptimizer.Device == "nvme" {
		r.Note(zero+"offload_optimizer.device", fmt.Sprintf(`is "nvme", which stage %d treats as "cpu"`, d.ZeROStage))
		d.OffloadOptimizer.Device = "cpu"
	}
	if r.Has("bf16") && r.Has("bfloat16") {
		r.Note("bfloat16", `has no effect beside "bf16"`)
	}
	if whole := r.Find("zero_optimization"); whole != nil && whole.Kind != '{' {
		r.Note("zero_optimization", `is a boolean, which is deprecated: use {"stage": 1}`)
	}
	// Two defaults changed recently and affect the result or the memory.
	if !r.Has("gradient_clipping") {
		r.Note("gradient_clipping",
			"is not given: DeepSpeed clips gradients to a norm of 1 since DeepSpeed #8068 (June 2026), and did not "+
				"before")
	}
	if pin := zero + "offload_optimizer.pin_memory"; d.OffloadOptimizer.Device != "none" && !r.Gives(pin) {
		r.Note(pin, "is not given: DeepSpeed pins the memory since DeepSpeed #8207 (August 2026), and did not before")
	}
}
