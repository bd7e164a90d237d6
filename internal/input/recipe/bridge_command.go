package recipe

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// BridgeKind is the kind of the commands of Megatron-Bridge that train by one of its recipes
// (scripts/training/run_recipe.py and its launcher for Slurm, of August 2026, commit 067f987d).
var BridgeKind = &Kind{Name: "training by a recipe of Megatron-Bridge", Flag: MegatronFlag, Marks: bridgeMark,
	Commands:  commandsOf(bridgeMark, "training/run_recipe.py", "run_recipe.py", "training/train.sh"),
	Asks:      "--recipe --model",
	Command:   bridgeMembers,
	Arguments: bridgeArguments}

const bridgeMark = "megatron_bridge_recipe"

// Members of such a command beside its flags: where its program is, and what it sets over the recipe.
const (
	bridgeProgramIn = "program_in"
	bridgeOver      = "over_the_recipe"
)

// bridgeShort are flags for single keys of the configuration (COMMON_OVERRIDE_FIELDS in run_recipe.py).
var bridgeShort = map[string]string{"gb": "train.global_batch_size", "global_batch_size": "train.global_batch_size",
	"mb": "train.micro_batch_size", "micro_batch_size": "train.micro_batch_size",
	"sl": "dataset.seq_length", "seq_length": "dataset.seq_length",
	"tp": "model.tensor_model_parallel_size", "tensor_model_parallel_size": "model.tensor_model_parallel_size",
	"pp": "model.pipeline_model_parallel_size", "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
	"cp": "model.context_parallel_size", "context_parallel_size": "model.context_parallel_size",
	"vp":                                   "model.virtual_pipeline_model_parallel_size",
	"virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
	"ep":                                   "model.expert_model_parallel_size",
	"expert_model_parallel_size":           "model.expert_model_parallel_size",
	"etp":                                  "model.expert_tensor_parallel_size",
	"expert_tensor_parallel_size":          "model.expert_tensor_parallel_size"}

// bridgeMembers returns the members of a command: its flags, and what is set over the recipe. An assignment goes before
// a flag for the same key.
func bridgeMembers(words []shell.Word) []strict.Member {
	over := &strict.Value{Kind: '{', At: words[0].At}
	list := []strict.Member{{Name: bridgeProgramIn, At: words[0].At,
		Value: strict.Of(filepath.Dir(words[0].Text))}}
	set := func(path string, w shell.Word) { assign(over, shell.Word{Text: path + "=" + w.Text, At: w.At}) }
	var assigned []shell.Word
	for i := 1; i < len(words); i++ {
		w := words[i]
		name, value, given := strings.Cut(strings.TrimLeft(w.Text, "-"), "=")
		name = strings.ReplaceAll(name, "-", "_")
		switch {
		case !strings.HasPrefix(w.Text, "-"):
			assigned = append(assigned, w)
			continue
		case given:
			w = shell.Word{Text: value, At: w.At}
		case i+1 < len(words) && !strings.HasPrefix(words[i+1].Text, "-") && !strings.Contains(words[i+1].Text, "="):
			i++
			w = words[i]
		default:
			w = shell.Word{Text: "true", At: w.At}
		}
		if path := bridgeShort[name]; path != "" {
			set(path, w)
			continue
		}
		list = append(list, strict.Member{Name: name, At: w.At, Value: argument(w)})
	}
	for _, w := range assigned {
		assign(over, w)
	}
	return append(list, strict.Member{Name: bridgeOver, At: over.At, Value: over})
}

// bridgeArguments reads the recipe that a command names, and what the command sets over it.
func bridgeArguments(d *strict.Document) (made MadeArguments, err error) {
	name, err := bridgeRecipe(d)
	if err != nil {
		return made, err
	}
	path, text, isBenchmark := recipeFile(d, name.Text)
	if path == "" {
		return made, d.Inputf(name.At, "the recipe is %s, and no file of megatron/bridge/recipes here has it",
			name.Text).WithHint("run plimsoll where the repository of Megatron-Bridge is; or give the recipe as " +
			"FILE.py:" + name.Text + "; or " + bridgeInstead)
	}
	recipe := parsePython(path+":"+name.Text, text, nil)
	if recipe == nil {
		return made, d.Inputf(name.At, "%s of %s makes a configuration in a way that only a run can tell", name.Text,
			path).WithHint(bridgeInstead)
	}
	if err := bridgeOverrides(d, recipe); err != nil {
		return made, err
	}
	s := sectioned(recipe)
	if s == nil {
		return made, d.Inputf(name.At, "%s of %s is no training of a language model", name.Text, path).
			WithHint(bridgeInstead)
	}
	arguments, err := s.arguments()
	if err != nil {
		return made, err
	}
	if isBenchmark && !s.is("optimizer.use_precision_aware_optimizer") && strings.Contains(name.Text, "_bf16") &&
		!hasOver(d, "optimizer") {
		s.give("use_precision_aware_optimizer", recipe.Root, true) // _apply_benchmark_runtime_defaults
	}
	made = MadeArguments{Root: arguments.Root, In: arguments, Adapter: s.adapter, Notes: s.notes,
		Files: []string{path}}
	made.Notes = append(made.Notes, Note{Where: d.Position(name.At),
		What: fmt.Sprintf("the recipe is %s of %s, read without running it", name.Text, path)})
	if isBenchmark {
		made.Notes = append(made.Notes, Note{Where: d.Position(name.At), What: fmt.Sprintf("%s is a benchmark: with "+
			"other than its %d GPUs Megatron-Bridge scales train.global_batch_size, which the plan does not", name.Text,
			s.ranks)})
	}
	made.Nodes, made.PerNode = wholeNumber(d, "nodes"), wholeNumber(d, "gpus_per_node")
	return made, nil
}

