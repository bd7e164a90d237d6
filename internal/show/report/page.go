// Package report shows results: a typed document for programs, and a page for people, as text or as Markdown.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/safe"
)

// Page is a result in the shape that all verbs share. Text and Markdown show its sections; JSON shows the document
// that the page was made of.
type Page struct {
	Title    string // heads the Markdown; the text stands below the command that the user has typed
	Sections []Section
	Verdict  string   // stands before the sections
	Tone     Tone     // of the verdict
	Hints    []string // what would change the verdict
	Document any
	Dense    bool // text has lines of 120 columns where the screen takes any
	Narrow   bool // and of 80 columns
	Screen   Screen
	// Brief makes the page that text shows unless all is asked for: with less detail for each number down to 0.
	Brief func(detail int) *Page
	// Piped says that a file or a pipe gets all, and Brief is for terminals.
	Piped bool
}

// Section is a group of blocks. Text separates sections by an empty line, and blocks of one section not at all.
type Section []Block

// Block is a piece of a page: Facts, *Table, Tree, List, Paragraph, Gantt or Bars. What it returns ends with a newline,
// or is empty.
type Block interface {
	text(layout) string
	markdown() string
}

// Sentence is a page that says one thing.
func Sentence(text string) *Page { return &Page{Sections: []Section{{Paragraph(text)}}} }

// Facts are names with values.
type Facts []Fact

// Fact is one name. Its values stand below each other.
type Fact struct {
	Name   string
	Values []string
}

func (f *Facts) add(name, format string, values ...any) {
	*f = append(*f, Fact{name, []string{fmt.Sprintf(format, values...)}})
}

// addEach adds a fact for every value, all of one name.
func (f *Facts) addEach(name string, values []string) {
	for _, value := range values {
		f.add(name, "%s", value)
	}
}

// Tree is a list whose items have lists of their own.
type Tree []Node

// Node is an item of a Tree.
type Node struct {
	Text     string
	Children Tree
}

// List is items below each other.
type List []string

// Paragraph is a line of text.
type Paragraph string

// conclusion is the first block of a page.
type conclusion struct {
	verdict string
	tone    Tone
	hints   []string
}

// blocks returns the sections, with the verdict first.
func (p *Page) blocks() []Section {
	if p.Verdict == "" {
		return p.Sections
	}
	return append([]Section{{conclusion{p.Verdict, p.Tone, p.Hints}}}, p.Sections...)
}

// Format is how a page is written.
type Format string

// The formats of pages.
const (
	Text     Format = "text"
	JSON     Format = "json"
	Markdown Format = "markdown"
)

// Formats returns the names of all formats.
func Formats() []string { return []string{string(Text), string(JSON), string(Markdown)} }

// ParseFormat returns the format of a name. An error is a *fault.Input.
func ParseFormat(name string) (Format, error) {
	if !slices.Contains(Formats(), name) {
		return "", fault.Inputf("%q is no format: expected %s", name, strings.Join(Formats(), ", "))
	}
	return Format(name), nil
}

// Write writes the page in a format.
func (p *Page) Write(w io.Writer, format Format) error {
	var text string
	switch format {
	case JSON:
		return WriteJSON(w, p.Document)
	case Markdown:
		text = safe.Text(p.markdown())
	default:
		text = p.safeText()
	}
	_, err := io.WriteString(w, text)
	return err
}

// safeText returns the text of the page with nothing in it that acts on a terminal, beside colors. Layouts escape names
// (oneLine). A page in which one would act all the same has no colors: nobody could tell its own from theirs.
func (p *Page) safeText() string {
	plain := *p
	plain.Screen.Color = false
	text := plain.text()
	if safe := safe.Text(text); safe != text || !p.Screen.Color {
		return safe
	}
	return p.text()
}

// WriteJSON writes a document. Sizes in it are integer bytes.
func WriteJSON(w io.Writer, document any) error {
	var text strings.Builder
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(document); err != nil {
		return err
	}
	_, err := io.WriteString(w, safe.Text(text.String()))
	return err
}
