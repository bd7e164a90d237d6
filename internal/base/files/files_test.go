package files_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/files/filestest"
)

// says is the message for each kind of file that is no document.
var says = map[string]string{
	"a pipe": "it is a pipe", "a link": "it is a pipe", "/dev/zero": "it is a device", "/dev/null": "it is a device",
	"a directory": "it is a directory", "a loop": "too many levels of symbolic links", "a socket": "it is a socket",
	"a sparse file": "it has more than 1000 bytes",
}

func TestOnlyRegularFilesAreRead(t *testing.T) {
	for kind, make := range filestest.Special {
		path := filepath.Join(t.TempDir(), "file")
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		_, err := files.Read(path, 1000)
		var failed *fs.PathError
		if !errors.As(err, &failed) || failed.Path != path || says[kind] == "" ||
			!strings.Contains(failed.Err.Error(), says[kind]) {
			t.Errorf("%s: %v, want %q", kind, err, says[kind])
		}
		if text, err := files.ReadKernel(path); err == nil {
			t.Errorf("%s: %d bytes were read", kind, len(text))
		}
		if file, _, err := files.OpenFile(path, os.O_WRONLY, 0); err == nil && kind != "a sparse file" {
			file.Close()
			t.Errorf("%s was opened for writing", kind)
		}
	}
	if _, err := files.Read(filepath.Join(t.TempDir(), "missing"), 1000); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestReadKernel(t *testing.T) {
	for _, path := range []string{"/proc/self/status", "/proc/self/maps"} {
		if text, err := files.ReadKernel(path); err != nil || len(text) < 1000 {
			t.Errorf("%s: %d bytes, %v", path, len(text), err)
		}
	}
}

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "document")
	for _, size := range []int{0, 1, 4096, 100_000} {
		want := strings.Repeat("x", size)
		if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		if text, err := files.Read(path, int64(size)); err != nil || string(text) != want {
			t.Errorf("%d bytes of %d, %v", len(text), size, err)
		}
		var tooLarge *files.TooLarge
		if _, err := files.Read(path, int64(size)-1); !errors.As(err, &tooLarge) || tooLarge.Limit != int64(size)-1 {
			t.Errorf("one byte more than the limit: %v", err)
		}
	}
}

// TestReadOpenOfAFileThatGrows checks that the limit holds for the bytes read,
// not only for the initial size.
func TestReadOpenOfAFileThatGrows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "document")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file, info, err := files.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := os.WriteFile(path, make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	var tooLarge *files.TooLarge
	if _, err := files.ReadOpen(file, info, 1000); !errors.As(err, &tooLarge) {
		t.Errorf("5000 bytes, of which 1000 are allowed: %v", err)
	}
	if _, err := file.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	if text, err := files.ReadOpen(file, info, 5000); err != nil || len(text) != 5000 {
		t.Errorf("%d bytes of 5000, %v", len(text), err)
	}
}
