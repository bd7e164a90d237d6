package evidence

import (
	"slices"
	"strings"
	"testing"
)

const (
	ignoredTrace = "Exception ignored in: <function Loader.__del__>\nTraceback (most recent call last):\n" +
		"  File \"loader.py\", line 9, in __del__\n    self.close()\nBrokenPipeError: [Errno 32] Broken pipe\n"
	ignoredAlone = "Exception ignored in: <_io.TextIOWrapper>\nBrokenPipeError: [Errno 32] Broken pipe\n"
	ignoredCut   = "Exception ignored in: <function\nstep 7: loss 2.1\nstep 8: loss 2.1\n"
	raisedTrace  = "Traceback (most recent call last):\n  File \"train.py\", line 9, in main\n    step()\n" + raised
	raised       = "KeyError: 'loss'\n"
)

// TestIgnoredException: an exception that Python only reports is no finding, and one beside it is.
func TestIgnoredException(t *testing.T) {
	tests := []struct {
		name, text string
		exceptions []string
	}{
		{"alone", ignoredTrace, nil},
		{"without a traceback", ignoredAlone, nil},
		{"before a raised one", ignoredTrace + raisedTrace, []string{"KeyError"}},
		{"after a raised one", raisedTrace + ignoredTrace, []string{"KeyError"}},
		{"within a raised one", strings.Replace(raisedTrace, raised, ignoredCut+raised, 1), []string{"KeyError"}},
		{"cut", ignoredCut + raisedTrace, []string{"KeyError"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, f := range readText(t, "log", []byte(test.text)).Findings {
				if e, ok := f.Fact.(Exception); ok {
					got = append(got, e.Type)
				}
			}
			if !slices.Equal(got, test.exceptions) {
				t.Errorf("the exceptions are %v, expected %v", got, test.exceptions)
			}
		})
	}
}

// TestNotebookTraceback: a traceback of IPython tells the phase as one of Python does.
func TestNotebookTraceback(t *testing.T) {
	text := "ValueError                                Traceback (most recent call last)\nCell In[11], line 1\n" +
		"----> 1 trainer.train()\n\nFile /opt/torch/autograd/__init__.py:200, in backward(tensors)\n" +
		"--> 200 engine.run_backward(\n\nValueError: no gradient\n"
	facts := factsOf(readText(t, "notebook.log", []byte(text)), false)
	if !strings.Contains(facts, "backward") || !strings.Contains(facts, "ValueError") {
		t.Errorf("the facts are %q, expected the backward pass and a ValueError", facts)
	}
}

// TestUnknownTextOfAKnownBeginning: an exception whose text begins like a long one of another is no less an exception.
func TestUnknownTextOfAKnownBeginning(t *testing.T) {
	text := "Traceback (most recent call last):\n  File \"train.py\", line 9, in main\n    step()\n" +
		"RuntimeError: arena: Tried to allocate too much\n"
	source, err := Read("log", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range source.Findings {
		if e, ok := f.Fact.(Exception); ok && e.Message == "arena: Tried to allocate too much" && f.Number == 4 {
			return
		}
	}
	t.Errorf("no exception in %v", source.Findings)
}

// TestStackWithoutError: a program that prints where it is has not failed, whatever it prints next. A traceback whose
// first line was cut off is one.
func TestStackWithoutError(t *testing.T) {
	calls := "  File \"train.py\", line 9, in main\n    step()\n"
	for after, want := range map[string]int{
		"Epoch: 1\nDone\nLoss: 0.5\n":                   0,
		"step 3\nValueError: it was handled long ago\n": 0,
		"ValueError: no such size\n":                    1,
	} {
		source, err := Read("log", strings.NewReader(calls+after))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, f := range source.Findings {
			if _, ok := f.Fact.(Exception); ok {
				found++
			}
		}
		if found != want {
			t.Errorf("%q: %d exceptions, expected %d", after, found, want)
		}
	}
}

// TestHeadline: the text of an exception that says no more goes on in an indented line that follows at once.
func TestHeadline(t *testing.T) {
	const headline = "RuntimeError: Error(s) in loading state_dict for Llama:"
	for after, want := range map[string]string{
		"\tsize mismatch for lm_head\n\tsize mismatch for norm\n": headline + " size mismatch for lm_head",
		"step 3 is done \n\tnot of the error\n":                   headline,
		"\n\tnot of the error\n":                                  headline,
	} {
		findings := readText(t, "log", []byte(strings.Replace(raisedTrace, raised, headline+"\n"+after, 1))).Findings
		if got := findings[len(findings)-1].Text; got != want {
			t.Errorf("%q: the text is %q, expected %q", after, got, want)
		}
	}
}

// TestHeadlineOfNoFinding: where no more findings are kept, the last one does not take the text of another.
func TestHeadlineOfNoFinding(t *testing.T) {
	r := &reader{source: &Source{Findings: make([]Finding, 1)}, kinds: map[Kind]int{}, held: mostHeld}
	s := &stream{trace: &trace{rank: NoRank, open: 1, inside: true}, rank: NoRank}
	r.trace(s, &text{string: "RuntimeError: many:"}, false, 1)
	if r.complete(s, &text{string: "\tone"}); !r.source.Cut || r.source.Findings[0].Text != "" {
		t.Errorf("cut: %v, findings: %v", r.source.Cut, r.source.Findings)
	}
}
