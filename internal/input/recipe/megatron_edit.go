package recipe

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// Argument is an argument of Megatron-LM with the value that it should have: nil for none.
type Argument struct {
	Key string
	To  any
}

// ArgumentKeys returns the arguments of Megatron-LM for settings, without those that a program has in other ways, and
// with its own.
func ArgumentKeys(own SettingKeys, without ...Setting) SettingKeys {
	keys := maps.Clone(argumentKeys)
	for _, setting := range without {
		delete(keys, setting)
	}
	maps.Copy(keys, own)
	return keys
}

// argumentKeys are the arguments of Megatron-LM for settings.
var argumentKeys = SettingKeys{
	MicroBatch:           {Path: "micro_batch_size"},
	TrainBatch:           {Path: "global_batch_size"},
	Accumulation:         {Follows: TrainBatch},
	TensorDegree:         {Path: "tensor_model_parallel_size", Unset: 1},
	ContextDegree:        {Path: "context_parallel_size", Unset: 1},
	PipelineDegree:       {Path: "pipeline_model_parallel_size", Unset: 1},
	SequenceSplit:        {Path: "sequence_parallel", Unset: false},
	RecomputeGranularity: {Path: "recompute_granularity"},
	RecomputeMethod:      {Path: "recompute_method"},
	RecomputeLayers:      {Path: "recompute_num_layers"},
	DistributedOptimizer: {Path: "use_distributed_optimizer", Unset: false},
	PrecisionAware:       {Path: "use_precision_aware_optimizer", Unset: false},
	OptimizerOffload:     {Path: "optimizer_cpu_offload", Unset: false},
	OffloadFraction:      {Path: "optimizer_offload_fraction", Unset: 1.},
	StatesOffload:        {Path: "offload_optimizer_states", Unset: false},
	ChunkedStatesOffload: {Path: "chunked_optimizer_state_offload", Unset: false},
	SavesModelOnly:       {Path: "no_save_optim", Unset: false},
	FusedLoss:            {Path: "cross_entropy_loss_fusion", Unset: false},
	FusedLossBy:          {Path: "cross_entropy_fusion_impl"},
	BF16:                 {Path: "bf16", Says: Constant(true), Unset: false},
	FP16:                 {Path: "fp16", Says: Constant(true), Unset: false},
}

// bridgeKeys are the keys of Megatron-Bridge's recipes for settings (src/megatron/bridge/training/config.py).
var bridgeKeys = map[Setting]string{
	MicroBatch:           "train.micro_batch_size",
	TrainBatch:           "train.global_batch_size",
	TensorDegree:         "model.tensor_model_parallel_size",
	ContextDegree:        "model.context_parallel_size",
	PipelineDegree:       "model.pipeline_model_parallel_size",
	SequenceSplit:        "model.sequence_parallel",
	RecomputeGranularity: "model.recompute_granularity",
	RecomputeMethod:      "model.recompute_method",
	RecomputeLayers:      "model.recompute_num_layers",
	DistributedOptimizer: "ddp.use_distributed_optimizer",
	PrecisionAware:       "optimizer.use_precision_aware_optimizer",
	OptimizerOffload:     "optimizer.optimizer_cpu_offload",
	OffloadFraction:      "optimizer.optimizer_offload_fraction",
	SavesModelOnly:       "checkpoint.save_optim",
	FusedLoss:            "model.cross_entropy_loss_fusion",
	FusedLossBy:          "model.cross_entropy_fusion_impl",
}

// BridgeAssignment returns what sets a setting over a recipe of Megatron-Bridge, on its command line: it is empty for a
// setting that no key says.
func BridgeAssignment(setting Setting, to any) string {
	key, value := bridgeKeys[setting], fmt.Sprint(to)
	switch {
	case key == "":
		return ""
	case to == nil:
		value = "null"
	case setting == SavesModelOnly:
		value = fmt.Sprint(to != true)
	}
	return key + "=" + value
}

// IsBridge reports whether a file is a recipe or a configuration of Megatron-Bridge, or starts it by one.
func IsBridge(file string, texts files.Texts) bool {
	text, err := texts.Read(file, largest)
	if err != nil {
		return false
	}
	d := parseContent(file, text)
	if d == nil {
		return false
	}
	s := sectioned(d)
	return d.Root.Member(bridgeMark) != nil || s != nil && s.program != nemoProgram
}

// MegatronSettings lists the settings that arguments of Megatron-LM say.
func MegatronSettings() (list []Setting) {
	for setting, key := range argumentKeys {
		if key.Path != "" {
			list = append(list, setting)
		}
	}
	return list
}

// ArgumentOf returns the argument of Megatron-LM for a setting. Its key is empty for a setting that none says.
func ArgumentOf(setting Setting, to any) Argument {
	key := argumentKeys[setting]
	if key.Says != nil {
		to = key.Says(to)
	}
	return Argument{key.Path, to}
}

// String returns the argument as people type it.
func (a Argument) String() string {
	name := "--" + strings.ReplaceAll(a.Key, "_", "-")
	switch {
	case a.isOff():
		return "without " + name
	case a.To == true:
		return name
	}
	return fmt.Sprintf("%s %v", name, a.To)
}

