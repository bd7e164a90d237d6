package foreign

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/state/checkpoint"
)

// TestUniversalFolderOfANameAlone: each parameter has a folder of its name, so no name may lead out of the checkpoint.
func TestUniversalFolderOfANameAlone(t *testing.T) {
	c, err := checkpoint.Open(filepath.Join("../../../..", "examples", "checkpoints"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"..", ".", "../a", "a/b"} {
		u := &universalWriter{exporter: newExporter(c, io.Discard, nil), folder: t.TempDir()}
		u.parameters[0].Name = name
		err := u.write(t.Context())
		if err == nil || !strings.Contains(err.Error(), "cannot name a folder") {
			t.Errorf("%q: %v", name, err)
		}
		if left, err := os.ReadDir(u.folder); err != nil || len(left) > 0 {
			t.Errorf("%q: %v is there: %v", name, left, err)
		}
	}
}
