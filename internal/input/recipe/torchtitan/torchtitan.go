// Package torchtitan reads configurations of torchtitan.
package torchtitan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// section returns the rule of a section of torchtitan, whose other keys change no memory.
func section(lists ...strict.Keys) strict.Rule { return strict.Object(lists...).AndOthers() }

// Kind is the kind of torchtitan's configurations.
var Kind = &recipe.Kind{Name: "torchtitan configuration", Flag: recipe.ConfigFlag, Program: &torchtitan,
	ConfigIn: "job.config_file $CONFIG_FILE", OnlyByFile: true,
	Unnamed:         "torchtitan of 2026 names a function of Python by --module and --config, and plimsoll reads files",
	Runs:            "python -m torchtitan.train",
	LaunchVariables: []string{"NGPU", "NNODES"},
	Commands:        map[string]string{"torchtitan/train.py": "torchtitan_train", "run_train.sh": "torchtitan_train"},
	Marks:           "torchtitan_train activation_checkpoint parallelism", Settings: settings, SettingsOf: settingsOf}

var settings = recipe.SettingKeys{recipe.MicroBatch: {Path: "training.local_batch_size"},
	recipe.Accumulation:          {Follows: recipe.TrainBatch},
	recipe.TrainBatch:            {Path: "training.global_batch_size"},
	recipe.FSDPOffload:           {Path: "training.enable_cpu_offload"},
	recipe.Reshard:               {Path: "parallelism.fsdp_reshard_after_forward", Says: policyOf},
	recipe.GradientCheckpointing: {Path: "activation_checkpoint.mode", Says: modeOf},
	recipe.BF16:                  {Path: "training.mixed_precision_param", Says: recipe.Constant("bfloat16")},
	recipe.TensorDegree:          {Path: "parallelism.tensor_parallel_degree", Unset: 1},
	recipe.ContextDegree:         {Path: "parallelism.context_parallel_degree", Unset: 1},
	recipe.ShardDegree:           {Path: "parallelism.data_parallel_shard_degree", Unset: -1},
	recipe.PipelineDegree:        {Path: "parallelism.pipeline_parallel_degree", Unset: 1},
	recipe.PipelineSchedule:      {Path: "parallelism.pipeline_parallel_schedule", Unset: "1F1B"},
	recipe.PipelineMicroBatch:    {Path: "parallelism.pipeline_parallel_microbatch_size", Unset: 1},
}

// settingsOf returns the keys of a file, which may have the older name of the micro batch.
func settingsOf(root *strict.Value) recipe.SettingKeys {
	if root.Find("training.batch_size") == nil {
		return settings
	}
	return recipe.SettingKeys{recipe.MicroBatch: {Path: "training.batch_size"},
		recipe.GradientCheckpointing: settings[recipe.GradientCheckpointing]}
}

// modeOf is torchtitan's name of checkpointing.
func modeOf(x any) any {
	if x == true {
		return "full"
	}
	return "none"
}

// policyOf is torchtitan's name of resharding.
func policyOf(x any) any {
	if x == true {
		return "always"
	}
	return "never"
}

