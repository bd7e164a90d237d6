package recipe

import (
	"bytes"
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// Kind is a kind of configuration file, recognized by its top-level keys. It
// keeps a file of the wrong kind from being planned with defaults for every key
// that the file lacks.
type Kind struct {
	Name string
	Flag string // the command's flag for it; empty if there is none
	// Marks are keys that identify the kind. One is enough, if no kind earlier
	// in the list matches. "a.b" is a key in a section, and "a+b" are keys that
	// a file has to have both.
	Marks string
	// Known are the keys that the program reads, if it ignores all others. It
	// is nil if the schema refuses unknown keys.
	Known *strict.Rule
	// Instead says what to give in place of a file that plimsoll does not read.
	Instead string

	// Commands are commands whose arguments are such a file: their first words, or the end of a path, and the key that
	// stands for the command, a mark of the kind.
	Commands map[string]string
	// Asks are beginnings of words of which such commands have one, with dashes for underscores. It is for commands
	// whose names those of other programs or kinds have, too.
	Asks string
	// LaunchVariables are the variables of the environment that say the ranks of a node and the nodes of such commands,
	// nil for none.
	LaunchVariables []string
	// ConfigIn is how such commands name a file of the kind: the names of flags, $ and a variable, or 1 for the first
	// word. OnlyByFile says that arguments alone do not say a training.
	ConfigIn   string
	OnlyByFile bool
	Unnamed    string // what commands without a file name in its place
	Runs       string // the program that such commands start, where they are scripts of a launcher
	Bundled    string // where a repository has the files that commands name without their path: folder/%s.yaml
	// EveryDevice says that a command of two words starts a rank on each device. Forced is a variable that has every
	// command do so by a launcher. ByAccelerate says that a command takes flags of accelerate launch.
	EveryDevice, ByAccelerate bool
	Forced                    string
	// Spreads says that a rank with several devices of its own has the model on all of them (device_map "auto").
	Spreads bool
	// Assigns says that arguments of such commands are assignments, as Hydra has them: section.key=value.
	Assigns bool
	// Abbreviates says that such commands read their arguments by transformers' HfArgumentParser.
	Abbreviates bool
	// Command makes the members of such a command of its words, the name of the program first. It is nil for commands
	// of flags alone.
	Command func(words []shell.Word) []strict.Member
	// Arguments makes arguments of Megatron-LM of a command of a program that trains by Megatron core; nil for others.
	Arguments func(*strict.Document) (MadeArguments, error)
	// Python makes a document of a source of Python or a notebook, and of a function of it where a path names one: nil
	// for sources of other programs.
	Python func(source *python.Source, function string) *strict.Value
	// Program says how a file becomes a Framework. It is nil for files of other functions.
	Program *Program
	// Settings are the keys of settings. SettingsOf returns those of a file, where they depend on its keys.
	Settings   SettingKeys
	SettingsOf func(root *strict.Value) SettingKeys
}

// kinds are all kinds, in the order that a file is recognized in.
var kinds []*Kind

// Register sets the kinds of files and their order. Programs that wrap others come first, as their files have the
// others' keys, too. Package programs has the list.
func Register(all ...*Kind) { kinds = all }

// Packages returns the packages of PyPI whose releases the reading of files depends on, and peft.
func Packages() []string {
	list := []string{"peft", "unsloth"}
	for _, k := range kinds {
		if k.Program != nil && k.Program.Package != "" && !slices.Contains(list, k.Program.Package) {
			list = append(list, k.Program.Package)
		}
	}
	return list
}

func (k *Kind) String() string { return k.Name }

// commandsOf maps commands to the mark of their kind.
func commandsOf(mark string, commands ...string) map[string]string {
	list := map[string]string{}
	for _, command := range commands {
		list[command] = mark
	}
	return list
}

// ConfigFlag is the flag for files that say what several other files would say.
const ConfigFlag = "--config"

// MegatronFlag is the flag for files that say arguments of Megatron-LM.
const MegatronFlag = "--megatron"

// The kinds of files that package recipe reads itself, or that no program reads.
var (
	NeMoKind    = &Kind{Name: "NeMo configuration", Marks: "exp_manager restore_from_path", Instead: byFlags}
	SeveralKind = &Kind{Name: "script with more than one training", Marks: several,
		Instead: "give the command of one training in a script of its own"}
	ArgumentsKind = &Kind{Name: "file with arguments of Megatron-LM", Flag: MegatronFlag,
		Python:   bridgeSource,
		Marks:    megatronMark + " MODEL_ARGS num_layers+micro_batch_size num-layers+micro-batch-size",
		Settings: argumentKeys, SettingsOf: argumentKeysOf}
	sectionsKind = &Kind{Name: "configuration of NeMo or Megatron-Bridge", Flag: MegatronFlag}

	AccelerateKind = &Kind{Name: "accelerate configuration in YAML", Flag: "--accelerate",
		Marks:    "distributed_type compute_environment main_training_function num_machines",
		Settings: accelerateKeys, SettingsOf: accelerateKeysOf}
	DeepSpeedKind = &Kind{Name: "DeepSpeed JSON configuration", Flag: "--deepspeed",
		Marks: `zero_optimization train_batch_size train_micro_batch_size_per_gpu steps_per_print
			wall_clock_breakdown compression_training`, Known: &deepspeed.Rule, Settings: deepSpeedKeys}
	AdapterKind = &Kind{Name: "adapter_config.json of PEFT", Flag: "--adapter",
		Marks: "peft_type base_model_name_or_path"}
	ModelKind = &Kind{Name: "config.json of a model", Flag: "--model",
		Marks: `architectures model_type quantization_config num_hidden_layers hidden_size num_attention_heads
			n_embd`}
	QuantizationKind = &Kind{Name: "config.json with quantization_config, or BitsAndBytesConfig in JSON",
		Flag: "--quantization",
		Marks: `quant_method load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_compute_dtype
			llm_int8_threshold llm_int8_has_fp16_weight`, Known: &bitsAndBytesRule}
	TrainingKind = &Kind{Name: "file of TrainingArguments", Flag: "--training-args", Known: &trainingSchema.Rule,
		Marks: `per_device_train_batch_size per_device_eval_batch_size num_train_epochs learning_rate
			lr_scheduler_type output_dir save_strategy`, Settings: TrainerKeys, SettingsOf: trainerKeysOf}

	FSDPKind = &Kind{Name: "FSDP configuration in JSON", // of TrainingArguments
		Marks: `fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap fsdp_min_num_params min_num_params
			fsdp_backward_prefetch backward_prefetch fsdp_sharding_strategy fsdp_version fsdp_offload_params
			fsdp_state_dict_type`,
		Instead: `name it in a file of TrainingArguments: {"fsdp": "full_shard auto_wrap", "fsdp_config": "FILE"}`}
)

// onlyJSON are kinds whose files are never YAML.
var onlyJSON = []*Kind{DeepSpeedKind, AdapterKind, ModelKind, QuantizationKind}

// recognized returns the kind of an object and the key that identified it, or
// nil.
func recognized(root *strict.Value) (*Kind, *strict.Member) {
	if root == nil || root.Kind != '{' {
		return nil, nil
	}
	if kinds == nil {
		panic("recipe: no kind of file is registered: import plimsoll/internal/input/recipe/programs")
	}
	if sectioned(&strict.Document{Root: root}) != nil {
		return sectionsKind, cmp.Or(root.Member("trainer"), root.Member("train"), root.Member("ddp"))
	}
	for _, k := range kinds {
		if m := k.mark(root); m != nil {
			return k, m
		}
	}
	return nil, nil
}

// parseAny parses a file of unknown kind. It returns nil if the file cannot be
// parsed. JSON with comments is read under every name, as DeepSpeed reads it.
func parseAny(file string, text []byte) *strict.Document {
	parsers := []func(string, []byte) (*strict.Document, error){strict.ParseCommented}
	if strict.IsYAML(file) {
		parsers = slices.Insert(parsers, 0, strict.ParseYAML)
	}
	for _, parse := range parsers {
		if d, err := parse(file, text); err == nil {
			return d
		}
	}
	return nil
}

// expect refuses a file of another kind, or one whose keys are mostly unknown.
// It accepts a file that cannot be parsed: the parser of the kind refuses it.
func (k *Kind) expect(file string, text []byte) error {
	d := parseAny(file, text)
	if d == nil || d.Root.Kind == '"' {
		if what := nature(text); what != "" {
			return fault.File(file).Inputf("this is %s: expected %s", what, article(k.Name)).
				WithHint(fmt.Sprintf("give the path of the %v", k))
		}
		d = cmp.Or(parseContent(file, text), d) // of a format that its name does not say
	}
	if d == nil || d.Root.Kind != '{' {
		return nil
	}
	found, m := recognized(d.Root)
	switch {
	case found == nil || found == k:
	case k == QuantizationKind && found == ModelKind: // a model's config.json may hold one
		return nil
	default:
		return k.misplaced(d, found, m)
	}
	if k == QuantizationKind && k.mark(d.Root) != nil { // each method of quantization_config has keys of its own
		return nil
	}
	return k.own(d, k.Known)
}

// own refuses a document whose keys are mostly unknown to the program of the
// kind: another program has keys of the same names.
func (k *Kind) own(d *strict.Document, rule *strict.Rule) error {
	if rule == nil || d.Root.Kind != '{' || len(d.Root.Members) == 0 {
		return nil
	}
	var foreign []string
	known := rule.Names()
	for _, m := range d.Root.Members {
		if !known.Know(m.Name) && !known.Resemble(m.Name) {
			foreign = append(foreign, quotedKey(m.Name))
		}
	}
	if known := len(d.Root.Members) - len(foreign); known > 0 && known >= len(foreign) {
		return nil
	}
	return d.Inputf(d.Root.At, "this is no %v: %d of its %d keys are unknown there, such as %s",
		k, len(foreign), len(d.Root.Members), foreign[0]).
		WithHint(fmt.Sprintf("give the path of the %v, without the keys of other programs", k))
}

// mark returns the member for the first of the kind's marks that the object has, or nil.
func (k *Kind) mark(root *strict.Value) *strict.Member {
	for mark := range strings.FieldsSeq(k.Marks) {
		if m := marked(root, mark); m != nil {
			return m
		}
	}
	return nil
}

// marked returns the last member for a mark that the object has, with its path as the name, or nil.
func marked(root *strict.Value, mark string) (last *strict.Member) {
	for path := range strings.SplitSeq(mark, "+") {
		inside := root
		for name := range strings.SplitSeq(path, ".") {
			m := inside.Member(name)
			if m == nil {
				return nil
			}
			last, inside = &strict.Member{Name: path, At: m.At, Value: m.Value}, m.Value
		}
	}
	return last
}

// misplaced refuses a file of another kind, which the member m shows.
func (k *Kind) misplaced(d *strict.Document, found *Kind, m *strict.Member) error {
	hint := fmt.Sprintf("plimsoll does not read %s yet: give the path of the %v", article(found.Name), k)
	switch {
	case found.Flag != "":
		hint = "give it as " + found.Flag
	case found.Instead != "":
		hint = found.Instead
	}
	return d.Inputf(m.At, "this seems to be %s, as it has the key %q: expected %s",
		article(found.Name), m.Name, article(k.Name)).WithHint(hint)
}

// article returns a name with its indefinite article.
func article(name string) string {
	if strings.ContainsRune("aeiouAEIO", rune(name[0])) || anLetters.MatchString(name) {
		return "an " + name
	}
	return "a " + name
}

// anLetters matches abbreviations whose first letter is spoken with a vowel first.
var anLetters = lazyregexp.New("^(?:FSDP|H2O|LLM) ")

// Misplaced returns an error if a file that was given as a model seems to be of
// another kind.
func Misplaced(path string) error {
	text, err := files.Read(path, largest)
	if err != nil {
		return nil
	}
	return ModelKind.expect(path, text)
}

// KindOf returns the kind of a configuration or script, and the command's flag for it, such as --deepspeed. Both are
// empty if the text is none that Plimsoll reads. A script is one by its name or its first line: a log or the text of a
// pod may have such commands, too.
func KindOf(file string, text []byte) (kind, flag string) {
	var d *strict.Document
	switch start := bytes.TrimSpace(text); {
	case bytes.HasPrefix(start, []byte("#!")), isTOML(file), slices.Contains(scriptNames, filepath.Ext(file)):
		d = parseContent(file, text)
	case bytes.HasPrefix(start, []byte{'{'}), bytes.HasPrefix(start, []byte("//")), strict.IsYAML(file):
		d = parseAny(file, text)
	}
	if d == nil {
		return "", ""
	}
	if found, _ := recognized(d.Root); found != nil {
		return found.Name, found.Flag
	}
	return "", ""
}

// scriptNames are how names of scripts end.
var scriptNames = []string{".sh", ".bash", ".sbatch", ".slurm"}
