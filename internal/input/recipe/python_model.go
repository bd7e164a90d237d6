package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
)

// silentLoading are arguments of from_pretrained that change no memory of a training, or that a training on several
// ranks has to have another way.
var silentLoading = strings.Fields(`name class trust_remote_code token revision cache_dir local_files_only use_cache
	device_map low_cpu_mem_usage use_safetensors variant subfolder force_download proxies max_memory
	ignore_mismatched_sizes pretrained_model_name_or_path`)

// ReadLoaded reads how a source loads its model: the name, the type, attention and quantization. The types are those of
// transformers from release 5 on where nothing says the release. Others reads the other arguments of another loader.
func (r *Reader) ReadLoaded(others bool) error {
	v := r.Find(Loaded)
	if v == nil || v.Kind != '{' {
		return nil
	}
	if err := r.computed(Loaded, v); err != nil {
		return err
	}
	name := v.Member("name")
	if name == nil || name.Value.Kind != '"' {
		return r.Fault(Loaded, "names no model", "give --model with its name")
	}
	r.To.Model, r.To.place = name.Value.Text, r.Position(name.Value.At)
	r.readEnvironment()
	if n := r.Integer(unread); n > 0 {
		r.Note(unread, fmt.Sprintf("is %d: what they set is not known, and counts as not set", n))
	}
	if r.Truth(prepared) {
		r.To.WidensNorms = true
		r.Note(prepared, "makes the parameters that are not quantized fp32, and turns on checkpoints")
		if r.Arguments.Member("gradient_checkpointing") == nil {
			r.Set("gradient_checkpointing", prepared, true)
		}
	}
	if r.Truth(asked) {
		r.Note(asked, "is planned as true, as on GPUs since Ampere")
	}
	if others {
		return nil
	}
	if err := r.otherModel(v); err != nil {
		return err
	}
	for _, m := range v.Members {
		switch m.Name {
		case "dtype", "torch_dtype", "attn_implementation", "quantization_config", "load_in_4bit", "load_in_8bit":
		default:
			if !slices.Contains(silentLoading, m.Name) && On(m.Value) {
				r.Note(Loaded, fmt.Sprintf("has %s, which is not read, and may change memory", m.Name))
			}
		}
	}
	return r.loadedTypes(v)
}

// LoaderClass returns the class that a source loads its model by, or "".
func (r *Reader) LoaderClass() string {
	v := r.Find(Loaded)
	if v == nil || v.Member("class") == nil {
		return ""
	}
	return v.Member("class").Value.Text
}

// computed refuses values of a section that only a run can tell, but for those without effect on memory.
func (r *Reader) computed(section string, v *strict.Value) error {
	for _, m := range v.Members {
		if isComputed(m.Value) && !slices.Contains(silentLoading[1:], m.Name) {
			return r.Inputf(m.Value.At, "%s of %s is %s, which only a run can tell", m.Name, section, saidBy(m.Value)).
				WithHint(asSource(r.File, m.Value))
		}
	}
	return nil
}

// saidBy returns the expression of a computed value.
func saidBy(v *strict.Value) string {
	return strings.TrimSuffix(strings.TrimPrefix(v.Text, computed), ")")
}

// asSource says how a source is planned whose values only a run can tell.
func asSource(file string, computed *strict.Value) string {
	if !python.IsSource(file) {
		return "write the value in its place, in a copy of the script"
	}
	if strings.Contains(computed.Text, "parse_args") || strings.Contains(computed.Text, "args.") {
		return fmt.Sprintf("its values stand on the command line: give a script with the line that starts it, whose "+
			"words plimsoll follows through argparse and HfArgumentParser; or 'plimsoll plan --gpu NAME -- python %s "+
			"...' plans the program as it runs", file)
	}
	return fmt.Sprintf("write the value in its place; or 'plimsoll plan --gpu NAME -- python %s' plans the program as "+
		"it runs, without a GPU", file)
}

// loadedTypes reads the types of the weights, attention and quantization.
func (r *Reader) loadedTypes(v *strict.Value) error {
	is := Either(v, "dtype", "torch_dtype")
	switch {
	case is == nil && !r.transformers5():
		r.To.Weights = "fp32"
	case is == nil:
		r.Note(Loaded, "has no dtype: transformers from release 5 on loads the type of config.json, and release 4 fp32")
	case is.IsAuto() || is.Kind == 'n':
	case PrecisionNames[is.Text] == "":
		return r.Inputf(is.At, "dtype is %s, expected torch.bfloat16, torch.float16, torch.float32 or auto", is)
	default:
		r.To.Weights = PrecisionNames[is.Text]
	}
	if a := v.Member("attn_implementation"); a != nil {
		name, known := map[string]string{"flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager",
			"flash_attention_3": "flash3"}[a.Value.Text]
		if !known && a.Value.Kind == '"' {
			return r.Inputf(a.Value.At, "attn_implementation is %s, expected flash_attention_2, flash_attention_3, "+
				"sdpa or eager", a.Value)
		}
		r.To.Attention = name
	}
	return r.loadedBits(v)
}

// transformers5 reports whether nothing says an older release of transformers.
func (r *Reader) transformers5() bool {
	return r.releases == nil || r.releases("transformers").IsZero() || r.releases("transformers").AtLeast(5, 0, 0)
}

// loadedBits reads a BitsAndBytesConfig, or the arguments that stand for one.
func (r *Reader) loadedBits(v *strict.Value) error {
	values := map[string]*strict.Value{}
	for _, key := range []string{"load_in_4bit", "load_in_8bit"} {
		if m := v.Member(key); m != nil && On(m.Value) {
			values[key] = m.Value
		}
	}
	if q := v.Member("quantization_config"); q != nil && q.Value.Kind != 'n' {
		class := q.Value.Member("class")
		if q.Value.Kind != '{' || class == nil || class.Value.Text != "BitsAndBytesConfig" {
			return r.Inputf(q.Value.At, "quantization_config is %v, which is not planned yet", q.Value).
				WithHint("plimsoll plans BitsAndBytesConfig with values that stand in the source")
		}
		if err := r.computed("BitsAndBytesConfig", q.Value); err != nil {
			return err
		}
		for _, m := range q.Value.Members {
			if m.Name != "class" {
				is := *m.Value
				is.Text = strings.TrimPrefix(is.Text, "torch.")
				values[m.Name] = &is
			}
		}
	}
	if len(values) == 0 {
		return nil
	}
	return r.Quantize(Loaded, values)
}

// Either returns the first of the members that an object has, or nil.
func Either(object *strict.Value, names ...string) *strict.Value {
	for _, name := range names {
		if m := object.Member(name); m != nil {
			return m.Value
		}
	}
	return nil
}

// ReadAdapted reads the LoraConfig of a source.
func (r *Reader) ReadAdapted() error {
	v := r.Find(Adapted)
	if v == nil || v.Kind == 'n' {
		return nil
	}
	class := v.Member("class")
	if v.Kind != '{' || class == nil || class.Value.Text != "LoraConfig" {
		return r.Inputf(v.At, "the adapter is %v, which is not planned yet", v).
			WithHint("plimsoll plans a LoraConfig whose values stand in the source")
	}
	if err := r.computed(Adapted, v); err != nil {
		return err
	}
	values := map[string]*strict.Value{}
	for _, m := range v.Members {
		if m.Name != "class" {
			values[m.Name] = m.Value
		}
	}
	return r.Adapt(Adapted, values)
}
