package report

import (
	"bytes"
	"go/parser"
	"go/token"
	"html"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
)

// sample has every kind of block, every kind of column and every style of table.
func sample() *Page {
	return &Page{
		Title: "Sample of exp_avg",
		Sections: []Section{
			{Facts{{"host", []string{"2 cores"}}, {"rank 0", []string{"CPUs 0-1", "why: near"}}, {"rank 1", nil}}},
			{
				&Table{
					Columns: []Column{{Title: "part"}, {Title: "in", Kind: Label}, {Title: "bytes", Kind: Bytes},
						{Title: "GB/s", Kind: Number, Decimals: 1}, {Title: "ranks", Kind: Number},
						{Title: "of the limit", Kind: Share, Decimals: 1}},
					Rows: [][]any{
						{"bf16|fp32", "L2", 3 * ledger.GiB, 12.34, 8, 0.4567},
						{"int8", "memory", ledger.KiB, nil, "none", "1 % (0..2)"},
					},
					Footer: []any{"all", nil, 4 * ledger.GiB, 12.34, nil, 1.0},
				},
				Paragraph("in: the *nearest* memory"),
				&Table{Style: Listed,
					Columns: []Column{{Title: "bytes", Kind: Bytes, Width: 10}, {Title: "held by"}},
					Rows:    [][]any{{3 * ledger.GiB, "parameters: in bf16"}, {2 * ledger.KiB, "batch"}}},
			},
			{Facts{}},
			{Tree{{"package 0", Tree{{"GPU 0", nil}, {"2 x L3", Tree{{"core 0", nil}}}}}, {"package 1", nil}}},
			{&Table{Style: Plain, Columns: []Column{{Title: "distances"}, {Title: "0", Kind: Number, Width: 4}},
				Rows: [][]any{{"     node 0", 10}}}},
		},
		Verdict: "FITS: 3 GiB",
		Hints:   []string{"would fit: two", "would fit: three"},
	}
}

func TestPage(t *testing.T) {
	loose, dense := sample(), sample()
	long := strings.Repeat("word ", 22)
	dense.Sections = []Section{{Facts{{"assumed", []string{long + "end", "second"}}}}}
	dense.Verdict, dense.Dense = "", true
	for _, test := range []struct {
		page   *Page
		format Format
		want   string
	}{
		{loose, Text, `FITS: 3 GiB
  would fit: two
  would fit: three

host               2 cores
rank 0             CPUs 0-1
                   why: near

┌───────────┬────────┬──────────┬──────┬───────┬──────────────┐
│ part      │     in │    bytes │ GB/s │ ranks │ of the limit │
├───────────┼────────┼──────────┼──────┼───────┼──────────────┤
│ bf16|fp32 │     L2 │ 3.00 GiB │ 12.3 │     8 │       45.7 % │
│ int8      │ memory │ 1.00 KiB │      │  none │   1 % (0..2) │
├───────────┼────────┼──────────┼──────┼───────┼──────────────┤
│ all       │        │ 4.00 GiB │ 12.3 │       │      100.0 % │
└───────────┴────────┴──────────┴──────┴───────┴──────────────┘
in: the *nearest* memory
    3.00 GiB  parameters: in bf16
    2.00 KiB  batch

┌─ package 0
│  ├─ GPU 0
│  └─ 2 x L3
│     └─ core 0
└─ package 1

distances      0
     node 0   10
`},
		{loose, Markdown, `## Sample of exp_avg

**FITS: 3 GiB**

+ would fit: two
+ would fit: three

- **host**: 2 cores
- **rank 0**: CPUs 0-1
  - why: near

| part | in | bytes | GB/s | ranks | of the limit |
|:--- | ---:| ---:| ---:| ---:| ---:|
| bf16\|fp32 | L2 | 3.00 GiB | 12.3 | 8 | 45.7 % |
| int8 | memory | 1.00 KiB |  | none | 1 % (0..2) |
| all |  | 4.00 GiB | 12.3 |  | 100.0 % |

in: the \*nearest\* memory

| bytes | held by |
| ---:|:--- |
| 3.00 GiB | parameters: in bf16 |
| 2.00 KiB | batch |

* package 0
  * GPU 0
  * 2 x L3
    * core 0
* package 1

| distances | 0 |
|:--- | ---:|
| node 0 | 10 |
`},
		{dense, Text, "assumed     " + long[:104] + "\n            word end\n            second\n"},
	} {
		var out strings.Builder
		if err := test.page.Write(&out, test.format); err != nil {
			t.Fatal(err)
		}
		if out.String() != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", test.format, out.String(), test.want)
		}
	}
}

