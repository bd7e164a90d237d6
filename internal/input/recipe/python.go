package recipe

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// A source of Python may say a training by literals: the arguments of a Trainer's constructor, or a function that
// returns a configuration. The kinds of programs read such a source (Kind.Python), and make of it a document like that
// of a file. FILE.py:FUNCTION names a function of a source.

// parsePython returns the training that a source of Python or a notebook says, as a document, or nil if it says none.
// Its command line is nil where it is not known.
func parsePython(file string, text []byte, command []python.Argument) *strict.Document {
	source, function := readPython(file, text, command)
	if source == nil {
		return nil
	}
	path, _ := files.SplitFunction(file)
	for _, k := range kinds {
		if k.Python == nil {
			continue
		}
		if root := k.Python(source, function); root != nil {
			return &strict.Document{File: path, Text: text, Root: withoutSilent(root)}
		}
	}
	return nil
}

// readPython reads a source of Python or a notebook, and the function that a path names. It returns nil for other
// texts.
func readPython(file string, text []byte, command []python.Argument) (source *python.Source, function string) {
	path, function := files.SplitFunction(file)
	if filepath.Ext(path) != ".py" && !python.IsNotebook(text) {
		return nil, ""
	}
	source, err := python.ReadStarted(path, text, command, func(module string) ([]byte, string, error) {
		text, err := files.Read(module, largest)
		return text, module, err
	}, unopened...)
	if err != nil {
		return nil, ""
	}
	return source, function
}

// silentComputed are keys that programs compute and no plan depends on.
var silentComputed = lazyregexp.New(`^(?:learning_rate|weight_decay|warmup_ratio|warmup_steps|max_steps|` +
	`num_train_epochs|seed|data_seed|lr_scheduler_type|lr_scheduler_kwargs|save_steps|eval_steps|save_total_limit|` +
	`hub_.*|push_to_hub|chat_template_path|eos_token|pad_token|temperature|top_p|top_k|min_p|.*_token)$`)

// withoutSilent leaves out what a source computes and no plan depends on.
func withoutSilent(root *strict.Value) *strict.Value {
	root.Members = slices.DeleteFunc(root.Members, func(m strict.Member) bool {
		return isComputed(m.Value) && (silentComputed.MatchString(m.Name) || harmless.MatchString(m.Name))
	})
	return root
}

// isComputed reports whether a value is one that a source of Python computes, as Literal writes it.
func isComputed(v *strict.Value) bool { return v.Kind == '"' && strings.HasPrefix(v.Text, computed) }

// computed begins the text of a value that only a run can tell.
const computed = "$("

// computedValue returns the value of a key that only a run can tell, and why.
func computedValue(why string, at int) *strict.Value {
	v := strict.Of(computed + why + ")")
	v.At = int64(max(0, at))
	return v
}

// enumerated matches a member of an enumeration, such as peft.TaskType.CAUSAL_LM.
var enumerated = lazyregexp.New(`(?:^|\.)[A-Z]\w*[a-z]\w*\.([A-Z][A-Z0-9_]*)$`)

// Literal returns a value of a source as one of a document. What the source does not say becomes one that a run
// computes. A value of another file is placed at an offset.
func Literal(v *python.Value, at int) *strict.Value {
	room := 1 << 12
	return literal(v, at, &room)
}

func literal(v *python.Value, at int, room *int) *strict.Value {
	if v.At >= 0 {
		at = v.At
	}
	if *room--; *room < 0 {
		return computedValue("a value of many parts", at)
	}
	is := &strict.Value{At: int64(at)}
	switch v.Kind {
	case python.None:
		is.Kind, is.Text = 'n', "null"
	case python.Bool:
		*is = *strict.Of(v.Truth)
	case python.Number:
		*is = *strict.Of(v.Number)
		if v.Whole {
			*is = *strict.Of(int(v.Number))
		}
	case python.Text:
		is.Kind, is.Text = '"', v.Text
	case python.List:
		is.Kind = '['
		for _, e := range v.Elements {
			is.Elements = append(is.Elements, literal(e, at, room))
		}
	case python.Dict:
		is.Kind = '{'
		for _, m := range v.Members {
			is.Members = append(is.Members, strict.Member{Name: m.Name, At: int64(max(m.At, 0)),
				Value: literal(m.Is, at, room)})
		}
	case python.Symbol:
		return symbol(v, at)
	default:
		return computedValue(fmt.Sprintf("%.60s", v), at)
	}
	is.At = int64(at)
	return is
}

// class matches a class of another module.
var class = lazyregexp.New(`\.[A-Z]\w*[a-z]\w*$`)

// symbol returns a name of torch, a class, or a member of an enumeration.
func symbol(v *python.Value, at int) *strict.Value {
	is := &strict.Value{At: int64(at), Kind: '"', Text: v.Text}
	member := enumerated.FindStringSubmatch(v.Text)
	switch {
	case strings.HasPrefix(v.Text, "torch."), class.MatchString(v.Text):
	case member != nil:
		is.Text = member[1]
	default:
		return computedValue(fmt.Sprintf("%.60s", v.Text), at)
	}
	return is
}

