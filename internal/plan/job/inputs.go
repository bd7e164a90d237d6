package job

import (
	"cmp"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
	_ "plimsoll/internal/input/recipe/programs" // recognizes files
)

// Inputs are a request with its files, read and parsed. Nothing changes them: any
// number of goroutines may decide jobs from the same Inputs.
type Inputs struct {
	request          Request
	deepSpeedRelease version.Version
	model            *model.Model
	reference        *model.Model        // nil without
	companions       []companionModel    // of the policy
	fused            func() *model.Model // the model with fused experts
	training         *recipe.Training
	launch           *recipe.Accelerate
	script           *recipe.Started   // what a script among the configurations starts, nil without
	deepSpeed        *deepspeed.Config // of the file that goes before the others
	fsdp             *recipe.FSDP
	adapter          *peft.Adapter
	quantization     *recipe.Quantization
	storage          string            // how the model's name and the job say that the weights are stored: "gptq"
	framework        *recipe.Framework // a file that says what several others say; nil without
	factors          *Factors
	environment      environment
	megatron         *recipe.Megatron // of a job of Megatron-LM, whose arguments say all of it; nil for others
	files            []string         // without the catalog
}

// Read reads the files of a request. Every error is a *fault.Input.
func Read(q Request) (*Inputs, error) {
	if err := q.Shorthand.check(); err != nil {
		return nil, err
	}
	q, err := q.inFull()
	if err != nil {
		return nil, err
	}
	environment, err := q.readEnvironment()
	if err != nil {
		return nil, err
	}
	release, err := q.deepSpeedRelease()
	if err != nil {
		return nil, err
	}
	in := &Inputs{request: q, deepSpeedRelease: release, environment: environment}
	if in.request.FindMegatron(); in.request.Megatron != "" {
		return in, in.readMegatron()
	}
	for _, step := range []func() error{in.readConfigs, q.MegatronArguments.unused, in.readModel, in.readTraining,
		in.readLaunch, in.readDeepSpeed, in.readQuantization, in.readAdapter, in.readFactors} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	in.listFiles()
	return in, nil
}

// source is what the files of the request are read with.
func (in *Inputs) source() recipe.Source {
	s := recipe.Source{DeepSpeed: in.deepSpeedRelease, Texts: in.request.Texts, Releases: in.releaseOf}
	if in.script != nil && in.script.Command != nil {
		s.Started, s.Command = in.script.Config, in.script.Command
	}
	return s
}

// releaseOf returns the release of a package that a flag or the environment says, zero where neither does.
func (in *Inputs) releaseOf(name string) version.Version {
	if flag := in.request.planned()[name]; flag != nil && *flag != "" {
		if v, err := version.Parse(*flag); err == nil {
			return v
		}
	}
	return in.environment.releaseOf(name)
}

// readConfigs gives each file of unknown kind to the flag for its content.
func (in *Inputs) readConfigs() error {
	q := &in.request
	if err := in.readScript(); err != nil {
		return err
	}
	to := map[string]*string{"--model": &q.Model, "--deepspeed": &q.DeepSpeed, "--training-args": &q.TrainingArgs,
		"--accelerate": &q.Accelerate, "--adapter": &q.Adapter, "--quantization": &q.Quantization}
	for _, path := range q.Configs {
		flag, err := recipe.Detect(path, in.request.Texts)
		if err != nil {
			return err
		}
		if to[flag] != nil {
			if *to[flag] != "" {
				return fault.File(path).Inputf("this file is for %s, which %s is for already", flag, *to[flag]).
					WithHint("leave one of the two out")
			}
			*to[flag] = path
			continue
		}
		if in.framework != nil {
			return fault.File(path).Inputf("this file says how the job is trained, and %s does so, too",
				in.framework.File).WithHint("leave one of the two out")
		}
		if in.framework, err = recipe.LoadFramework(path, in.source()); err != nil {
			return err
		}
	}
	if f := in.framework; f != nil && q.TrainingArgs != "" {
		return fault.File(q.TrainingArgs).Inputf("these are TrainingArguments, but %s sets them, too", f.File).
			WithHint("leave one of the two files out")
	}
	return nil
}

