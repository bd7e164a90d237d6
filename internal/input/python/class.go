package python

import (
	"maps"
	"slices"
	"strings"
)

// classOf binds a class of the source, with the attributes that its body gives it.
func (b *block) classOf(s *statement) {
	module := strings.TrimLeft(b.global["__name__"].Text, ".")
	class := &Value{Kind: Symbol, Text: module + "." + s.name, At: b.file.position(s.at), class: true, born: b.steps}
	inner := *b
	inner.local, inner.class, inner.inside = map[string]*Value{}, true, false
	if b.inside {
		inner.around = append([]map[string]*Value{b.local}, b.around...)
	}
	inner.run(s.body)
	for _, name := range slices.Sorted(maps.Keys(inner.local)) {
		if is := inner.local[name]; is.Kind != Symbol || is.resolve == nil {
			class.Members = append(class.Members, Member{name, is.At, is})
		}
	}
	class.inherits = b.libraryBase(s)
	b.inheritFields(class, s)
	for _, d := range s.decorators {
		class.fields = class.fields || strings.HasSuffix(d.String(), "dataclass") ||
			strings.HasSuffix(d.String(), "dataclass(...)")
	}
	if class.fields {
		b.fieldDefaults(class)
	}
	b.bind(&expression{kind: nameOf, at: s.at, text: s.name}, class)
}

// fieldDefaults gives the fields of a dataclass the defaults that dataclasses.field says.
func (b *block) fieldDefaults(class *Value) {
	for i, m := range class.Members {
		if m.Is.Kind != Object || m.Is.Name() != "field" {
			continue
		}
		factory := m.Is.Attribute("default_factory")
		switch is := m.Is.Attribute("default"); {
		case is != nil:
			class.Members[i].Is = is
		case factory == nil:
		case factory.Kind == Function:
			class.Members[i].Is = b.invoke(factory, nil, nil, m.At)
		case factory.Kind == Symbol && factory.Text == "list":
			class.Members[i].Is = &Value{Kind: List, At: m.At, born: b.steps}
		case factory.Kind == Symbol && factory.Text == "dict":
			class.Members[i].Is = &Value{Kind: Dict, At: m.At, born: b.steps}
		}
	}
}

// inheritFields gives a class the fields of the dataclass that it extends, if that stands in the source.
func (b *block) inheritFields(class *Value, s *statement) {
	for _, t := range s.targets {
		above := b.value(t)
		if above.Kind != Symbol || !above.class || !above.fields {
			continue
		}
		for _, m := range above.Members {
			isMethod := m.Is.Kind == Function && m.Is.Text == m.Name
			if !isMethod && class.Attribute(m.Name) == nil {
				class.Members = append(class.Members, m)
			}
		}
	}
}

// libraryBase returns the class of a library that a class of the source extends, itself or by another one.
func (b *block) libraryBase(s *statement) string {
	for _, t := range s.targets {
		switch above := b.value(t); {
		case above.Kind == Symbol && above.class && above.inherits != "":
			return above.inherits
		case above.Kind == Symbol && !above.class && strings.Contains(above.Text, "."):
			return above.Text
		}
	}
	return ""
}

// construct gives an object of a class of the source the attributes that its class gives it.
func (b *block) construct(made, class *Value) {
	made.of = class
	starts := class.Attribute("__init__")
	if starts != nil && starts.Kind == Function {
		named := made.Members
		made.Members = nil
		b.invoke(starts, append([]*Value{made}, made.Given...), named, made.At)
		return
	}
	if class.fields {
		given := made.Given
		for _, m := range class.Members {
			if len(given) == 0 {
				break
			}
			if m.Is.Kind != Function && made.Attribute(m.Name) == nil {
				made.set(m.Name, m.At, b.unknown("an argument by its place", 0))
			}
		}
	}
	if ends := class.Attribute("__post_init__"); ends != nil && ends.Kind == Function {
		b.invoke(ends, []*Value{made}, nil, made.At)
	}
}

// isMethod reports whether a function is called on an object of its class, which it gets as its first argument.
func isMethod(f, of *Value) bool {
	return of != nil && of.Kind == Object && of.of != nil && of.of.Attribute(f.function.name) == f &&
		!slices.ContainsFunc(f.function.decorators, func(d *expression) bool { return d.text == "staticmethod" })
}
