package files

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// TestOneWording: a common cause has the words of Linux on every system.
func TestOneWording(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	_, err := Read(missing, 1)
	if !errors.Is(err, fs.ErrNotExist) || !strings.HasSuffix(err.Error(), ": no such file or directory") {
		t.Errorf("a missing file: %v", err)
	}
	err = inOneWording(&fs.PathError{Op: "open", Path: "secret", Err: otherWords{fs.ErrPermission}})
	if !errors.Is(err, fs.ErrPermission) || err.Error() != "open secret: permission denied" {
		t.Errorf("a file without permission: %v", err)
	}
	if other := errors.New("disk full"); inOneWording(other) != other {
		t.Error("another error has changed")
	}
}

// otherWords is an error as another system words it.
type otherWords struct{ cause error }

func (otherWords) Error() string   { return "Access is denied." }
func (o otherWords) Unwrap() error { return o.cause }
