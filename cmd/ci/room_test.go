package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestRoom: what Go has not used for a while goes where the disk is short, and the build says what is missing.
func TestRoom(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	old := cached(t, cache, "00/old-d", 7*time.Hour)
	fresh := cached(t, cache, "ff/fresh-d", 5*time.Hour)
	notice := cached(t, cache, "README", 100*time.Hour)

	if out, err := room(t, cache, "0"); err != nil || out != "" || missing(old) {
		t.Fatalf("with room: %v, %q, the old file is missing: %t", err, out, missing(old))
	}
	out, err := room(t, cache, "1000000000")
	if err == nil || !strings.Contains(out, "but the build needs 1000000000") {
		t.Errorf("without room: %v, %q", err, out)
	}
	if !missing(old) || missing(fresh) || missing(notice) {
		t.Errorf("missing: the old file %t, the fresh one %t, the notice %t; expected true, false, false",
			missing(old), missing(fresh), missing(notice))
	}
}

func room(t *testing.T, cache, size string) (string, error) {
	t.Helper()
	command := exec.Command("../../scripts/_room", size)
	command.Env = append(os.Environ(), "GOCACHE="+cache)
	out, err := command.CombinedOutput()
	return string(out), err
}

// cached writes a file of the cache that was used some time ago.
func cached(t *testing.T, cache, name string, ago time.Duration) string {
	t.Helper()
	path := filepath.Join(cache, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	used := time.Now().Add(-ago)
	if err := os.Chtimes(path, used, used); err != nil {
		t.Fatal(err)
	}
	return path
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return os.IsNotExist(err)
}
