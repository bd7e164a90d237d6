package recipe

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
)

// companion returns the path of the file that the key at path names.
func companion(r *strict.Reader, path string) (string, error) {
	v := r.Find(path)
	if strings.HasPrefix(v.Text, "{") {
		return "", r.Inputf(v.At, "%s is an object written as a string", path).
			WithHint("remove the quotes around it and the \\ in it")
	}
	for _, name := range places(r.File, v.Text) {
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			return name, nil
		}
	}
	return "", r.Inputf(v.At, "%s names %s, which does not exist", path, v.Text).
		WithHint("give the path relative to the working directory, to this file or to a folder above it")
}

// places returns where a file that another one names may be. Programs look in the working directory. Users also write
// paths from the file itself or, in a repository, from a folder above it.
func places(from, name string) []string {
	if filepath.IsAbs(name) {
		return []string{name}
	}
	list := []string{name}
	folder := filepath.Dir(from)
	if absolute, err := filepath.Abs(folder); err == nil {
		list = append(list, filepath.Join(folder, name))
		for above := filepath.Dir(absolute); above != filepath.Dir(above); above = filepath.Dir(above) {
			list = append(list, filepath.Join(above, name))
		}
	}
	return list
}

// deepSpeedValues returns the keys of a DeepSpeed configuration that the
// Trainer takes from its arguments: trainer_config_process in
// integrations/deepspeed.py.
func (t *Training) deepSpeedValues() []deepspeed.Autofill {
	o := t.Optimizer
	return []deepspeed.Autofill{
		{Path: deepspeed.MicroKey, Is: strict.Of(t.MicroBatch), From: "per_device_train_batch_size",
			Lenient: t.AutoFindBatchSize},
		{Path: deepspeed.AccumulationKey, Is: strict.Of(t.GradientAccumulation), From: deepspeed.AccumulationKey},
		{Path: "gradient_clipping", Is: strict.Of(t.MaxGradNorm), From: "max_grad_norm"},
		{Path: "optimizer.params.lr", Is: strict.Of(o.LR), From: "learning_rate"},
		{Path: "optimizer.params.betas", Is: strict.Of([]float64{o.Beta1, o.Beta2}), From: "adam_beta1 and adam_beta2"},
		{Path: "optimizer.params.eps", Is: strict.Of(o.Epsilon), From: "adam_epsilon"},
		{Path: "optimizer.params.weight_decay", Is: strict.Of(o.WeightDecay), From: "weight_decay"},
		{Path: "scheduler.params.warmup_max_lr", Is: strict.Of(o.LR), From: "learning_rate"},
		{Path: "scheduler.params.warmup_min_lr", Is: strict.Of(0), Lenient: true},
		// ResolveBatch computes it, as it depends on the number of ranks.
		{Path: deepspeed.TrainKey, Is: strict.Of(nil), Lenient: true},
	}
}

// deepSpeed reads the DeepSpeed configuration and replaces "auto" as the
// Trainer does.
func (r *trainingReader) deepSpeed(t *Training) (*deepspeed.Config, error) {
	d := &strict.Document{File: r.File, Text: r.Text, Root: r.Find("deepspeed")}
	if d.Root.Kind == '"' {
		path, err := companion(r.Reader, "deepspeed")
		if err != nil {
			return nil, err
		}
		if d, err = load(r.from.Texts, path, DeepSpeedKind, strict.ParseJSON); err != nil {
			return nil, err
		}
	}
	precisions := []struct {
		section string
		is      Precision
	}{{"fp16", MixedF16}, {"bf16", MixedBF16}}
	values := t.deepSpeedValues()
	for _, p := range precisions {
		full := p.section + "_full_eval"
		values = append(values, deepspeed.Autofill{Path: p.section + ".enabled",
			Is: strict.Of(t.Precision == p.is || r.Truth(full)), From: p.section + " and " + full})
	}
	for i, v := range values {
		for key := range strings.SplitSeq(v.From, " and ") {
			if key != "" && r.Has(key) {
				values[i].Where = r.Place(key)
			}
		}
	}
	if err := deepspeed.FillIn(d, append(values, pluginDefaults()...)); err != nil {
		return nil, err
	}
	// DeepSpeedPlugin.set_mixed_precision adds a missing section.
	for _, p := range precisions {
		if d.Root.Kind == '{' && t.Precision == p.is && d.Root.Member(p.section) == nil {
			d.Root.Set(p.section+".enabled", d.Root.At, strict.Of(true))
		}
	}
	if d.Root.Kind == '{' && d.Root.Member(deepspeed.AccumulationKey) == nil && t.GradientAccumulation > 1 {
		r.Note(deepspeed.AccumulationKey,
			"has no effect on DeepSpeed: its configuration lacks the key, and accelerate sets it to 1")
	}
	return deepspeed.Hosted(d, r.from.DeepSpeed)
}

