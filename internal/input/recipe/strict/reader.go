package strict

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
)

// Schema is the rule of everything that a program reads.
type Schema struct {
	Program string          // for messages
	Release version.Version // of the program; zero for rules that depend on none
	Path    string          // of the value in a larger document, for messages; may be empty
	Rule
}

// String returns the program with its release, if the rules depend on it.
func (s *Schema) String() string {
	if s.Release.IsZero() {
		return s.Program
	}
	return fmt.Sprintf("%s %v", s.Program, s.Release)
}

// Note is a remark for the author of a document.
type Note struct {
	Where fault.Position
	What  string
}

func (n Note) String() string { return n.Where.String() + ": " + n.What }

// Reader is an object of a document that has been checked against its rule. Its methods take dotted paths in the
// object, made of the first names of keys. A path that the rule does not have is a mistake in the program; the
// methods panic.
type Reader struct {
	*Document
	*findings
	schema *Schema
	rule   Rule
	path   string // in the document, for messages
	value  *Value // nil if the document does not have the object
	at     int64  // offset of its key or the nearest ancestor's; negative if there is none
}

// findings are what a check has found in a document, besides faults.
type findings struct {
	Notes []Note
	Auto  []string // dotted paths of the keys with the value "auto"
}

// Read checks a document against the schema. The error is a *fault.Input.
func (s Schema) Read(d *Document) (*Reader, error) {
	r := &Reader{d, &findings{}, &s, s.Rule, s.Path, d.Root, -1}
	if s.Path != "" {
		r.at = d.Root.At
	}
	if d.Root.Kind != '{' {
		return nil, d.Inputf(d.Root.At, "the file holds %s, expected an object", d.Root)
	}
	return r, r.check(s.Rule, s.Path, d.Root)
}

// check compares the value at the dotted path with the rule, and converts it.
func (r *Reader) check(rule Rule, path string, v *Value) error {
	switch {
	case rule.optional && v.Kind == 'n':
		v.absent = true
		return nil
	case rule.auto && v.IsAuto():
		v.absent = true
		r.Auto = append(r.Auto, path)
		return nil
	}
	form, err := r.take(rule, path, v)
	if err != nil {
		return err
	}
	return r.checkInside(form, path, v)
}

// Take compares the value at a path with a rule and converts it. It does not check members or elements.
func (d *Document) Take(rule Rule, path string, v *Value) error {
	_, err := d.take(rule, path, v)
	return err
}

// take is Take, and returns the form of the rule that the value has.
func (d *Document) take(rule Rule, path string, v *Value) (Rule, error) {
	for form := &rule; form != nil; form = form.also {
		if form.takes(v) {
			return *form, nil
		}
	}
	return Rule{}, d.Inputf(v.At, "%s is %s, expected %s", path, v, rule).WithHint(d.slip(rule, v))
}

// checkInside checks the members of an object and the elements of a list.
func (r *Reader) checkInside(rule Rule, path string, v *Value) error {
	if rule.form == listForm {
		for i, element := range v.Elements {
			if err := r.check(*rule.each, fmt.Sprintf("%s[%d]", path, i), element); err != nil {
				return err
			}
		}
	}
	if rule.form != objectForm {
		return nil
	}
	var known Names // to recognize misspelled keys
	if rule.noted {
		known = rule.Names()
	}
	given := map[string]Member{} // by key, to recognize one with two names
	for _, m := range v.Members {
		key, keyRule, isKey := rule.named(m.Name)
		if !isKey || !isFrom(r.schema.Release, keyRule.since) {
			if err := r.unknown(rule, path, m, known, keyRule.since); err != nil {
				return err
			}
			continue
		}
		below := join(path, m.Name)
		if err := r.check(keyRule, below, m.Value); err != nil {
			return err
		}
		if first, twice := given[key]; twice {
			return r.Inputf(m.At, "%s and %s (line %d) are two names for one setting",
				below, first.Name, r.Position(first.At).Line).WithHint("remove one of the two")
		}
		given[key] = m
		note := keyRule.note
		if m.Name == keyRule.deprecated {
			note = fmt.Sprintf("is deprecated: use %q", key)
		}
		if note != "" && !m.Value.absent {
			r.Notes = append(r.Notes, Note{r.Position(m.At), below + " " + note})
		}
	}
	return nil
}

