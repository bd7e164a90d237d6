package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
)

var update = flag.Bool("update", false, "rewrite testdata/plan/bad.txt")

// TestPlanRefuses runs the command lines at the head of testdata/plan/bad.txtar
// beside its files, and compares what they print with testdata/plan/bad.txt:
// each ends with exit code 2, nothing on stdout and one error.
func TestPlanRefuses(t *testing.T) {
	golden, err := filepath.Abs("testdata/plan/bad.txt")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := txtar.ParseFile("testdata/plan/bad.txtar")
	if err != nil {
		t.Fatal(err)
	}
	plimsoll, folder := program(t), t.TempDir()
	for _, file := range archive.Files {
		if err := os.WriteFile(filepath.Join(folder, file.Name), file.Data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(folder, "checkpoint"), os.DirFS("../../model/testdata/checkpoint")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(folder, "checkpoint", "config.json")); err != nil {
		t.Fatal(err)
	}
	var messages strings.Builder
	lines := 0
	for line := range strings.Lines(string(archive.Comment)) {
		arguments := strings.Fields(line)
		if len(arguments) == 0 || arguments[0] == "#" {
			continue
		}
		lines++
		command := exec.Command(plimsoll, append([]string{"plan"}, arguments...)...)
		command.Dir = folder
		var stdout, stderr bytes.Buffer
		command.Stdout, command.Stderr = &stdout, &stderr
		var exit *exec.ExitError
		if err := command.Run(); !errors.As(err, &exit) || exit.ExitCode() != exitInput {
			t.Errorf("plan %s: %v, want exit code 2", strings.TrimSpace(line), err)
		}
		message, said := strings.CutPrefix(stderr.String(), "plimsoll: ")
		if text := strings.Split(strings.TrimSpace(message), "\n"); !said || stdout.Len() > 0 || len(text) > 2 || len(text) == 2 && !strings.HasPrefix(text[1], "  hint: ") {
			t.Errorf("plan %s: not one error and its hint:\n%s%s", strings.TrimSpace(line), &stdout, &stderr)
		}
		fmt.Fprintf(&messages, "> plan %s\n%s", strings.TrimSpace(line), message)
	}
	if lines < 100 {
		t.Errorf("only %d command lines", lines)
	}
	if *update {
		if err := os.WriteFile(golden, []byte(messages.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(messages.String(), "\n")); diff != "" {
		t.Errorf("messages differ from %s (-want +got), see -update:\n%s", golden, diff)
	}
}
