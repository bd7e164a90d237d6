package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// verbs returns all commands but cobra's own.
func verbs(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		if sub.Name() != "help" && sub.Name() != "completion" {
			all = append(all, verbs(sub)...)
		}
	}
	return all
}

// runs runs the program in this process.
func runs(arguments ...string) (stdout, stderr string, code int) {
	var out, errors bytes.Buffer
	code = run(arguments, &out, &errors)
	return out.String(), errors.String(), code
}

// TestVerbsCallARunFunction: RunE only says which function runs the verb, and with which of its flags.
func TestVerbsCallARunFunction(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range files {
		positions := token.NewFileSet()
		file, err := parser.ParseFile(positions, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			field, isField := n.(*ast.KeyValueExpr)
			if !isField {
				return true
			}
			if key, isName := field.Key.(*ast.Ident); !isName || key.Name != "RunE" {
				return true
			}
			found++
			body := field.Value.(*ast.FuncLit).Body
			calls := false
			ast.Inspect(body, func(n ast.Node) bool {
				switch called := n.(type) {
				case *ast.Ident:
					calls = calls || strings.HasPrefix(called.Name, "run")
				case *ast.SelectorExpr:
					calls = calls || called.Sel.Name == "Help"
				}
				return true
			})
			if len(body.List) != 1 || !calls {
				t.Errorf("%v: RunE does more than to call a run function", positions.Position(field.Pos()))
			}
			return true
		})
	}
	if want := len(verbs(rootCommand())) + 1; found != want { // and help, which cobra adds later
		t.Errorf("%d RunE were found, want %d", found, want)
	}
}

// TestHelpFitsATerminal of 80 columns.
func TestHelpFitsATerminal(t *testing.T) {
	for _, c := range verbs(rootCommand()) {
		arguments := append(strings.Fields(c.CommandPath())[1:], "--help")
		help, _, code := runs(arguments...)
		if code != exitDone {
			t.Errorf("%q: exit code %d", arguments, code)
		}
		for line := range strings.Lines(help) {
			line = strings.TrimSuffix(line, "\n")
			if n := utf8.RuneCountInString(line); n > 80 || strings.HasSuffix(line, " ") {
				t.Errorf("%q: a line of %d columns, or with blanks at its end: %q", arguments, n, line)
			}
		}
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if !regexp.MustCompile(`(?m)^ .*--` + f.Name + `\b.*(  \S|\n {20,}\S)`).MatchString(help) {
				t.Errorf("%q: the help does not show --%s", arguments, f.Name)
			}
		})
	}
}

// unknown is no value of any flag.
const unknown = "no-such-value"

// reaching are the arguments with which a verb checks its flags with lists of values. Those of a flag, "VERB FLAG", go
// before those of the verb.
var reaching = map[string]string{
	"bench":              "--workers 99999",
	"bench peer":         "--optimizer lion",
	"binding":            "--fsroot ../../examples/machines/two-socket.txtar",
	"checkpoint convert": "../../examples/checkpoints OUT",
	"explain":            "--model gpt2 ../../examples/failures/killed.log",
	"explain model":      "../../examples/failures/killed.log",
	"explain adapter-precision": "--model llama-2-7b --adapter ../../examples/adapter_config.json --seq-len 64 " +
		"../../examples/failures/killed.log",
	"explain pipeline-schedule": "--model gpt2 --seq-len 64 --gpus 2 --pipeline-parallel 2 --grad-accum 4 " +
		"../../examples/failures/killed.log",
	"explain zero-offload":       "--model gpt2 --seq-len 64 --zero 3 ../../examples/failures/killed.log",
	"export":                     "../../examples/recordings/run.jsonl",
	"fit":                        "--model gpt2 --seq-len 64",
	"fit adapter-precision":      "--model llama-2-7b --adapter ../../examples/adapter_config.json --seq-len 64",
	"fit master":                 "--model gpt2 --seq-len 64 --gpu H100-80GB",
	"fit offload-moments":        "--model gpt2 --seq-len 64 --gpu H100-80GB --precision bf16 --master split",
	"fit gpu":                    "--model gpt2 --seq-len 64 --precision none",
	"fit model":                  "--torch none",
	"fit pipeline-schedule":      "--model gpt2 --seq-len 64 --gpus 2 --pipeline-parallel 2 --grad-accum 4 --gpu T4",
	"models":                     "--gpus",
	"plan":                       "--model gpt2 --seq-len 64",
	"plan pipeline-schedule":     "--model gpt2 --seq-len 64 --gpus 2 --pipeline-parallel 2 --grad-accum 4",
	"roads pipeline-schedule":    "--model gpt2 --seq-len 64 --gpus 2 --pipeline-parallel 2 --grad-accum 4",
	"fit zero-offload":           "--model gpt2 --seq-len 64 --gpu H100-80GB --zero 3",
	"plan zero-offload":          "--model gpt2 --seq-len 64 --zero 3",
	"roads zero-offload":         "--model gpt2 --seq-len 64 --zero 3",
	"plan adapter-precision":     "--model llama-2-7b --adapter ../../examples/adapter_config.json --seq-len 64",
	"plan explain":               "--model gpt2 --seq-len 64 --gpu H100-80GB",
	"plan model":                 "--torch none",
	"roads":                      "--model gpt2 --seq-len 64",
	"roads adapter-precision":    "--model llama-2-7b --adapter ../../examples/adapter_config.json --seq-len 64",
	"roads model":                "--torch none",
	"rehearse":                   "--model ../../examples/config.json --steps 0",
	"rehearse embedding-moments": "--model ../../examples/config.json --steps 0 --moments int8",
	"rehearse model":             "--steps 0 --workers 99999",
	"rehearse offload-mode":      "--model ../../examples/config.json --offload states --steps 0",
	"run":                        "--dry-run -- true",
	"serve":                      "--socket private/socket --reserve 99999",
	"serve reserve":              "--metrics nowhere",
	"tune":                       "--ranks 99999",
	"topology":                   "--fsroot ../../examples/machines/two-socket.txtar",
}

