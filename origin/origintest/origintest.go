// Package origintest looks places of package origin up in the packages that a Python interpreter has. Only tests
// import it.
package origintest

import (
	_ "embed"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"plimsoll/optim/optimtest"
	"plimsoll/origin"
	"plimsoll/version"
)

//go:embed places.py
var script string

// packages are the Python packages of the projects.
var packages = map[origin.Project]string{origin.PyTorch: "torch", origin.Transformers: "transformers",
	origin.DeepSpeed: "deepspeed", origin.BitsAndBytes: "bitsandbytes", origin.TorchAO: "torchao", origin.PEFT: "peft"}

// Releases returns the releases that are installed. Python has torch, transformers, deepspeed and peft.
func Releases(t testing.TB) map[origin.Project]version.Version {
	t.Helper()
	python := optimtest.Python(t, "transformers", "deepspeed", "peft")
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
	command := exec.Command(optimtest.Python(t, "transformers", "deepspeed", "peft"), "-c", script)
	command.Stdin = strings.NewReader(string(input))
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' })
}
