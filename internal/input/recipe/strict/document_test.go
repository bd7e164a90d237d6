package strict

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

// TestPositions compares positions in a document with those of package fault.
func TestPositions(t *testing.T) {
	for _, text := range []string{"", "\n", "a\n\nb", "é\r\nx\n"} {
		d := &Document{File: "file", Text: []byte(text)}
		for at := int64(-1); at < int64(len(text))+2; at++ {
			if got, want := d.Position(at), fault.At("file", []byte(text), at); got != want {
				t.Errorf("offset %d of %q is at %v, want %v", at, text, got, want)
			}
		}
	}
}

// TestAliases reads YAML with aliases and merged objects, as PyYAML's safe_load does.
func TestAliases(t *testing.T) {
	d, err := ParseYAML("a.yaml", []byte("base: &base {r: 8, alpha: 16}\nfirst:\n  <<: *base\n  r: 4\nsecond: *base\n"+
		"third:\n  <<: [{alpha: 1}, *base]\n"))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"first.r": "4", "first.alpha": "16", "second.r": "8", "third.alpha": "1",
		"third.r": "8"} {
		if v := d.Root.Find(path); v == nil || v.Text != want {
			t.Errorf("%s is %v, expected %s", path, v, want)
		}
	}
}

// TestManyAliases gives a short text that would expand to 10^9 values.
func TestManyAliases(t *testing.T) {
	text := "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := range 8 {
		text += fmt.Sprintf("a%d: &a%d [%s*a%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 9), i)
	}
	if _, err := ParseYAML("a.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), "10000 values") {
		t.Errorf("got %v", err)
	}
	if Skim("a.yaml", []byte(text)) != nil {
		t.Error("Skim reads it")
	}
}