// unknown notes or refuses a key that the program does not know, or knows only since a later release.
func (r *Reader) unknown(rule Rule, path string, m Member, known Names, since version.Version) error {
	if rule.open || rule.comments && strings.HasPrefix(m.Name, "_") {
		return nil
	}
	m.Value.absent = true
	unknown := r.Inputf(m.At, "%s knows no key %q%s", r.schema, m.Name, within(path))
	misspelled := since.IsZero() && known.Resemble(m.Name)
	refuses := !rule.noted || misspelled && !rule.slips
	if !rule.strictly.IsZero() {
		refuses = isFrom(r.schema.Release, rule.strictly) && !m.Value.IsAuto()
	}
	came := ""
	if !since.IsZero() {
		came = fmt.Sprintf("it came with %s %v", r.schema.Program, since)
	}
	if refuses {
		hint := cmp.Or(came, r.advice(rule, m.Name))
		if rule.strictly.AtLeast(0, 16, 0) && came == "" && !misspelled { // earlier releases are hardly in use
			hint = strings.TrimPrefix(fmt.Sprintf("%s; %s ignores the key before %v", hint, r.schema.Program,
				rule.strictly), "; ")
		}
		return unknown.WithHint(hint)
	}
	what := unknown.What + ": plimsoll ignores it"
	if meant := cmp.Or(came, r.advised(rule, m.Name, misspelled)); meant != "" {
		what += "; " + meant
	}
	r.Notes = append(r.Notes, Note{unknown.Where, what})
	return nil
}

// advised returns advice for a key that is noted: what was probably meant, or where the key belongs. Only the first
// keys get it, as it takes long.
func (r *Reader) advised(rule Rule, name string, misspelled bool) string {
	const enough = 20
	if len(r.Notes) >= enough {
		return ""
	}
	if meant := r.advice(rule, name); misspelled || strings.Contains(meant, " belongs ") {
		return meant
	}
	return ""
}

// Under checks the object at a path against a rule of its own. The document's rule leaves that object open.
func (r *Reader) Under(path string, rule Rule) (*Reader, error) {
	f := r.look(path)
	below := &Reader{r.Document, r.findings, r.schema, rule, f.path, f.value, f.at}
	if f.value == nil {
		return below, nil
	}
	return below, r.check(rule, f.path, f.value)
}

// Section returns the object at a path.
func (r *Reader) Section(path string) *Reader {
	f := r.look(path)
	return &Reader{r.Document, r.findings, r.schema, f.rule, f.path, f.value, f.at}
}

// found is what a document has at a path.
type found struct {
	rule  Rule
	path  string // as the document spells it
	value *Value // nil if there is none or the default applies
	named bool   // the document has the key, whatever its value
	at    int64  // offset of the key or its nearest ancestor; negative if there is none
}

// look finds a path in the rule, which must have it, and in the document.
func (r *Reader) look(path string) found {
	f := found{rule: r.rule, path: r.path, value: r.value, at: r.at}
	if path == "" { // the object itself
		return f
	}
	for name := range strings.SplitSeq(path, ".") {
		object := f.rule.object()
		key, rule, known := object.named(name)
		if !known || key != name {
			panic(fmt.Sprintf("strict: the schema of %s has no key %s", r.schema.Program, join(f.path, name)))
		}
		f.rule, f.named = rule, false
		spelled := name
		if f.value != nil {
			m := object.member(f.value, name)
			f.value = nil
			if m != nil {
				spelled, f.at, f.named = m.Name, m.At, true
				if !m.Value.absent {
					f.value = m.Value
				}
			}
		}
		f.path = join(f.path, spelled)
	}
	return f
}

