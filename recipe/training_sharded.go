package recipe

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/fault"
)

// companion returns the path of the file that the key at path names.
func (c *checking) companion(path string) (string, error) {
	v := c.root.find(path)
	if strings.HasPrefix(v.text, "{") {
		return "", c.bad(v.at, path+" is an object within a string", "remove the quotes around it and the \\ in it")
	}
	name := v.text
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(c.file), name)
	}
	if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
		return "", c.bad(v.at, fmt.Sprintf("%s names %s, which does not exist", path, name),
			"give the path relative to this file")
	}
	return name, nil
}

// trainerDeepSpeed reads the DeepSpeed configuration and replaces "auto" as the
// Trainer does: trainer_config_process in integrations/deepspeed.py.
func (c *checking) trainerDeepSpeed(t *Training) (*DeepSpeed, error) {
	v := c.root.find("deepspeed")
	d := &document{file: c.file, text: c.text, root: v}
	if v.kind == '"' {
		path, err := c.companion("deepspeed")
		if err != nil {
			return nil, err
		}
		if d, err = load(path, deepSpeedKind, parseCommented); err != nil {
			return nil, err
		}
	}
	o := t.Optimizer
	at := func(path string, is *value, keys ...string) filling {
		f := filling{path: path, is: is, name: strings.Join(keys, " and ")}
		for _, key := range keys {
			if m := c.root.member(key); m != nil {
				f.where = c.position(m.at)
			}
		}
		return f
	}
	micro := at(microKey, number(float64(t.MicroBatch)), "per_device_train_batch_size")
	micro.lenient = t.AutoFindBatchSize
	err := d.fill(append([]filling{
		micro,
		at(accumulationKey, number(float64(t.GradientAccumulation)), accumulationKey),
		// ResolveBatch computes it, as it depends on the number of ranks.
		{path: trainKey, is: &value{kind: 'n'}, lenient: true},
		at("gradient_clipping", number(t.MaxGradNorm), "max_grad_norm"),
		at("optimizer.params.lr", number(o.LR), "learning_rate"),
		at("optimizer.params.betas", &value{
			kind:     '[',
			elements: []*value{number(o.Beta1), number(o.Beta2)},
		}, "adam_beta1", "adam_beta2"),
		at("optimizer.params.eps", number(o.Epsilon), "adam_epsilon"),
		at("optimizer.params.weight_decay", number(o.WeightDecay), "weight_decay"),
		at("scheduler.params.warmup_max_lr", number(o.LR), "learning_rate"),
		{path: "scheduler.params.warmup_min_lr", is: number(0), lenient: true},
		at("fp16.enabled", truth(t.Precision == MixedF16 || c.truth(false, "fp16_full_eval")), "fp16",
			"fp16_full_eval"),
		at("bf16.enabled", truth(t.Precision == MixedBF16 || c.truth(false, "bf16_full_eval")), "bf16",
			"bf16_full_eval"),
	}, fillingsOfPlugin()...))
	if err != nil {
		return nil, err
	}
	// DeepSpeedPlugin.set_mixed_precision adds a missing section.
	for section, precision := range map[string]Precision{"bf16": MixedBF16, "fp16": MixedF16} {
		if d.root.kind == '{' && t.Precision == precision && d.root.member(section) == nil {
			d.root.members = append(d.root.members, member{section, d.root.at, &value{
				kind:    '{',
				at:      d.root.at,
				members: []member{{"enabled", d.root.at, truth(true)}},
			}})
		}
	}
	if d.root.kind == '{' && d.root.member(accumulationKey) == nil && t.GradientAccumulation > 1 {
		c.note(accumulationKey,
			"has no effect on DeepSpeed, whose configuration does not have the key: accelerate adds it as 1")
	}
	return hostedDeepSpeed(d)
}

// Mismatch returns an error if the Trainer refuses a DeepSpeed configuration
// that is given beside its arguments, not by them.
func (t *Training) Mismatch(d *DeepSpeed) error {
	for _, m := range []struct {
		key       string
		is        float64
		name      string
		said      float64
		overruled bool
	}{
		{microKey, float64(d.Batch.Micro), "per_device_train_batch_size", float64(t.MicroBatch), t.AutoFindBatchSize},
		{accumulationKey, float64(d.Batch.Accumulation), accumulationKey, float64(t.GradientAccumulation), false},
		{"gradient_clipping", d.GradientClipping, "max_grad_norm", t.MaxGradNorm, false},
	} {
		if where, given := d.places[m.key]; given && m.is != m.said && !m.overruled {
			return &fault.Input{
				Where: where,
				What: fmt.Sprintf("DeepSpeed's %s is %v, but %s is %v in %s: transformers refuses that",
					m.key, m.is, m.name, m.said, t.File),
				Hint: `set it to "auto"`,
			}
		}
	}
	return nil
}

// fillingsOfPlugin returns the defaults of accelerate's DeepSpeedPlugin.
func fillingsOfPlugin() []filling {
	const zero = "zero_optimization."
	var list []filling
	for path, is := range map[string]*value{
		"stage":                                     number(2),
		"offload_optimizer.device":                  {kind: '"', text: "none"},
		"offload_param.device":                      {kind: '"', text: "none"},
		"offload_optimizer.nvme_path":               {kind: 'n'},
		"offload_param.nvme_path":                   {kind: 'n'},
		"stage3_gather_16bit_weights_on_model_save": truth(false),
	} {
		list = append(list, filling{path: zero + path, is: is, lenient: true})
	}
	return list
}

