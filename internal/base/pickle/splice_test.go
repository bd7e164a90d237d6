package pickle

import (
	"bytes"
	"testing"
)

var stepNames = []string{"step", "common_step"}

// TestSplice: only the steps of an optimizer change in a pickle.
func TestSplice(t *testing.T) {
	of := func(step any) string {
		p := Document(func(p *Writer) {
			p.Value(&Dict{Entries: []Entry{{"iteration", int64(3)}, {"step", step}, {"lr", 3.0}}})
		})
		return string(p)
	}
	for _, test := range []struct{ from, to any }{
		{int64(3), int64(70_000)}, {3.0, 70_000.0},
	} {
		got, err := Splice([]byte(of(test.from)), stepNames, 1, 3, 70_000)
		if err != nil || string(got) != of(test.to) {
			t.Errorf("%v: %q, %v", test, got, err)
		}
		if _, err := Splice([]byte(of(test.from)), stepNames, 2, 3, 9); err == nil {
			t.Error("a step that is not there was replaced")
		}
		if _, err := Splice([]byte(of(test.from)), stepNames, 1, 4, 9); err == nil {
			t.Error("another step was replaced")
		}
	}
}

// FuzzSplice: a pickle is refused, or differs in its steps only.
func FuzzSplice(f *testing.F) {
	p := Document(func(p *Writer) {
		p.Value(&Dict{Entries: []Entry{{"step", int64(3)}, {"lr", 3.0}, {"common_step", 3.0}}})
	})
	f.Add(p)
	f.Fuzz(func(t *testing.T, text []byte) {
		places, err := findNumbers(text, stepNames)
		if err != nil || len(places) == 0 || places[0].value != 3 {
			return
		}
		spliced, err := Splice(text, stepNames, len(places), 3, 4)
		if err != nil {
			return
		}
		back, err := Splice(spliced, stepNames, len(places), 4, 3)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Splice(back, stepNames, len(places), 3, 4)
		if err != nil || !bytes.Equal(again, spliced) {
			t.Fatalf("%q is %q, and then %q: %v", text, spliced, again, err)
		}
	})
}
