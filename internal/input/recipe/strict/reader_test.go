package strict

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var program = Schema{Program: "Program", Rule: Object(Boolean().For("verbose quiet"), Keys{
	"width":  Integer().From(1).To(9).Default(4).Alias("w").Deprecated("breadth"),
	"rate":   Number().From(0).Under(1).Default(.5).OrAuto(),
	"mode":   Text("fast", "exact").InAnyCase().Default("fast"),
	"layers": List(Text()).Or(Text()).OrNull(),
	"nested": Object(Keys{"depth": Integer().Lax(), "mark": Text().Noting("has no effect")}).Prefixed("nested_").
		Or(Text()),
	"params": Free(),
}).NotingOthers()}

func read(t *testing.T, text string) *Reader {
	t.Helper()
	d, err := ParseCommented("p.json", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	r, err := program.Read(d)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// settings has a field of every type that Fill sets.
type settings struct {
	Verbose bool     `key:"verbose"`
	Width   int      `key:"width"`
	Width64 int64    `key:"width"`
	Rate    float64  `key:"rate"`
	Mode    string   `key:"mode"`
	Layers  []string `key:"layers"`
	Nested  nested   `key:"nested"`
	Given   *nested  `key:"nested"`
	Inline  struct {
		Quiet bool `key:"quiet"`
	} `key:""`
	Unread string
}

type nested struct {
	Depth int `key:"depth"`
}

func TestFill(t *testing.T) {
	for text, want := range map[string]settings{
		`{}`: {Width: 4, Width64: 4, Rate: .5, Mode: "fast"},
		`{"verbose": true, "quiet": true, "w": 7, "rate": "auto", "mode": "EXACT", "layers": "a, b", "nested": {"nested_depth": "3"}}`: {
			Verbose: true, Width: 7, Width64: 7, Rate: .5, Mode: "EXACT", Layers: []string{"a", "b"},
			Nested: nested{3}, Given: &nested{3}, Inline: struct {
				Quiet bool `key:"quiet"`
			}{true}},
		`{"layers": ["c"], "breadth": 1, "nested": {}}`: {Width: 1, Width64: 1, Rate: .5, Mode: "fast",
			Layers: []string{"c"}, Given: &nested{}},
	} {
		var got settings
		read(t, text).Fill(&got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

func TestFaults(t *testing.T) {
	for text, want := range map[string]string{
		`{"width": 10}`:                               `p.json:1:11: width is 10, expected a whole number from 1 to 9`,
		`{"wdith": 4}`:                                `p.json:1:2: Program knows no key "wdith" at the top level` + "\n  hint: did you mean \"width\"?",
		`{"nested": {"rate": 1}}`:                     `Program knows no key "rate" in nested` + "\n  hint: \"rate\" belongs at the top level",
		`{"width": 1, "w": 2}`:                        `p.json:1:14: w and width (line 1) are two names for one setting`,
		`{"nested": {"nested_depth": 1, "depth": 2}}`: `nested.depth and nested_depth (line 1) are two names`,
		`{"rate": 1}`:                                 `rate is 1, expected a number from 0 to below 1 or "auto"`,
		`{"rate": "1"}`:                               `rate is "1", expected`,
		`[]`:                                          `the file holds a list of 0, expected an object`,
	} {
		d, err := ParseCommented("p.json", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if _, err = program.Read(d); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
}

func TestNotes(t *testing.T) {
	r := read(t, `{"breadth": 2, "later": 1,
		"nested": {"nested_mark": "x"}}`)
	r.Note("nested.depth", "is not given")
	want := []string{
		`p.json:1:2: breadth is deprecated: use "width"`,
		`p.json:1:16: Program knows no key "later" at the top level: plimsoll ignores it`,
		`p.json:2:14: nested.nested_mark has no effect`,
		`p.json:2:3: nested.depth is not given`,
	}
	var got []string
	for _, note := range r.Notes {
		got = append(got, note.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestUnder checks messages of an object with a rule of its own.
func TestUnder(t *testing.T) {
	r := read(t, `{"params": {"lr": 2}}`)
	params, err := r.Under("params", Object(Number().For("lr momentum")))
	if err != nil || params.Number("lr") != 2 || params.Gives("momentum") {
		t.Fatalf("got %v, %v", params, err)
	}
	if got := params.Fault("lr", "is wrong", "").Error(); got != "p.json:1:13: params.lr is wrong" {
		t.Errorf("got %q", got)
	}
	if _, err = r.Under("params", Object()); err == nil || !strings.Contains(err.Error(), `no key "lr" in params`) {
		t.Errorf("got %v", err)
	}
}

// TestMistakesPanic checks that a program cannot read a key that its schema does
// not have, or has with another type.
func TestMistakesPanic(t *testing.T) {
	r := read(t, `{"nested": {"depth": 1}}`)
	for name, mistake := range map[string]func(){
		"an unknown path":       func() { r.Integer("height") },
		"an unknown path below": func() { r.Section("nested").Integer("height") },
		"a path below a number": func() { r.Gives("width.height") },
		"an alias":              func() { r.Integer("w") },
		"another type":          func() { r.Truth("width") },
		"a tag": func() {
			r.Fill(&struct {
				Height int `key:"height"`
			}{})
		},
		"a type of a field": func() {
			r.Fill(&struct {
				Width [2]int `key:"width"`
			}{})
		},
		"a default": func() { Integer().To(3).Default(4) },
		"a value":   func() { Of(struct{}{}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", name)
				}
			}()
			mistake()
		}()
	}
}
