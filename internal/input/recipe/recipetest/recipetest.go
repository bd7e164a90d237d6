// Package recipetest has what tests of configurations share: archives of files that are refused, and notes.
package recipetest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/input/recipe/strict"
)

// errorOf is the end of the name of a file with the error that another file of the
// archive is refused with: bf16.json.error stands behind bf16.json.
const errorOf = ".error"

// ReadArchive reads an archive of files that are refused, with the errors.
func ReadArchive(t testing.TB, path string) *txtar.Archive {
	archive, err := txtar.ParseFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// IsCase tells files that are refused from their errors, and from files that other
// files refer to, whose names begin with _.
func IsCase(name string) bool {
	return !strings.HasPrefix(filepath.Base(name), "_") && !strings.HasSuffix(name, errorOf)
}

// Archived calls do with each file of an archive that is refused.
func Archived(t testing.TB, path string, do func(file string, text []byte)) {
	for _, file := range ReadArchive(t, path).Files {
		if IsCase(file.Name) {
			do(file.Name, file.Data)
		}
	}
}

// Refused loads every file of testdata/bad/KIND.txtar, and compares the error with
// the one behind the file. An error without a file is that of a path that does not
// exist, or of a folder.
func Refused[T any](t *testing.T, kind string, least int, load func(string) (*T, error)) {
	path, err := filepath.Abs(filepath.Join("testdata", "bad", kind+".txtar"))
	if err != nil {
		t.Fatal(err)
	}
	archive := ReadArchive(t, path)
	got := &txtar.Archive{Comment: archive.Comment}
	var names []string // on Windows, and in the archive
	for _, file := range archive.Files {
		names = append(names, filepath.FromSlash(file.Name), file.Name)
	}
	named := strings.NewReplacer(names...)
	t.Chdir(t.TempDir())
	for _, file := range archive.Files {
		if strings.HasSuffix(file.Name, errorOf) {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(file.Name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file.Name, file.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cases := 0
	for i, file := range archive.Files {
		name, isError := strings.CutSuffix(file.Name, errorOf)
		if !isError {
			got.Files = append(got.Files, file)
		}
		// A new file has no error behind it before -update writes one.
		hasError := i+1 < len(archive.Files) && archive.Files[i+1].Name == name+errorOf
		if !isError && (!IsCase(name) || hasError) {
			continue
		}
		cases++
		loaded, err := load(name)
		if err == nil {
			t.Errorf("%s was accepted: %+v", name, loaded)
			continue
		}
		RequireInput(t, err)
		got.Files = append(got.Files,
			txtar.File{Name: name + errorOf, Data: []byte(named.Replace(err.Error()) + "\n")})
	}
	if cases < least {
		t.Errorf("only %d files in %s", cases, path)
	}
	goldentest.Compare(t, path, string(txtar.Format(got)))
}

// RequireNotes compares each note with an expected part of it.
func RequireNotes(t *testing.T, got []strict.Note, want []string) {
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

// RequireInput fails unless err is a *fault.Input.
func RequireInput(t *testing.T, err error) {
	t.Helper()
	var bad *fault.Input
	if !errors.As(err, &bad) {
		t.Fatalf("got %v, want a *fault.Input", err)
	}
}