// isOff reports whether the argument should not be given.
func (a Argument) isOff() bool { return a.To == nil || a.To == false }

// value returns what a reader of the argument finds.
func (a Argument) value() *strict.Value {
	if a.To == true {
		return strict.Of(true)
	}
	return strict.Bare(fmt.Sprint(a.To), 0)
}

// in returns the members of an object with the argument.
func (a Argument) in(root *strict.Value) *strict.Value {
	with := root.Clone()
	m := with.Member(a.Key)
	switch {
	case a.isOff():
		with.Members = slices.DeleteFunc(with.Members, func(m strict.Member) bool { return m.Name == a.Key })
	case m != nil:
		m.Value = a.value()
	default:
		with.Members = append(with.Members, strict.Member{Name: a.Key, Value: a.value()})
	}
	return with
}

// With returns the job with other arguments in place of those that were read.
func (m *Megatron) With(arguments []Argument) (*Megatron, error) {
	d := *m.given.Document
	for _, a := range arguments {
		d.Root = a.in(d.Root)
	}
	r, err := megatronSchema().Read(&d)
	if err != nil {
		return nil, err
	}
	with := *m
	with.given = r
	r.Fill(&with)
	return &with, nil
}

// argumentKeysOf returns the keys of settings in arguments as they are typed, or in a YAML file.
func argumentKeysOf(root *strict.Value) SettingKeys {
	if root.Member(megatronMark) != nil {
		return argumentKeys
	}
	return keysInYAML(root)
}

// keysInYAML returns the keys of settings as a YAML file writes arguments: with dashes or underscores, and perhaps
// below MODEL_ARGS.
func keysInYAML(root *strict.Value) SettingKeys {
	section, prefix := root, ""
	if m := root.Member("MODEL_ARGS"); m != nil {
		section, prefix = m.Value, m.Name+"."
	}
	plain := func(name string) string { return strings.ReplaceAll(strings.TrimPrefix(name, "--"), "-", "_") }
	style := func(key string) string { return key }
	names := map[string]string{}
	for _, m := range section.Members {
		names[plain(m.Name)] = m.Name
		if strings.Contains(strings.TrimPrefix(m.Name, "--"), "-") {
			mark := m.Name[:len(m.Name)-len(strings.TrimPrefix(m.Name, "--"))]
			style = func(key string) string { return mark + strings.ReplaceAll(key, "_", "-") }
		}
	}
	keys := SettingKeys{}
	for setting, key := range argumentKeys {
		if name, has := names[key.Path]; has {
			key.Path = prefix + name
		} else if key.Path != "" {
			key.Path = prefix + style(key.Path)
		}
		keys[setting] = key
	}
	return keys
}

// scriptEdit is a text in place of a part of a script. From is the value that was there.
type scriptEdit struct {
	at, end    int
	text       string
	from, says string
}

// reviseScript returns a script with another argument. Everything else stays as it is. Several places may say the
// argument: the first counts whose edit is read as this change and no other.
func reviseScript(d *strict.Document, a Argument) (*strict.Revision, error) {
	m, text := d.Root.Member(a.Key), string(d.Text)
	var edits []scriptEdit
	switch {
	case m == nil && a.isOff() || m != nil && !a.isOff() && m.Value.Same(a.value()):
		return &strict.Revision{Text: d.Text}, nil
	case m == nil:
		edits = insertions(text, a)
	case a.isOff():
		edits = removals(text, a.Key)
	default:
		edits = replacements(text, a)
	}
	want := a.in(d.Root)
	for _, e := range edits[:min(len(edits), mostTried)] {
		r := &strict.Revision{Text: slices.Concat(d.Text[:e.at], []byte(e.text), d.Text[e.end:]), At: int64(e.at),
			From: e.from, To: e.says}
		if again := parseContent(d.File, r.Text); again != nil && again.Root.Same(want) {
			r.Added = bytes.Count(r.Text, []byte{'\n'}) - bytes.Count(d.Text, []byte{'\n'})
			return r, nil
		}
	}
	return nil, &NotEditable{fault.File(d.File).Inputf("plimsoll cannot change %s in this script and nothing else", a)}
}

// mostTried is how many places of a script are tried.
const mostTried = 32

// NotEditable is the error for a script that cannot be edited safely.
type NotEditable struct{ input *fault.Input }

func (e *NotEditable) Error() string { return e.input.Error() }

// Unwrap returns the bad input.
func (e *NotEditable) Unwrap() error { return e.input }

// place is a flag in a script, with the value behind it. Without a value, value and end are the end of the flag.
type place struct{ flag, value, end int }

