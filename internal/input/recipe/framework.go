// Package recipe reads how a model is trained: the precision, the optimizer,
// the sharding and the offloading. It reads strictly: a key that is silently
// ignored would lead to a plan for another training run than the user starts.
package recipe

import (
	"bytes"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/recipe/strict"
)

// Note is a remark for the author of a file.
type Note = strict.Note

// Framework is a configuration of a program that makes the model and the Trainer itself, such as LLaMA-Factory. It says
// what several files say of other jobs.
type Framework struct {
	File    string
	Program string // its name
	// Package is the program's on PyPI, and Release the one that its defaults are of, which is Assumed where neither a
	// flag nor an environment says it. Both are zero for a program whose defaults are those of one commit.
	Package string
	Release version.Version
	Assumed bool

	Model        string
	Training     *Training
	Adapter      *peft.Adapter // nil without
	Quantization *Quantization // nil without
	Sequence     int           // tokens, at most
	// MostPixels is the size that the program scales larger images down to, 0 without.
	MostPixels int64

	Optimizer string   // "" = what Training says
	LowRank   *LowRank // of GaLore and APOLLO where Optimizer is one of them
	// StepsInBackward says that every parameter has an optimizer, which steps once its gradient is complete.
	StepsInBackward bool

	Loading
	Trained
	Loss
	Passes
	Sharding
	Tricks

	Generation *Generation // nil for a program that is given its answers

	// Environment are the variables that a source sets for its process and that change what the training holds.
	Environment []Variable

	Notes []Note

	place fault.Position // of the model's name
}

// Loading says in which form a program loads the model.
type Loading struct {
	Modules string // the library of the model's modules, "" for transformers
	Packed  string // "gptq" where the model has to have weights in it, "" for any
	// Weights is the type that the weights are loaded in, "" for the type that they were published in. TrainedIn32 says
	// when trained weights are converted to fp32.
	Weights          string
	TrainedIn32      Upcast
	AdapterPrecision string // "" = that of PEFT
	// AddsInFull says that the program's PEFT is older than 0.21: the product of an adapter of a parameter is made in
	// full before it is added.
	AddsInFull bool
	// LoadsOnGPU says that every rank loads the full model on its GPU, and shards it there.
	LoadsOnGPU bool
	// LoadsOnFirst says that the first rank loads the model, and the others make it without memory, unless embeddings
	// are tied.
	LoadsOnFirst bool
}

// Trained says which part of the model a program trains.
type Trained struct {
	Freeze   *Freeze   // nil for all of it
	Unfrozen *Unfrozen // nil if all parameters are trained
	Freezes  *Freezes  // the parts of multimodal models that are not trained, nil without
}

// Loss says what a program trains the model for, and how it computes the loss.
type Loss struct {
	Answers *Answers // what is trained on answers, nil for a language model's loss
	// Rewards says that the program trains a reward model on pairs of answers. A micro batch counts pairs.
	Rewards bool
	// TokenLabels is the number of labels of every token that a process reward model is trained on, 0 if none is.
	TokenLabels int64
	// SequenceLabels is the number of classes of a sequence that a classifier is trained on, 0 if none is.
	SequenceLabels int64
	// ValueHead says that a reward model keeps its language model's head, beside one with an output for every token.
	ValueHead bool
	FusedLoss bool
	// FusedInTraining says that an evaluation has whole logits all the same, as with Liger's fused loss.
	FusedInTraining bool
	// Chunks says in which parts the program computes the loss, "" for all at once.
	Chunks       Chunks
	LigerModules bool // modules of liger-kernel, and the loss of the logits
	// LossTwice says that the program computes the loss from the logits of a model that has computed its own.
	LossTwice bool
	// ShiftsLabels says that the program shifts labels in place of logits, with each release of transformers:
	// torchtune.
	ShiftsLabels bool
	// Diverges says that the loss has the divergence from a frozen model, which is Judge, or "" for the model as it was
	// loaded. WeighsEntropy says that it weights tokens by an entropy of the logits.
	Diverges, WeighsEntropy bool
	Judge                   string
	// RouterLoss says that the program has the model output the logits of its routers, for RouterLossOf: types of
	// models, nil for all.
	RouterLoss bool
	// RouterLossAssumed says that it does so by default, for models that have such a loss.
	RouterLossAssumed bool
	RouterLossOf      []string
}

// Chunks is a way to compute a loss in parts, or of the tokens' log-probabilities.
type Chunks string