// hostedDeepSpeed reads a configuration for accelerate, which requires ZeRO.
func hostedDeepSpeed(d *document) (*DeepSpeed, error) {
	if d.root.kind == '{' && d.root.member("zero_optimization") == nil {
		return nil, d.bad(d.root.at, `the DeepSpeed configuration has no "zero_optimization", which accelerate needs`,
			`add "zero_optimization": {"stage": 2}`)
	}
	if d.root.kind == '{' && d.root.member(accumulationKey) == nil {
		d.root.members = append(d.root.members, member{accumulationKey, d.root.at, number(1)})
	}
	return readDeepSpeed(d)
}

func number(n float64) *value {
	return &value{kind: '0', text: strconv.FormatFloat(n, 'g', -1, 64)}
}

func truth(is bool) *value {
	text := strconv.FormatBool(is)
	return &value{kind: jsontext.Kind(text[0]), text: text}
}

func (c *checking) usesDeepSpeed() bool {
	v := c.root.find("deepspeed")
	return v != nil && (len(v.members) > 0 || v.kind == '"' && v.text != "")
}

func (c *checking) usesFSDP() bool {
	v := c.root.find("fsdp")
	return v != nil && (v.truth || len(v.elements) > 0 || v.kind == '"' && strings.TrimSpace(v.text) != "")
}

// trainerFSDP reads fsdp and fsdp_config: _process_fsdp_args.
func (c *checking) trainerFSDP() (*FSDP, error) {
	config := c
	section := "fsdp_config"
	if v := c.root.find(section); v != nil && v.kind == '"' {
		path, err := c.companion(section)
		if err != nil {
			return nil, err
		}
		// The file is read as if it were the section.
		d, err := load(path, fsdpKind, parseDocument)
		if err != nil {
			return nil, err
		}
		d.root = &value{kind: '{', members: []member{{name: section, value: d.root}}}
		config = &checking{
			document: d,
			schema:   schema{"TrainingArguments", isObject(map[string]rule{section: trainerFSDPSchema})},
		}
		if err := config.check(config.schema.rule, "", d.root); err != nil {
			return nil, err
		}
	}
	given := config.root.find(config.spelled(section, "fsdp_", "version"))
	version := int64(2)
	if given != nil {
		version = given.integer
	} else {
		c.note("fsdp", `is used without a "version" in fsdp_config: transformers 5.23 takes FSDP2, 4.57 took FSDP1`)
	}
	f := FSDP{
		Version:       2,
		Strategy:      "full_shard",
		WrapPolicy:    "transformer_based_wrap",
		StateDictType: "full_state_dict",
	}
	if err := c.fsdpOptions(&f, version); err != nil {
		return nil, err
	}
	if layer := c.word("", "fsdp_transformer_layer_cls_to_wrap"); layer != "" {
		f.WrapLayers = []string{layer}
	}
	f.WrapBySize = c.integer(0, "fsdp_min_num_params")
	read, err := config.fsdp(section, f, "cpu_offload")
	if err != nil {
		return nil, err
	}
	if config != c {
		c.notes = append(c.notes, config.notes...)
	}
	if version == 1 && read.Strategy != "full_shard" {
		c.note("fsdp", "is planned as "+read.Strategy+
			", which transformers 4.57 does; 5.23 with accelerate 1.15 does full_shard all the same")
	}
	reshard := config.spelled(section, "fsdp_", "reshard_after_forward")
	return read, config.refuse([]conflict{
		{config.truth(false, config.spelled(section, "fsdp_", "xla")), section,
			"asks for XLA, which is not planned yet", ""},
		{version == 1 && config.root.find(reshard) != nil && config.root.find(reshard).kind != '"', reshard,
			"is a truth value, but FSDP1 takes a strategy", `write "full_shard", or set "version" to 2`},
	})
}

// fsdpOptions reads the words of fsdp (_apply_legacy_fsdp_to_config) and
// refuses what transformers 4.57 refuses.
func (c *checking) fsdpOptions(f *FSDP, version int64) error {
	v := c.root.find("fsdp")
	words := strings.Fields(v.text)
	if v.kind == '[' {
		words = v.texts()
	}
	if v.kind != '[' && v.kind != '"' {
		words = nil
	}
	strategies := map[string]bool{}
	for _, word := range words {
		switch {
		case slices.Contains(fsdpStrategies, strings.ToUpper(word)):
			if f.Strategy = strings.ToLower(word); version == 2 && f.Strategy != "full_shard" &&
				f.Strategy != "shard_grad_op" {
				return c.bad(v.at, fmt.Sprintf("fsdp is %q, which only FSDP1 has", word),
					`add "version": 1 to "fsdp_config", or use full_shard`)
			}
			strategies[f.Strategy] = true
		case word == "offload":
			f.OffloadParameters = true
		case word == "auto_wrap":
		default:
			in := &fault.Input{Where: c.position(v.at), What: fmt.Sprintf("fsdp holds %q, which is no option", word)}
			options := append([]string{"offload", "auto_wrap"}, fsdpStrategies...)
			if near := fault.Nearest(word, options); near != "" {
				in.Hint = fmt.Sprintf("did you mean %q?", strings.ToLower(near))
			} else {
				in.Hint = "the options are " + strings.ToLower(strings.Join(options, ", "))
			}
			return in
		}
	}
	return c.refuse([]conflict{
		{len(words) == 1 && words[0] == "offload", "fsdp", `is "offload" alone, without a way to shard`,
			`write "full_shard offload"`},
		{len(strategies) > 1, "fsdp", "names more than one way to shard", "keep one of them"},
	})
}
