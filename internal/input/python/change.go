package python

import (
	"maps"
	"slices"
	"strings"
)

// isSure reports whether a change of a value is sure: the statements run, or the value was made where they may not run.
func (b *block) isSure(v *Value) bool { return b.unsure == "" || v.born > b.since }

// may returns a value that a statement sets, which is unknown where the statement may not run.
func (b *block) may(of, value *Value, at int) *Value {
	if b.isSure(of) {
		return value
	}
	return b.unknown(b.unsure, at)
}

// sees returns the scopes of a name, the innermost first.
func (b *block) sees(name string) []map[string]*Value {
	if scope := b.bound[name]; scope != nil {
		return []map[string]*Value{scope}
	}
	return append(append([]map[string]*Value{b.local}, b.around...), b.global)
}

// declare follows global and nonlocal.
func (b *block) declare(s *statement) {
	if !b.inside {
		return
	}
	if b.bound == nil {
		b.bound = map[string]map[string]*Value{}
	}
	for _, name := range s.names {
		b.bound[name] = b.global
		for _, scope := range b.around {
			if s.name == "nonlocal" && scope[name] != nil {
				b.bound[name] = scope
				break
			}
		}
	}
}

func (b *block) bindName(t *expression, value *Value) {
	scope := b.bound[t.text]
	if scope == nil {
		if b.class && value.Kind == Symbol && value.resolve != nil { // a field, and no import
			field := *value
			field.resolve = nil
			value = &field
		}
		b.local[t.text] = value
		return
	}
	if b.unsure != "" {
		value = b.unknown(b.unsure, t.at)
	}
	scope[t.text] = value
}

func (b *block) bindAttribute(t *expression, value *Value) {
	b.touch(t.text, t.at)
	of := b.value(t.parts[0])
	switch {
	case of.Kind == Object:
		of.set(t.text, b.file.position(t.at), b.may(of, value, t.at))
		of.Changed = append(of.Changed, Change{t.text, b.file.position(t.at)})
	case of.Kind == Symbol && of.class:
		of.set(t.text, b.file.position(t.at), b.may(of, value, t.at))
	default:
		b.below(of, t)
	}
}

func (b *block) bindItem(t *expression, value *Value) {
	of, key := b.value(t.parts[0]), b.value(t.parts[1])
	name, isKey := keyOf(key)
	switch i, inside := of.index(key); {
	case isEnvironment(of):
		b.export(key, value, t.at)
	case of.Kind == Dict && isKey:
		of.set(name, b.file.position(t.at), b.may(of, value, t.at))
	case of.Kind == List && inside && b.isSure(of):
		of.Elements[i] = value
	case of.Kind == List || of.Kind == Dict:
		of.spoil(t.String() + ", which the source sets")
	default:
		b.spoilOwner(of, t)
		b.below(of, t)
	}
}

// below notes that the source changes something below an object, such as model.layers[0].
func (b *block) below(of *Value, t *expression) {
	if of.Kind != Unknown || of.From == nil || !b.file.main {
		return
	}
	_, path, _ := strings.Cut(t.String(), ".")
	of.From.Changed = append(of.From.Changed, Change{path, b.file.position(t.at)})
}

// spoilOwner has an object be unknown whose attributes the source changes as those of a dict: vars(x)[...], x.__dict__.
// All names are unknown that it changes so: globals()[...].
func (b *block) spoilOwner(of *Value, t *expression) {
	switch {
	case of.Kind == Unknown && of.From != nil && strings.HasSuffix(of.Text, "__dict__"):
		of.From.spoil(t.String())
	case of.Kind == Object && of.Class == "vars" && len(of.Given) > 0:
		of.Given[0].spoil(t.String())
	case of.Kind == Object && (of.Class == "globals" || of.Class == "locals"):
		b.forget(of.Class + "()")
	}
}

// forget has all names with plain values be unknown, for code that may set any of them.
func (b *block) forget(why string) {
	for _, scope := range []map[string]*Value{b.local, b.global} {
		for name, v := range scope {
			switch v.Kind {
			case None, Bool, Number, Text, List, Dict:
				if name != "__name__" {
					scope[name] = &Value{Kind: Unknown, Text: why, At: v.At}
				}
			}
		}
	}
}

