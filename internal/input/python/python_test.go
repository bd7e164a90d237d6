package python

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// valuesOf are sources, each with the values of its name x.
var valuesOf = map[string]string{
	"x = 2e-4":                                    "0.0002",
	"x: int = 0x10":                               "16",
	"x = 8 * 1_024 // 3":                          "2730",
	"x = -7 % 4 + 2**3":                           "9",
	"x = 'a' \"b\"\n":                             `"ab"`,
	"n = 3\nx = f'{n}-{{}}'":                      `"3-{}"`,
	"x = r'\\d' + '\\n'":                          `"\\d\n"`,
	"x = [1, *[2, 3]]\nx = x[-1]":                 "3",
	"d = dict(a=1) | {'b': 2}\nx = d['b']":        "2",
	"d = {'a': 1}\nd.update(a=5)\nx = d.get('a')": "5",
	"x = None or 'a'":                             `"a"`,
	"x = True and not 0":                          "True",
	"x = 1 if 'a' in ['a'] else 2":                "1",
	"x = 2 if 3 > 4 else 5":                       "5",
	"a = b = 4\nx = a + b":                        "8",
	"(a, b), c = (1, 2), 3\nx = b * c":            "6",
	"x = 1\nx += 2":                               "3",
	"def f(a, b=2, *, c=3):\n    return a + b + c\nx = f(1, c=4)": "7",
	"def f():\n    a = 1\n    return {**{'k': a}}\nx = f()['k']":  "1",
	"if __name__ == '__main__':\n    x = 1\n":                     "1",
	"with open('f') as g:\n    x = 1\n":                           "1",
	"try:\n    x = 1\nexcept ImportError:\n    x = 2\n":           "1",
	"!pip install y\n%cd z\nx = 1":                                "1",
	"match a:\n    case 1:\n        y = 2\nx = 1":                 "1",
	"x = 1; y = 2\n":                    "1",
	"x = (\n  1 +  # one\n\n  2\n)":     "3",
	"import torch as t\nx = t.bfloat16": "torch.bfloat16",
	"from a.b import c\nx = c":          "a.b.c",
	"t = {}\ndef enter(f):\n    t[f.__name__.replace('_', '-')] = f\n    return f\n@enter\ndef f_g():\n    return 3\n" +
		"x = t['f-g']()": "3",
	"o = c(a=1)\nx = isinstance(o, c)":                      "True",
	"@decorated(1)\nclass A(B):\n    y: int = 1\nx = 2":     "2",
	"x = 1\nfor i in range(3):\n    x = 2\n":                "a loop",
	"x = 1\nif unknown:\n    x = 2\n":                       "unknown",
	"import os\nx = int(os.environ['A'])":                   "int(...)",
	"m = {(1, None): 2, 3: 4}\nx = m[(1, None)] + m[3]":     "6",
	"x = (1, 2) not in {(1, 3): 0}":                         "True",
	"i = 5\ny = [2 * i for i in [1, 2]]\nx = y[1] + i":      "9",
	"x = [i for i in [1, 2] if i > 1]":                      "an expression",
	"x = [] is not None and {} is not None":                 "True",
	"x = [i for i in y]":                                    "an expression",
	"def f():\n    return f()\nx = f()":                     "f(...)",
	"x = c(1, a=2)":                                         "c(...)",
	"o = c(a=1)\no.a.b = 3\no.a = 2\nx = o.a":               "2",
	"o = c(a=1)\nx = getattr(o, 'a', 0)":                    "1",
	"x = 'a'\nwhile True:\n    break\n":                     `"a"`,
	"x = max(1, 2, 3)":                                      "3",
	"x = 1\\\n + 1":                                         "2",
	"x = isinstance('a', str) and not isinstance([], dict)": "True",
	"x = 1 / 0":                   "1 / 0",
	"x = lambda a, b=1: a\nx = 2": "2",
	"x = a < b < c":               "an expression",
}

// TestValues evaluates sources: what they say is computed, and what they do not say is named.
func TestValues(t *testing.T) {
	for source, want := range valuesOf {
		s, err := Read("train.py", []byte(source), nil)
		if err != nil || len(s.Unread) > 1 {
			t.Errorf("%q: %v, unread at %d", source, err, s.Unread)
			continue
		}
		if x := s.Names["x"]; x == nil || x.String() != want {
			t.Errorf("%q: x is %v, want %s", source, x, want)
		}
	}
}

// TestCalls holds that a call has its arguments, where they stand in the file, and what it was called on.
func TestCalls(t *testing.T) {
	const source = "from trl import SFTConfig\nargs = SFTConfig(\n    max_length=1024, **more)\n" +
		"m, t = Auto.from_pretrained('a/b').half()\n"
	s, err := Read("train.py", []byte(source), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Calls) != 3 {
		t.Fatalf("%d calls: %v", len(s.Calls), s.Calls)
	}
	args, model := s.Calls[0], s.Calls[2]
	length := args.Attribute("max_length")
	if args.Class != "trl.SFTConfig" || args.Name() != "SFTConfig" || !args.Partial || length == nil ||
		source[length.At:length.At+4] != "1024" {
		t.Errorf("got %+v", args)
	}
	if model.Name() != "half" || model.From == nil || model.From.Given[0].Text != "a/b" || s.Names["m"] != model {
		t.Errorf("got %+v", model)
	}
}

