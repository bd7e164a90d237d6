package recipe

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// Framework is a configuration of a program that makes the model and the Trainer itself: LLaMA-Factory, axolotl,
// ms-swift, torchtune, torchtitan, or TRL's scripts. It says what several files say of other jobs.
type Framework struct {
	File string

	Model        string
	Training     *Training
	Adapter      *Adapter      // nil without
	Quantization *Quantization // nil without
	Packed       string        // "gptq" where the model has to have weights in it, "" for any
	Sequence     int           // tokens, at most
	Attention    string        // "" = the default of transformers, or "sdpa", "flash" or "eager"
	FusedLoss    bool
	// Rewards says that the program trains a reward model on pairs of answers. A micro batch counts pairs.
	Rewards bool
	// TokenLabels is the number of labels of every token that a process reward model is trained on, 0 if none is.
	TokenLabels int64
	// ValueHead says that a reward model keeps its language model's head, beside one with an output for every token.
	ValueHead bool
	Answers   *Answers // what is trained on answers, nil for a language model's loss
	Freeze    *Freeze  // the part of the model that is trained, nil for all of it
	Optimizer string   // "" = what Training says
	LowRank   *LowRank // of GaLore and APOLLO where Optimizer is one of them
	// LossTwice says that the program computes the loss from the logits of a model that has computed its own.
	LossTwice bool
	// Diverges says that the loss has the divergence from a frozen model, which is Judge, or "" for the model as it was
	// loaded. WeighsEntropy says that it weights tokens by an entropy of the logits.
	Diverges, WeighsEntropy bool
	Judge                   string
	LigerModules            bool // modules of liger-kernel, and the loss of the logits
	// LoadsOnGPU says that every rank loads the full model on its GPU, and shards it there.
	LoadsOnGPU bool
	// RouterLoss says that the program has the model output the logits of its routers, for RouterLossOf: types of
	// models, nil for all.
	RouterLoss   bool
	RouterLossOf []string

	// Weights is the type that the weights are loaded in, "" for the type that they were published in. TrainedIn32 says
	// when trained weights are converted to fp32.
	Weights          string
	TrainedIn32      Upcast
	AdapterPrecision string // "" = that of PEFT
	// AddsInFull says that the program's PEFT is older than 0.21: the product of an adapter of a parameter is made in
	// full before it is added.
	AddsInFull bool
	// UnitsAtEnds are those of a program that divides the model into units of FSDP2 itself, in place of accelerate. It
	// is nil for others.
	UnitsAtEnds *UnitsAtEnds
	// FSDP2WithoutReentrant says that FSDP2 turns reentrant checkpointing off.
	FSDP2WithoutReentrant bool

	// Freezes are the parts of multimodal models that the program does not train, nil without.
	Freezes *Freezes
	// MostPixels is the size that the program scales larger images down to, 0 without.
	MostPixels int64

	Pipeline    *Pipeline    // nil without
	Parallelism *Parallelism // nil without; shards over the ranks that are left where Shard is 0
	Experts     int          // ranks that divide the experts, 0 or 1 without
	GlobalBatch *GlobalBatch // nil where the file says accumulation
	// SeveralOnly says that the program shards the model only if there are several ranks.
	SeveralOnly bool
	ReducesIn32 bool      // FSDP reduces gradients in fp32
	Modules     string    // the library of the model's modules, "" for transformers
	Recompute   string    // "" = what Training says
	QAT         *QAT      // nil without
	Unfrozen    *Unfrozen // nil if all parameters are trained
	// ScattersExperts says that axolotl's kernels of ScatterMoE run fused experts.
	ScattersExperts bool
	TilesMLP        *Tiles // nil without
	// LinearizesExperts says that each of Llama 4's experts has linear modules.
	LinearizesExperts bool
	// WidensNorms says that norms, embeddings and the head are kept in fp32.
	WidensNorms bool
	// QuantizesExperts says that the parameters that hold all experts of a layer are quantized, too.
	QuantizesExperts bool
	// StepsInBackward says that every parameter has an optimizer, which steps once its gradient is complete.
	StepsInBackward bool
	// HostExperts says how KTransformers runs the experts, nil if they are a part of the model on the GPU.
	HostExperts *HostExperts
	// Offloading says which activations wait on the host for the backward pass, nil if none does.
	Offloading *Offloading

	Notes []Note

	place fault.Position // of the model's name
}

