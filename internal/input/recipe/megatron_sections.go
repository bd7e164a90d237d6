package recipe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// megatronSections are the YAML of a program that trains by Megatron core: NeMo 1 (trainer and model) or
// Megatron-Bridge (model beside train, ddp and others). Their keys become arguments of Megatron-LM, at the places of
// the keys.
type megatronSections struct {
	*strict.Document
	program string
	made    *strict.Value // the arguments
	notes   []Note
	taken   map[*strict.Value]bool // values that were read
	ranks   int64
	perNode int64
	adapter *CoreAdapter
}

// sectioned returns the sections of a document, or nil if it is of another kind.
func sectioned(d *strict.Document) *megatronSections {
	s := &megatronSections{Document: d, made: &strict.Value{Kind: '{'}, taken: map[*strict.Value]bool{}}
	has := func(section, names string) bool {
		m := d.Root.Member(section)
		return m != nil && slices.ContainsFunc(strings.Fields(names), func(name string) bool {
			return m.Value.Member(name) != nil
		})
	}
	others := slices.ContainsFunc(strings.Fields("model dist ddp scheduler checkpoint rng dataset"),
		func(name string) bool { return d.Root.Member(name) != nil })
	const divided = "tensor_model_parallel_size pipeline_model_parallel_size megatron_amp_O2 mcore_gpt"
	switch {
	case d.Root.Kind != '{':
	case d.Root.Member(nemoRecipe) != nil:
		s.program = nemo2Program
		return s
	case d.Root.Member("trainer") != nil && has("model", divided):
		s.program = nemoProgram
		return s
	case d.Root.Member("trainer") != nil || d.Root.Member("defaults") != nil:
	case has("train", "train_iters"), has("train", "micro_batch_size global_batch_size") && others,
		d.Root.Member("ddp") != nil && has("model", divided):
		s.program = "Megatron-Bridge"
		return s
	}
	return nil
}

const nemoProgram = "NeMo"

// source returns what the sections say beside the arguments.
func (s *megatronSections) source() source {
	return source{scripted: scripted{Adapter: s.adapter}, notes: s.notes, ranks: s.ranks, perNode: s.perNode}
}

// arguments returns the arguments of Megatron-LM that the sections say.
func (s *megatronSections) arguments() (*strict.Document, error) {
	read := s.bridge
	if s.program == nemoProgram {
		read = s.nemo
	}
	if err := read(); err != nil {
		return nil, err
	}
	return &strict.Document{File: s.File, Text: s.Text, Root: s.made}, nil
}

// find returns the value at a path such as model.optim.name, with interpolations filled in, or nil.
func (s *megatronSections) find(path string) *strict.Value { return s.resolve(s.lookUp(path), path, 0) }

func (s *megatronSections) lookUp(path string) *strict.Value {
	v := s.Root
	for name := range strings.SplitSeq(path, ".") {
		m := v.Member(name)
		if m == nil {
			return nil
		}
		v = m.Value
	}
	s.taken[v] = true
	return v
}

// resolve fills in what OmegaConf interpolates: ${a.b}, ${.b} beside the key, and NeMo's multiply and divide.
func (s *megatronSections) resolve(v *strict.Value, path string, depth int) *strict.Value {
	if v == nil || v.Kind != '"' || !strings.HasPrefix(v.Text, "${") || !strings.HasSuffix(v.Text, "}") || depth > 8 {
		return v
	}
	inner := v.Text[2 : len(v.Text)-1]
	filled := &strict.Value{}
	if name, numbers, found := strings.Cut(inner, ":"); found {
		n, ok := s.calculate(name, numbers, path, depth)
		if !ok {
			return v
		}
		*filled = *strict.Of(n)
	} else {
		if strings.HasPrefix(inner, ".") {
			parent := path[:max(0, strings.LastIndexByte(path, '.'))]
			for inner = inner[1:]; strings.HasPrefix(inner, "."); inner = inner[1:] {
				parent = parent[:max(0, strings.LastIndexByte(parent, '.'))]
			}
			inner = strings.TrimPrefix(parent+"."+inner, ".")
		}
		inner = strings.TrimPrefix(inner, "training.") // the launcher's name for the file
		found := s.resolve(s.lookUp(inner), inner, depth+1)
		if found == nil {
			return v
		}
		*filled = *found
	}
	filled.At = v.At
	return filled
}