// argumentsOf adds the arguments of a call to an object, but for those that a caller reads itself.
func argumentsOf(to *strict.Value, call *python.Value, but ...string) {
	for _, m := range call.Members {
		if !slices.Contains(but, m.Name) {
			Give(to, m.Name, int64(max(m.At, call.At, 0)), Literal(m.Is, max(m.At, call.At)))
		}
	}
	if call.Partial {
		Give(to, "per_device_train_batch_size", int64(max(0, call.At)),
			computedValue("arguments of "+call.Name()+" that only a run can tell", call.At))
	}
}

// The keys of a source that loads the model and makes the adapter itself.
const (
	Loaded  = "from_pretrained" // arguments of from_pretrained, and the name of the model
	Adapted = "LoraConfig"
	unread  = "statements_not_read"
	asked   = "is_bf16_supported" // the source asks whether the GPU computes in bf16
)

// SourceKeys are the keys of a source beside those of its program.
var SourceKeys = strict.Keys{Loaded: rule.Free.OrNull(), Adapted: rule.Free.OrNull(), environment: rule.Free,
	unread: rule.Count, asked: rule.Switched, prepared: rule.Switched}

// keeps are methods and functions that return the model that they get, and what they do to it.
var keeps = map[string]string{"to": "", "cuda": "", "train": "", "prepare_model_for_kbit_training": prepared,
	"prepare_model_for_int8_training": prepared, "prepare_model": ""}

// prepared is the key of a quantized model whose other parameters are made fp32, with checkpoints
// (prepare_model_for_kbit_training in peft/utils/other.py).
const prepared = "prepare_model_for_kbit_training"

// sourceModel is what a source does to the model that it gives a trainer.
type sourceModel struct {
	loaded   *python.Value // the call of from_pretrained, nil for a model that is made in another way
	adapter  *python.Value // the adapter that it gets, nil without
	prepared bool
	chain    []*python.Value // the calls that return it, the last one first
}

// modelOf returns what a source does to a model.
func modelOf(model *python.Value) (m sourceModel) {
	for range 8 {
		if model == nil || model.Kind != python.Object {
			return sourceModel{adapter: m.adapter}
		}
		m.chain = append(m.chain, model)
		does, known := keeps[model.Name()]
		switch {
		case model.Name() == "from_pretrained":
			m.loaded = model
			return m
		case model.Name() == "get_peft_model":
			m.adapter = adapterOf(model)
		case !known:
			return sourceModel{adapter: m.adapter}
		}
		m.prepared = m.prepared || does == prepared
		switch {
		case model.Attribute("model") != nil:
			model = model.Attribute("model")
		case len(model.Given) > 0 && model.Given[0].Kind == python.Object:
			model = model.Given[0]
		default:
			model = model.From
		}
	}
	return sourceModel{}
}

// decides are attributes that a source sets, and methods that it calls, that decide what a training holds.
var decides = map[string]string{"requires_grad": "which parameters are trained",
	"requires_grad_": "which parameters are trained", "resize_token_embeddings": "the size of the vocabulary",
	"add_adapter": "the adapter", "load_adapter": "the adapter"}

// touches reads what else a source does to its model.
func touches(root *strict.Value, source *python.Source) {
	for name, what := range decides {
		if at, is := source.Touched[name]; is {
			Give(root, name, int64(at), computedValue(what+", decided by code", at))
		}
	}
}

// TrainerOfSource gives a document what a trainer's constructor gets: the arguments of its configuration, how the model
// is loaded, by its name or by a call, and the adapter that it gets.
func TrainerOfSource(root *strict.Value, source *python.Source, trainer *python.Value) {
	if n := len(source.Unread); n > 0 {
		Give(root, unread, int64(source.Unread[0]), strict.Of(n))
	}
	if source.AsksBF16 {
		Give(root, asked, root.At, strict.Of(true))
	}
	argument := func(name string, place int) *python.Value {
		if is := trainer.Attribute(name); is != nil || len(trainer.Given) <= place {
			return is
		}
		return trainer.Given[place]
	}
	args := argument("args", 1)
	if trainer.Partial {
		argumentsOf(root, &python.Value{Class: trainer.Class, Partial: true, At: trainer.At})
	}
	isMade := args != nil && args.Kind == python.Object && args.From == nil && configures.MatchString(args.Class) &&
		OfLibrary(args)
	switch {
	case isMade:
		argumentsOf(root, args, "model_init_kwargs")
	case args != nil && args.Kind != python.None:
		Give(root, "per_device_train_batch_size", root.At, computedValue(args.String(), trainer.At))
	}
	model := argument("model", 0)
	made := modelOf(model)
	made.byStatement(root, source)
	switch {
	case model == nil:
	case model.Kind == python.Text:
		loadedBy(root, named(model, args))
	case root.Member("model") != nil:
	case made.loaded == nil:
		Give(root, "model", root.At, computedValue(model.String(), trainer.At))
	default:
		loadedBy(root, made.loaded)
	}
	if made.prepared {
		Give(root, prepared, root.At, strict.Of(true))
	}
	adapter := made.adapter
	if config := trainer.Attribute("peft_config"); config != nil && config.Kind != python.None {
		adapter = config
	}
	if adapter != nil {
		adaptedBy(root, adapter)
	}
	if is := modelOf(trainer.Attribute("ref_model")).loaded; is != nil && len(is.Given) > 0 {
		Give(root, "ref_model", root.At, Literal(is.Given[0], trainer.At))
	}
	trainerByStatement(root, source, trainer, args)
	liger(root, source)
	defaultTypes(root, source)
	exported(root, source)
	recomputes(root, source, trainer)
	touches(root, source)
}