// Pipeline says how the model is cut into pipeline stages.
type Pipeline struct {
	Place      fault.Position
	Degree     int
	Schedule   string // as torch.distributed.pipelining names it
	MicroBatch int    // sequences of a micro batch of the pipeline, 0 for the micro batches of the optimizer step
	LayersEach int    // layers of a stage, 0 for the fewest stages
	LayersLess [2]int // layers that the first and the last stage have less than others
	Layers     []int  // of each stage, nil for an even cut
}

// GlobalBatch is the number of sequences of all ranks in an optimizer step, where a program makes as many micro batches
// of it as it takes.
type GlobalBatch struct {
	Place     fault.Position
	Sequences int
}

// Stages returns the number of pipeline stages, 1 without.
func (f *Framework) Stages() int {
	if f.Pipeline == nil {
		return 1
	}
	return f.Pipeline.Degree
}

// QAT is quantization-aware training by torchao.
type QAT struct {
	Group       int  // inputs that share a scale of the weight
	Activations bool // inputs are rounded to int8, too
	Learned     bool // the gradient goes through the scales of the weight
	Packed      bool // inputs and weights are in MXFP4 until the backward pass
}

// Tiles says that feed-forward networks run on tiles of a sequence, one after the other: axolotl's tiled_mlp.
type Tiles struct{ Count int } // 0 for tiles of TileTokens

// TileTokens is axolotl's size of a tile.
const TileTokens = 32768

// Offloading is what OffloadActivations of TRL and torchtune does.
type Offloading struct {
	Streams    bool // copies are on a stream of their own
	Stash      int  // so many saved tensors stay on the GPU while they are copied
	Tracks     bool // a tensor stays whose storage is saved again while it is copied
	InputsOnly bool // of checkpoints
	BeforeLoss bool // what the loss saves stays
	Weights    bool // copies of the weights that products save wait on the host, too
}

// offloadingTRL is OffloadActivations with TRL's defaults.
func offloadingTRL() *Offloading { return &Offloading{Streams: true, Stash: 5, Tracks: true} }

// Freezes says which parts of a multimodal model are not trained.
type Freezes struct {
	Vision, Projector, Language bool
	// ModelTypes are the only models that it holds for, or none.
	ModelTypes []string
	// Named are components of the paths of these parts, of which a part has one; or none.
	Named []string
	// Contained says that an entry of target_modules adapts all modules whose names contain it.
	Contained bool
	// Open are parts of the names of parameters that stay trained in an encoder that is not.
	Open []string
}

// Holds reports whether a model's parts are frozen at all.
func (f *Freezes) Holds(modelType string) bool {
	return f != nil && (len(f.ModelTypes) == 0 || slices.Contains(f.ModelTypes, modelType))
}

// Names reports whether a part with its modules in a path may be frozen.
func (f *Freezes) Names(path string) bool {
	return len(f.Named) == 0 || slices.ContainsFunc(strings.Split(path, "."),
		func(component string) bool { return slices.Contains(f.Named, component) })
}

// Upcast says when a program or an engine converts trained weights of the model to fp32.
type Upcast int

// Weights of an adapter are not meant.
const (
	Never     Upcast = iota
	UnderFSDP        // accelerate does so
	UnderFSDP1
	Always
)

// Place returns the place of the model's name.
func (f *Framework) Place() fault.Position { return f.place }

// family is what the configurations of one program hold.
type family struct {
	kind    *kind
	program string
	// own are the keys beside those of TrainingArguments. A rule without a form is of a key that no plan depends on.
	own keys
	// hosts reports whether the keys of TrainingArguments are keys of the file, too.
	hosts bool
	read  func(r *frameworkReader) error
}

// families are in the order of their kinds.
func families() []family {
	return []family{llamaFactoryV1, swift, llamaFactory, axolotl, torchtune, torchtitan, trl}
}

// LoadFramework reads the file at path. It returns nil if another function loads files of
// its kind.
func LoadFramework(path string, from Source) (*Framework, error) {
	text, err := from.Texts.Read(path, largest)
	if err != nil {
		return nil, &fault.Input{Where: fault.Position{File: path}, Err: err}
	}
	return ParseFramework(path, text, from)
}

// ParseFramework parses the text of a file. Paths in it are relative to the working directory or to the file. Every
// error is a *fault.Input.
func ParseFramework(file string, text []byte, from Source) (*Framework, error) {
	document := parseContent(file, text)
	if document == nil {
		return nil, nil
	}
	found, _ := recognized(document.Root)
	for _, f := range families() {
		if f.kind == found {
			return f.parse(document, from)
		}
	}
	return nil, nil
}

