package python

import (
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

	Elements []*Value          // of a List
	Members  []Member          // of a Dict, or the attributes of an Object
	Class    string            // of an Object: the name of what was called, with its module, such as trl.SFTConfig
	From     *Value            // of an Object: what it was called on, such as Auto.from_pretrained(...); or nil
	Given    []*Value          // of an Object: the arguments without names
	Partial  bool              // of an Object: it has arguments that the source does not say
	function *statement        // of a Function
	scope    map[string]*Value // that a Function sees
	file     *file
	resolve  func() *Value // of a name of another module that nobody has used yet
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
		return strconv.FormatFloat(v.Number, 'g', -1, 64)
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