// The ways of TRL: tiles of tokens and vocabulary; so many tokens at a time, computed again in the backward pass; and
// log-probabilities of whole logits, sequence by sequence.
const (
	// Outputs and Linear are torchtune's parts of the tokens: with all logits, or with those of a part.
	Outputs    Chunks = "outputs"
	Linear     Chunks = "linear"
	InTiles    Chunks = "tiles"
	Recomputed Chunks = "recomputed"
	BySequence Chunks = "sequences"
	// Kernel and WideKernel are those of a kernel of flash-attn, of the logits or of an fp32 copy: verl and OpenRLHF.
	Kernel     Chunks = "kernel"
	WideKernel Chunks = "wide kernel"
	// InPlace is a kernel that makes the loss of the logits, and writes their gradient over them: Unsloth.
	InPlace Chunks = "in place"
)

// Passes says how a program runs the passes of the model.
type Passes struct {
	Attention string // "" = the default of transformers, or "sdpa", "flash", "flash3", "flash4" or "eager"
	Recompute string // "" = what Training says
	// FSDP2WithoutReentrant says that FSDP2 turns reentrant checkpointing off.
	FSDP2WithoutReentrant bool
	QAT                   *QAT // nil without
	// Offloading says which activations wait on the host for the backward pass, nil if none does.
	Offloading *Offloading
}

// Sharding says how a program divides the model and the batch among ranks.
type Sharding struct {
	Pipeline    *Pipeline    // nil without
	Parallelism *Parallelism // nil without; shards over the ranks that are left where Shard is 0
	Experts     int          // ranks that divide the experts, 0 or 1 without
	GlobalBatch *GlobalBatch // nil where the file says accumulation
	// PerNode is the number of ranks of each node, and Nodes that of the nodes, where the file says them; 0 without.
	PerNode, Nodes int
	// SeveralOnly says that the program shards the model only if there are several ranks.
	SeveralOnly bool
	ReducesIn32 bool // FSDP reduces gradients in fp32
	// UnitsAtEnds are those of a program that divides the model into units of FSDP2 itself, in place of accelerate. It
	// is nil for others.
	UnitsAtEnds *UnitsAtEnds
}

