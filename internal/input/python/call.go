package python

import (
	"math"
	"slices"
	"strings"
)

// call evaluates a call: of a function of the source, of Python itself, or of a name of another module, whose arguments
// are kept.
func (b *block) call(e *expression) *Value {
	f, of := b.function(e.parts[0])
	from := of
	if of != nil && (of.Kind != Object || f.Kind != Unknown) {
		from = nil
	}
	made := &Value{Kind: Object, At: b.file.position(e.at), From: from}
	for _, part := range e.parts[1:] {
		if part.kind == starred {
			spread := b.value(part.parts[0])
			made.Given = append(made.Given, spread.Elements...)
			made.Partial = made.Partial || spread.Kind != List
			continue
		}
		made.Given = append(made.Given, b.value(part))
	}
	for _, k := range e.keywords {
		is := b.value(k.is)
		switch {
		case k.name != "":
			made.set(k.name, b.file.position(k.at), is)
		case is.Kind == Dict:
			for _, m := range is.Members {
				made.set(m.Name, m.At, m.Is)
			}
		default:
			made.Partial = true
		}
	}
	switch {
	case f.Kind == Function:
		return b.invoke(f, made.Given, made.Members, made.At)
	case f.Kind == Symbol:
		if is := b.builtin(f.Text, made, e); is != nil {
			return is
		}
		made.Class = f.Text
	case from != nil:
		made.Class = from.Class + "." + e.parts[0].text
	default:
		if is := b.method(of, e.parts[0].text, made); of != nil && is != nil {
			return is
		}
		return b.unknown(e.String(), e.at)
	}
	b.calls = append(b.calls, made)
	if b.unsure != "" && b.unsure != "a loop" {
		made.Partial = true
	}
	return made
}

// function evaluates what is called, and what it is an attribute of: nil for a name.
func (b *block) function(e *expression) (f, of *Value) {
	if e.kind != attribute {
		return b.value(e), nil
	}
	of = b.value(e.parts[0])
	b.touch(e.text, e.at)
	return b.attributeOf(of, e), of
}

// invoke runs a function of the source, and returns what it returns.
func (e *evaluator) invoke(f *Value, given []*Value, named []Member, at int) *Value {
	s := f.function
	unknown := &Value{Kind: Unknown, Text: f.Text + "(...)", At: at}
	if e.depth > deepestCall || e.isSpent() {
		return unknown
	}
	inner := &block{evaluator: e, file: f.file, local: map[string]*Value{}, global: f.scope}
	rest := &Value{Kind: Dict, At: -1}
	for _, m := range named {
		if slices.ContainsFunc(s.parameters, func(q parameter) bool { return q.star == "" && q.name == m.Name }) {
			inner.local[m.Name] = m.Is
		} else {
			rest.set(m.Name, m.At, m.Is)
		}
	}
	byPlace := true
	for _, q := range s.parameters {
		switch {
		case q.star == "*":
			if byPlace = false; q.name != "" {
				inner.local[q.name] = &Value{Kind: List, Elements: given, At: at}
				given = nil
			}
		case q.star == "**":
			inner.local[q.name] = rest
		case byPlace && len(given) > 0:
			inner.local[q.name], given = given[0], given[1:]
		case inner.local[q.name] != nil:
		case q.usual != nil:
			inner.local[q.name] = inner.value(q.usual)
		default:
			inner.local[q.name] = &Value{Kind: Unknown, Text: "the argument " + q.name + " of " + f.Text, At: at}
		}
	}
	before := e.returned
	e.returned = nil
	e.depth++
	inner.run(s.body)
	e.depth--
	result := e.returned
	e.returned = before
	if result == nil {
		return &Value{Kind: None, At: at}
	}
	return result
}

// builtin evaluates a function of Python itself, or of its library, that configurations use. It returns nil for others.
func (b *block) builtin(name string, c *Value, e *expression) *Value {
	var first *Value
	if len(c.Given) > 0 {
		first = c.Given[0]
	}
	switch {
	case strings.HasSuffix(name, "is_bf16_supported") || strings.HasSuffix(name, "is_bfloat16_supported"):
		b.asked = true
		return &Value{Kind: Bool, Truth: true, At: c.At}
	case name == "dict" && len(c.Given) == 0 && !c.Partial:
		return &Value{Kind: Dict, Members: c.Members, At: c.At}
	case first == nil:
		return nil
	case name == "isinstance" && len(c.Given) == 2:
		return b.isInstance(first, c.Given[1], c.At)
	case name == "setattr" && len(c.Given) == 3 && first.Kind == Object && c.Given[1].Kind == Text:
		first.set(c.Given[1].Text, c.At, c.Given[2])
		return &Value{Kind: None, At: c.At}
	case name == "getattr" && len(c.Given) == 3 && first.Kind == Object && c.Given[1].Kind == Text:
		if is := first.Attribute(c.Given[1].Text); is != nil {
			return is
		}
		return b.unknown(e.String(), e.at)
	case name == "len" && first.Kind == List:
		return &Value{Kind: Number, Number: float64(len(first.Elements)), Whole: true, At: c.At}
	case (name == "str" || name == "Path" || name == "pathlib.Path") && first.Kind == Text, name == "list" &&
		first.Kind == List, name == "tuple" && first.Kind == List, name == "float" && first.Kind == Number,
		name == "int" && first.Kind == Number && first.Whole:
		return first
	case name == "str" && first.Kind == Number:
		return &Value{Kind: Text, Text: first.String(), At: c.At}
	case name == "int" && first.Kind == Number:
		return &Value{Kind: Number, Number: math.Trunc(first.Number), Whole: true, At: c.At}
	case name == "max" || name == "min":
		return extreme(name, c.Given)
	case name == "copy.copy" || name == "copy.deepcopy" || name == "deepcopy":
		return b.clone(first)
	case strings.HasPrefix(name, "os.path.join"):
		return b.unknown(e.String(), e.at)
	}
	return nil
}

