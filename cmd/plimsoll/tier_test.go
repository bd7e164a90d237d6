//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/state/tier"
)

// TestTiersAreRefused where they cannot be what was asked for, before anything is allocated.
func TestTiersAreRefused(t *testing.T) {
	folder := t.TempDir()
	release, err := tier.Lock([]string{folder})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const (
		small  = "rehearse --model ../../examples/config.json --steps 1"
		locked = "another service or rehearsal has its tier"
	)
	socket, free := filepath.Join(t.TempDir(), "socket"), " --tier "+t.TempDir()
	for line, want := range map[string]string{
		small + " --memory 1GiB":                                   "there is no --tier",
		small + " --tier " + folder + "/none":                      "does not exist",
		small + " --tier " + file:                                  "is a file, expected a folder",
		small + " --tier " + folder + ",":                          "--tier has an empty path",
		small + " --tier " + folder:                                locked,
		small + free + " --memory 1MiB":                            "--memory 1.00 MiB is too little",
		small + free + " --overlap forward --forward-ms 9":         "--tier is given, and --overlap forward",
		small + free + " --offload states":                         "--offload states is given, and --tier",
		"serve --socket " + socket + " --tier " + folder:           locked,
		"serve --socket " + socket + " --tier " + folder + "/none": "does not exist",
		"serve --socket " + socket + " --memory 1GiB":              "there is no --tier",
	} {
		_, stderr, code := runs(strings.Fields(line)...)
		if code != exitInput || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d and %q, want %q", line, code, stderr, want)
		}
	}
}
