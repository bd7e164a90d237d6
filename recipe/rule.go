package recipe

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"plimsoll/fault"
)

// rule is the set of values that a key accepts. The zero rule accepts any
// value.
type rule struct {
	form form

	keys     map[string]rule // of an object: the known keys
	open     bool            // of an object: other keys are accepted, too
	noted    bool            // of an object: other keys are noted, but misspelled keys are refused
	comments bool            // of an object: keys that begin with _ are accepted
	each     *rule           // of a list: its elements; of an object: the values of all keys

	words    []string // of a text: the accepted words; none means any
	anyCase  bool     // the words may be written in any case
	low      float64  // of a number: the limits, both included
	high     float64
	below    bool // high itself is excluded
	length   int  // of a list; 0 means any
	optional bool // null means absent
	auto     bool // "auto" is accepted: Hugging Face's integration or the default decides

	// lax follows pydantic, with which DeepSpeed reads parts of the file:
	// numbers and booleans may be strings, and booleans may be 0 or 1.
	lax bool

	// also is a further form that the key accepts.
	also *rule

	// note is the remark about a key that is accepted, but deprecated or
	// without effect.
	note string
}

type form int

const (
	anyForm form = iota
	objectForm
	listForm
	integerForm
	numberForm
	booleanForm
	textForm
)

// Constructors of rules.
func isInteger() rule { return rule{form: integerForm, low: math.Inf(-1), high: math.Inf(1)} }
func isNumber() rule  { return rule{form: numberForm, low: math.Inf(-1), high: math.Inf(1)} }
func isBoolean() rule { return rule{form: booleanForm} }

func isText(words ...string) rule        { return rule{form: textForm, words: words} }
func isList(each rule) rule              { return rule{form: listForm, each: &each} }
func isObject(keys map[string]rule) rule { return rule{form: objectForm, keys: keys} }

// isEach returns the rule of an object with any keys.
func isEach(each rule) rule { return rule{form: objectForm, each: &each} }

// isFree returns the rule of an object that the program passes on unread.
func isFree() rule { return isObject(nil).andOthers() }

// isModel returns the rule of an object that DeepSpeed reads with a pydantic
// model. Conversions are lax, and every key accepts "auto" for its default.
func isModel(keys map[string]rule) rule {
	relaxed := make(map[string]rule, len(keys))
	for name, key := range keys {
		key.lax, key.auto = true, true
		relaxed[name] = key
	}
	return isObject(relaxed)
}

func (r rule) from(low float64) rule   { r.low = low; return r }
func (r rule) to(high float64) rule    { r.high = high; return r }
func (r rule) under(high float64) rule { r.high, r.below = high, true; return r }
func (r rule) orNull() rule            { r.optional = true; return r }
func (r rule) orAuto() rule            { r.auto = true; return r }
func (r rule) inAnyCase() rule         { r.anyCase = true; return r }
func (r rule) andOthers() rule         { r.open = true; return r }
func (r rule) notingOthers() rule      { r.noted = true; return r }
func (r rule) andComments() rule       { r.comments = true; return r }
func (r rule) noting(note string) rule { r.note = note; return r }
func (r rule) ofLength(n int) rule     { r.length = n; return r }

// or adds a form that the rule accepts.
func (r rule) or(other rule) rule {
	if r.also != nil {
		other = r.also.or(other)
	}
	r.also = &other
	return r
}

// String returns what the rule expects, for messages.
func (r rule) String() string {
	expected := ""
	switch r.form {
	case objectForm:
		expected = "an object"
	case listForm:
		if expected = "a list"; r.length > 0 {
			expected = fmt.Sprintf("a list of %d", r.length)
		}
	case integerForm:
		expected = "a whole number" + r.limits()
	case numberForm:
		expected = "a number" + r.limits()
	case booleanForm:
		expected = "true or false"
	case textForm:
		if expected = "a string"; len(r.words) > 0 {
			expected = quoted(r.words)
		}
	}
	if r.also != nil {
		expected += " or " + r.also.String()
	}
	if r.auto {
		expected += ` or "auto"`
	}
	if r.optional {
		expected += " or null"
	}
	return expected
}

func (r rule) limits() string {
	low, high := strconv.FormatFloat(r.low, 'f', -1, 64), strconv.FormatFloat(r.high, 'f', -1, 64)
	switch {
	case r.below:
		return " from " + low + " to below " + high
	case math.IsInf(r.low, -1) && math.IsInf(r.high, 1):
		return ""
	case math.IsInf(r.high, 1):
		return " of at least " + low
	default:
		return " from " + low + " to " + high
	}
}

// quoted returns `one of "a", "b", "c"`, or `"a"` for a single word.
func quoted(words []string) string {
	if len(words) == 1 {
		return strconv.Quote(words[0])
	}
	var b strings.Builder
	for i, word := range words {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.Quote(word))
	}
	return "one of " + b.String()
}

// schema is the rule of everything that a program reads, with the program's
// name.
type schema struct {
	program string
	rule
}

