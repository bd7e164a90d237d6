package strict

import (
	"errors"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"

	"plimsoll/internal/base/fault"
)

// ParseTOML parses TOML.
func ParseTOML(file string, text []byte) (*Document, error) {
	p := &tomlParser{Document: &Document{File: file, Text: text, Root: &Value{Kind: '{'}, syntax: tomlSyntax},
		places: map[*Value]map[string]int{}}
	p.Reset(text)
	table := p.Root
	for p.NextExpression() {
		var err error
		switch e := p.Expression(); e.Kind {
		case unstable.Table:
			var last *unstable.Node
			if table, last, err = p.parent(p.Root, e); err == nil {
				table, err = p.inside(table, last)
			}
		case unstable.ArrayTable:
			table, err = p.element(e)
		case unstable.KeyValue:
			err = p.set(table, e)
		}
		if err != nil {
			return nil, err
		}
	}
	var bad *unstable.ParserError
	switch err := p.Error(); {
	case err != nil && p.isYAML():
		return nil, fault.File(file).Inputf("this is YAML: expected TOML").WithHint("name it .yaml")
	case errors.As(err, &bad) && len(bad.Highlight) > 0:
		return nil, p.Inputf(int64(p.Range(bad.Highlight).Offset), "this is not TOML: %s", bad.Message)
	case err != nil:
		return nil, fault.File(file).Inputf("this is not TOML: %v", err)
	}
	return p.Document, nil
}

// tomlParser makes values with offsets of the nodes of TOML.
type tomlParser struct {
	*Document
	unstable.Parser
	places map[*Value]map[string]int // the places of members in each table
}

// member returns the member of a table with the name of a key, or nil.
func (p *tomlParser) member(table *Value, key *unstable.Node) *Member {
	if i, found := p.places[table][string(key.Data)]; found {
		return &table.Members[i]
	}
	return nil
}

// add appends a member to a table.
func (p *tomlParser) add(table *Value, key *unstable.Node, value *Value) *Member {
	if p.places[table] == nil {
		p.places[table] = map[string]int{}
	}
	p.places[table][string(key.Data)] = len(table.Members)
	table.Members = append(table.Members, Member{Name: string(key.Data), At: int64(key.Raw.Offset), Value: value})
	return &table.Members[len(table.Members)-1]
}

// inside returns the table of a key, which it makes where it is missing. Of a list of tables, it is the last.
func (p *tomlParser) inside(table *Value, key *unstable.Node) (*Value, error) {
	at := int64(key.Raw.Offset)
	m := p.member(table, key)
	if m == nil {
		m = p.add(table, key, &Value{Kind: '{', At: at})
	}
	inner := m.Value
	if inner.Kind == '[' && len(inner.Elements) > 0 {
		inner = inner.Elements[len(inner.Elements)-1]
	}
	if inner.Kind != '{' {
		return nil, p.Inputf(at, "%s has a value already, %v", key.Data, inner)
	}
	return inner, nil
}

// parent returns the table above the last key of an expression, and that key.
func (p *tomlParser) parent(table *Value, e *unstable.Node) (above *Value, last *unstable.Node, err error) {
	path := e.Key()
	path.Next()
	for last = path.Node(); path.Next(); last = path.Node() {
		if table, err = p.inside(table, last); err != nil {
			return nil, nil, err
		}
	}
	return table, last, nil
}

// element appends a table to a list of tables.
func (p *tomlParser) element(e *unstable.Node) (*Value, error) {
	table, key, err := p.parent(p.Root, e)
	if err != nil {
		return nil, err
	}
	at := int64(key.Raw.Offset)
	m := p.member(table, key)
	if m == nil {
		m = p.add(table, key, &Value{Kind: '[', At: at})
	}
	if m.Value.Kind != '[' {
		return nil, p.Inputf(at, "%s has a value already, %v", key.Data, m.Value)
	}
	last := &Value{Kind: '{', At: at}
	m.Value.Elements = append(m.Value.Elements, last)
	return last, nil
}

// set adds a member to a table.
func (p *tomlParser) set(table *Value, e *unstable.Node) error {
	table, key, err := p.parent(table, e)
	if err != nil {
		return err
	}
	at := int64(key.Raw.Offset)
	if p.member(table, key) != nil {
		return p.Inputf(at, "%q is listed twice", key.Data).WithHint("remove one of the two")
	}
	value, err := p.value(e.Value(), at)
	p.add(table, key, value)
	return err
}

// value returns the value of a node. A node without a place in the text has that of its key.
func (p *tomlParser) value(n *unstable.Node, at int64) (*Value, error) {
	if n.Raw.Length > 0 {
		at = int64(n.Raw.Offset)
	}
	v := &Value{At: at, Kind: '"', Text: string(n.Data)}
	switch n.Kind {
	case unstable.Bool:
		v.Kind = bareKind(v.Text)
	case unstable.Integer, unstable.Float:
		v.Kind, v.Text = '0', strings.TrimPrefix(strings.ReplaceAll(v.Text, "_", ""), "+")
		if whole, err := strconv.ParseInt(v.Text, 0, 64); err == nil {
			v.Text = strconv.FormatInt(whole, 10)
		}
	case unstable.Array:
		v.Kind = '['
		for children := n.Children(); children.Next(); {
			child, err := p.value(children.Node(), at)
			if err != nil {
				return nil, err
			}
			v.Elements = append(v.Elements, child)
		}
	case unstable.InlineTable:
		v.Kind = '{'
		for children := n.Children(); children.Next(); {
			if err := p.set(v, children.Node()); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}