// readScript takes what a script says in place of the script: the configuration that it names, and its launcher.
func (in *Inputs) readScript() error {
	q := &in.request
	for i, path := range q.Configs {
		s, err := recipe.Starts(path, q.Texts, q.Accelerate != "")
		if err != nil {
			return err
		}
		if s == nil {
			continue
		}
		in.script, q.Texts = s, s.Texts
		if s.Config != "" {
			rest := slices.DeleteFunc(slices.Delete(slices.Clone(q.Configs), i, i+1), func(other string) bool {
				return isSameFile(other, s.Config) // which the user has named, too
			})
			q.Configs = append(rest, s.Config)
		}
		return nil
	}
	return nil
}

// isSameFile reports whether two paths are of one file.
func isSameFile(one, other string) bool {
	first, err := os.Stat(one)
	if err != nil {
		return filepath.Clean(one) == filepath.Clean(other)
	}
	second, err := os.Stat(other)
	return err == nil && os.SameFile(first, second)
}

// NamesModel reports whether flags or files say which model is trained, or have a fault that hides it.
func (q Request) NamesModel() bool {
	if q.FindMegatron(); q.Megatron != "" {
		return true
	}
	in := &Inputs{request: q}
	err := in.readConfigs()
	return err != nil || in.modelName() != ""
}

func (in *Inputs) modelName() string {
	if in.request.Model == "" && in.framework != nil {
		return in.framework.Model
	}
	return in.request.Model
}

// load loads a model of this host, of the catalog or of the hub.
func (in *Inputs) load(name string) (*model.Model, error) {
	if in.request.Online {
		return model.LoadOnline(name)
	}
	return model.Load(name)
}

// loadModel loads the model of a name. A path in a configuration may be one of another host.
func (in *Inputs) loadModel(name string) (err error) {
	if in.model, err = in.load(name); err != nil {
		storage := in.packing(name)
		if before := model.Before(name, storage); before != name {
			in.model, err = in.load(before)
			in.storage = storage
			name = before
		}
	}
	if err != nil && in.request.Model == "" {
		if absent := model.LoadAbsent(name); absent != nil {
			in.model, err = absent, nil
		}
	}
	switch {
	case err == nil:
		return nil
	case strings.HasSuffix(name, ".safetensors"): // a file of weights, whatever is wrong with it
		return in.named(err)
	}
	return cmp.Or(recipe.Misplaced(name), in.named(err))
}

func (in *Inputs) readModel() (err error) {
	name := in.modelName()
	if name == "" {
		return fault.Inputf("no model was named").
			WithHint("add --model with a name of the catalog or the path of a config.json")
	}
	if err := in.loadModel(name); err != nil {
		return err
	}
	plain := in.model
	if f := in.framework; f != nil && in.model.Network != nil {
		switch {
		case f.Rewards:
			in.model, err = in.model.Classifying(1)
		case f.SequenceLabels > 0:
			in.model, err = in.model.Classifying(f.SequenceLabels)
		case f.TokenLabels > 0:
			in.model, err = in.model.Labeling(f.TokenLabels)
		}
		if err != nil {
			return in.named(err)
		}
		if f.ValueHead {
			in.model = in.model.Valued()
		}
		if f.LinearizesExperts { // other models have no module that axolotl replaces
			in.model, _ = in.model.Linearized()
		}
	}
	if c := in.model.Namesake; c != nil && c.Linearized && in.model == plain {
		return fault.Inputf("%s names experts as linear modules, and the job has them in one parameter", c.Name).
			WithHint("axolotl's llama4_linearized_experts replaces the modules of Llama 4; or name the model with " +
				"its own experts: --model " + in.model.Name)
	}
	if err := in.addRouterLoss(); err != nil {
		return err
	}
	if in.model, err = described(in.model); err != nil {
		return err
	}
	if err := in.readCompanions(); err != nil {
		return err
	}
	in.fused = sync.OnceValue(in.model.FuseExperts)
	name = in.request.Reference
	if a := in.answers(); a != nil && a.Reference && name == "" {
		name = a.Model
		if name == "" && in.framework.Adapter == nil {
			in.reference = plain
		}
	}
	if f := in.framework; f != nil && f.Diverges && name == "" {
		if name = f.Judge; name == "" {
			in.reference = plain
		}
	}
	if f := in.framework; f != nil && f.Generation != nil && f.Generation.Reference && name == "" && f.Adapter == nil {
		in.reference = plain
	}
	if name != "" {
		if in.reference, err = in.load(name); err != nil {
			return err
		}
	}
	if in.reference != nil {
		in.reference, err = described(in.reference)
	}
	return err
}

