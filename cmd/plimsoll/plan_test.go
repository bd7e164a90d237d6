//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/show/report"
)

// TestPlanRefuses runs the command lines of testdata/plan/bad.txtar, also beside a folder with weights alone.
func TestPlanRefuses(t *testing.T) {
	folder := t.TempDir()
	from := os.DirFS("../../internal/input/model/testdata/checkpoint")
	if err := os.CopyFS(filepath.Join(folder, "checkpoint"), from); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(folder, "checkpoint", "config.json")); err != nil {
		t.Fatal(err)
	}
	if commands := checkRefusals(t, "testdata/plan/bad.txtar", folder); commands < 100 {
		t.Errorf("only %d command lines", commands)
	}
}

// TestTypicalMistakes runs the command lines of testdata/mistakes.txtar.
func TestTypicalMistakes(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir()) // where no job has failed
	folder := t.TempDir()
	weights := "\x02\x00\x00\x00\x00\x00\x00\x00{}"
	for name, content := range map[string]string{
		"photo.png": "\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x01\x00", "model.safetensors": weights,
		"adapter_model.safetensors": weights, "pytorch_model.bin": "PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(folder, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	if commands := checkRefusals(t, "testdata/mistakes.txtar", folder); commands < 150 {
		t.Errorf("only %d command lines", commands)
	}
}