// isInstance evaluates isinstance for the types of Python itself. It returns nil where the source does not say it.
func (b *block) isInstance(v, class *Value, at int) *Value {
	kinds := map[string]Kind{"str": Text, "bool": Bool, "list": List, "tuple": List, "dict": Dict, "int": Number,
		"float": Number}
	kind, known := kinds[class.Text]
	plain := v.Kind == None || v.Kind == Text || v.Kind == Number || v.Kind == Bool
	if class.Kind == Symbol && !known && plain && class.Text != "object" { // a class of another module
		return &Value{Kind: Bool, At: at}
	}
	if class.Kind == Symbol && v.Kind == Object && v.Class == class.Text {
		return &Value{Kind: Bool, Truth: true, At: at}
	}
	if class.Kind != Symbol || !known || v.Kind == Unknown || v.Kind == Symbol || kind == Number && v.Kind == Number {
		return nil
	}
	return &Value{Kind: Bool, Truth: v.Kind == kind, At: at}
}

// extreme returns the largest or the smallest of numbers, or nil.
func extreme(name string, list []*Value) *Value {
	best := list[0]
	for _, v := range list {
		switch {
		case v.Kind != Number:
			return nil
		case name == "max" && v.Number > best.Number, name == "min" && v.Number < best.Number:
			best = v
		}
	}
	return best
}

// clone returns a deep copy.
func (e *evaluator) clone(v *Value) *Value {
	copied := *v
	if e.steps++; e.isSpent() {
		return &copied
	}
	copied.Members, copied.Elements = slices.Clone(v.Members), slices.Clone(v.Elements)
	for i := range copied.Members {
		copied.Members[i].Is = e.clone(copied.Members[i].Is)
	}
	for i := range copied.Elements {
		copied.Elements[i] = e.clone(copied.Elements[i])
	}
	return &copied
}

// method evaluates methods of texts, lists and dicts that configurations use. It returns nil for others.
func (b *block) method(of *Value, name string, c *Value) *Value {
	if of == nil {
		return nil
	}
	var first *Value
	if len(c.Given) > 0 {
		first = c.Given[0]
	}
	switch {
	case of.Kind == Dict && name == "copy":
		return &Value{Kind: Dict, Members: slices.Clone(of.Members), At: c.At}
	case of.Kind == Dict && name == "get" && first != nil && first.Kind == Text:
		if is := of.Attribute(first.Text); is != nil {
			return is
		}
		if len(c.Given) > 1 {
			return c.Given[1]
		}
		return &Value{Kind: None, At: c.At}
	case of.Kind == Dict && name == "update":
		more := slices.Clone(c.Members)
		if first != nil {
			if first.Kind != Dict {
				return nil
			}
			more = append(slices.Clone(first.Members), more...)
		}
		for _, m := range more {
			if b.unsure != "" {
				m.Is = &Value{Kind: Unknown, Text: b.unsure, At: m.At}
			}
			of.set(m.Name, m.At, m.Is)
		}
		return &Value{Kind: None, At: c.At}
	case of.Kind == List && name == "append" && first != nil && b.unsure == "":
		of.Elements = append(of.Elements, first)
		return &Value{Kind: None, At: c.At}
	case of.Kind == Text && name == "replace" && len(c.Given) == 2 && first.Kind == Text && c.Given[1].Kind == Text:
		return &Value{Kind: Text, Text: strings.ReplaceAll(of.Text, first.Text, c.Given[1].Text), At: c.At}
	case of.Kind == Text && len(c.Given) == 0 && (name == "lower" || name == "upper" || name == "strip"):
		change := map[string]func(string) string{"lower": strings.ToLower, "upper": strings.ToUpper,
			"strip": strings.TrimSpace}[name]
		return &Value{Kind: Text, Text: change(of.Text), At: c.At}
	}
	return nil
}
