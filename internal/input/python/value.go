package python

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// Value is what an expression is worth, as far as the source says it.
type Value struct {
	Kind   Kind
	At     int    // the offset of its first byte in the file; -1 for one of another file
	Text   string // of a Text; the name of a Symbol; of an Unknown the reason, such as os.environ.get(...)
	Truth  bool
	Number float64
	Whole  bool // the number is an integer

	Elements []*Value // of a List
	Members  []Member // of a Dict, or the attributes of an Object
	Class    string   // of an Object: the name of what was called, with its module, such as trl.SFTConfig
	From     *Value   // of an Object: what it was called on, such as Auto.from_pretrained(...); or nil
	Given    []*Value // of an Object: the arguments without names
	Partial  bool     // of an Object: it has arguments that the source does not say
	Changed  []Change // of an Object: what the source sets in it and below it

	tuple    bool                // of a List: it is a tuple
	born     int                 // the step that made a List, a Dict or an Object
	of       *Value              // of an Object: its class, if that stands in the source
	class    bool                // of a Symbol: it is a class of the source, whose attributes are Members
	fields   bool                // of such a class: it is a dataclass
	inherits string              // of such a class: the class of a library that it extends, "" for none
	function *statement          // of a Function
	scope    map[string]*Value   // that a Function sees
	around   []map[string]*Value // that a Function sees of the functions around it
	usual    map[string]*Value   // defaults of a Function
	file     *file
	names    map[string]*Value // of a Symbol: what a module of the same project binds
	resolve  func() *Value     // of a name of another module that nobody has used yet
}

// Change is an attribute below an object that a source sets or deletes, such as model.layers.
type Change struct {
	Path string // without the object itself
	At   int
}

// Member is an element of a Dict, or an attribute.
type Member struct {
	Name string
	At   int
	Is   *Value
}

// Kind is the kind of a value.
type Kind byte

// The kinds of values.
const (
	Unknown  Kind = iota // the source does not say it
	None                 //
	Bool                 //
	Number               //
	Text                 //
	List                 // or a tuple, or a set
	Dict                 // with texts as keys
	Symbol               // a name of another module, such as torch.bfloat16
	Object               // what a call of another module's name returns
	Function             // of the source
)

// Attribute returns an attribute of an object or a member of a dict, or nil.
func (v *Value) Attribute(name string) *Value {
	if v == nil {
		return nil
	}
	for i := range v.Members {
		if v.Members[i].Name == name {
			return v.Members[i].Is
		}
	}
	return nil
}

// set sets an attribute.
func (v *Value) set(name string, at int, is *Value) {
	for i := range v.Members {
		if v.Members[i].Name == name {
			v.Members[i] = Member{name, at, is}
			return
		}
	}
	v.Members = append(v.Members, Member{name, at, is})
}

// index returns the place of an element.
func (v *Value) index(key *Value) (int, bool) {
	i := int(key.Number)
	if i < 0 {
		i += len(v.Elements)
	}
	return i, key.Kind == Number && i >= 0 && i < len(v.Elements)
}

// distinct returns a list without elements that are equal to others: a set.
func (v *Value) distinct() *Value {
	var kept []*Value
	for _, e := range v.Elements {
		if !slices.ContainsFunc(kept, func(k *Value) bool { same, sure := k.equal(e); return same && sure }) {
			kept = append(kept, e)
		}
	}
	v.Elements = kept
	return v
}

// spoil has a value be unknown that code may change which is not followed.
func (v *Value) spoil(why string) {
	switch v.Kind {
	case List, Dict:
		*v = Value{Kind: Unknown, Text: why, At: v.At}
	case Object:
		v.Partial = true
		for i := range v.Members {
			v.Members[i].Is = &Value{Kind: Unknown, Text: why, At: v.Members[i].At}
		}
	}
}

// Name returns the last word of an object's class or of a symbol.
func (v *Value) Name() string {
	of := v.Class
	if v.Kind == Symbol {
		of = v.Text
	}
	return of[strings.LastIndexByte(of, '.')+1:]
}

// String returns the value for a message.
func (v *Value) String() string {
	switch v.Kind {
	case None:
		return "None"
	case Bool:
		if v.Truth {
			return "True"
		}
		return "False"
	case Number:
		if v.Whole {
			return strconv.FormatInt(int64(v.Number), 10)
		}
		return floating(v.Number)
	case Text:
		return strconv.Quote(v.Text)
	case List:
		return "a list of " + strconv.Itoa(len(v.Elements))
	case Dict:
		return "a dict"
	case Object:
		return v.Class + "(...)"
	}
	return v.Text
}

// floating returns a number as Python shows a float.
func floating(x float64) string {
	if size := math.Abs(x); size != 0 && (size < 1e-4 || size >= 1e16) {
		return strconv.FormatFloat(x, 'e', -1, 64)
	}
	text := strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.ContainsAny(text, ".nI") {
		text += ".0"
	}
	return text
}

// truth reports whether a value counts as true, and whether the source says so.
func (v *Value) truth() (is, known bool) {
	switch v.Kind {
	case None:
		return false, true
	case Bool:
		return v.Truth, true
	case Number:
		return v.Number != 0, true
	case Text:
		return v.Text != "", true
	case List:
		return len(v.Elements) > 0, true
	case Dict:
		return len(v.Members) > 0, true
	}
	return false, false
}

// equal reports whether two values are the same, and whether the source says so.
func (v *Value) equal(w *Value) (is, known bool) {
	plain := func(k Kind) bool { return k == None || k == Bool || k == Number || k == Text }
	if v.Kind == Bool && w.Kind == Number || v.Kind == Number && w.Kind == Bool {
		return v.number() == w.number(), true
	}
	switch {
	case v.Kind == Symbol && w.Kind == Symbol && v.Text == w.Text:
		return true, true
	case !plain(v.Kind) || !plain(w.Kind):
		return false, false
	case v.Kind != w.Kind:
		return false, true
	case v.Kind == Bool:
		return v.Truth == w.Truth, true
	case v.Kind == Number:
		return v.Number == w.Number, true
	}
	return v.Text == w.Text, true
}

// number returns a number, or the one that a truth is.
func (v *Value) number() float64 {
	if v.Kind == Bool && v.Truth {
		return 1
	}
	return v.Number
}
