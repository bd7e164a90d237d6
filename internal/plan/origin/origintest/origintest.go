// Package origintest looks places of package origin up in the packages that a Python interpreter has, and says which
// components of a plan have no address. Only tests import it.
package origintest

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/base/version"
	"plimsoll/internal/plan/origin"
)

//go:embed places.py
var script string

// packages are the Python packages of the projects that tests install.
var packages = map[origin.Project]string{origin.PyTorch: "torch", origin.Transformers: "transformers",
	origin.DeepSpeed: "deepspeed", origin.BitsAndBytes: "bitsandbytes", "torchao": "torchao", "PEFT": "peft"}

// Releases returns the releases that are installed. Python has torch, transformers, deepspeed and peft.
func Releases(t testing.TB) map[origin.Project]version.Version {
	t.Helper()
	python := torchtest.Python(t, "transformers", "deepspeed", "peft")
	installed := map[origin.Project]version.Version{}
	for project, name := range packages {
		out, err := exec.Command(python, "-c", "import importlib.metadata as m; print(m.version('"+name+"'))").Output()
		if err != nil {
			continue // bitsandbytes and torchao are not installed everywhere
		}
		release, err := version.Parse(strings.TrimSpace(string(out)))
		if err != nil {
			t.Fatal(err)
		}
		installed[project] = release
	}
	return installed
}

// Missing returns the places that the installed packages do not have, with what is missing.
func Missing(t testing.TB, places []origin.Place) []string {
	t.Helper()
	var questions [][2]string
	installed := Releases(t)
	for _, p := range places {
		if _, ok := installed[p.Project]; ok {
			questions = append(questions, [2]string{p.File, p.Function})
		}
	}
	if len(questions) == 0 {
		t.Fatal("nothing was looked up")
	}
	input, err := json.Marshal(questions)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(torchtest.Python(t, "transformers", "deepspeed", "peft"), "-c", script)
	command.Stdin = strings.NewReader(string(input))
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' })
}

// Unaddressed returns how many components of all phases were looked at, and what is missing: a formula that evaluates
// to the bytes of its component, or the source that makes the component.
func Unaddressed(devices []ledger.Device) (components int, missing []string) {
	for _, d := range devices {
		for _, p := range append(slices.Clone(d.Phases), ledger.Phase{Name: "all phases", Components: d.Outside}) {
			for _, c := range p.Components {
				components++
				where := fmt.Sprintf("%s, %s %s, %s", d.Kind, p.Iteration, p.Name, c.Component)
				if sum, ok := c.Formula.Bytes(); !ok || sum != c.Bytes {
					missing = append(missing, fmt.Sprintf("%s has %v, and its formula is %q", where, c.Bytes.Exact(),
						c.Formula))
				}
				if c.Origin == nil || c.Origin.File == "" && c.Origin.Note == "" {
					missing = append(missing, fmt.Sprintf("%s has no source: %s", where, c.Why))
				}
			}
		}
	}
	return components, missing
}