// remove follows del.
func (b *block) remove(t *expression) {
	gone := b.unknown(t.String()+", which the source deletes", t.at)
	switch t.kind {
	case nameOf:
		b.bindName(t, gone)
	case attribute:
		b.bindAttribute(t, gone)
	case tupleOf, listOf:
		for _, part := range t.parts {
			b.remove(part)
		}
	case item:
		of, key := b.value(t.parts[0]), b.value(t.parts[1])
		name, isKey := keyOf(key)
		if isEnvironment(of) {
			b.export(key, gone, t.at)
			return
		}
		if of.Kind == Dict && isKey && b.isSure(of) {
			of.drop(name)
			return
		}
		of.spoil(t.String() + ", which the source deletes")
		b.spoilOwner(of, t)
		b.below(of, t)
	}
}

// drop removes a member of a dict.
func (v *Value) drop(name string) {
	v.Members = slices.DeleteFunc(v.Members, func(m Member) bool { return m.Name == name })
}

// changed returns what an assignment with an operator makes of a value. A list and a dict change in place.
func (b *block) changed(old *Value, operator string, value *Value, at int) *Value {
	is := b.operation(operator, old, value, at)
	if old.Kind != List && old.Kind != Dict || old.tuple {
		return is
	}
	if is.Kind != old.Kind || !b.isSure(old) {
		old.spoil(is.String())
		return old
	}
	old.Elements, old.Members = is.Elements, is.Members
	return old
}

// try follows the statements of a try. What handles an exception may run, unless nothing in the body can raise one.
func (b *block) try(s *statement) {
	before := maps.Clone(b.local)
	b.run(s.body)
	switch {
	case len(s.otherwise) == 0 || b.areCalm(s.body):
	case b.returned != nil && !leaves(s.otherwise):
		b.returned = b.unknown(exception, s.at)
	case b.returned == nil:
		for name, was := range before {
			if is := b.local[name]; is != was && !isSame(is, was) && !leaves(s.otherwise) {
				b.local[name] = b.unknown(exception, s.at)
			}
		}
		b.perhaps(s.otherwise, exception)
	}
	b.run(s.last)
}

func isSame(v, w *Value) bool {
	same, sure := v.equal(w)
	return same && sure
}

// leaves reports whether statements end with an exception or the end of the program.
func leaves(list []*statement) bool {
	last := list[len(list)-1]
	if last.kind == evaluates && last.value.kind == call {
		switch last.value.parts[0].String() {
		case "exit", "quit", "sys.exit", "os._exit":
			return true
		}
	}
	return last.kind == raises
}

// areCalm reports whether no statement can raise an exception: assignments of literals and names, and imports of
// libraries that a training needs.
func (b *block) areCalm(list []*statement) bool {
	return !slices.ContainsFunc(list, func(s *statement) bool { return !b.isCalm(s) })
}

func (b *block) isCalm(s *statement) bool {
	switch s.kind {
	case passes, defines, scopes:
		return true
	case returns:
		return s.value == nil || s.value.isCalm()
	case importing:
		return !slices.ContainsFunc(s.imports, func(i imported) bool {
			first, _, _ := strings.Cut(i.module, ".")
			return first != "torch" && !slices.Contains(b.known, first)
		})
	case assigns:
		return s.name == "=" && s.value.isCalm() && !slices.ContainsFunc(s.targets, func(t *expression) bool {
			return t.kind != nameOf
		})
	}
	return false
}

func (e *expression) isCalm() bool {
	switch e.kind {
	case nameOf, numberOf, textOf, lambda:
		return true
	case joined, listOf, tupleOf:
		return !slices.ContainsFunc(e.parts, func(p *expression) bool { return !p.isCalm() })
	case unary:
		return e.parts[0].isCalm()
	}
	return false
}

// comprehend follows what a comprehension makes of an element, for what that changes.
func (b *block) comprehend(e *expression) {
	inner := *b
	inner.since = b.steps
	inner.unsure, inner.branch = "a comprehension", "a comprehension"
	inner.around = append([]map[string]*Value{b.local}, b.around...)
	inner.local = map[string]*Value{}
	for _, k := range e.keywords {
		inner.local[k.name] = inner.unknown(k.name, k.at)
	}
	calls := len(b.calls)
	for _, part := range e.parts {
		inner.value(part)
	}
	b.calls = b.calls[:calls]
}

// hand follows functions of the source that other code gets, which may call them: for what they change. It follows each
// of them once.
func (b *block) hand(list ...*Value) {
	for _, f := range list {
		if f == nil || f.Kind != Function || b.handed[f.function] {
			continue
		}
		if b.handed == nil {
			b.handed = map[*statement]bool{}
		}
		b.handed[f.function] = true
		inner := *b
		inner.since = b.steps
		inner.unsure, inner.branch = "a function that other code may call", "a function that other code may call"
		calls := len(b.calls)
		inner.invoke(f, nil, nil, f.At)
		b.calls = b.calls[:calls]
	}
}