// TestCompletionsAreAccepted holds what the shell completes against what the program accepts: no completion is refused
// as an unknown value is.
func TestCompletionsAreAccepted(t *testing.T) {
	completed := 0
	for _, c := range verbs(rootCommand()) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if _, completes := c.GetFlagCompletionFunc(f.Name); !completes {
				return
			}
			completed++
			verb, _ := strings.CutPrefix(c.CommandPath(), "plimsoll ")
			t.Run(verb+" "+f.Name, func(t *testing.T) { checkCompletions(t, verb, f.Name) })
		})
	}
	if completed < 24 {
		t.Errorf("only %d flags are completed", completed)
	}
}

func checkCompletions(t *testing.T, verb, flag string) {
	with := func(value string) (message string, code int) {
		arguments := reaching[verb+" "+flag]
		if arguments == "" {
			arguments = reaching[verb]
		}
		fields := strings.Fields(arguments)
		if i := slices.Index(fields, "OUT"); i >= 0 {
			fields[i] = filepath.Join(t.TempDir(), "out")
		}
		_, stderr, code := runs(slices.Concat(strings.Fields(verb), []string{"--" + flag + "=" + value}, fields)...)
		message, _, _ = strings.Cut(stderr, "\n")
		return message, code
	}
	refusal, code := with(unknown)
	if code != exitInput || !strings.Contains(refusal, unknown) {
		t.Fatalf("%s is not refused: exit code %d, %s", unknown, code, refusal)
	}
	before := []string{}
	if flag == "explain" { // the components are those of a job
		before = strings.Fields(reaching[verb+" "+flag])
	}
	out, _, _ := runs(slices.Concat([]string{"__complete"}, strings.Fields(verb), before, []string{"--" + flag, ""})...)
	values := strings.Split(strings.TrimSpace(out), "\n")
	values = values[:len(values)-1] // the last line is for the shell
	if len(values) == 0 {
		t.Fatal("the shell completes nothing")
	}
	most := 30 // other tests plan each of the hundreds of models
	if testing.Short() {
		most = 4
	}
	stride := len(values)/most + 1
	for i := len(verb) % stride; i < len(values); i += stride {
		value := values[i]
		if message, _ := with(value); message == strings.ReplaceAll(refusal, unknown, value) {
			t.Errorf("%s is completed and refused: %s", value, message)
		}
	}
}

// TestFormerNames: flags go by their former names, too, and the help does not show these.
func TestFormerNames(t *testing.T) {
	planned := func(flags ...string) string {
		out, stderr, code := runs(append([]string{"plan", "--model", "llama-3.2-1b", "--deepspeed",
			"../../examples/zero2_offload.json", "--gpus", "2", "--seq-len", "64"}, flags...)...)
		if code != exitDone {
			t.Errorf("%q: exit code %d: %s", flags, code, stderr)
		}
		return out
	}
	for former, value := range map[string]string{"engine-version": "0.15.0", "modules": "litgpt"} {
		present := formerNames[former]
		got, want := planned("--"+former, value), planned("--"+present, value)
		if got != want || got == planned() {
			t.Errorf("--%s is not --%s:\n%s\nwant\n%s", former, present, got, want)
		}
	}
	help, _, _ := runs("plan", "--help")
	for former, present := range formerNames {
		if strings.Contains(help, "--"+former) || !strings.Contains(help, "--"+present) {
			t.Errorf("the help shows --%s, or not --%s", former, present)
		}
	}
}