// torchtitan is torchtitan's JobConfig of 2025 in TOML (torchtitan/config/job_config.py), with the older names of keys.
var torchtitan = recipe.Program{Name: "torchtitan",
	Package: "torchtitan", Release: version.Version{Minor: 2, Patch: 2},
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(strict.Keys{
		"model": section(rule.Worded.For("name flavor"), rule.Names.OrNull().For("converters")),
		"optimizer": section(strict.Keys{"name": rule.Worded.Default("AdamW"),
			"implementation": strict.Text("for-loop", "foreach", "fused").Default("fused"),
			"fused":          rule.Boolean.OrNull()},
			rule.Switched.For("early_step_in_backward")),
		"training": section(rule.Counted.For("local_batch_size batch_size"), strict.Keys{
			"seq_len":                rule.Counted.Default(2048),
			"max_norm":               rule.Measured.Default(1.),
			"mixed_precision_param":  strict.Text("bfloat16", "float32").Default("bfloat16"),
			"mixed_precision_reduce": strict.Text("float32"),
			"dtype":                  strict.Text("float32", "bfloat16").Default("float32")},
			rule.Switched.For("compile enable_cpu_offload"),
			rule.Integer.For(`global_batch_size tensor_parallel_degree data_parallel_degree
				data_parallel_replicate_degree data_parallel_shard_degree`)),
		"parallelism": section(rule.Integer.For(`data_parallel_replicate_degree tensor_parallel_degree
			pipeline_parallel_degree context_parallel_degree expert_parallel_degree expert_tensor_parallel_degree`),
			strict.Keys{
				"data_parallel_shard_degree":                rule.Integer.Default(-1),
				"disable_loss_parallel":                     rule.Switched,
				"enable_async_tensor_parallel":              rule.Switched,
				"expert_parallel_comm_backend":              rule.Worded.Default("standard"),
				"pipeline_parallel_schedule":                rule.Worded.Default("1F1B"),
				"pipeline_parallel_schedule_csv":            rule.Text.OrNull(),
				"pipeline_parallel_microbatch_size":         rule.Counted.Default(1),
				"pipeline_parallel_layers_per_stage":        rule.Counted.OrNull(),
				"pipeline_parallel_first_stage_less_layers": rule.Integer.Default(1),
				"pipeline_parallel_last_stage_less_layers":  rule.Integer.Default(1),
				"pipeline_parallel_split_points":            rule.Names,
				"module_fqns_per_model_part":                strict.List(rule.Names).OrNull(),
				"fsdp_reshard_after_forward": strict.Text("default", "always", "never").
					Default("default")}),
		"activation_checkpoint": section(strict.Keys{"mode": rule.Worded.Default("selective"),
			"selective_ac_option": rule.Worded.Or(rule.Integer).Default("2"), "early_stop": rule.Switched,
			"per_op_sac_force_recompute_mm_shapes_by_fqns": rule.Names}),
		"fault_tolerance": section(rule.Switched.For("enable")),
		"validation":      section(rule.Switched.For("enable")),
		"checkpoint":      section(rule.Worded.For("async_mode")),
		"job":             section(rule.Worded.For("custom_config_module")),
		"compile":         section(rule.Switched.For("enable"), rule.Names.For("components")),
		"experimental": section(rule.Integer.For("pipeline_parallel_degree context_parallel_degree"),
			rule.Worded.For("custom_import custom_args_module")),
	}, rule.Free.For(`profiling metrics lr_scheduler float8 mx comm memory_estimation quantize debug`))}

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	r.To.Modules, r.To.ReducesIn32 = "torchtitan", true
	r.model()
	if err := r.refuse(); err != nil {
		return err
	}
	r.Longest("training.seq_len")
	batch := "training.local_batch_size"
	if r.Gives("training.batch_size") {
		batch = "training.batch_size"
	}
	size := max(1, r.Integer(batch))
	if !r.Gives(batch) {
		size = 8
	}
	r.Set("per_device_train_batch_size", batch, int(size))
	if all := r.Integer("training.global_batch_size"); all > 0 {
		r.To.GlobalBatch = &recipe.GlobalBatch{Place: r.Place("training.global_batch_size"), Sequences: int(all)}
	}
	r.Set("max_grad_norm", "training.max_norm", r.Number("training.max_norm"))
	r.compile()
	name := "adamw_torch"
	if r.Word("optimizer.implementation") == "fused" && (!r.Gives("optimizer.fused") || r.Truth("optimizer.fused")) {
		name = "adamw_torch_fused"
	}
	r.Set("optim", "optimizer.name", name)
	r.To.Weights = "fp32"
	if r.Word("training.dtype") == "bfloat16" {
		r.To.Weights = "bf16"
	}
	r.Set("bf16", "training.mixed_precision_param", r.Word("training.mixed_precision_param") == "bfloat16")
	r.shard()
	return cmp.Or(r.pipeline(), r.recompute())
}

