package strict

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Value is a JSON or YAML value with its place in the text.
type Value struct {
	At       int64         // offset of its first byte
	Kind     jsontext.Kind // of YAML, too
	Text     string        // the content of a string, the digits of a number
	Members  []Member
	Elements []*Value

	// A Reader sets these by the rule of the value.
	Integer int64
	Number  float64
	Truth   bool
	absent  bool // null or "auto": the default applies
}

// Member is a member of an object.
type Member struct {
	Name  string
	At    int64 // offset of the name
	Value *Value
}

// Of returns a value without a place in a text: nil is null.
func Of(x any) *Value {
	switch x := x.(type) {
	case nil:
		return &Value{Kind: 'n'}
	case bool:
		text := strconv.FormatBool(x)
		return &Value{Kind: jsontext.Kind(text[0]), Text: text, Truth: x}
	case int:
		return &Value{Kind: '0', Text: strconv.Itoa(x), Integer: int64(x), Number: float64(x)}
	case float64:
		v := &Value{Kind: '0', Text: strconv.FormatFloat(x, 'g', -1, 64)}
		v.parseNumber()
		return v
	case []float64:
		v := &Value{Kind: '['}
		for _, element := range x {
			v.Elements = append(v.Elements, Of(element))
		}
		return v
	case string:
		return &Value{Kind: '"', Text: x}
	}
	panic(fmt.Sprintf("strict: %T is no value", x))
}

// Clone returns a deep copy of the value.
func (v *Value) Clone() *Value {
	clone := *v
	clone.Members, clone.Elements = slices.Clone(v.Members), slices.Clone(v.Elements)
	for i := range clone.Members {
		clone.Members[i].Value = clone.Members[i].Value.Clone()
	}
	for i, element := range clone.Elements {
		clone.Elements[i] = element.Clone()
	}
	return &clone
}

// Member returns the member with that name, or nil.
func (v *Value) Member(name string) *Member {
	for i := range v.Members {
		if v.Members[i].Name == name {
			return &v.Members[i]
		}
	}
	return nil
}

// Find returns the value at a dotted path, or nil.
func (v *Value) Find(path string) *Value {
	for name := range strings.SplitSeq(path, ".") {
		m := v.Member(name)
		if m == nil {
			return nil
		}
		v = m.Value
	}
	return v
}

// Set adds a value at a dotted path that the object does not have. All names that it adds get the offset as their
// place.
func (v *Value) Set(path string, at int64, is *Value) {
	name, rest, below := strings.Cut(path, ".")
	if !below {
		v.Members = append(v.Members, Member{Name: name, At: at, Value: is})
		return
	}
	m := v.Member(name)
	if m == nil {
		v.Members = append(v.Members, Member{Name: name, At: at, Value: &Value{At: at, Kind: '{'}})
		m = v.Member(name)
	}
	m.Value.Set(rest, at, is)
}

// IsAuto reports whether the value is "auto".
func (v *Value) IsAuto() bool { return v.Kind == '"' && v.Text == "auto" }

// IsEmpty reports whether the value is an empty string, list or object.
func (v *Value) IsEmpty() bool {
	return strings.ContainsRune(`"[{`, rune(v.Kind)) && v.Text == "" && len(v.Elements) == 0 && len(v.Members) == 0
}

// Texts returns the elements of a list of strings.
func (v *Value) Texts() []string {
	var texts []string
	for _, element := range v.Elements {
		texts = append(texts, element.Text)
	}
	return texts
}

// String returns the value, for messages.
func (v *Value) String() string {
	switch v.Kind {
	case 'n':
		return "null"
	case 't', 'f', '0':
		return v.Text
	case '"':
		if len(v.Text) > 40 {
			return strconv.Quote(v.Text[:40]) + "..."
		}
		return strconv.Quote(v.Text)
	case '{':
		return "an object"
	default:
		return fmt.Sprintf("a list of %d", len(v.Elements))
	}
}

// InFull returns the value for messages, with the elements of a list.
func (v *Value) InFull() string {
	if v.Kind != '[' {
		return v.String()
	}
	var elements []string
	for _, element := range v.Elements {
		elements = append(elements, element.InFull())
	}
	return "[" + strings.Join(elements, ", ") + "]"
}

// Equals reports whether two values are equal. It compares numbers by value,
// not by spelling.
func (v *Value) Equals(w *Value) bool {
	if v.Kind != w.Kind {
		return false
	}
	switch v.Kind {
	case '0':
		v.parseNumber()
		w.parseNumber()
		return v.Number == w.Number
	case '"':
		return v.Text == w.Text
	}
	return slices.EqualFunc(v.Elements, w.Elements, (*Value).Equals)
}

// parseNumber parses the digits of v. A number with an exponent can be whole
// (5e8). A string with an exponent cannot: pydantic refuses it as an integer.
func (v *Value) parseNumber() (whole, ok bool) {
	var err error
	v.Number, err = strconv.ParseFloat(v.Text, 64)
	if err != nil || math.IsInf(v.Number, 0) || math.IsNaN(v.Number) || strings.ContainsAny(v.Text, "xX") {
		return false, false // not a JSON number, but a string may hold it
	}
	if v.Integer, err = strconv.ParseInt(v.Text, 10, 64); err == nil {
		return true, true
	}
	if v.Kind == '"' && strings.ContainsAny(v.Text, "eE") || math.Abs(v.Number) >= 1<<63 {
		return false, true
	}
	v.Integer = int64(v.Number)
	return v.Number == math.Trunc(v.Number), true
}

// parseTruth parses a truth value, for which YAML and pydantic have several words.
func (v *Value) parseTruth() (ok bool) {
	switch strings.ToLower(v.Text) {
	case "1", "true", "t", "yes", "y", "on":
		v.Truth = true
	case "0", "false", "f", "no", "n", "off":
	default:
		return false
	}
	return true
}