// checkRefusals runs the command lines at the head of an archive in a folder with its files, and compares each error
// with the one below the command. Each command ends with exit code 2, an empty stdout and one error. It returns the
// number of commands.
func checkRefusals(t *testing.T, archived, folder string) (commands int) {
	t.Helper()
	golden, err := filepath.Abs(archived)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := txtar.ParseFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range archive.Files {
		if err := os.WriteFile(filepath.Join(folder, file.Name), file.Data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(folder)
	var head strings.Builder
	for line := range strings.Lines(string(archive.Comment)) {
		arguments, isCommand := strings.CutPrefix(line, "> ")
		if isCommand || strings.TrimSpace(line) == "" || line[0] == '#' {
			head.WriteString(line)
		}
		if isCommand {
			commands++
			head.WriteString(refusal(t, argument.FindAllString(arguments, -1)))
		}
	}
	if *goldentest.Update {
		archive.Comment = []byte(head.String())
		if err := os.WriteFile(golden, txtar.Format(archive), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := strings.Split(string(archive.Comment), "\n")
	if diff := cmp.Diff(want, strings.Split(head.String(), "\n")); diff != "" {
		t.Errorf("errors differ from those in %s (-want +got), see -update:\n%s", golden, diff)
	}
	return commands
}

// argument is one of a command line. It may have blanks between quotes.
var argument = regexp.MustCompile(`'[^']*'|\S+`)

// variable is an argument that is a variable of the environment.
var variable = regexp.MustCompile(`^[A-Z_]+=`)

// refusal runs a command in this process and returns the error that it is refused with.
func refusal(t *testing.T, arguments []string) string {
	t.Helper()
	for variable.MatchString(arguments[0]) {
		name, value, _ := strings.Cut(arguments[0], "=")
		defer setVariable(t, name, value)()
		arguments = arguments[1:]
	}
	for i, a := range arguments {
		arguments[i] = strings.Trim(a, "'")
	}
	want := exitInput
	if strings.HasPrefix(strings.Join(arguments, " "), "run ") && !slices.Contains(arguments, "--plan") {
		want = 127 // as of a shell
	}
	stdout, stderr, code := runs(arguments...)
	if code != want {
		t.Errorf("%q: exit code %d, want %d", arguments, code, want)
	}
	message, said := strings.CutPrefix(stderr, "plimsoll: ")
	if text := strings.Split(strings.TrimSpace(message), "\n"); !said || stdout != "" || len(text) > 2 ||
		len(text) == 2 && !strings.HasPrefix(text[1], "  hint: ") {
		t.Errorf("%q: not one error and its hint:\n%s%s", arguments, stdout, stderr)
	}
	return message
}

// setVariable sets a variable of the environment and returns what sets it back.
func setVariable(t *testing.T, name, value string) (back func()) {
	t.Helper()
	before, known := os.LookupEnv(name)
	if err := os.Setenv(name, value); err != nil {
		t.Fatal(err)
	}
	return func() {
		if known {
			_ = os.Setenv(name, before)
		} else {
			_ = os.Unsetenv(name)
		}
	}
}

// TestPlanReportsItsFaults expects exit code 1, and a sentence that asks for a report, where the program is at fault.
func TestPlanReportsItsFaults(t *testing.T) {
	for _, err := range []error{
		reported(func() error { panic("no such block") }),
		reported(func() error { return &fault.Internal{Err: &fault.Input{What: "no such block"}} }),
	} {
		if code := exitCode(t.Context(), err); code != exitInternal {
			t.Errorf("%v: exit code %d, want %d", err, code, exitInternal)
		}
		for _, part := range []string{"this is a fault of plimsoll", "please report it with the command line",
			"no such block"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v: does not say %q", err, part)
			}
		}
	}
	if err := reported(func() error { return outcome(exitDoesNotFit) }); exitCode(t.Context(), err) != exitDoesNotFit {
		t.Errorf("%v is reported for a job that does not fit", err)
	}
}

// TestFalcon explains why Falcon-7B, with weights of 13 GiB, takes about 53 GiB after its first step, and 66 GiB for
// a moment during it.
func TestFalcon(t *testing.T) {
	arguments := filepath.Join(t.TempDir(), "args.json")
	if err := os.WriteFile(arguments, []byte(`{"optim": "adamw_torch"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(program(t), "plan", "--model", "falcon-7b", "--training-args", arguments, "--precision",
		"fp16", "--gpu", "A100-80GB", "--json").Output()
	var exit *exec.ExitError
	// with the Trainer's 8 sequences, whose activations are not in the question
	if !errors.As(err, &exit) || exit.ExitCode() != exitDoesNotFit {
		t.Fatal(err)
	}
	var d report.PlanDocument
	if err := json.Unmarshal(out, &d); err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Devices[0].Phases {
		if p.Name != ledger.Step || p.Iteration != ledger.First {
			continue
		}
		within := func(what string, got ledger.Bytes, least, most float64) {
			if gib := float64(got) / float64(ledger.GiB); gib < least || gib > most {
				t.Errorf("%s: %v, want %v to %v GiB", what, got, least, most)
			}
		}
		within("peak of the first step", p.PeakAllocated, 64.4, 66)
		within("end of the first step", p.EndAllocated, 51.5, 53.5)
		found := false
		for _, c := range p.Components {
			if c.Component == ledger.OptimizerTemporaries {
				found = true
				within(c.Component.Title(), c.Bytes, 12.8, 13)
				if !strings.Contains(c.Why, "torch._foreach_sqrt(exp_avg_sqs)") {
					t.Errorf("%s: %s", c.Component, c.Why)
				}
			}
		}
		if !found {
			t.Errorf("no %s among %v", ledger.OptimizerTemporaries, p.Components)
		}
		return
	}
	t.Error("no first step")
}

// TestCheckpointingAmongNames: the flag's value may be left out, or stand anywhere among the names of a model, of a GPU
// and of files.
func TestCheckpointingAmongNames(t *testing.T) {
	planned := func(arguments ...string) string {
		out, err := exec.Command(program(t), append([]string{"plan", "--json"}, arguments...)...).Output()
		var ended *exec.ExitError
		if err != nil && !(errors.As(err, &ended) && ended.ExitCode() == exitDoesNotFit) {
			t.Fatalf("%v: %v", arguments, err)
		}
		return string(out)
	}
	want := map[string]string{"full": planned("--model", "gpt2", "--gpu", "RTX-4090", "--gradient-checkpointing=full"),
		"every-3": planned("--model", "gpt2", "--gpu", "RTX-4090", "--gradient-checkpointing=every-3")}
	for _, c := range []struct{ way, arguments string }{
		{"full", "gpt2 RTX-4090 --gradient-checkpointing"},
		{"full", "gpt2 --gradient-checkpointing --gpu RTX-4090"},
		{"full", "--gradient-checkpointing gpt2 RTX-4090"},
		{"full", "gpt2 --gradient-checkpointing full RTX-4090"},
		{"every-3", "gpt2 RTX-4090 --gradient-checkpointing every-3"},
		{"every-3", "--gradient-checkpointing every-3 gpt2 RTX-4090"},
	} {
		if got := planned(strings.Fields(c.arguments)...); got != want[c.way] {
			t.Errorf("plan %s is not that of %s:\n%s", c.arguments, c.way, cmp.Diff(want[c.way], got))
		}
	}
}

// TestRankOfAdapters: an adapter without a rank has the usual one, and the plan says so. The rank may stand behind the
// flag as before.
func TestRankOfAdapters(t *testing.T) {
	for flag, want := range map[string]string{
		"--lora 16 --lora-targets all-linear": "--lora --lora-targets all-linear", "--qlora 16": "--qlora",
		"--qlora=16": "--qlora --seq-len 512", "--qlora 16 --seq-len 512": "--qlora --seq-len=512"} {
		rest := " plan qwen2.5-0.5b 4090 --micro-batch 1 --seq-len 512 --long "
		given, _, code := runs(strings.Fields(rest + flag)...)
		without, said, same := runs(strings.Fields(rest + want)...)
		if code != exitDone || same != code || !strings.Contains(said, "has a rank of 16") {
			t.Errorf("%s: %d, %d, %s", want, code, same, said)
		}
		note := "a rank of 16, as most recipes have: no rank was given; "
		squeezed := func(s string) string { return strings.Join(strings.Fields(s), " ") }
		if got := squeezed(without); !strings.Contains(got, note) ||
			strings.Replace(got, note, "", 1) != squeezed(given) {
			t.Errorf("%s plans\n%s\nand %s\n%s", flag, given, want, without)
		}
	}
}
