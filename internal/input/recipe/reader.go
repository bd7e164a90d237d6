package recipe

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/recipe/strict"
)

// Reader reads a configuration of a program: the kit of all programs' packages. It reads the keys of the file, and
// writes a Framework and the arguments that the program gives to the Trainer.
type Reader struct {
	*strict.Reader
	Arguments *strict.Value // what the program gives to TrainingArguments
	To        *Framework
	program   string // for messages
	texts     files.Texts
	releases  func(pkg string) version.Version // nil where nothing says releases
}

// Since reports whether the program is of a release or a later one.
func (r *Reader) Since(major, minor int) bool { return r.To.Release.AtLeast(major, minor, 0) }

// ReleaseOf returns the release of a package of Python, zero where none is known.
func (r *Reader) ReleaseOf(pkg string) version.Version {
	if r.releases == nil {
		return version.Version{}
	}
	return r.releases(pkg)
}

// noteRelease notes a release that is older than the oldest whose keys and defaults are known.
func (r *Reader) noteRelease(p *Program) {
	if o := p.Oldest; !r.To.Release.AtLeast(o.Major, o.Minor, o.Patch) {
		r.Notes = append(r.Notes, Note{Where: fault.Position{File: r.File}, What: fmt.Sprintf("%s %v may have other "+
			"keys and defaults: plimsoll knows those of %v and later", p.Name, r.To.Release, o)})
	}
}

// part returns a document of values that the file or its program sets.
func (r *Reader) part(root *strict.Value) *strict.Document {
	return &strict.Document{File: r.File, Text: r.Text, Root: root}
}

// Pass gives the value of a key to TrainingArguments, where it has the name.
func (r *Reader) Pass(key, name string) {
	if v := r.Find(key); v != nil {
		Give(r.Arguments, name, r.At(key), v)
	}
}

// Set gives TrainingArguments a value that the program derives from a key.
func (r *Reader) Set(name, key string, is any) {
	Give(r.Arguments, name, r.At(key), strict.Of(is))
}

// Model reads the key that names the model.
func (r *Reader) Model(key string) { r.NameModel(key, r.Word(key)) }

// NameModel sets the name of the model, which a program derives from a key.
func (r *Reader) NameModel(key, name string) { r.To.Model, r.To.place = name, r.Place(key) }

// Companion returns the document that a key names, which has to be of a kind.
func (r *Reader) Companion(key string, kind *Kind) (*strict.Document, error) {
	path, err := companion(r.Reader, key)
	if err != nil {
		return nil, err
	}
	return load(r.texts, path, kind, strict.Parse)
}

// RouterLoss reads a value that makes a mixture of experts output the logits of its routers, for all types of models or
// for some.
func (r *Reader) RouterLoss(value *strict.Value, of ...string) {
	r.To.RouterLoss = r.To.RouterLoss || On(value)
	r.To.RouterLossOf = of
}

// Unplanned refuses the first of the keys that asks for something, as it changes memory in a way that is not planned.
func (r *Reader) Unplanned(why, names string) error {
	for key := range strings.FieldsSeq(names) {
		if v := r.Find(key); On(v) {
			return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, why),
				"remove the key to plan the job without it, and expect its memory to differ")
		}
	}
	return nil
}

// OneOfThese refuses a word that no plan is made for.
func (r *Reader) OneOfThese(key string, reasons map[string]string) error {
	v := r.Find(key)
	if v == nil {
		return nil
	}
	if why := reasons[strings.ToLower(v.Text)]; why != "" {
		return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, why), "")
	}
	return nil
}

// Adapt reads the values of a LoraConfig, by their names in PEFT.
func (r *Reader) Adapt(key string, values map[string]*strict.Value) (err error) {
	root := &strict.Value{Kind: '{'}
	Give(root, "peft_type", r.At(key), strict.Of("LORA"))
	Give(root, "task_type", r.At(key), strict.Of("CAUSAL_LM"))
	if r.To.Rewards || r.To.SequenceLabels > 0 { // PEFT trains the head of a classifier of sequences (SEQ_CLS)
		saved := &strict.Value{Kind: '[', Elements: []*strict.Value{strict.Of("score")}}
		if v := values["modules_to_save"]; v != nil {
			saved.Elements = append(saved.Elements, v.Elements...)
		}
		values["modules_to_save"] = saved
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v != nil {
			Give(root, name, r.At(key), v)
		}
	}
	r.To.Adapter, err = peft.Read(r.part(root))
	return err
}

// Quantize reads the values of a BitsAndBytesConfig.
func (r *Reader) Quantize(key string, values map[string]*strict.Value) (err error) {
	root := &strict.Value{Kind: '{'}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v != nil {
			Give(root, name, r.At(key), v)
		}
	}
	r.To.Quantization, err = readQuantization(r.part(root))
	return err
}

// Longest takes the length of sequences from a key.
func (r *Reader) Longest(key string) {
	r.To.Sequence = int(r.Integer(key))
	what := fmt.Sprintf("sequences of %d tokens: %s is the most that a sample has, and shorter ones take less",
		r.To.Sequence, key)
	if !r.Gives(key) {
		what = fmt.Sprintf("sequences of %d tokens: %s is not given, and this is its default in %s",
			r.To.Sequence, key, r.program)
	}
	r.Notes = append(r.Notes, Note{Where: r.Place(key), What: what})
}

// PadTo makes sequences longer, to a multiple of the number at a key.
func (r *Reader) PadTo(key string) {
	v := r.Find(key)
	if n, err := strconv.Atoi(v.Text); err == nil && n > 1 && r.To.Sequence%n > 0 {
		r.To.Sequence += n - r.To.Sequence%n
		r.Note(key, fmt.Sprintf("is %d: sequences are padded to %d tokens", n, r.To.Sequence))
	}
}

// Compute returns the type that a model computes in: "bf16", "fp16" or "".
func (r *Reader) Compute() string {
	for _, name := range []string{"bf16", "fp16"} {
		if m := r.Arguments.Member(name); m != nil && On(m.Value) {
			return name
		}
	}
	return ""
}

// NoteAnswers notes the passes of a training on answers, at the key that asks for it.
func (r *Reader) NoteAnswers(key string) {
	a := r.To.Answers
	what := "the training is on answers: "
	if a.Pairs {
		what += "passes have two sequences for each of a micro batch, "
	}
	if a.Mismatched {
		what += "another pass has answers to other prompts, "
	}
	switch {
	case !a.Reference:
		what += "and there is no reference model"
	case a.Model != "":
		what += "and " + a.Model + " is the reference"
	default:
		what += "and the reference is the model as it was loaded: a second copy of it, or the model without its adapter"
	}
	r.Notes = append(r.Notes, Note{Where: r.Place(key), What: what})
}
