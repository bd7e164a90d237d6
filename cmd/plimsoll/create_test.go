//go:build linux

package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/fault"
)

// TestFullDiskKeepsTheOldFile: what cannot be written in full leaves the file as it was, and nothing beside it.
func TestFullDiskKeepsTheOldFile(t *testing.T) {
	folder := t.TempDir()
	plan := filepath.Join(folder, "plan.json")
	if err := os.WriteFile(plan, []byte("old"), 0o640); err != nil {
		t.Fatal(err)
	}
	full := func(w io.Writer) error {
		if _, err := w.Write([]byte("half of it")); err != nil {
			return err
		}
		return unix.ENOSPC
	}
	err := writeFile("--out", plan, full)
	if !errors.As(err, new(*fault.Input)) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v, expected a refusal", err)
	}
	checkOnly(t, folder, plan, "old", 0o640)
	if err := writeFile("--out", plan, writesNew); err != nil {
		t.Error(err)
	}
	checkOnly(t, folder, plan, "new", 0o640)
}

// TestWritesThroughLinks: the file that a link names is written, and the link stays.
func TestWritesThroughLinks(t *testing.T) {
	folder := t.TempDir()
	link, target := filepath.Join(folder, "link"), filepath.Join(folder, "target")
	if err := errors.Join(os.WriteFile(target, nil, 0o600), os.Symlink(target, link)); err != nil {
		t.Fatal(err)
	}
	if err := writeFile("--out", link, writesNew); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(target)
	named, notALink := os.Readlink(link)
	if string(text) != "new" || named != target || errors.Join(err, notALink) != nil {
		t.Errorf("%q, a link to %q, %v", text, named, errors.Join(err, notALink))
	}
}

func writesNew(w io.Writer) error {
	_, err := io.WriteString(w, "new")
	return err
}

// checkOnly checks that a folder has one file, with a content and a mode.
func checkOnly(t *testing.T, folder, path, want string, mode os.FileMode) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 {
		t.Errorf("%d files, %v", len(entries), err)
	}
	text, err := os.ReadFile(path)
	info, err2 := os.Stat(path)
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	if string(text) != want || info.Mode().Perm() != mode {
		t.Errorf("%q with mode %v", text, info.Mode())
	}
}