// configures matches the classes of libraries whose calls make a trainer's configuration.
var configures = lazyregexp.New(`^(?:\w+\.)*[A-Z]\w*(?:Config|Arguments)$`)

// libraries have the classes that are known by their names.
var libraries = strings.Fields("transformers trl peft unsloth")

// unopened are modules that are known by the names of what they have, also where a source's own project has them.
var unopened = append(strings.Fields(`megatron.bridge.models megatron.core megatron.bridge.data megatron.bridge.utils
	megatron.bridge.training.config megatron.bridge.training.flex_dispatcher_backend`), libraries...)

// OfLibrary reports whether a class is one of these libraries, or of no module that the source names.
func OfLibrary(v *python.Value) bool {
	module, _, inModule := strings.Cut(v.Class, ".")
	return !inModule || slices.Contains(libraries, module)
}

// named returns the call by which a trainer loads a model that it gets by its name: in fp32 unless model_init_kwargs
// say another type (create_model_from_path in trl/trainer/utils.py).
func named(model, args *python.Value) *python.Value {
	call := &python.Value{Kind: python.Object, Class: "from_pretrained", At: max(0, model.At),
		Given: []*python.Value{model}}
	call.Members = []python.Member{{Name: "dtype", At: call.At, Is: &python.Value{Kind: python.Text, Text: "float32",
		At: call.At}}}
	more := args.Attribute("model_init_kwargs")
	switch {
	case more == nil || more.Kind == python.None:
	case more.Kind != python.Dict:
		call.Partial = true
	case more.Attribute("dtype") != nil || more.Attribute("torch_dtype") != nil:
		call.Members = more.Members
	default:
		call.Members = append(call.Members, more.Members...)
	}
	return call
}

// loadedBy gives a document the arguments of from_pretrained.
func loadedBy(to *strict.Value, call *python.Value) {
	object := &strict.Value{Kind: '{', At: int64(call.At)}
	name := call.Attribute("pretrained_model_name_or_path")
	if len(call.Given) > 0 {
		name = call.Given[0]
	}
	if name == nil {
		name = call.Attribute("model_name")
	}
	if name != nil {
		Give(object, "name", 0, Literal(name, call.At))
	}
	Give(object, "class", int64(call.At), strict.Of(strings.TrimSuffix(call.Class, ".from_pretrained")))
	for _, m := range call.Members {
		if q := m.Is; m.Name == "quantization_config" && q.Kind == python.Object {
			config := &strict.Value{Kind: '{', At: int64(max(q.At, 0))}
			Give(config, "class", config.At, strict.Of(libraryName(q)))
			argumentsOf(config, q)
			Give(object, m.Name, int64(max(m.At, 0)), config)
			continue
		}
		Give(object, m.Name, int64(max(m.At, 0)), Literal(m.Is, max(m.At, call.At)))
	}
	if call.Partial {
		Give(object, "arguments", int64(call.At), computedValue("arguments of from_pretrained", call.At))
	}
	Give(to, Loaded, int64(call.At), object)
}

// libraryName returns the name of a class without its module, or with it for one that the source defines.
func libraryName(v *python.Value) string {
	if !OfLibrary(v) {
		return v.Class
	}
	return v.Name()
}

// adaptedBy gives a document the arguments of a LoraConfig.
func adaptedBy(to *strict.Value, config *python.Value) {
	at := int64(max(0, config.At))
	object := &strict.Value{Kind: '{', At: at}
	if config.Kind != python.Object {
		Give(to, Adapted, at, Literal(config, int(at)))
		return
	}
	Give(object, "class", at, strict.Of(libraryName(config)))
	for _, m := range config.Members {
		Give(object, m.Name, int64(max(m.At, 0)), Literal(m.Is, max(m.At, config.At)))
	}
	if config.Partial {
		Give(object, "arguments", at, computedValue("arguments of "+config.Name(), config.At))
	}
	Give(to, Adapted, at, object)
}