// Mismatch returns an error if the Trainer refuses a DeepSpeed configuration
// that is given beside its arguments, not by them.
func (t *Training) Mismatch(d *deepspeed.Config) error {
	for _, v := range t.deepSpeedValues() {
		if is, where, given := d.Number(v.Path); given && !v.Lenient && is != v.Is.Number {
			return where.Inputf("DeepSpeed's %s is %v, but %s is %v in %s: transformers refuses that",
				v.Path, is, v.From, v.Is.Number, t.File).WithHint(`set it to "auto"`)
		}
	}
	return nil
}

func (r *trainingReader) usesDeepSpeed() bool {
	v := r.Find("deepspeed")
	return v != nil && !v.IsEmpty()
}

func (r *trainingReader) usesFSDP() bool {
	v := r.Find("fsdp")
	return v != nil && (v.Truth || len(v.Elements) > 0 || v.Kind == '"' && strings.TrimSpace(v.Text) != "")
}

// fsdp reads fsdp and fsdp_config: _process_fsdp_args.
func (r *trainingReader) fsdp() (*FSDP, error) {
	config, err := r.fsdpConfig()
	if err != nil {
		return nil, err
	}
	version := int(config.Integer("version"))
	older := FSDP{Strategy: "full_shard", WrapBySize: r.Integer("fsdp_min_num_params")}
	if !config.Gives("version") {
		if r.takesFSDP1() {
			version, older.Version = 1, 1
		}
		r.Note("fsdp", `is used without a "version" in fsdp_config: transformers takes FSDP2 from 5.10 on, and FSDP1 before`)
	}
	if err := r.fsdpOptions(&older, version); err != nil {
		return nil, err
	}
	if layer := r.Word("fsdp_transformer_layer_cls_to_wrap"); layer != "" {
		older.WrapLayers = []string{layer}
	}
	f, err := readFSDP(config, older, "cpu_offload")
	if err != nil {
		return nil, err
	}
	if config.File != r.File {
		r.Notes = append(r.Notes, config.Notes...)
	}
	if version == 1 && f.Strategy != "full_shard" {
		r.Note("fsdp", "is planned as "+f.Strategy+
			", as transformers 4.57 does; 5.23 with accelerate 1.15 uses full_shard instead")
	}
	reshard := config.Find("reshard_after_forward")
	return f, config.Refuse([]strict.Conflict{
		{config.Truth("xla"), "", "asks for XLA, which is not planned yet", ""},
		{version == 1 && reshard != nil && reshard.Kind != '"', "reshard_after_forward",
			"is a boolean, but FSDP1 takes a strategy", `write "full_shard", or set "version" to 2`},
	})
}

// takesFSDP1 reports whether a known release of transformers takes FSDP1 where nothing says a version: before 5.10.
func (r *trainingReader) takesFSDP1() bool {
	if r.from.Releases == nil {
		return false
	}
	of := r.from.Releases("transformers")
	return !of.IsZero() && !of.AtLeast(5, 10, 0)
}

// fsdpConfig returns fsdp_config. A file that it names is read as if it were
// the section.
func (r *trainingReader) fsdpConfig() (*strict.Reader, error) {
	const section = "fsdp_config"
	if v := r.Find(section); v == nil || v.Kind != '"' {
		return r.Section(section), nil
	}
	path, err := companion(r.Reader, section)
	if err != nil {
		return nil, err
	}
	d, err := load(r.from.Texts, path, FSDPKind, strict.Parse)
	if err != nil {
		return nil, err
	}
	return strict.Schema{Program: "TrainingArguments", Path: section, Rule: trainerFSDPRule}.Read(d)
}

// fsdpOptions reads the words of fsdp (_apply_legacy_fsdp_to_config) and
// refuses what transformers 4.57 refuses.
func (r *trainingReader) fsdpOptions(f *FSDP, version int) error {
	v := r.Find("fsdp")
	words := strings.Fields(v.Text)
	if v.Kind == '[' {
		words = v.Texts()
	}
	if v.Kind != '[' && v.Kind != '"' {
		words = nil
	}
	strategies := map[string]bool{}
	for _, word := range words {
		switch {
		case slices.Contains(fsdpStrategies, strings.ToUpper(word)):
			if f.Strategy = strings.ToLower(word); version == 2 && f.Strategy != "full_shard" &&
				f.Strategy != "shard_grad_op" {
				return r.Inputf(v.At, "fsdp is %q, which only FSDP1 has", word).
					WithHint(`add "version": 1 to "fsdp_config", or use full_shard`)
			}
			strategies[f.Strategy] = true
		case word == "offload":
			f.OffloadParameters = true
		case word == "auto_wrap":
		default:
			options := append([]string{"offload", "auto_wrap"}, fsdpStrategies...)
			hint := strings.ToLower(strict.DidYouMean(word, options))
			if hint == "" {
				hint = "the options are " + strings.ToLower(strings.Join(options, ", "))
			}
			return r.Inputf(v.At, "fsdp has an unknown option, %q", word).WithHint(hint)
		}
	}
	return r.Refuse([]strict.Conflict{
		{len(words) == 1 && words[0] == "offload", "fsdp", `is "offload" alone: expected a sharding strategy, too`,
			`write "full_shard offload"`},
		{len(strategies) > 1, "fsdp", "names more than one sharding strategy", "keep one of them"},
	})
}
