package strict

import "strings"

// Bare returns the value of a word of a command line at an offset: a number, true or false, or a text.
func Bare(word string, at int64) *Value {
	v := &Value{At: at, Kind: '"', Text: word}
	if kind := bareKind(word); kind == '0' || strings.EqualFold(word, "true") || strings.EqualFold(word, "false") {
		v.Kind = kind
	}
	return v
}
