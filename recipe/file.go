package recipe

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/files"
)

// largest is the limit of a file's size. No real configuration comes near it.
// It keeps a wrong file (weights, a log) from being read as a configuration.
const largest = 1 << 20

// load parses the file at path, after checking its kind.
func load[T any](path string, what *kind, parse func(file string, text []byte) (*T, error)) (*T, error) {
	text, err := files.Read(path, largest)
	var notRegular *files.NotRegular
	var tooLarge *files.TooLarge
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &fault.Input{
			Where: fault.Position{File: path}, What: "there is no such file",
			Hint: fmt.Sprintf("give the path of the %v", what),
		}
	case errors.As(err, &notRegular) || errors.As(err, &tooLarge):
		return nil, &fault.Input{
			Where: fault.Position{File: path},
			What:  fmt.Sprintf("expected a %v of at most %d bytes", what, largest),
			Err:   errors.Unwrap(err),
		}
	case err != nil:
		return nil, &fault.Input{Where: fault.Position{File: path}, Err: err}
	}
	if err := what.expect(path, text); err != nil {
		return nil, err
	}
	return parse(path, text)
}

// read checks a document against the schema.
func (s schema) read(d *document) (*checking, error) {
	c := &checking{document: d, schema: s}
	if d.root.kind != '{' {
		return nil, c.bad(d.root.at, fmt.Sprintf("the file holds %s, expected an object", d.root), "")
	}
	return c, c.check(s.rule, "", d.root)
}

// The getters return the value at the first of the dotted paths that has one,
// or else the given default.

func (c *checking) integer(otherwise int64, paths ...string) int64 {
	for _, path := range paths {
		if v := c.root.find(path); v != nil {
			return v.integer
		}
	}
	return otherwise
}

func (c *checking) number(otherwise float64, path string) float64 {
	if v := c.root.find(path); v != nil {
		return v.number
	}
	return otherwise
}

func (c *checking) truth(otherwise bool, path string) bool {
	if v := c.root.find(path); v != nil {
		return v.truth
	}
	return otherwise
}

func (c *checking) word(otherwise, path string) string {
	if v := c.root.find(path); v != nil {
		return v.text
	}
	return otherwise
}

// isAuto reports whether the key has the value "auto".
func (c *checking) isAuto(path string) bool { return slices.Contains(c.auto, path) }

// elements returns the element type at path, or Invalid.
func (c *checking) elements(path string) dtype.Type {
	t, _ := dtype.Parse(c.word("", path)) // the schema lists only names that parse
	return t
}

// at returns the offset of the key at a dotted path, or of its nearest
// ancestor. It is negative if there is none.
func (c *checking) at(path string) int64 {
	v, at := c.root, int64(-1)
	for name := range strings.SplitSeq(path, ".") {
		m := v.member(name)
		if m == nil {
			break
		}
		v, at = m.value, m.at
	}
	return at
}

// place returns the position of the key at path or its nearest ancestor, or
// else the file alone.
func (c *checking) place(path string) fault.Position {
	if at := c.at(path); at >= 0 {
		return c.position(at)
	}
	return fault.Position{File: c.file}
}