// isTOML reports whether a file name ends like that of a TOML file.
func isTOML(file string) bool { return strings.HasSuffix(strings.ToLower(file), ".toml") }

// parseContent parses a text as what it looks like, whatever the name of its file. It returns nil if it cannot.
func parseContent(file string, text []byte) *strict.Document {
	if d := parseCommand(file, text); d != nil {
		return d
	}
	if d := parseArguments(file, text); d != nil {
		return d
	}
	start := bytes.TrimSpace(text)
	named := isTOML(file) && !bytes.HasPrefix(start, []byte{'{'})
	if named || sectionLine.Match(text) && !strict.IsYAML(file) {
		if d, err := strict.ParseTOML(file, text); err == nil || named {
			return d
		}
	}
	if bytes.HasPrefix(start, []byte{'{'}) || bytes.HasPrefix(start, []byte("//")) || strict.IsYAML(file) {
		return parseAny(file, text)
	}
	d, err := strict.ParseYAML(file, text)
	if err != nil {
		return nil
	}
	return d
}

// known are the keys of TrainingArguments that are keys of the file, too.
func (f family) known() keys {
	known := keys{}
	if f.hosts {
		for name := range trainingSchema.Rule.Keys() {
			known[name] = strict.Rule{}
		}
	}
	return known
}

func (f family) parse(d *strict.Document, from Source) (*Framework, error) {
	if err := template(d); err != nil {
		return nil, err
	}
	rule := object(f.known(), f.own).NotingAll()
	checked, err := strict.Schema{Program: f.program, Rule: rule}.Read(d)
	if err != nil {
		return nil, err
	}
	r := &frameworkReader{Reader: checked, arguments: &strict.Value{Kind: '{'},
		to: &Framework{File: d.File}, program: f.program, texts: from.Texts}
	for _, m := range d.Root.Members {
		_, own := f.own[m.Name]
		if _, argument := trainingSchema.Keys()[m.Name]; f.hosts && !own && argument {
			r.arguments.Members = append(r.arguments.Members, m)
		}
	}
	if err := f.read(r); err != nil {
		return nil, err
	}
	if f.kind != torchtuneKind { // its files have keys for each component
		if err := f.kind.own(d, &rule); err != nil {
			return nil, err
		}
	}
	if r.to.Training, err = readTraining(r.part(r.arguments), from); err != nil {
		return nil, err
	}
	r.to.Notes = append(r.Notes, r.to.Training.Notes...)
	r.to.Training.Notes = nil
	return r.to, nil
}

// frameworkReader reads a configuration of a family.
type frameworkReader struct {
	*strict.Reader
	arguments *strict.Value // what the program gives to TrainingArguments
	to        *Framework
	program   string // for messages
	texts     files.Texts
}

// part returns a document of values that the file or its program sets.
func (r *frameworkReader) part(root *strict.Value) *strict.Document {
	return &strict.Document{File: r.File, Text: r.Text, Root: root}
}

// harmless matches keys that no plan depends on and that scripts compute.
var harmless = lazyregexp.New(
	`dataset|^data_|^output|^logging|^run_name|_dir$|^model_name$|^model_author|_port$|^node|_val$|^report|^system$`)

// template refuses a file with variables that another program fills in.
func template(d *strict.Document) error {
	for _, m := range d.Root.Members {
		if v := m.Value; v.Kind == '"' && strings.HasPrefix(v.Text, "$") && !harmless.MatchString(m.Name) {
			return d.Inputf(v.At, "%s is %s, a variable: this file is a template", m.Name, v).
				WithHint("give the file with the variables filled in")
		}
	}
	return nil
}

// pass gives the value of a key to TrainingArguments, where it has the name.
func (r *frameworkReader) pass(key, name string) {
	if v := r.Find(key); v != nil {
		give(r.arguments, name, r.At(key), v)
	}
}

// set gives TrainingArguments a value that the program derives from a key.
func (r *frameworkReader) set(name, key string, is any) {
	give(r.arguments, name, r.At(key), strict.Of(is))
}

// give sets a member of an object, whether the object has it or not.
func give(object *strict.Value, name string, at int64, is *strict.Value) {
	given := *is
	if given.At = max(given.At, at); given.At < 0 {
		given.At = 0
	}
	if m := object.Member(name); m != nil {
		m.Value = &given
		return
	}
	object.Members = append(object.Members, strict.Member{Name: name, At: max(at, 0), Value: &given})
}