// calculate returns multiply:a,b and divide_ceil:a,b.
func (s *megatronSections) calculate(name, numbers, path string, depth int) (int, bool) {
	first, second, found := strings.Cut(numbers, ",")
	a, ok := s.number(strings.TrimSpace(first), path, depth)
	b, both := s.number(strings.TrimSpace(second), path, depth)
	switch {
	case !found || !ok || !both:
		return 0, false
	case name == "multiply":
		return a * b, true
	case strings.HasPrefix(name, "divide") && b > 0:
		return (a + b - 1) / b, true
	}
	return 0, false
}

func (s *megatronSections) number(text, path string, depth int) (int, bool) {
	v := s.resolve(&strict.Value{Kind: '"', Text: text}, path, depth+1)
	n, err := strconv.Atoi(v.Text)
	return n, err == nil
}

// is reports whether a key asks for something.
func (s *megatronSections) is(path string) bool { return On(s.find(path)) }

// word returns the text of a key in lower case, or "".
func (s *megatronSections) word(path string) string {
	if v := s.find(path); v != nil && !v.IsEmpty() {
		return strings.ToLower(v.Text)
	}
	return ""
}

// give sets an argument at the place of a value.
func (s *megatronSections) give(argument string, at *strict.Value, is any) {
	Give(s.made, argument, at.At, strict.Of(is))
}

// same gives arguments the values of keys with their names, or of key=argument. Null is none.
func (s *megatronSections) same(section, names string) error {
	for name := range strings.FieldsSeq(names) {
		key, argument, renamed := strings.Cut(name, "=")
		if !renamed {
			argument = key
		}
		v := s.find(section + "." + key)
		if v == nil || v.IsEmpty() || v.Text == "null" || v.Text == "None" {
			continue
		}
		if strings.HasPrefix(v.Text, "${") {
			return s.Inputf(v.At, "%s is %s, which this file does not fill in", key, v).
				WithHint("give the number in its place")
		}
		Give(s.made, argument, v.At, v)
	}
	return nil
}

// negated gives arguments that turn off what keys turn on. Without the key it is on.
func (s *megatronSections) negated(section, names string) {
	for name := range strings.FieldsSeq(names) {
		key, argument, _ := strings.Cut(name, "=")
		if v := s.find(section + "." + key); v != nil && !v.IsEmpty() && !On(v) {
			s.give(argument, v, true)
		}
	}
}

// refuse refuses keys that ask for something.
func (s *megatronSections) refuse(section, why, names string) error {
	for key := range strings.FieldsSeq(names) {
		if v := s.find(section + "." + key); On(v) && !v.IsEmpty() {
			return s.fault(section+"."+key, why)
		}
	}
	return nil
}

// fault returns an error at the place of a key.
func (s *megatronSections) fault(path, why string) error {
	at, text := s.Root.At, "absent"
	if v := s.find(path); v != nil {
		at, text = v.At, fmt.Sprintf("%.60v", v)
		if v.Kind == '{' || v.Kind == '[' {
			text = "given"
		}
	}
	return s.Inputf(at, "%s is %s: %s, which is not planned yet", path, text, why).
		WithHint("give arguments of Megatron-LM that say the same")
}

func (s *megatronSections) note(at *strict.Value, format string, values ...any) {
	s.notes = append(s.notes, Note{Where: s.Position(at.At), What: fmt.Sprintf(format, values...)})
}

// rest notes the keys of a section that ask for something and that nobody has read. Those of the list change no
// memory.
func (s *megatronSections) rest(section string, silent []string) {
	v := s.lookUp(section)
	if v == nil {
		return
	}
	for _, m := range v.Members {
		if !s.taken[m.Value] && On(m.Value) && m.Value.Text != "0.0" && m.Value.Kind != '{' &&
			!slices.Contains(silent, m.Name) && !strings.HasPrefix(m.Name, "_") {
			s.note(m.Value, "%s of %s: planned as without it, and it may change memory", m.Name, s.program)
		}
	}
}