func TestWriteJSON(t *testing.T) {
	var out strings.Builder
	page := &Page{Document: struct {
		Schema string       `json:"schema"`
		Bytes  ledger.Bytes `json:"held_bytes"`
	}{"a <b> & c", ledger.KiB}}
	if err := page.Write(&out, JSON); err != nil {
		t.Fatal(err)
	}
	if want := "{\n  \"schema\": \"a <b> & c\",\n  \"held_bytes\": 1024\n}\n"; out.String() != want {
		t.Errorf("got %s, want %s", out.String(), want)
	}
}

func TestParseFormat(t *testing.T) {
	for _, name := range Formats() {
		if format, err := ParseFormat(name); err != nil || string(format) != name {
			t.Errorf("%s: %s, %v", name, format, err)
		}
	}
	for _, name := range []string{"", "JSON", "html"} {
		if _, err := ParseFormat(name); err == nil || !strings.Contains(err.Error(), "expected text, json, markdown") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestOneLayout keeps layout out of the files of the documents: a page is all that they make.
func TestOneLayout(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range file.Imports {
			if strings.Contains(i.Path.Value, "go-pretty") && !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	}
	if want := []string{"table.go", "text.go"}; !slices.Equal(found, want) {
		t.Errorf("%q import go-pretty, want %q", found, want)
	}
}

// TestPageOfBarsRunsItsScriptsAlone: the policy names the scripts of the page by their hashes, and a page without bars
// has none.
func TestPageOfBarsRunsItsScriptsAlone(t *testing.T) {
	device := ledger.Device{Kind: ledger.GPU, Capacity: 10, Phases: []ledger.Phase{{Name: ledger.Step,
		PeakRequested: 4, PeakAllocated: 5, PeakReserved: 7, PeakUsed: 8,
		Components: []ledger.Holding{{Component: ledger.Parameters, Bytes: 4, Why: "</script><b>"}}}}}
	bars := Bars{Device: &device, palette: paletteOf([]ledger.Device{device})}
	var with, without bytes.Buffer
	for w, page := range map[*bytes.Buffer]*Page{
		&with: {Sections: []Section{{bars}}}, &without: {Sections: []Section{{Paragraph("no bars")}}}} {
		if err := WriteHTML(w, page, "test", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Contains(without.String(), "<script") ||
		!strings.Contains(html.UnescapeString(with.String()), scripts.Policy) {
		t.Error("a page without bars has scripts, or one with bars does not allow them")
	}
	for _, script := range []string{chartLibrary, memoryScript} {
		if !strings.Contains(with.String(), "<script>"+script+"</script>") {
			t.Error("a script is not in the page as its hash says")
		}
	}
	if strings.Contains(with.String(), "</script><b>") {
		t.Error("a reason ends the script of the data")
	}
	view := newMemoryView(&Page{Sections: []Section{{bars}}})
	var sum ledger.Bytes
	for _, h := range view.Devices[0].Phases[0].Held {
		sum += h.Bytes
	}
	for _, part := range view.Devices[0].Phases[0].Allocator {
		sum += part.Bytes
	}
	if sum != 16 {
		t.Errorf("components and parts of the allocator are %d bytes together, want 8 twice", sum)
	}
}

// TestListsAreListsInHTML: a block without HTML of its own would show the marks of Markdown.
func TestListsAreListsInHTML(t *testing.T) {
	var w bytes.Buffer
	page := &Page{Sections: []Section{{List{"one"}, Tree{{"two", Tree{{"three", nil}}}}}}}
	if err := WriteHTML(&w, page, "test", nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<ul><li>one</li></ul>", "<ul><li>two<ul><li>three</li></ul></li></ul>"} {
		if !strings.Contains(w.String(), want) {
			t.Errorf("the page lacks %s", want)
		}
	}
}
