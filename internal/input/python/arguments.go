package python

import (
	"cmp"
	"slices"
	"strings"
)

// Argument is a word of the command line that a source is started with.
type Argument struct {
	Text    string
	Unknown bool // only a run can tell it
}

// argumentParser is the class whose parse_args reads the command line.
const argumentParser = "argparse.ArgumentParser"

// parses evaluates parse_args and parse_known_args of an argparse.ArgumentParser, where the command line is known. It
// returns nil for other calls, and for parsers with parts that are not followed.
func (b *block) parses(name string, made *Value) *Value {
	parser := rootOf(made.From)
	if b.command == nil || parser == nil || name != "parse_args" && name != "parse_known_args" || len(made.Given) > 0 {
		return nil
	}
	var options []*option
	for _, c := range b.calls {
		switch {
		case c == parser || rootOf(c) != parser:
		case c.Name() == "add_argument":
			o := optionOf(c)
			if o == nil {
				return nil
			}
			options = append(options, o)
		case c.Name() == "set_defaults" && !c.Partial:
			for _, m := range c.Members {
				options = append(options, &option{destination: m.Name, usual: m.Is})
			}
		case c.Name() == "add_argument_group", c.Name() == "add_mutually_exclusive_group":
		default: // subparsers, parents
			return nil
		}
	}
	space := &Value{Kind: Object, Class: "argparse.Namespace", At: made.At, born: b.steps}
	for _, o := range options {
		space.set(o.destination, o.at, o.usual)
	}
	if !readCommand(space, options, b.command) {
		return nil
	}
	if name == "parse_args" {
		return space
	}
	return &Value{Kind: List, tuple: true, Elements: []*Value{space, b.unknown("arguments that are left", 0)},
		At: made.At, born: b.steps}
}

// rootOf returns the parser that a call belongs to, itself or by a group of it, or nil.
func rootOf(v *Value) *Value {
	for range 4 {
		switch {
		case v == nil:
			return nil
		case v.Class == argumentParser || v.From == nil && strings.HasSuffix(v.Class, ".ArgumentParser"):
			return v
		}
		v = v.From
	}
	return nil
}

// option is an argument that a parser knows.
type option struct {
	names       []string // with hyphens; none for one by its place
	destination string
	at          int
	usual       *Value // its value where it is not given
	given       *Value // the value that a switch has; nil for options with values
	kind        string // the type that values are converted to
	negated     string // the name that turns it off
	placed      bool   // it has no name, and is known by its place
	many, maybe bool   // it takes as many values as there are; it takes one or none
	unread      bool   // its value is not followed
}

// optionOf returns the argument that a call of add_argument adds, or nil where the source does not say its name.
func optionOf(c *Value) *option {
	o := &option{at: c.At, usual: &Value{Kind: None, At: c.At}, kind: "str", unread: c.Partial}
	for _, name := range c.Given {
		if name.Kind != Text {
			return nil
		}
		o.names = append(o.names, name.Text)
	}
	if len(o.names) == 0 {
		return nil
	}
	long := slices.IndexFunc(o.names, func(name string) bool { return strings.HasPrefix(name, "--") })
	o.destination = strings.ReplaceAll(strings.TrimLeft(o.names[max(long, 0)], "-"), "-", "_")
	if !strings.HasPrefix(o.names[0], "-") {
		o.names, o.placed = nil, true
	}
	for _, m := range c.Members {
		o.setting(m.Name, m.Is)
	}
	return o
}

func (o *option) setting(name string, is *Value) {
	switch name {
	case "dest":
		o.destination = is.Text
		o.unread = o.unread || is.Kind != Text
	case "default":
		o.usual = is
	case "type":
		o.kind = is.Text
		known := is.Kind == Symbol && slices.Contains([]string{"int", "float", "str", "bool"}, is.Text)
		o.unread = o.unread || !known
	case "nargs":
		o.many = is.Kind == Text && (is.Text == "+" || is.Text == "*")
		o.maybe = is.Kind == Text && is.Text == "?"
		o.unread = o.unread || !o.many && !o.maybe
	case "const":
		o.given = is
	case "action":
		truth := func(is bool) *Value { return &Value{Kind: Bool, Truth: is, At: o.at} }
		switch {
		case is.Text == "store_true":
			o.usual, o.given = truth(false), truth(true)
		case is.Text == "store_false":
			o.usual, o.given = truth(true), truth(false)
		case strings.HasSuffix(is.Text, "BooleanOptionalAction") && len(o.names) > 0:
			o.given, o.negated = truth(true), "--no-"+strings.TrimLeft(o.names[0], "-")
		case is.Text != "store":
			o.unread = true
		}
	}
}

