package strict

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"go.yaml.in/yaml/v3"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// parseYAML parses YAML 1.1, like PyYAML's safe_load: unquoted yes, no, on and
// off are booleans, 1e8 is a string, and << merges objects. It refuses tags,
// and aliases that would let a short file expand to a long one.
func parseYAML(file string, text []byte) (*Document, error) {
	p := &yamlParser{Document: &Document{File: file, Text: text, syntax: yamlSyntax}}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err := p.first(decoder); err != nil {
		return nil, err
	}
	var more yaml.Node
	switch err := decoder.Decode(&more); {
	case err == nil:
		return nil, p.Inputf(p.offset(&more), "more text after the end of the configuration").
			WithHint("a file holds one document: remove the ---")
	case err != io.EOF:
		return nil, p.notYAML(err)
	}
	return p.Document, nil
}

// Skim returns the first document of a YAML text, to tell what it is: tags and duplicate keys are no faults. It returns
// nil if there is none.
func Skim(file string, text []byte) *Document {
	p := &yamlParser{Document: &Document{File: file, Text: text, syntax: yamlSyntax}, skims: true}
	if p.first(yaml.NewDecoder(bytes.NewReader(text))) != nil {
		return nil
	}
	return p.Document
}

// first reads the first document.
func (p *yamlParser) first(decoder *yaml.Decoder) (err error) {
	var node yaml.Node
	switch err := decoder.Decode(&node); {
	case err == io.EOF:
		return p.Inputf(int64(len(p.Text)), "the file is empty, expected keys and values")
	case err != nil:
		return p.notYAML(err)
	}
	p.Root, err = p.fromYAML(node.Content[0])
	return err
}

var yamlError = lazyregexp.New(`^yaml: (?:line (\d+): )?((?s).*)$`)

func (p *yamlParser) notYAML(err error) error {
	bad := &fault.Input{
		Where: fault.Position{File: p.File},
		What:  "this is not YAML",
		Err:   err,
		Hint:  "check the indentation, the colons and the quotes",
	}
	if parts := yamlError.FindStringSubmatch(err.Error()); parts != nil {
		bad.Err = errors.New(parts[2])
		if line, err := strconv.Atoi(parts[1]); err == nil {
			bad.Where.Line, bad.Where.Column = line, 1
			if p.hasTab(line) {
				bad.Err, bad.Hint = errors.New("a tab begins the line"), "indent with blanks: YAML allows no tabs there"
			}
		}
	}
	return bad
}

// hasTab reports whether a tab is among the blanks at the beginning of a line.
func (p *yamlParser) hasTab(line int) bool {
	lines := bytes.SplitN(p.Text, []byte("\n"), line+1)
	if line > len(lines) {
		return false
	}
	text := lines[line-1]
	blanks := text[:len(text)-len(bytes.TrimLeft(text, " \t"))]
	return bytes.Contains(blanks, []byte("\t"))
}

// yamlParser makes values with offsets of YAML's nodes.
type yamlParser struct {
	*Document
	cursor    cursor // where the method offset stopped last
	aliased   int    // 1 inside an alias
	ofAliases int    // values that aliases stand for, so far
	skims     bool   // tags and duplicates are no faults
}

// errManyAliases ends the reading of aliases that stand for too many values.
var errManyAliases = errors.New("aliases stand for too many values")

// cursor is a place in the text: a line, a column in characters, and the
// offset.
type cursor struct {
	line, column int
	at           int64
}

// offset returns the offset of a node, whose column counts characters. Nodes
// come in the order of the text, so the walk along a line continues where the
// last one ended.
func (p *yamlParser) offset(n *yaml.Node) int64 {
	starts := p.lineStarts()
	c := p.cursor
	if n.Line != c.line || n.Column < c.column {
		line := min(max(n.Line, 1), len(starts))
		c = cursor{n.Line, 1, starts[line-1]}
	}
	for c.column < n.Column && c.at < int64(len(p.Text)) {
		_, size := utf8.DecodeRune(p.Text[c.at:])
		c.at += int64(size)
		c.column++
	}
	p.cursor = c
	return c.at
}

// mostOfAliases is the most values that the aliases of a document may stand for.
const mostOfAliases = 10_000

// alias returns the value that an alias stands for.
func (p *yamlParser) alias(n *yaml.Node) (*Value, error) {
	at := p.offset(n)
	if p.aliased == 0 {
		p.aliased++
		defer func() { p.aliased = 0 }()
	}
	v, err := p.fromYAML(n.Alias)
	if p.ofAliases > mostOfAliases {
		return nil, p.Inputf(at, "aliases such as *%s stand for more than %d values", n.Value, mostOfAliases).
			WithHint("write out their values")
	}
	return v, err
}

