package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// placeholder matches a name that a script replaces by a value, such as BATCH_SIZE.
var placeholder = lazyregexp.New(`^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+`)

// comment matches the start of a comment, which Python's json refuses.
var comment = lazyregexp.New(`^(?:#|//|/\*)`)

// isYAML reports whether the text is YAML with keys, and no object of JSON.
func (d *Document) isYAML() bool {
	other, err := parseYAML(d.File, d.Text)
	return err == nil && other.Root.Kind == '{' && d.Text[other.Root.At] != '{'
}

// jsonParser parses JSON into values with offsets.
type jsonParser struct {
	*Document
	plain   []byte // the document's text without comments, of the same length
	decoder *jsontext.Decoder
}

func (d *Document) parseJSON(plain []byte) (*Document, error) {
	p := &jsonParser{Document: d, plain: plain}
	p.decoder = jsontext.NewDecoder(bytes.NewReader(plain),
		// The method object compares names: it knows both places.
		jsontext.AllowDuplicateNames(true))
	var err error
	if d.Root, err = p.value(); err != nil {
		return nil, err
	}
	if at := p.next(); at < int64(len(d.Text)) {
		return nil, d.Inputf(at, "more text after the end of the configuration").
			WithHint("a file holds one object: check the braces")
	}
	return d, nil
}

// withoutComments returns the text as plain JSON of the same length. Comments,
// trailing commas and a byte order mark become spaces, so all offsets stay
// valid.
func (d *Document) withoutComments() ([]byte, error) {
	text := bytes.Clone(d.Text)
	clear := func(from, to int) {
		for i := from; i < to; i++ {
			text[i] = ' '
		}
	}
	if bytes.HasPrefix(text, []byte("\ufeff")) {
		clear(0, len("\ufeff"))
	}
	comma := -1           // offset of the last comma
	var before, last byte // the last two bytes outside spaces and comments
	for i := 0; i < len(text); {
		rest := text[i:]
		end := i + 1
		switch c := text[i]; {
		case c == ' ' || c == '\t' || c == '\r' || c == '\n':
			i = end
			continue
		case c == '#' || bytes.HasPrefix(rest, []byte("//")):
			if end = i + bytes.IndexByte(rest, '\n'); end < i {
				end = len(text)
			}
			clear(i, end)
			i = end
			continue
		case bytes.HasPrefix(rest, []byte("/*")):
			length := bytes.Index(rest[2:], []byte("*/"))
			if length < 0 {
				return nil, d.Inputf(int64(i), "this comment does not end").WithHint("close it with */")
			}
			clear(i, i+length+4)
			i += length + 4
			continue
		case c == '"':
			for ; end < len(text) && text[end] != '"'; end++ {
				if text[end] == '\\' {
					end++
				}
			}
			end++
		case c == ',':
			comma = i
		case (c == '}' || c == ']') && last == ',' && !strings.ContainsRune("{[,:\x00", rune(before)):
			text[comma] = ' '
		}
		before, last = last, text[i]
		i = end
	}
	return text, nil
}

// next returns the offset of the next name or value.
func (p *jsonParser) next() int64 {
	return int64(len(p.plain) - len(bytes.TrimLeft(p.plain[p.decoder.InputOffset():], " \t\r\n,:")))
}

func (p *jsonParser) token() (jsontext.Token, error) {
	token, err := p.decoder.ReadToken()
	var syntax *jsontext.SyntacticError
	switch {
	case err == nil:
		return token, nil
	case err == io.EOF:
		return token, p.Inputf(int64(len(p.Text)), "the file is empty, expected a JSON object")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return token, p.Inputf(int64(len(p.Text)), "the file ends too early").
			WithHint("check that every brace, bracket and quote is closed")
	}
	bad := &fault.Input{What: "this is not JSON", Err: err,
		Hint: "names and strings need double quotes; true, false and null are in lower case; commas separate members"}
	if errors.As(err, &syntax) {
		bad.Where, bad.Err = p.Position(syntax.ByteOffset), syntax.Err
		rest := p.plain[min(syntax.ByteOffset, int64(len(p.plain))):]
		if name := placeholder.Find(rest); name != nil {
			bad.Err = fmt.Errorf("%s stands for a value", name)
			bad.Hint = "this file is a template: give it with the values filled in"
		}
		switch next := bytes.TrimLeft(rest, ", \t\r\n"); {
		case p.decoder.InputOffset() == 0 && p.isYAML():
			bad.What, bad.Err = "this is YAML: expected JSON", nil
			bad.Hint = "write it as JSON, or name it .yaml if its program reads YAML"
		case comment.Match(rest):
			bad.Err = errors.New("a comment")
			bad.Hint = "remove the comments: the program reads this file by Python's json, which allows none"
		case bytes.HasPrefix(rest, []byte(",")) && len(next) > 0 && (next[0] == '}' || next[0] == ']'):
			bad.Err = errors.New("a comma before " + string(rune(next[0])))
			bad.Hint = "remove the comma: JSON has none at the end"
		}
	}
	return token, bad
}

func (p *jsonParser) value() (*Value, error) {
	v := &Value{At: p.next()}
	token, err := p.token()
	if err != nil {
		return nil, err
	}
	v.Kind = token.Kind()
	switch v.Kind {
	case '{':
		return v, p.object(v)
	case '[':
		for p.decoder.PeekKind() != ']' {
			element, err := p.value()
			if err != nil {
				return nil, err
			}
			v.Elements = append(v.Elements, element)
		}
		_, err = p.token()
	default:
		v.Text = token.String()
	}
	return v, err
}

func (p *jsonParser) object(v *Value) error {
	places := map[string]int64{}
	for p.decoder.PeekKind() != '}' {
		m := Member{At: p.next()}
		token, err := p.token()
		if err != nil {
			return err
		}
		m.Name = token.String()
		if err := p.once(places, m); err != nil {
			return err
		}
		if m.Value, err = p.value(); err != nil {
			return err
		}
		v.Members = append(v.Members, m)
	}
	_, err := p.token()
	return err
}

// once refuses a name that is already in places, and otherwise adds it.
func (d *Document) once(places map[string]int64, m Member) error {
	if first, twice := places[m.Name]; twice {
		at := d.Position(first)
		return d.Inputf(m.At, "%q is listed twice, first on line %d column %d",
			m.Name, at.Line, at.Column).WithHint("remove one of the two")
	}
	places[m.Name] = m.At
	return nil
}
