package model

import (
	"bytes"
	"errors"
	"io"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/fault"
)

// document is JSON text with the file that it comes from. Values keep their
// offsets, so that a fault can name the line.
type document struct {
	file string
	text []byte
}

// value is a JSON value with the offset of its first byte. The name is that of
// its object member, if it is one.
type value struct {
	name string
	raw  jsontext.Value
	at   int64
}

func (d document) whole() value { return value{raw: d.text} }

func (d document) fault(at int64, what, hint string) *fault.Input {
	return &fault.Input{Where: fault.At(d.file, d.text, at), What: what, Hint: hint}
}

// members returns the members of an object. elements returns those of an array.
func (d document) members(v value) ([]value, error)  { return d.children(v, '{', "an object") }
func (d document) elements(v value) ([]value, error) { return d.children(v, '[', "an array") }

func (d document) children(v value, open jsontext.Kind, kind string) ([]value, error) {
	decoder := jsontext.NewDecoder(bytes.NewReader(v.raw))
	failed := func(err error) error {
		at := decoder.InputOffset()
		var syntax *jsontext.SyntacticError
		if errors.As(err, &syntax) {
			at, err = syntax.ByteOffset, syntax.Err
		}
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			err = errors.New("the text ends too early")
		}
		return &fault.Input{Where: fault.At(d.file, d.text, v.at+at), What: "not valid JSON", Err: err}
	}
	if found := decoder.PeekKind(); found != open && found != jsontext.KindInvalid {
		start := int64(len(v.raw) - len(bytes.TrimLeft(v.raw, " \t\r\n")))
		what := "expected " + kind + ", found " + article(found)
		if v.name != "" {
			what = v.name + ": " + what
		}
		return nil, d.fault(v.at+start, what, "")
	}
	if _, err := decoder.ReadToken(); err != nil {
		return nil, failed(err)
	}
	var list []value
	for {
		var child value
		switch next := decoder.PeekKind(); {
		case next == '}' || next == ']':
			if _, err := decoder.ReadToken(); err != nil {
				return nil, failed(err)
			}
			if decoder.PeekKind() != jsontext.KindInvalid {
				return nil, failed(errors.New("there is more text after the value"))
			}
			if _, err := decoder.ReadToken(); err != io.EOF {
				return nil, failed(err)
			}
			return list, nil
		case open == '{':
			name, err := decoder.ReadToken()
			if err != nil {
				return nil, failed(err)
			}
			child.name = name.String()
		}
		raw, err := decoder.ReadValue()
		if err != nil {
			return nil, failed(err)
		}
		end := decoder.InputOffset()
		child.raw, child.at = v.raw[end-int64(len(raw)):end], v.at+end-int64(len(raw))
		list = append(list, child)
	}
}

// article returns the name of a kind of JSON value, with its article.
func article(kind jsontext.Kind) string {
	switch kind {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case 't', 'f':
		return "a boolean"
	default:
		return kind.String()
	}
}

// text returns the contents of a JSON string.
func (v value) text() (string, bool) {
	if v.raw.Kind() != '"' {
		return "", false
	}
	unquoted, err := jsontext.AppendUnquote(nil, v.raw)
	return string(unquoted), err == nil
}

// shown returns the value as the file has it, shortened for messages.
func (v value) shown() string {
	const enough = 40
	text := strings.Join(strings.Fields(string(v.raw)), " ")
	if len(text) > enough {
		return strings.ToValidUTF8(text[:enough], "") + "..."
	}
	return text
}