func (p *yamlParser) fromYAML(n *yaml.Node) (*Value, error) {
	if p.ofAliases += p.aliased; p.ofAliases > mostOfAliases {
		return nil, errManyAliases
	}
	if n.Kind == yaml.AliasNode {
		return p.alias(n)
	}
	v := &Value{At: p.offset(n)}
	if n.Style&yaml.TaggedStyle != 0 && !p.skims {
		return nil, p.Inputf(v.At, "found a tag, %s", n.Tag).WithHint("remove it")
	}
	switch n.Kind {
	case yaml.MappingNode:
		v.Kind = '{'
		return v, p.members(v, n)
	case yaml.SequenceNode:
		v.Kind = '['
		for _, element := range n.Content {
			e, err := p.fromYAML(element)
			if err != nil {
				return nil, err
			}
			v.Elements = append(v.Elements, e)
		}
	default:
		v.Text, v.Kind = n.Value, '"'
		if n.Style == 0 {
			if v.Kind = bareKind(n.Value); v.Kind == '0' {
				v.Text = strings.ReplaceAll(v.Text, "_", "")
			} else if whole, is := otherBase(n.Value); is {
				v.Kind, v.Text = '0', strconv.FormatInt(whole, 10)
			}
		}
	}
	return v, nil
}

// members reads the members of an object. Those that << merges come behind its own, and give way to them.
func (p *yamlParser) members(v *Value, n *yaml.Node) error {
	places := map[string]int64{}
	var merged []*Value
	for i := 0; i < len(n.Content); i += 2 {
		key := n.Content[i]
		m := Member{Name: key.Value, At: p.offset(key)}
		if key.Kind != yaml.ScalarNode {
			return p.Inputf(m.At, "expected the name of a key")
		}
		if err := p.once(places, m); err != nil && !p.skims {
			return err
		}
		var err error
		if m.Value, err = p.fromYAML(n.Content[i+1]); err != nil {
			return err
		}
		switch {
		case m.Name != "<<" || key.Style != 0:
			v.Members = append(v.Members, m)
		case m.Value.Kind == '[':
			merged = append(merged, m.Value.Elements...)
		default:
			merged = append(merged, m.Value)
		}
	}
	for _, from := range merged {
		if from.Kind != '{' {
			return p.Inputf(from.At, "<< merges %s, expected an object", from)
		}
		for _, m := range from.Members {
			if v.Member(m.Name) == nil {
				v.Members = append(v.Members, m)
			}
		}
	}
	return nil
}

var (
	yamlNull   = lazyregexp.New(`^(?:|~|null|Null|NULL)$`)
	yamlTrue   = lazyregexp.New(`^(?:yes|Yes|YES|true|True|TRUE|on|On|ON)$`)
	yamlFalse  = lazyregexp.New(`^(?:no|No|NO|false|False|FALSE|off|Off|OFF)$`)
	yamlNumber = lazyregexp.New(`^[-+]?(?:0|[1-9][0-9_]*|[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+)$`)
)

// bareKind returns the kind of an unquoted word in YAML 1.1.
func bareKind(word string) jsontext.Kind {
	switch {
	case yamlNull.MatchString(word):
		return 'n'
	case yamlTrue.MatchString(word):
		return 't'
	case yamlFalse.MatchString(word):
		return 'f'
	case yamlNumber.MatchString(word):
		return '0'
	}
	return '"'
}

// yamlOther matches whole numbers of YAML 1.1 that are not decimal: in base 2, 8 and 16, and in base 60 with colons.
var yamlOther = lazyregexp.New(`^[-+]?(?:0b[01_]+|0[0-7_]+|0x[0-9a-fA-F_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+)$`)

// otherBase returns the value of a whole number that is not decimal, as PyYAML reads it: 010 is 8, and 1:30 is 90.
func otherBase(word string) (whole int64, is bool) {
	if !yamlOther.MatchString(word) {
		return 0, false
	}
	digits := strings.ReplaceAll(strings.TrimLeft(word, "-+"), "_", "")
	for part := range strings.SplitSeq(digits, ":") {
		base := 0 // as the prefix says
		if strings.Contains(digits, ":") {
			base = 10
		}
		n, err := strconv.ParseInt(part, base, 64)
		if err != nil || whole > 1<<40 {
			return 0, false
		}
		whole = whole*60 + n
	}
	if strings.HasPrefix(word, "-") {
		whole = -whole
	}
	return whole, true
}
