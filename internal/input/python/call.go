package python

import (
	"cmp"
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
	made := &Value{Kind: Object, At: b.file.position(e.at), From: from, born: b.steps}
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
		if isMethod(f, of) {
			made.Given = append([]*Value{of}, made.Given...)
		}
		return b.invoke(f, made.Given, made.Members, made.At)
	case f.Kind == Symbol:
		if b.exports(f.Text, made, e.at) {
			return &Value{Kind: None, At: made.At}
		}
		if is := b.builtin(f.Text, made, e); is != nil {
			return is
		}
		made.Class = f.Text
	case from != nil && cmp.Or(b.parses(e.parts[0].text, made), b.dataclasses(e.parts[0].text, made)) != nil:
		return cmp.Or(b.parses(e.parts[0].text, made), b.dataclasses(e.parts[0].text, made))
	case from != nil:
		made.Class = from.Class + "." + e.parts[0].text
		if slices.Contains(bridged, e.parts[0].text) {
			made.of = b.ofLibrary("megatron.core")["TransformerConfig"]
		}
		if changes(e.parts[0].text) {
			b.spoilOwner(of, e)
		}
	default:
		b.hands(made)
		if of == nil {
			return b.unknown(e.String(), e.at)
		}
		if is := b.method(of, e.parts[0].text, made); is != nil {
			return is
		}
		if changes(e.parts[0].text) {
			of.spoil(e.String())
			b.spoilOwner(of, e)
		}
		return b.unknown(e.String(), e.at)
	}
	b.hands(made)
	if f.class {
		b.construct(made, f)
	}
	b.calls = append(b.calls, made)
	if b.unsure != "" && b.unsure != looped && b.unsure != early {
		made.Partial = true
	}
	return made
}

// bridged are the methods of Megatron-Bridge's AutoBridge that return the configuration of a model.
var bridged = []string{"to_megatron_provider", "get_model_config"}

// hands follows the functions of the source among the arguments of a call that is not followed.
func (b *block) hands(made *Value) {
	b.hand(made.Given...)
	for _, m := range made.Members {
		b.hand(m.Is)
	}
}

// changes reports whether a method of a list, a set or a dict changes it.
func changes(method string) bool {
	switch method {
	case "append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort", "reverse", "add", "discard",
		"update", "setdefault", "__setitem__", "__delitem__", "difference_update", "intersection_update",
		"symmetric_difference_update":
		return true
	}
	return false
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

// invoke runs a function of the source, and returns what it returns. Where the call may not run, so do its statements.
func (b *block) invoke(f *Value, given []*Value, named []Member, at int) *Value {
	s, e := f.function, b.evaluator
	unknown := &Value{Kind: Unknown, Text: f.Text + "(...)", At: at}
	if e.depth > deepestCall || e.isSpent() {
		return unknown
	}
	inner := &block{evaluator: e, file: f.file, local: map[string]*Value{}, around: f.around, global: f.scope,
		inside: true, unsure: b.unsure, since: b.since}
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
				inner.local[q.name] = &Value{Kind: List, Elements: given, At: at, tuple: true, born: e.steps}
				given = nil
			}
		case q.star == "**":
			inner.local[q.name] = rest
		case byPlace && len(given) > 0:
			inner.local[q.name], given = given[0], given[1:]
		case inner.local[q.name] != nil:
		case f.usual[q.name] != nil:
			inner.local[q.name] = f.usual[q.name]
		default:
			inner.local[q.name] = &Value{Kind: Unknown, Text: "the argument " + q.name + " of " + f.Text, At: at}
		}
	}
	before, leaving := e.returned, e.leaving
	e.returned, e.leaving = nil, nil
	e.depth++
	inner.run(s.body)
	e.depth--
	result := cmp.Or(e.leaving, e.returned)
	e.returned, e.leaving = before, leaving
	switch {
	case s.yields:
		return unknown
	case result == nil:
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
		return &Value{Kind: Dict, Members: c.Members, At: c.At, born: b.steps}
	case first == nil:
		return nil
	case name == "dict" && first.Kind == Dict && !c.Partial:
		all := &Value{Kind: Dict, Members: slices.Clone(first.Members), At: c.At, born: b.steps}
		for _, m := range c.Members {
			all.set(m.Name, m.At, m.Is)
		}
		return all
	case name == "exec":
		b.forget("exec(...)")
		return nil
	case (name == "cast" || name == "typing.cast") && len(c.Given) == 2:
		return c.Given[1]
	case name == "isinstance" && len(c.Given) == 2:
		return b.isInstance(first, c.Given[1], c.At)
	case name == "setattr" && len(c.Given) == 3:
		return b.setAttribute(first, c.Given[1], c.Given[2], e)
	case name == "getattr" && len(c.Given) == 3 && first.Kind == Object && c.Given[1].Kind == Text:
		if is := cmp.Or(first.Attribute(c.Given[1].Text), first.of.Attribute(c.Given[1].Text)); is != nil {
			return is
		}
		return b.unknown(e.String(), e.at)
	case name == "hasattr" && len(c.Given) == 2 && first.Kind == Object && c.Given[1].Kind == Text &&
		cmp.Or(first.Attribute(c.Given[1].Text), first.of.Attribute(c.Given[1].Text)) != nil:
		return &Value{Kind: Bool, Truth: true, At: c.At}
	case name == "getattr" && len(c.Given) == 2 && first.Kind == Symbol && !first.class && c.Given[1].Kind == Text:
		return &Value{Kind: Symbol, Text: first.Text + "." + c.Given[1].Text, At: c.At}
	case name == "len" && (first.Kind == List || first.Kind == Dict):
		return &Value{Kind: Number, Number: float64(len(first.Elements) + len(first.Members)), Whole: true, At: c.At}
	case (name == "list" || name == "tuple" || name == "set") && first.Kind == List:
		is := &Value{Kind: List, Elements: slices.Clone(first.Elements), At: c.At, born: b.steps}
		is.tuple = name == "tuple"
		if name == "set" {
			return is.distinct()
		}
		return is
	case (name == "str" || name == "Path" || name == "pathlib.Path") && first.Kind == Text,
		name == "int" && first.Kind == Number && first.Whole:
		return first
	case name == "float" && first.Kind == Number:
		return &Value{Kind: Number, Number: first.Number, At: c.At}
	case (name == "int" || name == "float") && first.Kind == Text && len(c.Given) == 1:
		return numeral(name, first.Text, c.At)
	case name == "str" && first.Kind == Number:
		return &Value{Kind: Text, Text: first.String(), At: c.At}
	case name == "int" && first.Kind == Number:
		return &Value{Kind: Number, Number: math.Trunc(first.Number), Whole: true, At: c.At}
	case (name == "max" || name == "min") && len(c.Members) == 0:
		return extreme(name, c.Given)
	case name == "copy.copy":
		copied := *first
		copied.Members, copied.Elements = slices.Clone(first.Members), slices.Clone(first.Elements)
		copied.born = b.steps
		return &copied
	case name == "copy.deepcopy" || name == "deepcopy":
		return b.clone(first)
	case strings.HasPrefix(name, "os.path.join"):
		return b.unknown(e.String(), e.at)
	}
	return nil
}