// TestBranches holds that what a condition decides that only a run can tell is not taken for granted.
func TestBranches(t *testing.T) {
	s, err := Read("train.py", []byte("c = A(a=1)\nif b:\n    c.a = 2\n    B(1)\nfor i in d:\n    C(i)\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if a := s.Names["c"].Attribute("a"); a.Kind != Unknown {
		t.Errorf("a is %v", a)
	}
	for _, c := range s.Calls {
		if c.Partial != (c.Class == "B") {
			t.Errorf("%v: partial %t", c, c.Partial)
		}
	}
}

// TestNotebook reads the cells of code of a notebook, at the places of their lines.
func TestNotebook(t *testing.T) {
	book := map[string]any{"nbformat": 4, "cells": []any{
		map[string]any{"cell_type": "markdown", "source": []string{"x = 1\n"}},
		map[string]any{"cell_type": "code", "source": []string{"!ls\n", "a = 'b\"c'\n", "x = f(k=7)"}},
		map[string]any{"cell_type": "code", "source": "%%bash -s\nz = 4\nx = 1"},
		map[string]any{"cell_type": "code", "source": "%%capture out\ny = 2\nz = 3"},
		map[string]any{"cell_type": "code", "source": []string{"%%writefile train.py\n", "z = 5"}},
	}}
	text, err := json.MarshalIndent(book, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Read("train.ipynb", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	x := s.Names["x"]
	if x == nil || !strings.HasPrefix(string(text[x.At:]), "f(k=7)") || s.Names["z"].String() != "3" {
		t.Errorf("x is %v, z is %v", x, s.Names["z"])
	}
}

// TestImports evaluates modules of the same project, and calls a function of the source.
func TestImports(t *testing.T) {
	modules := map[string]string{"p/common.py": "from p.other import WIDTH\ndef base():\n    return C(a=1, b=WIDTH)\n",
		"p/other.py": "WIDTH = 4\nfrom p.common import base\n"}
	open := func(path string) ([]byte, string, error) {
		if text, is := modules[path]; is {
			return []byte(text), path, nil
		}
		return nil, "", fmt.Errorf("no %s", path)
	}
	s, err := Read("p/r.py", []byte("from .common import base\ndef f():\n    c = base()\n"+
		"    c.a = c.b * 2\n    return c\n"),
		open)
	if err != nil {
		t.Fatal(err)
	}
	c := s.Call("f")
	if a := c.Attribute("a"); a == nil || a.String() != "8" || c.Attribute("b").At != -1 || len(s.Functions) != 1 {
		t.Errorf("got %+v, a %+v, b %+v of %v", c, a, c.Attribute("b"), s.Functions)
	}
	if s, err = Read("p/r.py", []byte("from p.common import base as x\n"), open, "p"); err != nil ||
		s.Names["x"].Text != "p.common.base" || s.evaluator.modules["p/common.py"] != nil {
		t.Errorf("a known package is opened: %v, %v", s.Names["x"], err)
	}
	if s.Call("g") != nil {
		t.Error("a function that is not there was called")
	}
}

// TestLimits holds that no source takes long or much memory. One that is not followed to its end says nothing: what it
// leaves out may decide everything.
func TestLimits(t *testing.T) {
	const long = "def f(a):\n    return [f(a), f(a), f(a)]\n"
	if s, err := Read("train.py", []byte(long+"SFTConfig(max_length=1)\nx = f(1)\nSFTConfig(max_length=2)\n"),
		nil); !errors.Is(err, errSpent) {
		t.Errorf("a source that takes long: %+v, error %v", s, err)
	}
	s, err := Read("recipe.py", []byte(long+"def recipe():\n    f(1)\n    return Configuration(a=1)\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if made := s.Call("recipe"); made.Kind != Unknown || !strings.Contains(made.Text, "takes very long") {
		t.Errorf("a function that takes long returns %+v", made)
	}
	for _, source := range []string{
		strings.Repeat("(", 100_000), strings.Repeat("if a:\n", 1000), strings.Repeat("-", 100_000) + "1",
		"x = [1]\n" + strings.Repeat("x = x + x\n", 60), "x = 'a'\n" + strings.Repeat("x = f'{x}{x}'\n", 60),
		"x = [1]\n" + strings.Repeat("x = [x, x]\n", 60) + "import copy\ny = copy.deepcopy(x)\n",
		"def f(a):\n    return [f(a), f(a), f(a)]\nx = f(1)\n", strings.Repeat("not ", 100_000) + "1",
	} {
		if _, err := Read("train.py", []byte(source), nil); err != nil && !errors.Is(err, errSpent) {
			t.Error(err)
		}
	}
}

// FuzzRead reads any text: it ends, and every place is one of the file.
func FuzzRead(f *testing.F) {
	for source := range valuesOf {
		f.Add([]byte(source))
	}
	f.Add([]byte(`{"nbformat": 4, "cells": [{"cell_type": "code", "source": ["x = f(1)\n", "y"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := Read("train.py", text, nil)
		if err != nil {
			return
		}
		for _, c := range s.Calls {
			if c.At < 0 || c.At > len(text) {
				t.Errorf("%q: a call at %d", text, c.At)
			}
		}
		for _, name := range s.Functions {
			s.Call(name)
		}
	})
}
