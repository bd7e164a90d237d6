package python

import (
	_ "embed"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"plimsoll/internal/base/torchtest"
)

// snippets are sources that bind x, between lines of three dashes.
//
//go:embed testdata/snippets.txt
var snippets string

// TestSnippets compares sources with Python: x has the value that Python gives it, or is unknown. So no change of a
// value is lost that the source makes: by a method, by another name of it, in a function, in a loop, or by code that is
// not followed.
func TestSnippets(t *testing.T) {
	const script = `
import json, sys
values = []
for source in json.loads(sys.argv[1]):
    names = {"__name__": "__main__"}
    try:
        exec(source, names)
        x = names.get("x")
        values.append(json.dumps(x) if isinstance(x, str) else str(x))
    except Exception as wrong:
        values.append(type(wrong).__name__)
print(json.dumps(values))
`
	list := strings.Split(strings.TrimSuffix(snippets, "\n"), "\n---\n")
	values := torchtest.Answer[[]string](t, torchtest.Fresh(), "-c", script, string(toJSON(t, list)))
	if len(values) != len(list) {
		t.Fatalf("Python gives %d values for %d sources", len(values), len(list))
	}
	known := 0
	for i, source := range list {
		s, err := Read("train.py", []byte(source), nil)
		if err != nil {
			t.Fatal(err)
		}
		x := s.Names["x"]
		switch {
		case x == nil || x.Kind == Unknown || x.Kind == Object || x.Kind == Symbol || x.Kind == Function:
			continue
		case x.Kind == List || x.Kind == Dict:
			t.Errorf("%s\n# x is %v, expected a value of one part", source, x)
		case x.String() != values[i] && strconv.Quote(x.Text) != values[i]:
			t.Errorf("%s\n# x is %v, and Python says %s", source, x, values[i])
		}
		known++
	}
	if least := 140; known < least {
		t.Errorf("%d of %d values are known, expected at least %d", known, len(list), least)
	}
}

func toJSON(t *testing.T, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
