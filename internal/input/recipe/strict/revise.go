package strict

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

// syntax is the language of a document's text. The zero value is of values that stand in no text of their own.
type syntax int

const (
	jsonSyntax syntax = iota + 1
	yamlSyntax
	tomlSyntax
)

// Revision is a text with another value for a key.
type Revision struct {
	Text []byte
	At   int64  // offset of the change in the text that it was made from
	From string // the value as the text had it; empty if it did not have the key
	To   string // as the text has it now
	// Added is the number of lines more than before.
	Added int
}

// Revise returns the text of the document with another value at a dotted path. Everything else stays as it is:
// comments, order and indentation. A missing key comes before the first member of its section. The new text is parsed
// again, and an error says that it would say something else.
func (d *Document) Revise(path string, to *Value) (*Revision, error) {
	if d.syntax == 0 {
		return nil, d.Inputf(0, "plimsoll edits JSON, YAML and TOML, and this is neither")
	}
	var r *Revision
	var err error
	if v := d.Root.Find(path); v != nil {
		r, err = d.replace(path, v, to)
	} else {
		r, err = d.insert(path, to)
	}
	if err != nil {
		return nil, err
	}
	again, err := d.parseAgain(r.Text)
	if err != nil {
		return nil, err
	}
	want := d.Root.Clone()
	if v := want.Find(path); v != nil {
		*v = *to
	} else {
		want.Set(path, 0, to)
	}
	r.Added = bytes.Count(r.Text, []byte{'\n'}) - bytes.Count(d.Text, []byte{'\n'})
	if !again.Root.Same(want) {
		return nil, d.Inputf(r.At, "plimsoll cannot edit %s here without changing something else", path)
	}
	return r, nil
}

func (d *Document) parseAgain(text []byte) (*Document, error) {
	switch d.syntax {
	case yamlSyntax:
		return ParseYAML(d.File, text)
	case tomlSyntax:
		return ParseTOML(d.File, text)
	}
	return ParseCommented(d.File, text)
}

// Same reports whether two values are equal, whatever the order of members.
func (v *Value) Same(w *Value) bool {
	if v.Kind != w.Kind || len(v.Members) != len(w.Members) || len(v.Elements) != len(w.Elements) {
		return false
	}
	for i := range v.Members {
		other := w.Member(v.Members[i].Name)
		if other == nil || !v.Members[i].Value.Same(other.Value) {
			return false
		}
	}
	for i := range v.Elements {
		if !v.Elements[i].Same(w.Elements[i]) {
			return false
		}
	}
	return v.Kind == '{' || v.Kind == '[' || v.Equals(w)
}

// newline returns how the lines of the text end.
func (d *Document) newline() string {
	if bytes.Contains(d.Text, []byte("\r\n")) {
		return "\r\n"
	}
	return "\n"
}

// replace writes another value over one.
func (d *Document) replace(path string, v, to *Value) (*Revision, error) {
	end := d.scalarEnd(v)
	if end < 0 {
		return nil, d.Inputf(v.At, "%s is %s, expected one value that plimsoll can replace", path, v)
	}
	is := d.written(to)
	return &Revision{Text: slices.Concat(d.Text[:v.At], []byte(is), d.Text[end:]), At: v.At,
		From: string(d.Text[v.At:end]), To: is}, nil
}

// scalarEnd returns the offset behind a scalar, or -1 for other values and for those over several lines.
func (d *Document) scalarEnd(v *Value) int64 {
	rest := d.Text[v.At:]
	if len(rest) == 0 || v.Kind == '{' || v.Kind == '[' || bytes.IndexByte([]byte("|>{[\n"), rest[0]) >= 0 {
		return -1
	}
	if quote := rest[0]; quote == '"' || quote == '\'' {
		for i := 1; i < len(rest); i++ {
			switch {
			case rest[i] == '\\' && quote == '"':
				i++
			case rest[i] == quote:
				return v.At + int64(i) + 1
			}
		}
		return -1
	}
	end := bytes.IndexAny(rest, ",]} \t\r\n#")
	if end < 0 {
		end = len(rest)
	}
	if end == 0 {
		return -1
	}
	return v.At + int64(end)
}

// written returns a scalar as the language of the document writes it.
func (d *Document) written(v *Value) string {
	if v.Kind != '"' {
		return v.Text
	}
	if d.syntax == yamlSyntax && bareKind(v.Text) == '"' && !strings.ContainsAny(v.Text, ":#{}[],&*!|>'\"%@` ") {
		return v.Text
	}
	return strconv.Quote(v.Text)
}

// insert adds a key that the document lacks to the innermost section that it has.
func (d *Document) insert(path string, to *Value) (*Revision, error) {
	section, names := d.Root, strings.Split(path, ".")
	for len(names) > 1 {
		m := section.Member(names[0])
		if m == nil {
			break
		}
		section, names = m.Value, names[1:]
	}
	if section.Kind != '{' {
		return nil, d.Inputf(section.At, "plimsoll cannot add %s to %s", path, section)
	}
	braced := int(section.At) < len(d.Text) && d.Text[section.At] == '{'
	flow := d.syntax == jsonSyntax || d.syntax == yamlSyntax && braced
	if flow {
		return d.insertFlow(section, names, to)
	}
	if len(section.Members) == 0 {
		return nil, d.Inputf(section.At, "plimsoll cannot add %s to an empty section", path)
	}
	first := section.Members[0].At
	start := int64(bytes.LastIndexByte(d.Text[:first], '\n') + 1)
	indent := string(d.Text[start:first])
	if strings.TrimSpace(indent) != "" {
		return nil, d.Inputf(first, "plimsoll cannot add %s in the middle of a line", path)
	}
	line := indent + strings.Join(names, ".") + " = " + d.written(to) + d.newline()
	if d.syntax == yamlSyntax {
		line = ""
		for i, name := range names {
			line += indent + strings.Repeat("  ", i) + name + ":"
			if i < len(names)-1 {
				line += d.newline()
			}
		}
		line += " " + d.written(to) + d.newline()
	}
	return &Revision{Text: slices.Concat(d.Text[:start], []byte(line), d.Text[start:]), At: start,
		To: d.written(to)}, nil
}

// insertFlow adds a key behind the brace of an object.
func (d *Document) insertFlow(section *Value, names []string, to *Value) (*Revision, error) {
	brace := int64(bytes.IndexByte(d.Text[section.At:], '{'))
	if brace < 0 {
		return nil, d.Inputf(section.At, "plimsoll finds no brace here")
	}
	at := section.At + brace + 1
	is := d.written(to)
	for i, name := range slices.Backward(names) {
		key := strconv.Quote(name) + ": "
		if is = key + is; i > 0 {
			is = "{" + is + "}"
		}
	}
	if len(section.Members) > 0 {
		first := section.Members[0].At
		line := int64(bytes.LastIndexByte(d.Text[:first], '\n') + 1)
		if line > at { // the first member has a line of its own
			is = d.newline() + string(d.Text[line:first]) + is
		}
		is += ","
		if line <= at {
			is += " "
		}
	}
	return &Revision{Text: slices.Concat(d.Text[:at], []byte(is), d.Text[at:]), At: at, To: d.written(to)}, nil
}
