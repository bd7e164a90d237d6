// Package trainer reads sources of Python that call transformers' Trainer.
package trainer

import (
	"cmp"
	"fmt"

	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// mark is the key of a document that stands for a source with a Trainer.
const mark = "transformers_trainer"

// Kind is the kind of sources that call transformers' Trainer.
var Kind = &recipe.Kind{Name: "source of Python with transformers' Trainer", Flag: recipe.ConfigFlag, Marks: mark,
	Program: &program, Python: fromPython, Settings: recipe.TrainerKeys}

// program reads what such a source says. The length of its sequences is in the code that makes the samples.
var program = recipe.Program{Name: "transformers", Hosts: true,
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(recipe.SourceKeys, rule.Anything.For(mark+" model "+decided),
		rule.Switched.For("predict_with_generate sortish_sampler"),
		rule.Anything.For("generation_max_length generation_num_beams generation_config"))}

// decided are arguments of Trainer with code that decides what a training holds.
const decided = "optimizers optimizer_cls_and_kwargs compute_loss_func model_init"

// reader reads a source.
type reader struct{ *recipe.Reader }

func (r *reader) read() error {
	if err := cmp.Or(r.Unplanned("code of the source decides what a training holds", decided),
		r.ReadLoaded(false)); err != nil {
		return err
	}
	if r.Find(recipe.Loaded) == nil {
		return r.Fault("model", "is made by code that is not read", "give --model with its name")
	}
	r.To.TrainedIn32 = recipe.UnderFSDP
	if class := r.LoaderClass(); !trained(class) {
		return r.Fault(recipe.Loaded, fmt.Sprintf("is of %s, whose head is not planned by a source", class),
			"name the model's config.json by --model, and its TrainingArguments by --training-args")
	}
	for _, key := range []string{"predict_with_generate", "sortish_sampler"} {
		if r.Truth(key) {
			r.Note(key, "is of evaluation or of samples: what it takes is not planned")
		}
	}
	return r.ReadAdapted()
}

// trained reports whether a class has the head that the plan of a model's name has: that of a language model.
func trained(class string) bool {
	switch of := (&python.Value{Class: class}); of.Name() {
	case "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq",
		"AutoModelForMultimodalLM":
		return true
	default:
		return len(of.Name()) > len("ForCausalLM") && hasEnding(of.Name())
	}
}

// hasEnding reports whether the name of a class is one of a language model.
func hasEnding(name string) bool {
	for _, ending := range []string{"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"} {
		if len(name) > len(ending) && name[len(name)-len(ending):] == ending {
			return true
		}
	}
	return false
}

// fromPython makes a document of a source that calls a Trainer.
func fromPython(source *python.Source, _ string) *strict.Value {
	var trainer *python.Value
	for _, c := range source.Calls {
		if name := c.Name(); c.From != nil || !recipe.OfLibrary(c) ||
			name != "Trainer" && name != "Seq2SeqTrainer" {
			continue
		}
		if trainer != nil {
			return recipe.Several(int64(c.At))
		}
		trainer = c
	}
	if trainer == nil || trainer.Attribute("args") == nil && len(trainer.Given) < 2 {
		return nil // one of another library
	}
	root := &strict.Value{Kind: '{', At: int64(max(0, trainer.At))}
	recipe.Give(root, mark, root.At, strict.Of(true))
	recipe.TrainerOfSource(root, source, trainer)
	for _, name := range []string{"optimizers", "optimizer_cls_and_kwargs", "compute_loss_func", "model_init"} {
		if is := trainer.Attribute(name); is != nil && is.Kind != python.None {
			recipe.Give(root, name, root.At, recipe.Literal(is, trainer.At))
		}
	}
	return root
}