// object returns the form of the rule that is an object.
func (r Rule) object() Rule {
	for form := &r; form != nil; form = form.also {
		if form.form == objectForm {
			return *form
		}
	}
	return Rule{}
}

// member returns the member for a key by any of its names, or nil.
func (r Rule) member(v *Value, key string) *Member {
	if m := v.Member(key); m != nil {
		return m
	}
	for i := range v.Members {
		if canonical, is := r.names[v.Members[i].Name]; is && canonical == key {
			return &v.Members[i]
		}
	}
	return nil
}

// Value returns the value at a path, its default, or nil.
func (r *Reader) Value(path string) *Value { return r.look(path).orDefault() }

func (f found) orDefault() *Value {
	if f.value == nil {
		return f.rule.fallback
	}
	return f.value
}

// get is Value for a key of one of two forms.
func (r *Reader) get(path string, first, second form) *Value {
	f := r.look(path)
	for rule := &f.rule; rule != nil; rule = rule.also {
		if rule.form == first || rule.form == second {
			return f.orDefault()
		}
	}
	panic(fmt.Sprintf("strict: the schema of %s has another type for %s", r.schema.Program, f.path))
}

// Integer returns the whole number at a path, its default, or 0.
func (r *Reader) Integer(path string) int64 {
	if v := r.get(path, integerForm, integerForm); v != nil {
		return v.Integer
	}
	return 0
}

// Number returns the number at a path, its default, or 0.
func (r *Reader) Number(path string) float64 {
	if v := r.get(path, numberForm, integerForm); v != nil {
		return v.Number
	}
	return 0
}

// Truth returns the truth value at a path, its default, or false.
func (r *Reader) Truth(path string) bool {
	v := r.get(path, booleanForm, booleanForm)
	return v != nil && v.Truth
}

// Word returns the text at a path, its default, or "".
func (r *Reader) Word(path string) string {
	if v := r.get(path, textForm, textForm); v != nil {
		return v.Text
	}
	return ""
}

// List returns the list of names at a path, which the document may give as one
// text with commas.
func (r *Reader) List(path string) []string {
	v := r.get(path, listForm, textForm)
	if v == nil {
		return nil
	}
	if v.Kind == '"' {
		return strings.FieldsFunc(v.Text, func(r rune) bool { return r == ',' || r == ' ' })
	}
	return v.Texts()
}

// Find returns the document's value at a path. It is nil if there is none or
// the default applies.
func (r *Reader) Find(path string) *Value { return r.look(path).value }

// Gives reports whether the document has a value at a path. Has also reports true for null and "auto".
func (r *Reader) Gives(path string) bool { return r.look(path).value != nil }
func (r *Reader) Has(path string) bool   { return r.look(path).named }

// IsAuto reports whether the value at a path is "auto".
func (r *Reader) IsAuto(path string) bool {
	f := r.look(path)
	return slices.Contains(r.Auto, f.path)
}

// Knows reports whether the rule has a key at the top level.
func (r *Reader) Knows(key string) bool {
	_, _, known := r.rule.named(key)
	return known
}

// At returns the offset of the key at a path, or of its nearest ancestor. It is
// negative if there is none.
func (r *Reader) At(path string) int64 { return r.look(path).at }

// Place returns the position of the key at a path or its nearest ancestor, or
// else the file alone.
func (r *Reader) Place(path string) fault.Position {
	if at := r.At(path); at >= 0 {
		return r.Position(at)
	}
	return fault.Position{File: r.File}
}

// Note adds a note about the key at a path.
func (r *Reader) Note(path, what string) {
	r.Notes = append(r.Notes, Note{r.Place(path), r.look(path).path + " " + what})
}

// Fault returns a fault of the key at a path.
func (r *Reader) Fault(path, what, hint string) error {
	return r.Place(path).Inputf("%s %s", r.look(path).path, what).WithHint(hint)
}
