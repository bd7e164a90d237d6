package recipe

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/fault"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite testdata/bad.txt")

// ranks is the number of ranks for the files of testdata/bad.
const ranks = 8

// TestBad compares the message for every file of testdata/bad, and for paths
// without a file, with testdata/bad.txt.
func TestBad(t *testing.T) {
	paths, err := filepath.Glob("testdata/bad/*.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) < 40 {
		t.Fatalf("only %d files in testdata/bad", len(paths))
	}
	var messages strings.Builder
	for _, path := range append([]string{"testdata/absent.json", "testdata/bad"}, paths...) {
		d, err := LoadDeepSpeed(path)
		if err == nil {
			_, err = d.ResolveBatch(ranks)
		}
		requireInput(t, err)
		fmt.Fprintf(&messages, "%s\n", filepath.ToSlash(err.Error()))
	}
	const golden = "testdata/bad.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(messages.String()), 0o644); err != nil {
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

// requireInput fails unless err is a *fault.Input.
func requireInput(t *testing.T, err error) {
	t.Helper()
	var bad *fault.Input
	if !errors.As(err, &bad) {
		t.Fatalf("got %v, want a *fault.Input", err)
	}
}