// compile reads what is compiled: the model and the loss, unless components name less.
func (r *reader) compile() {
	compiles := r.Truth("training.compile") || r.Truth("compile.enable")
	if v := r.Find("compile.components"); v != nil && compiles && !slices.Contains(v.Texts(), "model") {
		r.Note("compile.components", "has no model: the job is planned without compilation")
		compiles = false
	}
	r.Set("torch_compile", "compile", compiles)
}

// pipeline reads how the model is cut into pipeline stages.
func (r *reader) pipeline() error {
	const p = "parallelism.pipeline_parallel_"
	degree := int(r.Integer(p + "degree"))
	if degree <= 1 {
		return nil
	}
	for _, own := range []string{p + "schedule_csv", p + "split_points"} {
		if v := r.Find(own); v != nil && (v.Text != "" || len(v.Elements) > 0) {
			return r.Fault(own, "is given, which is not planned yet", "plimsoll plans "+p+"schedule and "+p+
				"layers_per_stage")
		}
	}
	r.To.Pipeline = &recipe.Pipeline{Place: r.Place(p + "degree"), Degree: degree, Schedule: r.Word(p + "schedule"),
		MicroBatch: int(r.Integer(p + "microbatch_size")), LayersEach: int(r.Integer(p + "layers_per_stage")),
		LayersLess: [2]int{int(r.Integer(p + "first_stage_less_layers")), int(r.Integer(p + "last_stage_less_layers"))}}
	if v := r.Find("parallelism.module_fqns_per_model_part"); v != nil {
		for _, part := range v.Elements {
			layers := 0
			for _, name := range part.Texts() {
				if strings.HasPrefix(name, "layers.") {
					layers++
				}
			}
			r.To.Pipeline.Layers = append(r.To.Pipeline.Layers, layers)
		}
	}
	return nil
}

// olderDegrees are the degrees of parallelism where torchtitan of 2024 has them.
const olderDegrees = `training.tensor_parallel_degree training.data_parallel_degree
	training.data_parallel_replicate_degree training.data_parallel_shard_degree
	experimental.pipeline_parallel_degree experimental.context_parallel_degree`

// refuse refuses what is not planned.
func (r *reader) refuse() error {
	if v := r.Find("optimizer.name"); v != nil && v.Text != "AdamW" {
		return r.Fault("optimizer.name", fmt.Sprintf("is %s, which is not planned yet", v), "plimsoll plans AdamW")
	}
	const experts, tensor = "parallelism.expert_parallel_degree", "parallelism.tensor_parallel_degree"
	if r.Integer(experts) > 1 && r.Integer(tensor) > 1 {
		return r.Fault(experts, "and tensor_parallel_degree are both above 1, which is not planned yet",
			"set one of the two to 1")
	}
	if r.Truth("parallelism.disable_loss_parallel") && r.Integer(tensor) > 1 {
		return r.Fault("parallelism.disable_loss_parallel", "is true beside tensor parallelism: every rank then has "+
			"all logits, which is not planned yet", "set it to false")
	}
	r.remarks()
	for key := range strings.FieldsSeq(olderDegrees) {
		if v := r.Find(key); v != nil && !slices.Contains([]string{"1", "0", "-1"}, v.String()) {
			return r.Fault(key, fmt.Sprintf("is %s, but torchtitan of 2025 reads it in [parallelism]", v),
				"move it there")
		}
	}
	if v := r.Find("model.converters"); v != nil {
		for _, name := range v.Texts() {
			if !strings.HasSuffix(name, "float8") || strings.Contains(name, "grouped_mm") {
				return r.Fault("model.converters", fmt.Sprintf("is %q: it quantizes layers, which is not planned yet",
					name), "remove it to plan the job without, and expect its memory to differ")
			}
			r.To.ScalesProducts = true
			r.Note("model.converters", "has float8, which is not planned: products save what they read in 16 bits")
		}
	}
	return r.Unplanned("the optimizer steps in the backward pass", "optimizer.early_step_in_backward")
}

