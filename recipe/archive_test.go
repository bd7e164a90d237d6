package recipe

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
)

// archived calls do with each file of an archive. It skips files with names
// that begin with _, which other files refer to.
func archived(t testing.TB, path string, do func(file string, text []byte)) {
	archive, err := txtar.ParseFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range archive.Files {
		if !strings.HasPrefix(file.Name, "_") {
			do(file.Name, file.Data)
		}
	}
}

// unpack writes the files of an archive to a new folder and changes to it.
func unpack(t *testing.T, path string) {
	archive, err := txtar.ParseFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for _, file := range archive.Files {
		if err := os.WriteFile(file.Name, file.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// refused compares the messages for every file of testdata/bad/KIND.txtar with
// testdata/KIND_bad.txt.
func refused[T any](t *testing.T, kind string, least int, load func(string) (*T, error)) {
	archive, err := filepath.Abs(filepath.Join("testdata", "bad", kind+".txtar"))
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join(filepath.Dir(filepath.Dir(archive)), kind+"_bad.txt")
	unpack(t, archive)
	var messages strings.Builder
	files := 0
	archived(t, archive, func(file string, _ []byte) {
		files++
		got, err := load(file)
		if err == nil {
			t.Errorf("%s was accepted: %+v", file, got)
			return
		}
		requireInput(t, err)
		fmt.Fprintf(&messages, "%s\n", filepath.ToSlash(err.Error()))
	})
	if files < least {
		t.Errorf("only %d files in %s", files, archive)
	}
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

// requireNotes compares each note with an expected part of it.
func requireNotes(t *testing.T, got []Note, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("notes: %v, want %q", got, want)
	}
	for i, note := range want {
		if !strings.Contains(got[i].String(), note) {
			t.Errorf("note %d is %q, want %q", i, got[i], note)
		}
	}
}
