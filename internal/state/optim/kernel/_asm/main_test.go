package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// TestGeneratedKernels checks that the checked-in kernels, and their checksums, equal the output of the generator.
func TestGeneratedKernels(t *testing.T) {
	dir := t.TempDir()
	command := exec.Command("go", "run", ".", "-out", filepath.Join(dir, "kernel_amd64.s"),
		"-dispatch", filepath.Join(dir, "kernel_amd64.go"))
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	all := append(slices.Clone(outputs), sums)
	written, err := matching(dir, all)
	if err != nil {
		t.Fatal(err)
	}
	if checkedIn, err := matching("..", all); err != nil || !slices.Equal(written, checkedIn) {
		t.Fatalf("the generator writes %v, and %v are checked in (%v): run make generate", written, checkedIn, err)
	}
	for _, name := range written {
		got, want := content(t, "..", name), content(t, dir, name)
		if !slices.Equal(got, want) {
			t.Errorf("%s is not what the generator writes: run make generate", name)
		}
		if len(got) > 512<<10 {
			t.Errorf("%s has %d bytes, expected 512 KiB at most", name, len(got))
		}
	}
}

func content(t *testing.T, folder, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}
