//go:build linux

package recipe

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
)

// processorTime returns the CPU time of this process in seconds. Other load
// affects it less than wall time.
func processorTime(t *testing.T) float64 {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

// manyKeys returns an object of 60,000 keys, close to the size limit.
func manyKeys(begin, key, end string) string {
	var b strings.Builder
	b.WriteString(begin)
	for i := range 60_000 {
		fmt.Fprintf(&b, key, i)
	}
	return b.String() + end
}

// largeDocuments are the slowest documents to read, by file name.
var largeDocuments = map[string]string{
	"keys.json":          manyKeys(`{"a":1`, `,"k%d":1`, `}`),
	"lines.json":         manyKeys("{\"a\":1", ",\n\"k%d\":1", `}`),
	"names.json":         manyKeys(`{"a":1`, `,"lr_%d":1`, `}`),
	"values.json":        manyKeys(`{"a":[1`, `,%d`, `]}`),
	"inside.json":        manyKeys(`{"lr_scheduler_kwargs":{"a":1`, `,"k%d":1`, `}}`),
	"comments.json":      "{" + strings.Repeat("/**/\n//\n", 100_000) + "}",
	"lists.json":         strings.Repeat("[", 1<<20),
	"objects.json":       strings.Repeat(`{"a":`, 200_000),
	"lines.yaml":         manyKeys("a: 1\n", "k%d: 1\n", ""),
	"quotes.yaml":        manyKeys("a: 1\n", "'k%d': \"1\"\n", ""),
	"values.yaml":        manyKeys("a:\n", "- k%d\n", ""),
	"objects.yaml":       manyKeys("a:\n", "- k%d: 1\n", ""),
	"one line.yaml":      manyKeys("{a: 1", ", k%d: 1", "}"),
	"not ASCII.yaml":     manyKeys("{a: 1", ", é%d: 1", "}"),
	"one text.yaml":      manyKeys("a: |\n", "  k%d\n", ""),
	"words.yaml":         manyKeys("a:\n", "  k%d\n", ""),
	"comments.yaml":      manyKeys("a: 1\n", "# %d\n", ""),
	"documents.yaml":     strings.Repeat("---\n", 200_000),
	"lists.yaml":         strings.Repeat("[", 1<<20),
	"flow objects.yaml":  strings.Repeat("{a: ", 200_000),
	"block lists.yaml":   strings.Repeat("- ", 1<<19),
	"keys of keys.yaml":  strings.Repeat("? ", 1<<19),
	"colons.yaml":        strings.Repeat(":", 1<<20),
	"quoted colons.yaml": strings.Repeat("\"a\":", 1<<18),
	"flags.conf":         manyKeys("swift sft", " --k%d v", "\n"),
	"keys.toml":          manyKeys("[parallelism]\n", "k%d = 1\n", ""),
	"tables.toml":        manyKeys("[parallelism]\n", "[k%d]\n", ""),
	"lists.toml":         manyKeys("[parallelism]\n", "[[k]]\na = %d\n", ""),
	"variables.conf":     strings.Repeat("A=$A$A\n", 1<<16) + "swift sft --model $A\n",
	"anchors.yaml":       manyKeys("", "k%[1]d: &%[1]d 1\n", ""),
	"aliases.yaml":       "a: &a [1]\n" + manyKeys("", "k%d: *a\n", ""),
	"bomb.yaml": func() string {
		var b strings.Builder
		b.WriteString("a0: &a0 [1]\n")
		for i := range 1000 {
			fmt.Fprintf(&b, "a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d,", i), 9))
		}
		return b.String()
	}(),
}

// TestLargeDocuments checks that the time to read or refuse a document does not grow with the square of its length. In
// short mode one kind of program reads each document, and another kind the next.
func TestLargeDocuments(t *testing.T) {
	var plain map[string]any
	begin := processorTime(t)
	if err := json.Unmarshal([]byte(largeDocuments["keys.json"]), &plain); err != nil {
		t.Fatal(err)
	}
	most := max(3, 60*(processorTime(t)-begin)) // a slow host takes longer with any reader
	for number, name := range slices.Sorted(maps.Keys(largeDocuments)) {
		text := largeDocuments[name]
		t.Run(name, func(t *testing.T) {
			if len(text) > largest {
				t.Fatalf("%d bytes, which no file may have", len(text))
			}
			parsers := map[string]func() error{
				"DeepSpeed": func() error {
					_, err := deepspeed.Parse(name, []byte(text), version.Version{})
					return err
				},
				"TrainingArguments": func() error {
					_, err := ParseTraining(name, []byte(text), Source{})
					return err
				},
				"accelerate": func() error {
					_, err := ParseAccelerate(name, []byte(text), Source{})
					return err
				},
				"PEFT": func() error { _, err := peft.Parse(name, []byte(text)); return err },
				"frameworks": func() error {
					_, err := ParseFramework(name, []byte(text), Source{})
					return err
				},
				"bitsandbytes": func() error { _, err := ParseQuantization(name, []byte(text)); return err },
			}
			for i, what := range slices.Sorted(maps.Keys(parsers)) {
				if testing.Short() && i != number%len(parsers) {
					continue
				}
				begin := processorTime(t)
				err := parsers[what]()
				var input *fault.Input
				if err != nil && !errors.As(err, &input) {
					t.Errorf("%s: %v", what, err)
				}
				took := processorTime(t) - begin
				if took > most {
					t.Errorf("%s took %.1f s, expected %.1f s at most (%v)", what, took, most, err)
				}
				if testing.Verbose() && took > .3 {
					t.Logf("%s took %.1f s", what, took)
				}
			}
		})
	}
}
