//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/recipe/strict"
)

// replacements are values that hardly any key takes, or takes for something else.
var replacements = []any{nil, true, "", strings.Repeat("x", 100_000), -1, 0, 1, 3, 1e308, []any{}, []any{3},
	map[string]any{}}

// limits of one plan of a small model.
const (
	mostSeconds = 5.0
	mostMemory  = 500 << 20
)

// littleLlama is a model whose plan takes a few milliseconds.
const littleLlama = `{"model_type": "llama", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256,
	"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}`

// TestReplacedModels plans every model of package model with each value of its config.json replaced. Every plan must
// be made or refused.
func TestReplacedModels(t *testing.T) {
	var list []string
	for _, folder := range []string{"multimodal", "ranged-multimodal", "remote", "variants"} {
		found, err := filepath.Glob(filepath.Join("../../internal/input/model/testdata", folder, "*.json"))
		if err != nil || len(found) == 0 {
			t.Fatal(folder, err)
		}
		list = append(list, found...)
	}
	replaced(t, list, 97, "plan", "--gpus", "8", "--gpu", "H100-80GB", "--seq-len", "256", "--model")
}

// TestReplacedRecipes does so with configurations of DeepSpeed and of others.
func TestReplacedRecipes(t *testing.T) {
	list, err := filepath.Glob("../../internal/input/recipe/deepspeed/testdata/good/*.json")
	if err != nil || len(list) == 0 {
		t.Fatal(err)
	}
	examples := []string{"adapter_config.json", "llama_factory.yaml", "training_args.json"}
	for _, name := range examples {
		list = append(list, filepath.Join("../../examples", name))
	}
	replaced(t, list, 23, planOfConfig(t)...)
}

// TestReplacedPublicConfigs does so with configurations of public projects.
func TestReplacedPublicConfigs(t *testing.T) {
	var list []string
	for _, c := range filestest.PublicConfigs(t, "../../../shared/data/configs") {
		if kind := filepath.Ext(c.Path); kind == ".json" || kind == ".yaml" || kind == ".yml" {
			list = append(list, c.Path)
		}
	}
	replaced(t, list, 397, planOfConfig(t)...)
}

// planOfConfig is a command line that plans a little model; the configuration comes last.
func planOfConfig(t *testing.T) []string {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	model := filestest.InNewFolder(t)("config.json", littleLlama)
	return []string{"plan", "--gpus", "8", "--gpu", "H100-80GB", "--seq-len", "256", "--model", model, "--config"}
}

// replaced runs the command for every file, with each value of the file replaced by each replacement. In short mode it
// runs every stride-th of these.
func replaced(t *testing.T, list []string, stride int, arguments ...string) {
	folder, tried, ends := t.TempDir(), 0, newEndings()
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(ends.left + mostMemory/2))
	for _, path := range list {
		root := decoded(t, path)
		name := filepath.Join(folder, filepath.Base(path))
		command := parsedCommand(t, append(arguments, name))
		eachPlace(root, nil, func(place []string) {
			for _, value := range replacements {
				if tried++; testing.Short() && tried%stride != 0 {
					continue
				}
				text, err := json.Marshal(with(root, place, value))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(name, text, 0o600); err != nil {
					t.Fatal(err)
				}
				change := fmt.Sprintf("%s with %s = %.40v", path, strings.Join(place, "."), value)
				ends.check(t, change, command, exitDone, exitInput, exitDoesNotFit)
			}
		})
	}
	t.Logf("%d files: %v", len(list), ends)
	if ends.codes[exitDone]+ends.codes[exitDoesNotFit] == 0 || ends.codes[exitInput] == 0 {
		t.Error("not both plans and refusals")
	}
}

// parsedCommand returns the command of a command line, whose RunE can be called again and again. Cobra keeps something
// of every command, so a new one for every change would fill the memory.
func parsedCommand(t *testing.T, arguments []string) *cobra.Command {
	t.Helper()
	root := rootCommand()
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	root.SetContext(t.Context())
	command, rest, err := root.Find(arguments)
	if err == nil {
		err = command.ParseFlags(rest)
	}
	if err == nil {
		err = command.ValidateArgs(command.Flags().Args())
	}
	if err != nil {
		t.Fatal(err)
	}
	command.SetContext(t.Context())
	return command
}