// isInstance evaluates isinstance for the types of Python itself. It returns nil where the source does not say it.
func (b *block) isInstance(v, class *Value, at int) *Value {
	kinds := map[string]Kind{"str": Text, "bool": Bool, "list": List, "tuple": List, "dict": Dict, "int": Number,
		"float": Number, "set": List}
	kind, known := kinds[class.Text]
	if v.Kind == List && kind == List && v.tuple != (class.Text == "tuple") {
		return nil // a tuple or a set, which are lists here
	}
	plain := v.Kind == None || v.Kind == Text || v.Kind == Number || v.Kind == Bool
	if class.Kind == Symbol && !known && plain && class.Text != "object" { // a class of another module
		return &Value{Kind: Bool, At: at}
	}
	if class.Kind == Symbol && v.Kind == Object && v.Class == class.Text {
		return &Value{Kind: Bool, Truth: true, At: at}
	}
	isNumeric := v.Kind == Number || v.Kind == Bool
	if class.Kind != Symbol || !known || v.Kind == Unknown || v.Kind == Symbol || kind == Number && isNumeric {
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
	copied.born = e.steps
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
		return &Value{Kind: Dict, Members: slices.Clone(of.Members), At: c.At, born: b.steps}
	case of.Kind == List && name == "copy":
		return &Value{Kind: List, Elements: slices.Clone(of.Elements), At: c.At, born: b.steps}
	case of.Kind == Dict && name == "update" && !c.Partial && (first == nil || first.Kind == Dict):
		more := slices.Clone(c.Members)
		if first != nil {
			more = append(slices.Clone(first.Members), more...)
		}
		for _, m := range more {
			of.set(m.Name, m.At, b.may(of, m.Is, 0))
		}
		return &Value{Kind: None, At: c.At}
	case of.Kind == Dict && first != nil:
		return b.ofDict(of, name, c)
	case of.Kind == List && name == "append" && first != nil && b.isSure(of):
		of.Elements = append(of.Elements, first)
		return &Value{Kind: None, At: c.At}
	case of.Kind == List && name == "extend" && first != nil && first.Kind == List && b.isSure(of):
		of.Elements = append(of.Elements, first.Elements...)
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

// ofDict evaluates a method of a dict with a key: get, setdefault and pop.
func (b *block) ofDict(of *Value, name string, c *Value) *Value {
	key, is := keyOf(c.Given[0])
	if !is || name != "get" && !b.isSure(of) {
		return nil
	}
	value := of.Attribute(key)
	usual := &Value{Kind: None, At: c.At}
	if len(c.Given) > 1 {
		usual = c.Given[1]
	}
	switch name {
	case "get":
	case "setdefault":
		if value == nil {
			of.set(key, c.At, usual)
		}
	case "pop":
		of.drop(key)
	default:
		return nil
	}
	return cmp.Or(value, usual)
}

// setAttribute follows setattr.
func (b *block) setAttribute(of, name, value *Value, e *expression) *Value {
	at := b.file.position(e.at)
	if name.Kind != Text {
		of.spoil(e.String())
		return &Value{Kind: None, At: at}
	}
	b.touch(name.Text, e.at)
	if of.Kind == Object {
		of.set(name.Text, at, b.may(of, value, e.at))
		of.Changed = append(of.Changed, Change{name.Text, at})
	} else if of.Kind == Unknown && of.From != nil {
		of.From.Changed = append(of.From.Changed, Change{name.Text, at})
	}
	return &Value{Kind: None, At: at}
}

// numeral returns the number that a text says, or nil.
func numeral(kind, text string, at int) *Value {
	text = strings.TrimSpace(text)
	is := numberFrom(strings.TrimLeft(text, "-+"), at)
	if is.Kind != Number || kind == "int" && (!is.Whole || strings.Trim(text, "-+0123456789") != "") {
		return nil
	}
	if strings.HasPrefix(text, "-") {
		is.Number = -is.Number
	}
	is.Whole = kind == "int"
	return is
}