// model reads the key that names the model.
func (r *frameworkReader) model(key string) {
	r.to.Model, r.to.place = r.Word(key), r.Place(key)
}

// on reports whether a value of any form asks for something.
func on(v *strict.Value) bool {
	if v == nil || v.IsEmpty() {
		return false
	}
	return !slices.Contains([]string{"false", "False", "0", "no", "none", "null"}, v.Text) && v.Kind != 'f'
}

// routerLoss reads a value that makes a mixture of experts output the logits of its routers, for all types of models or
// for some.
func (r *frameworkReader) routerLoss(value *strict.Value, of ...string) {
	r.to.RouterLoss = r.to.RouterLoss || on(value)
	r.to.RouterLossOf = of
}

// unplanned refuses the first of the keys that asks for something, as it changes memory in a way that is not planned.
func (r *frameworkReader) unplanned(why, names string) error {
	for key := range strings.FieldsSeq(names) {
		if v := r.Find(key); on(v) {
			return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, why),
				"remove the key to plan the job without it, and expect its memory to differ")
		}
	}
	return nil
}

// oneOfThese refuses a word that no plan is made for.
func (r *frameworkReader) oneOfThese(key string, reasons map[string]string) error {
	v := r.Find(key)
	if v == nil {
		return nil
	}
	if why := reasons[strings.ToLower(v.Text)]; why != "" {
		return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, why), "")
	}
	return nil
}

// adapt reads the values of a LoraConfig, by their names in PEFT.
func (r *frameworkReader) adapt(key string, values map[string]*strict.Value) (err error) {
	root := &strict.Value{Kind: '{'}
	give(root, "peft_type", r.At(key), strict.Of("LORA"))
	give(root, "task_type", r.At(key), strict.Of("CAUSAL_LM"))
	if r.to.Rewards { // PEFT trains the head of a classifier of sequences (SEQ_CLS)
		saved := &strict.Value{Kind: '[', Elements: []*strict.Value{strict.Of("score")}}
		if v := values["modules_to_save"]; v != nil {
			saved.Elements = append(saved.Elements, v.Elements...)
		}
		values["modules_to_save"] = saved
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v != nil {
			give(root, name, r.At(key), v)
		}
	}
	r.to.Adapter, err = readAdapter(r.part(root))
	return err
}

// quantize reads the values of a BitsAndBytesConfig.
func (r *frameworkReader) quantize(key string, values map[string]*strict.Value) (err error) {
	root := &strict.Value{Kind: '{'}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v != nil {
			give(root, name, r.At(key), v)
		}
	}
	r.to.Quantization, err = readQuantization(r.part(root))
	return err
}

// longest takes the length of sequences from a key.
func (r *frameworkReader) longest(key string) {
	r.to.Sequence = int(r.Integer(key))
	what := fmt.Sprintf("sequences of %d tokens: %s is the most that a sample has, and shorter ones take less",
		r.to.Sequence, key)
	if !r.Gives(key) {
		what = fmt.Sprintf("sequences of %d tokens: %s is not given, and this is its default in %s",
			r.to.Sequence, key, r.program)
	}
	r.Notes = append(r.Notes, Note{Where: r.Place(key), What: what})
}

// compute returns the type that a model computes in: "bf16", "fp16" or "".
func (r *frameworkReader) compute() string {
	for _, name := range []string{"bf16", "fp16"} {
		if m := r.arguments.Member(name); m != nil && on(m.Value) {
			return name
		}
	}
	return ""
}

// elementNames are torch's names of types.
var elementNames = map[string]string{"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

// precisionNames are Plimsoll's names of torch's types.
var precisionNames = map[string]string{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
	"torch.bfloat16": "bf16",
	"torch.float16":  "fp16", "torch.float32": "fp32", "half": "fp16", "float": "fp32", "bf16": "bf16", "fp16": "fp16",
	"fp32": "fp32"}

// separated returns a text with commas as a list of its parts.
func separated(v *strict.Value) *strict.Value {
	if v == nil || v.Kind != '"' {
		return v
	}
	list := &strict.Value{At: v.At, Kind: '['}
	for part := range strings.SplitSeq(v.Text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list.Elements = append(list.Elements, &strict.Value{At: v.At, Kind: '"', Text: part})
		}
	}
	return list
}