// checking is the check of one document against a schema.
type checking struct {
	*document
	schema schema
	notes  []Note
	auto   []string // dotted paths of the keys with the value "auto"
}

// check compares the value at the dotted path with the rule, and converts it.
func (c *checking) check(r rule, path string, v *value) error {
	switch {
	case r.optional && v.kind == 'n':
		v.absent = true
		return nil
	case r.auto && v.kind == '"' && v.text == "auto":
		v.absent = true
		c.auto = append(c.auto, path)
		return nil
	}
	for form := &r; form != nil; form = form.also {
		if form.takes(v) {
			return c.inside(*form, path, v)
		}
	}
	return &fault.Input{
		Where: c.position(v.at),
		What:  fmt.Sprintf("%s is %s, expected %s", path, v, r),
		Hint:  c.slip(r, v),
	}
}

// takes converts v to the form of the rule and reports whether it could.
func (r rule) takes(v *value) bool {
	switch r.form {
	case anyForm:
		return true
	case objectForm:
		return v.kind == '{'
	case listForm:
		return v.kind == '[' && (r.length == 0 || len(v.elements) == r.length)
	case booleanForm:
		return r.takesBoolean(v)
	case integerForm, numberForm:
		if v.kind != '0' && !(r.lax && v.kind == '"') {
			return false
		}
		whole, ok := v.parseNumber()
		return ok && (whole || r.form == numberForm) &&
			v.number >= r.low && v.number <= r.high && !(r.below && v.number == r.high)
	default:
		return v.kind == '"' && (len(r.words) == 0 || slices.ContainsFunc(r.words, func(word string) bool {
			return word == v.text || r.anyCase && strings.EqualFold(word, v.text)
		}))
	}
}

func (r rule) takesBoolean(v *value) bool {
	if v.kind == 't' || v.kind == 'f' {
		v.truth = v.kind == 't'
		return true
	}
	if !r.lax || v.kind != '0' && v.kind != '"' {
		return false
	}
	switch strings.ToLower(v.text) {
	case "1", "true", "t", "yes", "y", "on":
		v.truth = true
	case "0", "false", "f", "no", "n", "off":
	default:
		return false
	}
	return true
}

// parseNumber parses the digits of v. A number with an exponent can be whole
// (5e8). A string with an exponent cannot: pydantic refuses it as an integer.
func (v *value) parseNumber() (whole, ok bool) {
	var err error
	v.number, err = strconv.ParseFloat(v.text, 64)
	if err != nil || math.IsInf(v.number, 0) || math.IsNaN(v.number) || strings.ContainsAny(v.text, "xX") {
		return false, false // not a JSON number, but a string may hold it
	}
	if v.integer, err = strconv.ParseInt(v.text, 10, 64); err == nil {
		return true, true
	}
	if v.kind == '"' && strings.ContainsAny(v.text, "eE") || math.Abs(v.number) >= 1<<63 {
		return false, true
	}
	v.integer = int64(v.number)
	return v.number == math.Trunc(v.number), true
}

// String returns the value, for messages.
func (v *value) String() string {
	switch v.kind {
	case 'n':
		return "null"
	case 't', 'f', '0':
		return v.text
	case '"':
		if len(v.text) > 40 {
			return strconv.Quote(v.text[:40]) + "..."
		}
		return strconv.Quote(v.text)
	case '{':
		return "an object"
	default:
		return fmt.Sprintf("a list of %d", len(v.elements))
	}
}

// inside checks the members of an object and the elements of a list.
func (c *checking) inside(r rule, path string, v *value) error {
	if r.form == listForm {
		for i, element := range v.elements {
			if err := c.check(*r.each, fmt.Sprintf("%s[%d]", path, i), element); err != nil {
				return err
			}
		}
	}
	var known spellings // of the keys, to recognize misspelled ones
	if r.noted {
		known = r.spellings()
	}
	for _, m := range v.members {
		below := m.name
		if path != "" {
			below = path + "." + m.name
		}
		key, isKey := r.keys[m.name]
		if r.form == objectForm && r.each != nil {
			key, isKey = *r.each, true
		}
		unknown := fmt.Sprintf("%s knows no key %q%s", c.schema.program, m.name, within(path))
		switch {
		case isKey:
		case r.form != objectForm || r.open || r.comments && strings.HasPrefix(m.name, "_"):
			continue
		case r.noted && !known.haveSlip(m.name):
			c.notes = append(c.notes, Note{c.position(m.at), unknown + ": it is not planned with"})
			continue
		default:
			return &fault.Input{Where: c.position(m.at), What: unknown, Hint: c.advice(r, m.name)}
		}
		if err := c.check(key, below, m.value); err != nil {
			return err
		}
		if key.note != "" && !m.value.absent {
			c.notes = append(c.notes, Note{c.position(m.at), below + " " + key.note})
		}
	}
	return nil
}

// within returns " in path", for messages.
func within(path string) string {
	if path == "" {
		return " at the top level"
	}
	return " in " + path
}
