package strict

import (
	"errors"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

func TestParseTOML(t *testing.T) {
	d, err := ParseTOML("a.toml", []byte("# comment\n[a]\nb = 1_000\nc.d = \"x\"\n[a.e]\nf = [0x10, 2.5, true]\n"+
		"g = {h = 'y'}\n[[list]]\ni = 1\n[[list]]\ni = 2\n[list.j]\nk = 3\n"))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"a.b": "1000", "a.c.d": "x", "a.e.g.h": "y"} {
		if v := d.Root.Find(path); v == nil || v.Text != want {
			t.Errorf("%s is %v, want %s", path, v, want)
		}
	}
	if f := d.Root.Find("a.e.f").Elements; f[0].Text != "16" || f[1].Text != "2.5" || f[2].Kind != 't' {
		t.Errorf("the list is %v", f)
	}
	if list := d.Root.Find("list").Elements; len(list) != 2 || list[1].Find("j.k").Text != "3" {
		t.Errorf("the list of tables is %v", list)
	}
	if at := d.Position(d.Root.Find("a").Member("b").At); at.Line != 3 || at.Column != 1 {
		t.Errorf("a.b is at %v", at)
	}
	for text, want := range map[string]string{"a = 1\na = 2\n": "a.toml:2:1: \"a\" is listed twice",
		"a = 1\n[a]\n": "a.toml:2:2: a has a value already", "a = \n": "this is not TOML"} {
		if _, err := ParseTOML("a.toml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParseTOML(f *testing.F) {
	f.Add([]byte("[a]\nb = 1\n[[c]]\nd = {e = [1, '2']}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var bad *fault.Input
		if _, err := ParseTOML("a.toml", text); err != nil && !errors.As(err, &bad) {
			t.Fatalf("%T: %v", err, err)
		}
	})
}