// Tricks are what one program alone does with the model: axolotl, but for HostExperts.
type Tricks struct {
	// ScattersExperts says that kernels of ScatterMoE run fused experts.
	ScattersExperts bool
	// LinearizesExperts says that each of Llama 4's experts has linear modules.
	LinearizesExperts bool
	// QuantizesExperts says that the parameters that hold all experts of a layer are quantized, too.
	QuantizesExperts bool
	// OwnExperts says that the program has modules of its own for the experts of quantized models: Unsloth.
	OwnExperts bool
	// OwnAttention says that the program calls kernels of attention itself, with each release of transformers: Unsloth.
	OwnAttention bool
	// GroupsWithMask are types of models whose attention gives PyTorch's kernels a mask and keys that several heads
	// share: Unsloth.
	GroupsWithMask []string
	// Separate are names of modules that the program adapts one by one, also where transformers joins them.
	Separate []string
	// WidensNorms says that norms, embeddings and the head are kept in fp32.
	WidensNorms bool
	// NormsAlone says that embeddings and the head have their 16-bit type again (peft_module_casting_to_bf16 in
	// trl/trainer/utils.py).
	NormsAlone bool
	// UnlessSharded says that nothing is widened where the weights are read onto the host, to be sharded (TRL's
	// is_sharded_qlora).
	UnlessSharded bool
	// ScalesProducts says that products of blocks are in fp8.
	ScalesProducts bool
	TilesMLP       *Tiles // nil without
	// HostExperts says how KTransformers runs the experts, nil if they are a part of the model on the GPU.
	HostExperts *HostExperts
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

// NewOffloading returns OffloadActivations with TRL's defaults.
func NewOffloading() *Offloading { return &Offloading{Streams: true, Stash: 5, Tracks: true} }

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

// Program says how a file of a program that sets up the Trainer itself becomes a Framework.
type Program struct {
	Name string // for messages
	// Package is its name on PyPI, and Release the newest release whose defaults are known here. Oldest is the first
	// one.
	Package         string
	Release, Oldest version.Version
	// Keys are those beside the ones of TrainingArguments. A rule without a form is of a key that no plan depends on.
	Keys strict.Keys
	// Unread are keys that no plan depends on, whose values a script may compute.
	Unread string
	// Hosts reports whether the keys of TrainingArguments are keys of the file, too.
	Hosts bool
	// Loose reports whether most keys of a file may be unknown: its components have keys of their own.
	Loose bool
	// Ray are a variable of the environment that has Ray start the ranks in place of a launcher, and the key that says
	// how many; "" without.
	Ray  [2]string
	Read func(r *Reader) error
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
	if from.Started == file && python.IsSource(file) {
		document = parsePython(file, text, from.Command)
	}
	if document == nil {
		return nil, nil
	}
	found, _ := recognized(document.Root)
	if found == nil || found.Program == nil {
		return nil, nil
	}
	return found.parse(document, from)
}

// isTOML reports whether a file name ends like that of a TOML file.
func isTOML(file string) bool { return strings.HasSuffix(strings.ToLower(file), ".toml") }

// parseContent parses a text as what it looks like, whatever the name of its file. It returns nil if it cannot.
func parseContent(file string, text []byte) *strict.Document {
	if d := parsePython(file, text, nil); d != nil {
		return d
	}
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
func (p *Program) known() strict.Keys {
	known := strict.Keys{}
	if p.Hosts {
		for name := range trainingSchema.Rule.Keys() {
			known[name] = strict.Rule{}
		}
	}
	return known
}

// parse reads a document of a program.
func (k *Kind) parse(d *strict.Document, from Source) (*Framework, error) {
	p := k.Program
	if err := template(d, strings.Fields(p.Unread)); err != nil {
		return nil, err
	}
	if err := k.expand(d, p.known(), p.Keys); err != nil {
		return nil, err
	}
	rule := strict.Object(p.known(), p.Keys).NotingAll()
	checked, err := strict.Schema{Program: p.Name, Rule: rule}.Read(d)
	if err != nil {
		return nil, err
	}
	r := &Reader{Reader: checked, Arguments: &strict.Value{Kind: '{'},
		To: &Framework{File: d.File, Program: p.Name, Package: p.Package}, program: p.Name, texts: from.Texts,
		releases: from.Releases}
	r.To.Release, r.To.Assumed = from.release(p)
	r.noteRelease(p)
	for _, m := range d.Root.Members {
		_, own := p.Keys[m.Name]
		if _, argument := trainingSchema.Keys()[m.Name]; p.Hosts && !own && argument {
			r.Arguments.Members = append(r.Arguments.Members, m)
		}
	}
	if err := p.Read(r); err != nil {
		return nil, err
	}
	if !p.Loose {
		if err := k.own(d, &rule); err != nil {
			return nil, err
		}
	}
	if r.To.Training, err = readTraining(r.part(r.Arguments), from); err != nil {
		return nil, err
	}
	r.To.Notes = append(r.Notes, r.To.Training.Notes...)
	r.To.Training.Notes = nil
	return r.To, nil
}

// harmless matches keys that no plan depends on and that scripts compute, or that are templates themselves.
var harmless = lazyregexp.New(
	`dataset|^data_|^output|^logging|^run_name|_dir$|^model_name$|^model_author|_port$|^node|_val$|^report|^system$|` +
		`^chat_template`)

// computedMember refuses a file with a value that only a run can tell.
func computedMember(d *strict.Document) error {
	for _, m := range d.Root.Members {
		if v := m.Value; isComputed(v) {
			return d.Inputf(v.At, "%s is %s, which only a run can tell", m.Name, saidBy(v)).
				WithHint(asSource(d.File, v))
		}
	}
	return nil
}

// template refuses a file with variables that another program fills in.
func template(d *strict.Document, unread []string) error {
	if err := computedMember(d); err != nil {
		return err
	}
	for _, m := range d.Root.Members {
		isUnread := harmless.MatchString(m.Name) || slices.Contains(unread, m.Name)
		if v := m.Value; v.Kind == '"' && isVariable(v.Text) && !isUnread {
			return d.Inputf(v.At, "%s is %s, a variable: this file is a template", m.Name, v).
				WithHint("give the file with the variables filled in")
		}
	}
	return nil
}

// isVariable reports whether a text has a variable in its place: of a shell, or of a template, {{ name }}.
func isVariable(text string) bool {
	return strings.HasPrefix(text, "$") || templateName.MatchString(text)
}

// templateName matches a name that a template puts a value for.
var templateName = lazyregexp.New(`\{\{-?\s*[\w.]+\s*-?\}\}`)

// ElementNames are torch's names of types.
var ElementNames = map[string]string{"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

// PrecisionNames are Plimsoll's names of torch's types.
var PrecisionNames = map[string]string{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
	"torch.bfloat16": "bf16",
	"torch.float16":  "fp16", "torch.float32": "fp32", "half": "fp16", "float": "fp32", "bf16": "bf16", "fp16": "fp16",
	"fp32": "fp32"}
