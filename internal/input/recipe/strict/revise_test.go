package strict

import (
	"strings"
	"testing"
)

// TestRevise edits values and adds keys. Comments, order and indentation stay.
func TestRevise(t *testing.T) {
	for _, test := range []struct {
		name, text, path string
		to               any
		want             string
	}{
		{"a.json", "{\n  // buckets\n  \"zero\": {\n    \"size\": 5e8, // big\n    \"stage\": 2\n  }\n}\n", "zero.size",
			200000000, "{\n  // buckets\n  \"zero\": {\n    \"size\": 200000000, // big\n    \"stage\": 2\n  }\n}\n"},
		{"a.json", "{\n  \"zero\": {\n    \"stage\": 2\n  }\n}", "zero.offload.device", "cpu",
			"{\n  \"zero\": {\n    \"offload\": {\"device\": \"cpu\"},\n    \"stage\": 2\n  }\n}"},
		{"a.json", `{"a": 1}`, "b", true, `{"b": true, "a": 1}`},
		{"a.json", `{"a": {}}`, "a.b", 1, `{"a": {"b": 1}}`},
		{"a.json", "{\r\n  \"a\": 1\r\n}\r\n", "b", 2, "{\r\n  \"b\": 2,\r\n  \"a\": 1\r\n}\r\n"},
		{"a.yaml", "z:\r\n  a: 1\r\n", "z.b.c", 2, "z:\r\n  b:\r\n    c: 2\r\n  a: 1\r\n"},
		{"a.yaml", "# top\nmicro: 4   # per GPU\ncheckpoint: no\n", "micro", 2,
			"# top\nmicro: 2   # per GPU\ncheckpoint: no\n"},
		{"a.yaml", "fsdp:\n    offload: 'no'  # x\n", "fsdp.wrap", "whole",
			"fsdp:\n    wrap: whole\n    offload: 'no'  # x\n"},
		{"a.yaml", "fsdp:\n  offload: 'no'\n", "fsdp.offload", true, "fsdp:\n  offload: true\n"},
		{"a.yaml", "a: {b: 1, c: 2}\n", "a.b", 3, "a: {b: 3, c: 2}\n"},
		{"a.yaml", "a: 1\n", "b.c", "on", "b:\n  c: \"on\"\na: 1\n"},
		{"a.toml", "title = \"x\"\n[training]\n# size\nbatch = 8 # of a GPU\n", "training.batch", 4,
			"title = \"x\"\n[training]\n# size\nbatch = 4 # of a GPU\n"},
		{"a.toml", "[training]\nbatch = 8\n", "training.mode", "full", "[training]\nmode = \"full\"\nbatch = 8\n"},
	} {
		var d *Document
		var err error
		if strings.HasSuffix(test.name, ".toml") {
			d, err = ParseTOML(test.name, []byte(test.text))
		} else if IsYAML(test.name) {
			d, err = ParseYAML(test.name, []byte(test.text))
		} else {
			d, err = ParseCommented(test.name, []byte(test.text))
		}
		if err != nil {
			t.Fatal(err)
		}
		r, err := d.Revise(test.path, Of(test.to))
		if err != nil {
			t.Errorf("%q, %s: %v", test.text, test.path, err)
			continue
		}
		if string(r.Text) != test.want {
			t.Errorf("%q, %s:\n%q, want\n%q", test.text, test.path, r.Text, test.want)
		}
	}
}

// FuzzRevise: an edited text says the same but for the key, or it is refused.
func FuzzRevise(f *testing.F) {
	f.Add("a: 1\nb:\n  c: x # y\n", "b.c", true)
	f.Add("{\"a\": {\"b\": \"c\"}}", "a.b", false)
	f.Fuzz(func(t *testing.T, text, path string, yaml bool) {
		parse := ParseCommented
		if yaml {
			parse = ParseYAML
		}
		d, err := parse("f", []byte(text))
		if err != nil || d.Root.Kind != '{' || strings.Contains(path, "..") {
			return
		}
		r, err := d.Revise(path, Of(7))
		if err != nil {
			return
		}
		again, err := parse("f", r.Text)
		if err != nil {
			t.Fatalf("%q: %v", r.Text, err)
		}
		if v := again.Root.Find(path); v == nil || v.Text != "7" {
			t.Fatalf("%q at %q: %q has %v", text, path, r.Text, v)
		}
	})
}