// placesOf lists where a text has the flag of an argument, also in comments.
func placesOf(text, key string) (list []place) {
	flag := regexp.MustCompile(`--` + strings.ReplaceAll(regexp.QuoteMeta(key), "_", "[-_]") +
		`(?:(?:=|(?:\s|\\\n)+)|\b)`)
	for _, found := range flag.FindAllStringIndex(text, -1) {
		if found[0] > 0 && text[found[0]-1] == '-' || strings.HasPrefix(text[found[1]:], "-") &&
			!strings.HasPrefix(text[found[1]:], "--") {
			continue // a longer flag
		}
		p := place{found[0], found[1], wordEnd(text, found[1])}
		if strings.HasPrefix(text[p.value:], "--") {
			p.value = p.flag + len(strings.TrimRight(text[p.flag:p.value], " \t\n\\="))
			p.end = p.value
		}
		list = append(list, p)
	}
	return list
}

// wordEnd returns the end of a word of a script, with its quotes and what it expands.
func wordEnd(text string, at int) int {
	if at < len(text) && (text[at] == '"' || text[at] == '\'') {
		if n := strings.IndexByte(text[at+1:], text[at]); n >= 0 {
			return at + n + 2
		}
	}
	depth := 0
	for ; at < len(text); at++ {
		switch c := text[at]; {
		case c == '$' && at+1 < len(text) && (text[at+1] == '(' || text[at+1] == '{'):
			depth++
			at++
		case depth > 0 && c == '(':
			depth++
		case depth > 0 && (c == ')' || c == '}'):
			depth--
		case depth == 0 && strings.ContainsRune(" \t\r\n\\\"');&|`", rune(c)):
			return at
		}
	}
	return at
}

var (
	variableWord = lazyregexp.New(`^\$(?:\{(\w+)\}|(\w+))$`)
	defaultWord  = lazyregexp.New(`^\$\{\w+:?-([^{}]*)\}$`)
)

// replacements lists the ways to give an argument another value: where a variable gets the value that the flag names,
// and at the flag.
func replacements(text string, a Argument) (list []scriptEdit) {
	for _, p := range placesOf(text, a.Key) {
		at, end := unquoted(text, p.value, p.end)
		if at == end {
			continue
		}
		if v := variableWord.FindStringSubmatch(text[at:end]); v != nil {
			set := regexp.MustCompile(`(?m)(?:^|[\s;])` + v[1] + v[2] + `=`)
			for _, found := range set.FindAllStringIndex(text, -1) {
				at, end := unquoted(text, found[1], wordEnd(text, found[1]))
				list = append(list, a.over(text, at, end))
			}
		}
		list = append(list, a.over(text, at, end))
	}
	return list
}

// over puts the value of an argument over a word, or over its default.
func (a Argument) over(text string, at, end int) scriptEdit {
	if d := defaultWord.FindStringSubmatchIndex(text[at:end]); d != nil {
		at, end = at+d[2], at+d[3]
	}
	is := fmt.Sprint(a.To)
	return scriptEdit{at, end, is, text[at:end], is}
}

// unquoted returns a word without its quotes.
func unquoted(text string, at, end int) (from, to int) {
	if end-at > 1 && (text[at] == '"' || text[at] == '\'') && text[end-1] == text[at] {
		return at + 1, end - 1
	}
	return at, end
}

// removals lists the ways to leave an argument out: with its line, or alone.
func removals(text, key string) (list []scriptEdit) {
	for _, p := range placesOf(text, key) {
		first, rest := lineOf(text, p.flag)
		says := text[p.value:p.end]
		if says == "" {
			says = "true"
		}
		last := p.end + len(text[p.end:]) - len(strings.TrimLeft(text[p.end:], " \t"))
		if strings.TrimSpace(text[first:p.flag]) == "" && strings.Trim(text[p.end:rest], " \t\\\n") == "" &&
			strings.HasSuffix(strings.TrimSpace(text[p.end:rest]), `\`) == continues(text, first) {
			list = append(list, scriptEdit{first, rest, "", says, "none"})
		}
		list = append(list, scriptEdit{p.flag, last, "", says, "none"})
	}
	return list
}

// lineOf returns the start of the line of a place, and that of the next line.
func lineOf(text string, at int) (first, next int) {
	next = len(text)
	if n := strings.IndexByte(text[at:], '\n'); n >= 0 {
		next = at + n + 1
	}
	return strings.LastIndexByte(text[:at], '\n') + 1, next
}

// continues reports whether the line before a line ends with a backslash.
func continues(text string, first int) bool { return strings.HasSuffix(text[:first], "\\\n") }

// insertions lists the ways to add an argument: before others that most scripts have, on a line of its own where these
// have one.
func insertions(text string, a Argument) (list []scriptEdit) {
	says := fmt.Sprint(a.To)
	for anchor := range strings.FieldsSeq("micro_batch_size global_batch_size seq_length num_layers hidden_size") {
		for _, p := range placesOf(text, anchor) {
			first, _ := lineOf(text, p.flag)
			indent := text[first:p.flag]
			if strings.TrimSpace(indent) == "" {
				between := "\n" + indent
				if continues(text, first) {
					between = " \\" + between
				}
				list = append(list, scriptEdit{p.flag, p.flag, a.String() + between, "", says})
			}
			list = append(list, scriptEdit{p.flag, p.flag, a.String() + " ", "", says})
		}
	}
	return list
}