// readCompanions loads the models of the companions that a framework's file names.
func (in *Inputs) readCompanions() error {
	if in.framework == nil || in.framework.Generation == nil {
		return nil
	}
	for _, c := range in.framework.Generation.Companions {
		m, err := in.load(c.Model)
		if absent := model.LoadAbsent(c.Model); err != nil && absent != nil {
			m, err = absent, nil
		}
		if err != nil {
			return c.At.Inputf("the %s is %q: %v", c.Role, c.Model, err).
				WithHint("give a folder, a file or a name of the catalog; plan the policy without it, and expect it " +
					"on top")
		}
		if m.Network == nil || m.Network.Opaque != nil {
			return c.At.Inputf("the %s is %s, whose layers are unknown, which is not planned", c.Role, c.Model).
				WithHint("plan the job with the policy's own model, and expect the difference on top")
		}
		labeling, err := m.Labeling(1)
		if err != nil {
			return c.At.Inputf("the %s is %s: %v", c.Role, c.Model, err).WithHint("plan the job with another model")
		}
		in.companions = append(in.companions, companionModel{labeling, m.TiesEmbeddings()})
	}
	return nil
}

// packing returns how the weights of a repository were quantized, as a flag, a file or the repository's name says it.
func (in *Inputs) packing(name string) string {
	if in.framework != nil {
		return cmp.Or(in.request.Quantization, in.framework.Packed, model.UsualPacking(name))
	}
	return cmp.Or(in.request.Quantization, model.UsualPacking(name))
}

// answers returns how the framework's file trains on answers, or nil.
func (in *Inputs) answers() *recipe.Answers {
	if in.framework == nil {
		return nil
	}
	return in.framework.Answers
}

// described returns a model with the network that its weights stand for, if the operations are not known.
func described(m *model.Model) (*model.Model, error) {
	if m.Network != nil {
		return m, nil
	}
	with, ok := m.WithoutOperations()
	if !ok {
		return nil, fault.File(m.Source).Inputf("the headers have tensors that are neither fp32, fp16 nor bf16, so " +
			"they do not tell the sizes of the weights in a training").
			WithHint("name the files of the weights before they were quantized, or the model's config.json")
	}
	return with, nil
}

// addRouterLoss adds the loss of the load of experts to a mixture if the program has it output the logits of its
// routers.
func (in *Inputs) addRouterLoss() error {
	f, m := in.framework, in.model
	if f == nil || !f.RouterLoss || m.Network == nil ||
		f.RouterLossOf != nil && !slices.Contains(f.RouterLossOf, m.Type) {
		return nil
	}
	mixes := slices.ContainsFunc(m.Network.Blocks(), func(b model.Block) bool { return b.FeedForward.Mixture != nil })
	with, ok := m.WithRouterLoss()
	if mixes && !ok && f.RouterLossAssumed {
		what := "is a mixture of experts: if " + f.Program + " has a loss of its routers, their logits come on top"
		f.Notes = append(f.Notes, recipe.Note{Where: f.Place(), What: what})
		return nil
	}
	if mixes && !ok {
		return fault.File(f.File).Inputf("the logits of all routers are not planned for %s", m.Architecture).
			WithHint("leave out the loss of routers, and expect a training with it to take more memory: a logit for " +
				"each token, layer and expert")
	}
	in.model = with
	return nil
}

func (in *Inputs) readTraining() (err error) {
	if f := in.framework; f != nil {
		in.training, in.adapter, in.quantization = f.Training, f.Adapter, f.Quantization
		in.deepSpeed, in.fsdp = f.Training.DeepSpeed, f.Training.FSDP
		return nil
	}
	if in.request.TrainingArgs == "" {
		return nil
	}
	if in.training, err = recipe.LoadTraining(in.request.TrainingArgs, in.source()); err != nil {
		return err
	}
	in.deepSpeed, in.fsdp = in.training.DeepSpeed, in.training.FSDP
	return nil
}