// unfollowed is the value of an argument that is not followed.
func (o *option) unfollowed(why string) *Value { return &Value{Kind: Unknown, Text: why, At: o.at} }

// readCommand sets what a command line gives. It reports whether it is one that the parser takes.
func readCommand(space *Value, options []*option, command []Argument) bool {
	places := slices.DeleteFunc(slices.Clone(options), func(o *option) bool { return !o.placed })
	for i := 0; i < len(command); i++ {
		word := command[i]
		name, value, joined := strings.Cut(word.Text, "=")
		var o *option
		isFlag := strings.HasPrefix(word.Text, "-") && numeral("float", word.Text, 0) == nil
		switch {
		case isFlag && !word.Unknown || isFlag && joined:
			if o = findOption(options, name); o == nil { // of code that is not followed
				for i+1 < len(command) && isOperand(command[i+1]) {
					i++
				}
				continue
			}
		case len(places) > 0:
			o = places[0]
			if !o.many {
				places = places[1:]
			}
			i--
		default:
			continue
		}
		var values []Argument
		if joined && isFlag {
			values = []Argument{{value, word.Unknown}}
		}
		for !joined && (o.given == nil || o.maybe) && i+1 < len(command) && isOperand(command[i+1]) &&
			(len(values) == 0 || o.many) {
			i++
			values = append(values, command[i])
		}
		if !isFlag && len(values) == 0 {
			return false
		}
		space.set(o.destination, o.at, o.value(values, name))
	}
	return true
}

// isOperand reports whether a word is no name of an option: negative numbers are none.
func isOperand(a Argument) bool {
	return !strings.HasPrefix(a.Text, "-") || numeral("float", a.Text, 0) != nil
}

// findOption returns the option that a name is of, in full or as the only one that begins so.
func findOption(options []*option, name string) (found *option) {
	for _, o := range options {
		if slices.Contains(o.names, name) || o.negated == name && name != "" {
			return o
		}
	}
	if !strings.HasPrefix(name, "--") {
		return nil
	}
	for _, o := range options {
		if slices.ContainsFunc(o.names, func(full string) bool { return strings.HasPrefix(full, name) }) {
			if found != nil {
				return nil
			}
			found = o
		}
	}
	return found
}

// value returns what an option is worth with the values that a command line gives it.
func (o *option) value(values []Argument, name string) *Value {
	switch {
	case o.unread:
		return o.unfollowed("an argument of add_argument that is not followed")
	case name == o.negated && name != "":
		return &Value{Kind: Bool, At: o.at}
	case len(values) == 0 && o.given != nil:
		return o.given
	case len(values) == 0 && !o.many:
		return o.unfollowed(name + " without a value")
	}
	list := &Value{Kind: List, At: o.at}
	for _, v := range values {
		list.Elements = append(list.Elements, o.converted(v))
	}
	if o.many {
		return list
	}
	return list.Elements[0]
}

func (o *option) converted(a Argument) *Value {
	is := &Value{Kind: Text, Text: a.Text, At: o.at}
	switch {
	case a.Unknown:
		return o.unfollowed(a.Text)
	case o.kind == "bool": // of a text: all but the empty one are true
		return &Value{Kind: Bool, Truth: a.Text != "", At: o.at}
	case o.kind == "int" || o.kind == "float":
		if n := numeral(o.kind, a.Text, o.at); n != nil {
			return n
		}
		return o.unfollowed(a.Text + ", which is no " + o.kind)
	}
	return is
}

// dataclassParsers are the ends of the classes whose method reads the command line, by the name of the method.
var dataclassParsers = map[string]string{"parse_args_into_dataclasses": ".HfArgumentParser",
	"parse_args_and_config": ".TrlParser"}

