//go:build linux

package files

import (
	"os"
	"strings"
	"testing"
)

// TestStreamsAreRefused: a read of the kernel's log would wait for its next line.
func TestStreamsAreRefused(t *testing.T) {
	found := 0
	for _, path := range streams {
		if file, err := os.Open(path); err != nil {
			continue
		} else {
			file.Close()
		}
		found++
		if file, _, err := Open(path); err == nil || !strings.Contains(err.Error(), "a stream without an end") {
			t.Errorf("%s: %v, %v", path, file, err)
		}
	}
	if found == 0 {
		t.Skip("this process may open no stream of the kernel")
	}
}