func (in *Inputs) readLaunch() (err error) {
	switch {
	case in.request.Accelerate != "":
		in.launch, err = recipe.LoadAccelerate(in.request.Accelerate, in.source())
	case in.script != nil && in.script.Accelerate != nil:
		in.launch, err = recipe.ReadAccelerate(in.script.Accelerate, in.source())
	default:
		return nil
	}
	if err != nil {
		return err
	}
	in.deepSpeed, in.fsdp = cmp.Or(in.launch.DeepSpeed, in.deepSpeed), cmp.Or(in.launch.FSDP, in.fsdp)
	return nil
}

func (in *Inputs) readDeepSpeed() (err error) {
	if in.request.DeepSpeed != "" {
		in.deepSpeed, err = recipe.LoadDeepSpeed(in.request.DeepSpeed, in.source())
	}
	if err == nil && in.request.ZeRO != "" {
		in.deepSpeed, err = in.shortDeepSpeed()
	}
	return err
}

func (in *Inputs) readAdapter() (err error) {
	if in.request.Adapter != "" {
		in.adapter, err = recipe.LoadAdapter(in.request.Adapter)
	}
	if err == nil && in.request.LoRA > 0 {
		in.adapter, err = in.shortAdapter()
	}
	return err
}

// readQuantization reads how the weights are stored. The quantization_config of
// the model's config.json has precedence over the request, as in transformers.
func (in *Inputs) readQuantization() (err error) {
	name := cmp.Or(in.request.Quantization, in.storage)
	if in.model.Quantized {
		name = in.model.Source
	}
	if name == "" && in.quantization == nil && in.model.Namesake != nil && in.model.Namesake.NF4 {
		name = "nf4-dq" // as Unsloth stores them
	}
	switch {
	case name == "":
	case quantizations[strings.ToLower(name)].Bits > 0:
		q := quantizations[strings.ToLower(name)]
		in.quantization = &q
	default:
		if _, err := os.Stat(name); err != nil && !strings.ContainsAny(name, "./") {
			return fault.Inputf("unknown quantization %q", name).
				WithHint("expected " + strings.Join(Quantizations(), ", ") + ", or a file with BitsAndBytesConfig in " +
					"JSON; nf4 is load_in_4bit, and int8 is load_in_8bit")
		}
		in.quantization, err = recipe.LoadQuantization(name)
	}
	return err
}

// listFiles lists the files that were read.
func (in *Inputs) listFiles() {
	q := in.request
	candidates := append([]string{q.DeepSpeed, q.TrainingArgs, q.Accelerate, q.Adapter, q.Quantization, q.Factors,
		q.Environment}, q.Configs...)
	if in.model.Source != model.FromCatalog {
		candidates = append(candidates, in.model.Source)
	}
	if s := in.script; s != nil {
		candidates = append(candidates, s.File)
		if s.Accelerate != nil {
			candidates = append(candidates, s.Accelerate.File)
		}
	}
	if in.deepSpeed != nil {
		candidates = append(candidates, in.deepSpeed.File) // another file may name it
	}
	for _, file := range candidates {
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && !slices.Contains(in.files, file) {
			in.files = append(in.files, file)
		}
	}
}

// Quantizations returns the names that --quantization takes in place of a file.
func Quantizations() []string { return slices.Sorted(maps.Keys(quantizations)) }

// quantizations maps these names to what they mean.
var quantizations = map[string]recipe.Quantization{
	"nf4":    {Bits: 4, Kind: "nf4"},
	"fp4":    {Bits: 4, Kind: "fp4"},
	"nf4-dq": {Bits: 4, Kind: "nf4", DoubleQuant: true},
	"fp4-dq": {Bits: 4, Kind: "fp4", DoubleQuant: true},
	"int8":   {Bits: 8},
	"gptq":   {Method: "gptq", Bits: 4, Group: 128},
	"awq":    {Method: "awq", Bits: 4, Group: 128},
	"aqlm":   {Method: "aqlm", Bits: 2, Group: 8, Codebooks: 1, CodeBits: 16},

	recipe.CompressedTensors: {Method: recipe.CompressedTensors, Bits: 4, Group: 128},
}