// dataclasses evaluates parse_args_into_dataclasses of transformers' HfArgumentParser and parse_args_and_config of
// TRL's heir of it, where the command line is known: an object of each class. What no class of the source has is of the
// one class of a library. It returns nil for other calls, and for parsers that are not followed.
func (b *block) dataclasses(name string, made *Value) *Value {
	parser := made.From
	if b.command == nil || parser == nil || dataclassParsers[name] == "" || parser.Partial || made.Partial ||
		!strings.HasSuffix("."+parser.Class, dataclassParsers[name]) || len(made.Given) > 0 {
		return nil
	}
	types := parser.Attribute("dataclass_types")
	if len(parser.Given) > 0 {
		types = parser.Given[0]
	}
	classes := []*Value{types}
	if types != nil && types.Kind == List {
		classes = types.Elements
	}
	objects := &Value{Kind: List, tuple: true, At: made.At, born: b.steps}
	var ofLibrary *Value
	for _, class := range classes {
		if class == nil || class.Kind != Symbol {
			return nil
		}
		object := &Value{Kind: Object, Class: cmp.Or(class.inherits, class.Text), At: made.At, born: b.steps}
		if class.class {
			if object.of = b.withDefaults(class); object.of == nil {
				return nil
			}
		}
		if !class.class || class.inherits != "" {
			if ofLibrary != nil {
				return nil
			}
			ofLibrary = object
		}
		objects.Elements = append(objects.Elements, object)
	}
	if !b.distribute(objects.Elements, ofLibrary) {
		return nil
	}
	if rest := made.Attribute("return_remaining_strings"); rest != nil {
		is, known := rest.truth()
		if !known {
			return nil
		}
		if is {
			objects.Elements = append(objects.Elements, b.unknown("arguments that are left", 0))
		}
	}
	return objects
}

// withDefaults returns a dataclass of the source whose attributes are the defaults of its fields, or nil for one with
// code that sets them.
func (b *block) withDefaults(class *Value) *Value {
	is := *class
	is.Members = slices.Clone(class.Members)
	for i, m := range is.Members {
		switch {
		case m.Is.Kind == Function && m.Name == "__post_init__":
			return nil
		case m.Is.Kind == Object && m.Is.Name() == "field":
			is.Members[i].Is = cmp.Or(m.Is.Attribute("default"), b.unknown(m.Name+", a field without a default", 0))
		}
	}
	return &is
}

// distribute gives objects of dataclasses what the command line has for them.
func (b *block) distribute(objects []*Value, ofLibrary *Value) bool {
	for i := 0; i < len(b.command); i++ {
		name, value, joined := strings.Cut(b.command[i].Text, "=")
		if !strings.HasPrefix(name, "--") {
			return false // a file of arguments
		}
		values := []Argument{{value, b.command[i].Unknown}}
		if !joined {
			for values = nil; i+1 < len(b.command) && isOperand(b.command[i+1]); i++ {
				values = append(values, b.command[i+1])
			}
		}
		key := strings.ReplaceAll(strings.TrimLeft(name, "-"), "-", "_")
		if key == "config" { // a file with more of them
			return false
		}
		to := ofLibrary
		for _, o := range objects {
			if is := o.of.Attribute(key); is != nil && is.Kind != Function {
				to = o.of // the configuration of a library does not have the fields of the source
			}
		}
		if to != nil {
			to.set(key, -1, plain(values))
		}
	}
	return true
}

// plain returns the value of words: a switch without any, a list of several.
func plain(values []Argument) *Value {
	list := &Value{Kind: List, At: -1}
	for _, a := range values {
		is := &Value{Kind: Text, Text: a.Text, At: -1}
		switch n := numeral("float", a.Text, -1); {
		case a.Unknown:
			is.Kind = Unknown
		case slices.Contains([]string{"true", "false"}, strings.ToLower(a.Text)):
			is = &Value{Kind: Bool, Truth: strings.EqualFold(a.Text, "true"), At: -1}
		case n != nil:
			n.Whole = numeral("int", a.Text, -1) != nil
			is = n
		}
		list.Elements = append(list.Elements, is)
	}
	switch len(values) {
	case 0:
		return &Value{Kind: Bool, Truth: true, At: -1}
	case 1:
		return list.Elements[0]
	}
	return list
}
