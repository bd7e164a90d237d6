//go:build unix

package files_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"plimsoll/internal/base/files"
)

// TestTakeAccess: an edited copy may be read by those who may read the original.
func TestTakeAccess(t *testing.T) {
	original, name := filepath.Join(t.TempDir(), "original"), filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(original, nil, 0o640); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		if err := os.Chown(original, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := files.TakeAccess(file, original); err != nil {
		t.Fatal(err)
	}
	want, err := os.Stat(original)
	if err != nil {
		t.Fatal(err)
	}
	got, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if got.Mode() != want.Mode() || !sameOwner(got, want) {
		t.Errorf("mode %v, owner %+v; want %v, %+v", got.Mode(), got.Sys(), want.Mode(), want.Sys())
	}
	if err := files.TakeAccess(file, filepath.Join(t.TempDir(), "gone")); err == nil {
		t.Error("access was taken from a file that does not exist")
	}
}

func sameOwner(a, b fs.FileInfo) bool {
	x, y := a.Sys().(*syscall.Stat_t), b.Sys().(*syscall.Stat_t)
	return x.Uid == y.Uid && x.Gid == y.Gid
}
