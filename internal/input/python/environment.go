package python

import (
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// Setting is a variable of the environment that a source sets for its process, by os.environ, os.putenv or %env.
type Setting struct {
	Name string
	At   int
	Is   *Value // a Text, or Unknown
}

// environment is the name of the mapping that has the variables of a process.
const environment = "os.environ"

// isEnvironment reports whether a value is the mapping of the variables of the process.
func isEnvironment(v *Value) bool { return v != nil && v.Kind == Symbol && v.Text == environment }

// export notes a variable that the source sets. A value that may not be set is unknown.
func (b *block) export(key, value *Value, at int) {
	if key.Kind != Text {
		return
	}
	if b.unsure != "" || value.Kind != Text {
		value = b.unknown(value.String(), at)
	}
	b.exported = append(b.exported, Setting{key.Text, b.file.position(at), value})
}

// exports follows a call that sets variables. It reports whether it is one.
func (b *block) exports(name string, made *Value, at int) bool {
	given := func(n int) bool { return len(made.Given) >= n && !made.Partial }
	switch name {
	case "os.putenv", environment + ".__setitem__":
		if given(2) {
			b.export(made.Given[0], made.Given[1], at)
		}
	case environment + ".setdefault": // which keeps what the process was started with
		if given(2) {
			b.export(made.Given[0], made.Given[1], at)
			return false
		}
	case environment + ".update":
		for _, more := range append(slices.Clone(made.Given), made) {
			for _, m := range more.Members {
				b.export(&Value{Kind: Text, Text: m.Name}, m.Is, at)
			}
		}
	case "os.unsetenv", environment + ".pop":
		if given(1) {
			b.export(made.Given[0], &Value{Kind: Unknown, Text: "deleted"}, at)
			return false
		}
	default:
		return false
	}
	return true
}

// variable returns the value of a variable that the source has set itself, or nil.
func (b *block) variable(name string) *Value {
	for i := len(b.exported) - 1; i >= 0; i-- {
		if s := b.exported[i]; s.Name == name {
			return s.Is
		}
	}
	return nil
}

// magic matches a line of a notebook that sets a variable: %env NAME=VALUE, %set_env NAME VALUE.
var magic = lazyregexp.New(`^[ \t]*%(?:set_)?env[ \t]+(\w+)[ \t]*[= \t][ \t]*(.*?)[ \t]*\s*$`)

// magics returns the variables that lines of a notebook set by %env.
func (f *file) magics() (list []Setting) {
	if f.cells == nil {
		return nil
	}
	from := 0
	for line := range strings.Lines(f.text) {
		if found := magic.FindStringSubmatchIndex(line); found != nil {
			at := f.position(from + found[2])
			is := &Value{Kind: Text, Text: line[found[4]:found[5]], At: at}
			if strings.ContainsAny(is.Text, "{$") {
				is.Kind = Unknown
			}
			list = append(list, Setting{line[found[2]:found[3]], at, is})
		}
		from += len(line)
	}
	return list
}
