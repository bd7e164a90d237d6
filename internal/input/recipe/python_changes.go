package recipe

import (
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
)

// A source may change its model, its trainer and its settings by other statements than those that make them. What such
// a statement means is read where that is known, and is refused elsewhere.

// casts are methods that change the type of all weights, or how they are computed with.
var casts = map[string]string{"half": "the type of the weights", "bfloat16": "the type of the weights",
	"float": "the type of the weights", "double": "the type of the weights", "to": "the type of the weights",
	"type": "the type of the weights", "compile": "that the model is compiled"}

// harmlessBelow matches what a source may set in a model without a change of its weights.
var harmlessBelow = lazyregexp.New(`^(?:config|generation_config)\b|^(?:name_or_path|is_parallelizable|` +
	`model_parallel|hf_device_map|warnings_issued|padding_side|training|is_gradient_checkpointing|use_cache)$`)

// harmlessOfTrainer matches what a source may set in a trainer without a change of what it holds.
var harmlessOfTrainer = lazyregexp.New(`^(?:tokenizer|processing_class|data_collator|train_dataset|eval_dataset|` +
	`compute_metrics|callback_handler|label_names|can_return_loss|state|preprocess_logits_for_metrics|` +
	`_signature_columns|model_accepts_loss_kwargs)\b`)

// byStatement gives a document what is done to a model by code that does not return it.
func (m *sourceModel) byStatement(root *strict.Value, source *python.Source) {
	for _, of := range m.chain {
		for _, c := range of.Changed {
			if !harmlessBelow.MatchString(c.Path) {
				Give(root, "model."+c.Path, int64(max(0, c.At)),
					computedValue("a part of the model, set by code", c.At))
			}
		}
	}
	for _, c := range source.Calls {
		switch {
		case slices.Contains(m.chain, c):
		case c.From != nil && slices.Contains(m.chain, c.From):
			if does := casts[c.Name()]; does != "" && (c.Name() != "to" && c.Name() != "type" || hasType(c)) {
				Give(root, "model."+c.Name(), int64(max(0, c.At)), computedValue(does+", set by code", c.At))
			}
		case m.isGiven(c):
			m.inPlace(root, c)
		}
	}
}

// isGiven reports whether a call gets the model as its first argument.
func (m *sourceModel) isGiven(c *python.Value) bool {
	model := c.Attribute("model")
	if model == nil && len(c.Given) > 0 {
		model = c.Given[0]
	}
	return model != nil && slices.Contains(m.chain, model)
}

// inPlace reads a function that changes the model that it gets, whatever becomes of its result.
func (m *sourceModel) inPlace(root *strict.Value, c *python.Value) {
	switch name := c.Name(); {
	case name == "get_peft_model":
		m.adapter = adapterOf(c)
	case keeps[name] == prepared:
		m.prepared = true
	case name == "inject_adapter_in_model" || name == "quantize_" || strings.HasPrefix(name, "convert_to_") ||
		name == "fully_shard" || name == "_apply_liger_kernel_to_instance" || name == "replace_linear":
		Give(root, "model", int64(max(0, c.At)), computedValue("changed by "+name, c.At))
	}
}

// adapterOf returns the configuration of an adapter that get_peft_model gets.
func adapterOf(call *python.Value) *python.Value {
	switch config := call.Attribute("peft_config"); {
	case config != nil:
		return config
	case len(call.Given) > 1:
		return call.Given[1]
	}
	return call
}

// hasType reports whether a call has a type of elements among its arguments.
func hasType(c *python.Value) bool {
	isType := func(v *python.Value) bool {
		return v.Kind == python.Symbol && PrecisionNames[strings.TrimPrefix(v.Text, "torch.")] != "" ||
			v.Kind != python.Text && strings.Contains(v.Text, "dtype")
	}
	return c.Attribute("dtype") != nil || c.Attribute("torch_dtype") != nil || slices.ContainsFunc(c.Given, isType)
}

