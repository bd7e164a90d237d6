//go:build linux

package report

import (
	"bytes"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"plimsoll/internal/after/explain"
)

// hostile acts on a terminal, turns the direction of a text, hides, and is a person, a page and an issue in Markdown.
const hostile = "h\x1b]0;title\x07\x1b[31m\u009b31m\u202e\u200b\u2028\U000e0041 fake\nfits: all @everyone " +
	"https://evil.test www.evil.test #123 <img src=x> ![x](https://evil.test)"

// fill puts the hostile text into every string of a value, and elements into every slice and map.
func fill(v reflect.Value, depth int) {
	if depth == 0 || !v.CanSet() {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(hostile)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth-1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2)) // so that the integer 1 is an index, too
		for i := range v.Len() {
			fill(v.Index(i), depth-1)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), depth-1)
		}
	case reflect.Map:
		key, element := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, depth-1)
		fill(element, depth-1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, element)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth-1)
		}
	}
}

// TestHostileStrings: whatever is in the strings of a document, no format of its page acts on a terminal or a reader.
func TestHostileStrings(t *testing.T) {
	for _, document := range []interface{ Page() *Page }{
		&Stat{}, &Binding{}, &StatesRehearsal{}, &Roads{}, &Fit{}, &Snapshot{}, &Run{}, &Catalog{}, &Rehearsal{},
		&statesCheckpoint{}, &Tuning{}, &Checkpoint{}, &Benchmark{}, &Build{}, &Watched{}, &Topology{}, &Comparison{},
		&PlanDocument{}, &Varied{}, (*explanation)(&explain.Explanation{}),
	} {
		t.Run(fmt.Sprintf("%T", document), func(t *testing.T) {
			fill(reflect.ValueOf(document).Elem(), 12)
			checkHostile(t, document.Page())
		})
	}
	t.Run("sentence", func(t *testing.T) { checkHostile(t, Sentence(hostile)) })
}

type explanation explain.Explanation

func (e *explanation) Page() *Page { return ExplanationPage((*explain.Explanation)(e)) }

func checkHostile(t *testing.T, page *Page) {
	written := map[string]string{}
	for _, format := range Formats() {
		for _, color := range []bool{false, true} {
			page.Screen = Screen{Color: color, Width: 100}
			var text bytes.Buffer
			if err := page.Write(&text, Format(format)); err != nil {
				t.Fatal(err)
			}
			written[fmt.Sprint(format, " ", color)] = text.String()
		}
	}
	var text bytes.Buffer
	if err := WriteHTML(&text, page, "1", nil, nil); err != nil {
		t.Fatal(err)
	}
	written["html"] = text.String()
	for format, text := range written {
		if format == "text true" { // text false has no colors to take for those of a name
			text = ownColors.ReplaceAllString(text, "")
		}
		for _, r := range text {
			if r != '\n' && r != '\t' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
				t.Errorf("%s has %U: %.300q", format, r, around(text, string(r)))
				break
			}
		}
		if strings.HasPrefix(format, "text") && strings.Contains(text, "\nfits: all") {
			t.Errorf("%s has a line that a name has made: %.300q", format, around(text, "\nfits: all"))
		}
	}
	for _, live := range []string{"@everyone", "https://evil", "www.evil", "#123", " <img"} {
		if text := written["markdown false"]; strings.Contains(text, live) {
			t.Errorf("Markdown has %q: %.300q", live, around(text, live))
		}
	}
}

// ownColors are what a page draws with.
var ownColors = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// TestHostileNamesAreLaidOut: a layout counts the columns of names as they are shown, and ends no color of theirs.
func TestHostileNamesAreLaidOut(t *testing.T) {
	name := "\x1b[31m" + strings.Repeat("red\u202e ", 12)
	table := &Table{Columns: []Column{{Title: "name"}, {Title: "name\x1b[1m"}}, Rows: [][]any{{name, "a"}, {"b", name}}}
	page := &Page{Screen: Screen{Width: 60}, Verdict: name,
		Sections: []Section{{Paragraph(name), Facts{{name, []string{name}}}, List{name}, Tree{{Text: name}}, table}}}
	var text bytes.Buffer
	if err := page.Write(&text, Text); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text.String(), `[0m`) {
		t.Errorf("a color of a name is ended:\n%s", text.String())
	}
	for line := range strings.Lines(text.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 60 {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
}

// around returns what stands around the first occurrence of a text.
func around(text, part string) string {
	at := strings.Index(text, part)
	return text[max(0, at-100):min(len(text), at+100)]
}
