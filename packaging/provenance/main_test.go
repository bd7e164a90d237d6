package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestStatement: every file is a subject with its digest, and a folder without files is refused.
func TestStatement(t *testing.T) {
	folder := t.TempDir()
	if err := write(&bytes.Buffer{}, folder, "1", "c0ffee", "https://example.org"); err == nil {
		t.Error("an empty folder has a provenance")
	}
	if err := os.WriteFile(filepath.Join(folder, "a.tar.gz"), []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := write(&out, folder, "1", "c0ffee", "https://example.org"); err != nil {
		t.Fatal(err)
	}
	var s statement
	if err := json.Unmarshal(out.Bytes(), &s); err != nil {
		t.Fatal(err)
	}
	const sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" // of FIPS 180-2's example
	if len(s.Subject) != 1 || s.Subject[0].Name != "a.tar.gz" || s.Subject[0].Digest["sha256"] != sum {
		t.Errorf("the subjects are %v", s.Subject)
	}
	if got := s.Predicate.BuildDefinition.ResolvedDependencies[0].Digest["gitCommit"]; got != "c0ffee" {
		t.Errorf("the commit is %q", got)
	}
}