// remarks notes keys that change memory in a way that the plan leaves out.
func (r *reader) remarks() {
	for _, n := range [][2]string{
		{"parallelism.enable_async_tensor_parallel", "has buffers of symmetric memory, which are not planned"},
		{"parallelism.disable_loss_parallel", "has every rank of tensor parallelism make all logits"},
		{"fault_tolerance.enable", "has copies of gradients or parameters for replicas, which are not planned"},
		{"validation.enable", "has passes over other samples, which are not planned"},
		{"experimental.custom_import", "imports code that may change the model or the passes"},
		{"experimental.custom_args_module", "imports code that may change the model or the passes"},
		{"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", "names products that are recomputed, " +
			"too, which takes less than the plan says"},
		{"job.custom_config_module", "imports code that may change the model or the passes"},
	} {
		if recipe.On(r.Find(n[0])) {
			r.Note(n[0], n[1])
		}
	}
	if mode := r.Word("checkpoint.async_mode"); mode != "" && mode != "disabled" {
		r.Note("checkpoint.async_mode", "is "+mode+": a copy of what is saved is on the host while it is written, "+
			"which is not planned")
	}
	if name := r.Word("parallelism.expert_parallel_comm_backend"); name != "standard" && name != "" {
		r.Note("parallelism.expert_parallel_comm_backend", "is "+name+", whose buffers are not planned")
	}
	if key := "activation_checkpoint.early_stop"; r.Truth(key) {
		r.Note(key, "is true: checkpoints recompute no more than they need, as planned")
	}
}

// model sets the name of the model in the catalog.
func (r *reader) model() {
	begin := map[string]string{"llama3": "llama-3-", "qwen3": "qwen3-", "gpt_oss": "gpt-oss-",
		"deepseek_v3": "deepseek-"}[r.Word("model.name")]
	flavor := strings.ToLower(r.Word("model.flavor"))
	r.NameModel("model.flavor", r.Word("model.name")+" "+flavor)
	if flavor == "405b" && begin == "llama-3-" {
		begin = "llama-3.1-"
	}
	if begin == "deepseek-" { // flavors are earlier models, too
		flavor = map[string]string{"16b": "v2-lite", "236b": "v2", "671b": "v3"}[flavor]
	}
	flavor, _, _ = strings.Cut(flavor, "_flex")
	flavor, _, _ = strings.Cut(flavor, "_varlen")
	if begin != "" && flavor != "" && !strings.HasPrefix(flavor, "debugmodel") {
		r.To.Model = begin + flavor
	}
}

// shard sets FSDP2, which several ranks have. Its default is to reshard where there is no pipeline.
func (r *reader) shard() {
	const p = "parallelism."
	policy := r.Word(p + "fsdp_reshard_after_forward")
	reshards := policy == "always" || policy == "default" && r.Integer(p+"pipeline_parallel_degree") <= 1
	r.ShardFSDP2("parallelism", reshards, r.Truth("training.enable_cpu_offload"), "SHARDED_STATE_DICT")
	r.Dimensions(p+"data_parallel_replicate_degree", p+"data_parallel_shard_degree", p+"tensor_parallel_degree",
		p+"context_parallel_degree")
	r.To.Experts = int(r.Integer(p + "expert_parallel_degree"))
}

// recompute reads what the backward pass recomputes.
func (r *reader) recompute() error {
	const mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
	switch r.Word(mode) {
	case "none":
		r.To.Recompute = "none"
	case "full":
		r.To.Recompute = "full"
	case "selective":
		switch v := r.Value(option); v.Text {
		case "op":
			r.To.Recompute = "selective"
		case "1":
			r.To.Recompute = "full"
		case "2":
			r.To.Recompute = "every-2"
		default:
			return r.Fault(option, fmt.Sprintf("is %s, which is not planned yet", v), `plimsoll plans "op", "1" and "2"`)
		}
	default:
		return r.Fault(mode, fmt.Sprintf("is %s, which is not planned yet", r.Find(mode)),
			"plimsoll plans none, selective and full")
	}
	return nil
}
