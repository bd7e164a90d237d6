package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
)

// errorOf is the end of the name of a file with the error that another file of the
// archive is refused with: bf16.json.error stands behind bf16.json.
const errorOf = ".error"

// readArchive reads an archive of files that are refused, with the errors.
func readArchive(t testing.TB, path string) *txtar.Archive {
	archive, err := txtar.ParseFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// isCase tells files that are refused from their errors, and from files that other
// files refer to, whose names begin with _.
func isCase(name string) bool {
	return !strings.HasPrefix(filepath.Base(name), "_") && !strings.HasSuffix(name, errorOf)
}

// archived calls do with each file of an archive that is refused.
func archived(t testing.TB, path string, do func(file string, text []byte)) {
	for _, file := range readArchive(t, path).Files {
		if isCase(file.Name) {
			do(file.Name, file.Data)
		}
	}
}

// refused loads every file of testdata/bad/KIND.txtar, and compares the error with
// the one behind the file. An error without a file is that of a path that does not
// exist, or of a folder.
func refused[T any](t *testing.T, kind string, least int, load func(string) (*T, error)) {
	path, err := filepath.Abs(filepath.Join("testdata", "bad", kind+".txtar"))
	if err != nil {
		t.Fatal(err)
	}
	archive := readArchive(t, path)
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
		if !isError && (!isCase(name) || hasError) {
			continue
		}
		cases++
		loaded, err := load(name)
		if err == nil {
			t.Errorf("%s was accepted: %+v", name, loaded)
			continue
		}
		requireInput(t, err)
		got.Files = append(got.Files,
			txtar.File{Name: name + errorOf, Data: []byte(named.Replace(err.Error()) + "\n")})
	}
	if cases < least {
		t.Errorf("only %d files in %s", cases, path)
	}
	if *update {
		if err := os.WriteFile(path, txtar.Format(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	lines := func(a *txtar.Archive) []string { return strings.Split(string(txtar.Format(a)), "\n") }
	if diff := cmp.Diff(lines(archive), lines(got)); diff != "" {
		t.Errorf("errors differ from those in %s (-want +got), see -update:\n%s", path, diff)
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
