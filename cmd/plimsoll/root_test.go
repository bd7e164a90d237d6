//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMessagesAreForTerminals quotes names and keys of any length with characters that a terminal would obey.
func TestMessagesAreForTerminals(t *testing.T) {
	long := strings.Repeat("k", 900_000)
	file := filepath.Join(t.TempDir(), "ds.json")
	if err := os.WriteFile(file, []byte(`{"`+long+`": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, arguments := range [][]string{
		{"plan", "--model", "llama-3.2-1b", "--gpu", "H100-80GB", "--deepspeed", file},
		{"plan", "--model", strings.Repeat("a", 5000)},
		{"checkpoint", "verify", strings.Repeat("a", 5000)},
		{"plan", "--model", "/nowhere/\x1b[2J/config.json"},
		{"checkpoint", "convert", "\x1b[2J" + strings.Repeat("a", 5000), "out", "--from", "torch"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(arguments, &stdout, &stderr); code != exitInput {
			t.Errorf("%.100q: exit code %d, want %d", arguments, code, exitInput)
		}
		for line := range strings.Lines(stderr.String()) {
			if len(line) > 1600 || strings.Contains(line, "\x1b") {
				t.Errorf("%.100q: a line of %d bytes: %.200q", arguments, len(line), line)
			}
		}
		if stderr.Len() == 0 {
			t.Errorf("%.100q: no message", arguments)
		}
	}
}
