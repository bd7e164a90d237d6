package shell

import (
	_ "embed"
	"encoding/json"
	"strings"
	"testing"

	"plimsoll/internal/base/torchtest"
)

// snippets are scripts that show values by the command T, between lines of three dashes.
//
//go:embed testdata/snippets.txt
var snippets string

// TestSnippets compares scripts with Bash: what they give T is what Bash gives it, or is unknown.
func TestSnippets(t *testing.T) {
	const script = `
import json, subprocess, sys
shown = []
for source in json.loads(sys.argv[1]):
    r = subprocess.run(["bash", "--norc", "-c", 'T() { printf "T"; printf "|%s" "$@"; echo; }\n' + source, "run.sh"], text=True,
        capture_output=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}, cwd="/", stdin=subprocess.DEVNULL, timeout=60)
    shown.append([line for line in r.stdout.split("\n") if line.startswith("T|") or line == "T"])
print(json.dumps(shown))
`
	list := strings.Split(strings.TrimSuffix(snippets, "\n"), "\n---\n")
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	real := torchtest.Answer[[][]string](t, torchtest.Fresh(), "-c", script, string(text))
	if len(real) != len(list) {
		t.Fatalf("Bash answers %d scripts of %d", len(real), len(list))
	}
	known := 0
	for i, source := range list {
		got, sure := shows(t, source)
		if !sure {
			continue
		}
		known++
		if want := strings.Join(real[i], "\n"); strings.Join(got, "\n") != want {
			t.Errorf("%s\n# shows %q, and Bash %q", source, got, want)
		}
	}
	if least := 230; known < least {
		t.Errorf("%d of %d scripts are known, expected at least %d", known, len(list), least)
	}
}

// shows returns what a script gives T, and whether the script says it.
func shows(t *testing.T, source string) (got []string, sure bool) {
	t.Helper()
	s, err := Read("run.sh", []byte(source), nil, nil)
	if err != nil {
		t.Fatalf("%s: %v", source, err)
	}
	for _, c := range s.Commands {
		if c.Words[0].Text != "T" {
			continue
		}
		line := "T"
		for _, w := range c.Words[1:] {
			if line += "|" + w.Text; len(w.Unknown) > 0 {
				return nil, false
			}
		}
		if len(c.Words) == 1 {
			line += "|" // as printf shows no words
		}
		if c.Unsure != "" {
			return nil, false
		}
		for range max(1, c.Often) {
			got = append(got, line)
		}
	}
	return got, true
}
