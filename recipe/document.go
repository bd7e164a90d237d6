package recipe

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sort"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/fault"
)

// value is a JSON or YAML value with its place in the text.
type value struct {
	at       int64 // offset of its first byte
	kind     jsontext.Kind
	text     string // the content of a string, the digits of a number
	members  []member
	elements []*value

	// Set by checking.check, by the schema.
	absent  bool // null or "auto": the default applies
	integer int64
	number  float64
	truth   bool
}

type member struct {
	name  string
	at    int64 // offset of the name
	value *value
}

// member returns the member called name, or nil.
func (v *value) member(name string) *member {
	for i := range v.members {
		if v.members[i].name == name {
			return &v.members[i]
		}
	}
	return nil
}

// find returns the value at a dotted path. It returns nil if there is none or
// the default applies.
func (v *value) find(path string) *value {
	for name := range strings.SplitSeq(path, ".") {
		m := v.member(name)
		if m == nil || m.value.absent {
			return nil
		}
		v = m.value
	}
	return v
}

// document is the text of a file and its parsed value.
type document struct {
	file    string
	text    []byte
	blanked []byte // text as plain JSON of the same length
	root    *value
	decoder *jsontext.Decoder

	lines  []int64 // offsets at which lines begin; see lineStarts
	cursor cursor  // where the method offset stopped last
}

// lineStarts returns the offsets at which lines begin. It computes them once,
// as every key may need a position.
func (d *document) lineStarts() []int64 {
	if d.lines == nil {
		d.lines = []int64{0}
		for i, c := range d.text {
			if c == '\n' {
				d.lines = append(d.lines, int64(i)+1)
			}
		}
	}
	return d.lines
}

// parseCommented parses JSON with comments (//, /* */, #) and trailing commas.
// DeepSpeed reads Hjson, which also allows names and strings without quotes and
// members without commas. Plimsoll refuses these: with them, a forgotten quote
// or comma changes the meaning of a file.
func parseCommented(file string, text []byte) (*document, error) {
	d := &document{file: file, text: text}
	var err error
	if d.blanked, err = d.blank(); err != nil {
		return nil, err
	}
	return d.parse()
}

// parseDocument parses YAML if the name of the file ends in .yaml or .yml.
// Otherwise it parses JSON without comments, like Python's json.
func parseDocument(file string, text []byte) (*document, error) {
	if ending := strings.ToLower(filepath.Ext(file)); ending == ".yaml" || ending == ".yml" {
		return parseYAML(file, text)
	}
	d := &document{file: file, text: text, blanked: text}
	return d.parse()
}

func (d *document) parse() (*document, error) {
	var err error
	d.decoder = jsontext.NewDecoder(bytes.NewReader(d.blanked),
		// The method object compares names: it knows both places.
		jsontext.AllowDuplicateNames(true))
	if d.root, err = d.value(); err != nil {
		return nil, err
	}
	if at := d.next(); at < int64(len(d.text)) {
		return nil, d.bad(at, "more text after the end of the configuration",
			"a file holds one object: check the braces")
	}
	return d, nil
}

// position returns the line and column of an offset, as [fault.At] does.
func (d *document) position(at int64) fault.Position {
	at = min(max(at, 0), int64(len(d.text)))
	starts := d.lineStarts()
	line := sort.Search(len(starts), func(i int) bool { return starts[i] > at })
	return fault.Position{File: d.file, Line: line, Column: int(at-starts[line-1]) + 1}
}

func (d *document) bad(at int64, what, hint string) error {
	return &fault.Input{Where: d.position(at), What: what, Hint: hint}
}

// blank returns the text as plain JSON of the same length. Comments, trailing
// commas and a byte order mark become spaces, so all offsets stay valid.
func (d *document) blank() ([]byte, error) {
	text := bytes.Clone(d.text)
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
				return nil, d.bad(int64(i), "this comment does not end", "close it with */")
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
func (d *document) next() int64 {
	return int64(len(d.blanked) - len(bytes.TrimLeft(d.blanked[d.decoder.InputOffset():], " \t\r\n,:")))
}

func (d *document) token() (jsontext.Token, error) {
	token, err := d.decoder.ReadToken()
	var syntax *jsontext.SyntacticError
	switch {
	case err == nil:
		return token, nil
	case err == io.EOF:
		return token, d.bad(int64(len(d.text)), "the file is empty, expected a JSON object", "")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return token, d.bad(int64(len(d.text)), "the file ends too early",
			"check that every brace, bracket and quote is closed")
	}
	bad := &fault.Input{What: "this is not JSON", Err: err,
		Hint: "names and strings need double quotes; true, false and null small letters; members commas between them"}
	if errors.As(err, &syntax) {
		bad.Where, bad.Err = d.position(syntax.ByteOffset), syntax.Err
	}
	return token, bad
}

func (d *document) value() (*value, error) {
	v := &value{at: d.next()}
	token, err := d.token()
	if err != nil {
		return nil, err
	}
	v.kind = token.Kind()
	switch v.kind {
	case '{':
		return v, d.object(v)
	case '[':
		for d.decoder.PeekKind() != ']' {
			element, err := d.value()
			if err != nil {
				return nil, err
			}
			v.elements = append(v.elements, element)
		}
		_, err = d.token()
	default:
		v.text = token.String()
	}
	return v, err
}

func (d *document) object(v *value) error {
	places := map[string]int64{}
	for d.decoder.PeekKind() != '}' {
		m := member{at: d.next()}
		token, err := d.token()
		if err != nil {
			return err
		}
		m.name = token.String()
		if err := d.once(places, m); err != nil {
			return err
		}
		if m.value, err = d.value(); err != nil {
			return err
		}
		v.members = append(v.members, m)
	}
	_, err := d.token()
	return err
}

// once refuses a name that is already in places, and otherwise adds it.
func (d *document) once(places map[string]int64, m member) error {
	if first, twice := places[m.name]; twice {
		return d.bad(m.at, fmt.Sprintf("%q is here for the second time, the first is on line %d column %d",
			m.name, d.position(first).Line, d.position(first).Column), "remove one of the two")
	}
	places[m.name] = m.at
	return nil
}
