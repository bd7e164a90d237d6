// Package goldentest compares what tests make with files that they have made before.
package goldentest

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Update says that files are to be written anew.
var Update = flag.Bool("update", false, "write anew what tests compare their results with")

// Compare compares a text with a file or, with -update, writes the file.
func Compare(t testing.TB, path, got string) {
	t.Helper()
	if *Update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("differs from %s (-want +got), see -update:\n%s", path, diff)
	}
}