// endings are how commands have ended: how often with each exit code, and the most that one of them took.
type endings struct {
	codes   map[int]int
	seconds float64 // of the processor
	memory  int64
	left    int64 // memory that is not theirs: earlier tests have left it, and cobra keeps something of every command
}

func newEndings() *endings {
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return &endings{codes: map[int]int{}, left: int64(memory.HeapAlloc)}
}

func (e *endings) String() string {
	return fmt.Sprintf("how often each exit code: %v; one took at most %.1f s and %d MiB", e.codes, e.seconds,
		e.memory>>20)
}

// check runs a command, which must end with one of some exit codes, soon and in little memory.
func (e *endings) check(t *testing.T, change string, command *cobra.Command, documented ...int) (code int) {
	t.Helper()
	if peakMemory(t)-e.left > mostMemory/2 {
		debug.FreeOSMemory() // what earlier commands have left is not this one's
	}
	resetPeak(t)
	before := usedSeconds(t)
	said := runsParsed(command)
	code = exitCode(t.Context(), said)
	if !slices.Contains(documented, code) {
		t.Errorf("%s: exit code %d\n%.2000v", change, code, said)
	}
	seconds, peak := usedSeconds(t)-before, peakMemory(t)-e.left
	if seconds > mostSeconds {
		t.Errorf("%s: %.1f s", change, seconds)
	}
	if peak > mostMemory {
		t.Errorf("%s: %d MiB", change, peak>>20)
	}
	e.codes[code]++
	e.seconds, e.memory = max(e.seconds, seconds), max(e.memory, peak)
	return code
}

// runsParsed runs a command. A panic, which would end the program, is an error that is no refusal.
func runsParsed(command *cobra.Command) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return command.RunE(command, command.Flags().Args())
}

// decoded returns the document of a JSON or YAML file, or nil where the file has none, such as a template.
func decoded(t *testing.T, path string) any {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	parse := strict.Parse
	if strings.HasSuffix(path, ".json") {
		parse = strict.ParseCommented
	}
	d, err := parse(path, text)
	if err != nil {
		t.Logf("left out: %v", err)
		return nil
	}
	return plain(d.Root)
}

// plain returns a value as encoding/json writes it.
func plain(v *strict.Value) any {
	switch v.Kind {
	case '{':
		object := map[string]any{}
		for _, m := range v.Members {
			object[m.Name] = plain(m.Value)
		}
		return object
	case '[':
		list := []any{}
		for _, element := range v.Elements {
			list = append(list, plain(element))
		}
		return list
	case '"':
		return v.Text
	case 'n':
		return nil
	}
	if json.Valid([]byte(v.Text)) {
		return json.RawMessage(v.Text)
	}
	return v.Text // a number of YAML only
}

// eachPlace calls do with the place of every value in a document: keys and indices from the root on.
func eachPlace(v any, above []string, do func([]string)) {
	below := func(name string, inner any) {
		place := append(slices.Clone(above), name)
		do(place)
		eachPlace(inner, place, do)
	}
	switch v := v.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			below(key, v[key])
		}
	case []any:
		if len(v) > 0 { // elements of a list are alike
			below("0", v[0])
		}
	}
}

// with returns a copy of a document with another value at a place.
func with(v any, place []string, value any) any {
	if len(place) == 0 {
		return value
	}
	switch v := v.(type) {
	case map[string]any:
		v = maps.Clone(v)
		v[place[0]] = with(v[place[0]], place[1:], value)
		return v
	case []any:
		v = slices.Clone(v)
		v[0] = with(v[0], place[1:], value)
		return v
	}
	panic("the place is in no list and no object")
}

// usedSeconds is the processor time of this process, which other programs do not change.
func usedSeconds(t *testing.T) float64 {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

// resetPeak makes the peak of this process' resident memory what is resident now.
func resetPeak(t *testing.T) {
	t.Helper()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}

// peakMemory is the peak of this process' resident memory in bytes.
func peakMemory(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if found == nil {
		t.Fatalf("no peak in\n%s", status)
	}
	kib, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}
