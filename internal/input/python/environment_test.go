package python

import (
	"strings"
	"testing"
)

// TestEnvironment reads the variables that a source sets for its process.
func TestEnvironment(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{`import os
os.environ["A"] = "1"`, "A=1"},
		{`from os import environ
environ["A"] = "x" + "y"`, "A=xy"},
		{`import os
os.environ["A"] = str(n)`, "A=?"},
		{`import os
os.environ.setdefault("A", "1")
os.environ.update({"B": "2"}, C="3")
os.putenv("D", "4")`, "A=1 B=2 C=3 D=4"},
		{`import os
if unknown():
    os.environ["A"] = "1"`, "A=?"},
		{`import os
os.environ["A"] = "1"
del os.environ["A"]`, "A=1 A=?"},
		{`import os
settings = {}
settings["A"] = "1"`, ""},
	} {
		s, err := Read("train.py", []byte(c.source), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := environmentOf(s); got != c.want {
			t.Errorf("%s\ngot %q, want %q", c.source, got, c.want)
		}
	}
	s, err := Read("n.ipynb", []byte(`{"nbformat": 4, "cells": [{"cell_type": "code", "source":
["%env A=1\n", "%set_env B 2\n", "x = 3\n", "%env C={x}"]}]}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := environmentOf(s); got != "A=1 B=2 C=?" {
		t.Errorf("a notebook sets %q", got)
	}
	read, err := Read("train.py", []byte("import os\nos.environ['A'] = '1'\nf(os.environ['A'])"), nil)
	if err != nil || len(read.Calls) != 1 || read.Calls[0].Given[0].Text != "1" {
		t.Errorf("a variable that the source has set is read as %v, error %v", read.Calls, err)
	}
}

func environmentOf(s *Source) string {
	var list []string
	for _, v := range s.Environment {
		is := v.Is.Text
		if v.Is.Kind != Text {
			is = "?"
		}
		list = append(list, v.Name+"="+is)
	}
	return strings.Join(list, " ")
}