// trainerByStatement gives a document what a source sets in its trainer and in its settings by other code.
func trainerByStatement(root *strict.Value, source *python.Source, trainer, args *python.Value) {
	for _, c := range trainer.Changed {
		of, key, isSetting := strings.Cut(c.Path, ".")
		isSilent := isSetting && of == "args" && (silentComputed.MatchString(key) || harmless.MatchString(key))
		if !isSilent && !harmlessOfTrainer.MatchString(c.Path) {
			Give(root, "trainer."+c.Path, int64(max(0, c.At)), computedValue("set by code", c.At))
		}
	}
	for _, c := range source.Calls {
		if name := c.Name(); args != nil && c.From == args && strings.HasPrefix(name, "set_") {
			switch name {
			case "set_logging", "set_save", "set_testing", "set_evaluate", "set_push_to_hub", "set_lr_scheduler":
			default:
				Give(root, "args."+name, int64(max(0, c.At)), computedValue("a change of the settings", c.At))
			}
		}
	}
}

// liger reads the functions and classes that put Liger's kernels into a model.
func liger(root *strict.Value, source *python.Source) {
	for _, c := range source.Calls {
		name := c.Name()
		isPatch := strings.HasPrefix(name, "apply_liger_kernel_to_")
		if !isPatch && !strings.Contains(c.Class, "AutoLigerKernel") {
			continue
		}
		if is := strict.Of(true); isPatch && len(c.Members)+len(c.Given) > 0 || c.Partial {
			Give(root, "use_liger_kernel", int64(max(0, c.At)), computedValue("a choice of kernels", c.At))
		} else if root.Member("use_liger_kernel") == nil {
			Give(root, "use_liger_kernel", int64(max(0, c.At)), is)
		}
	}
}

// defaultTypes gives a document the calls that change the type, or the device, of all tensors that name none.
func defaultTypes(root *strict.Value, source *python.Source) {
	for _, c := range source.Calls {
		name, is := strings.CutPrefix(c.Class, "torch.set_default_")
		if !is || len(c.Given) == 1 && slices.Contains(usualDefaults, c.Given[0].Text) {
			continue
		}
		Give(root, "torch.set_default_"+name, int64(max(0, c.At)),
			computedValue("the "+name+" of tensors that name none, set by code", c.At))
	}
}

// usualDefaults are arguments of these calls that change no memory of a training: what PyTorch does without them, and
// the device of the rank.
var usualDefaults = strings.Fields("torch.float32 torch.float torch.FloatTensor cpu cuda cuda:0")

// recomputes reads whether the model checkpoints activations by its own method, which no setting turns off.
func recomputes(root *strict.Value, source *python.Source, trainer *python.Value) {
	at, is := source.Touched["gradient_checkpointing_enable"]
	if !is {
		return
	}
	if off, is := source.Touched["gradient_checkpointing_disable"]; is && off < trainer.At {
		Give(root, "gradient_checkpointing", int64(off), computedValue("turned on and off by code", off))
		return
	}
	Give(root, "gradient_checkpointing", int64(at), strict.Of(true))
}

// shaping matches arguments of from_pretrained that go to the configuration of the model and change its tensors.
var shaping = lazyregexp.New(`^(?:num_(?:hidden_layers|attention_heads|key_value_heads|experts|local_experts|layers)|` +
	`n_layers?|n_heads?|n_embd|hidden_size|intermediate_size|moe_intermediate_size|ffn_dim|vocab_size|head_dim|` +
	`tie_word_embeddings|layer_types|num_nextn_predict_layers|num_experts_per_tok)$`)

// otherModel refuses arguments of from_pretrained that make another model of it.
func (r *Reader) otherModel(v *strict.Value) error {
	for _, m := range v.Members {
		if shaping.MatchString(m.Name) {
			return r.Inputf(m.At, "%s of from_pretrained is %v: it makes another model of %q, which is not planned",
				m.Name, m.Value, r.To.Model).
				WithHint("save the changed config.json, and give its path to --model and in the place of the name")
		}
	}
	return nil
}