// bridgeRecipe returns the name of the recipe, which a model and a mode may say.
func bridgeRecipe(d *strict.Document) (*strict.Value, error) {
	word := func(name string) *strict.Value {
		if m := d.Root.Member(name); m != nil {
			return m.Value
		}
		return &strict.Value{At: d.Root.At}
	}
	recipe, model, mode := word("recipe"), word("model"), word("mode")
	task := map[string]string{"pretrain": "pretrain", "sft": "sft", "lora": "peft", "dora": "peft"}[mode.Text]
	switch {
	case mode.Text == "dora":
		return nil, d.Inputf(mode.At, "mode is dora, which is not planned yet").
			WithHint("plimsoll plans LoRA and CanonicalLoRA of Megatron-Bridge")
	case strings.Contains(recipe.Text+model.Text, "$"):
		return nil, d.Inputf(recipe.At, "the recipe is %s, which the script does not set", recipe.Text+model.Text).
			WithHint("write its name in a copy of the script")
	case recipe.Text != "":
		return recipe, nil
	case task == "":
		return nil, d.Inputf(model.At, "--model names no recipe without --mode").
			WithHint("add --mode pretrain, sft or lora, as Megatron-Bridge asks for")
	}
	return &strict.Value{Kind: '"', At: model.At, Text: model.Text + "_" + task + "_config"}, nil
}

// recipeFile returns the file of Megatron-Bridge that has a recipe: a benchmark goes before one of the library. The
// repository is looked for around the program, the script and the working directory.
func recipeFile(d *strict.Document, name string) (path string, text []byte, isBenchmark bool) {
	for _, folder := range []string{"perf_recipes", "recipes"} {
		in := filepath.Join("megatron", "bridge", folder)
		for _, below := range []string{filepath.Join("src", in), in} {
			var roots []string
			if m := d.Root.Member(bridgeProgramIn); m != nil && !strings.Contains(m.Value.Text, "$") {
				roots = places(filepath.Join(m.Value.Text, "program"), below)
			}
			for _, root := range append(roots, places(d.File, below)...) {
				if path, text = definedIn(root, name); path != "" {
					return path, text, folder == "perf_recipes"
				}
			}
		}
	}
	return "", nil, false
}

// definedIn returns the source in a folder that defines a function or gives one a name.
func definedIn(folder, name string) (found string, text []byte) {
	defines, err := regexp.Compile(`(?m)^def ` + regexp.QuoteMeta(name) + `\(|\bas ` + regexp.QuoteMeta(name) + `\b|^` +
		regexp.QuoteMeta(name) + ` = `)
	if err != nil {
		return "", nil
	}
	seen := 0
	_ = filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if seen++; err != nil || seen > 1<<12 {
			return fs.SkipAll
		}
		if entry.IsDir() || filepath.Ext(path) != ".py" {
			return nil
		}
		if content, err := files.Read(path, largest); err == nil && defines.Match(content) {
			found, text = path, content
			return fs.SkipAll
		}
		return nil
	})
	return found, text
}

// hasOver reports whether a command sets something of a section over the recipe.
func hasOver(d *strict.Document, section string) bool {
	over := d.Root.Member(bridgeOver)
	return over != nil && over.Value.Member(section) != nil
}

// bridgeOverrides puts what a command sets over the keys of a recipe.
func bridgeOverrides(d, recipe *strict.Document) error {
	over := d.Root.Member(bridgeOver)
	if over == nil {
		return nil
	}
	for _, section := range over.Value.Members {
		if !slices.Contains(bridgeSections, section.Name) {
			continue
		}
		is := recipe.Root.Member(section.Name)
		if is == nil && section.Value.Kind == '{' {
			Give(recipe.Root, section.Name, recipe.Root.At, placed(section.Value.Clone(), recipe.Root.At))
			continue
		}
		if section.Value.Kind != '{' || is == nil || is.Value.Kind != '{' {
			return d.Inputf(section.At, "%s is set over the recipe, which is not planned", section.Name).
				WithHint("set single keys of it: " + section.Name + ".KEY=VALUE")
		}
		for _, m := range section.Value.Members {
			cuts := section.Name == "model" && strings.HasSuffix(m.Name, "pipeline_model_parallel_size")
			if cuts && ownsLayout(is.Value) && section.Value.Member("pipeline_model_parallel_layout") == nil {
				return d.Inputf(m.At, "%s is set over a recipe that makes a layout of pipeline stages by code", m.Name).
					WithHint("add model.pipeline_model_parallel_layout=LAYOUT; or " + bridgeInstead)
			}
			Give(is.Value, m.Name, is.At, placed(m.Value.Clone(), is.At))
		}
	}
	return nil
}

// ownsLayout reports whether a recipe says the layers of each pipeline stage.
func ownsLayout(model *strict.Value) bool {
	for _, key := range []string{"pipeline_model_parallel_layout", "_pipeline_model_parallel_layout_builder",
		"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"} {
		if m := model.Member(key); m != nil && !m.Value.IsEmpty() && m.Value.Kind != 'n' {
			return true
		}
	}
	return false
}

// wholeNumber returns a number that a command gives, 0 without one.
func wholeNumber(d *strict.Document, name string) int64 {
	var n int64
	if m := d.Root.Member(name); m != nil && m.Value.Kind == '0' {
		_, _ = fmt.Sscan(m.Value.Text, &n)
	}
	return n
}
