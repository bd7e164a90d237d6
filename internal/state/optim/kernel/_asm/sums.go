package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// What the generator reads and writes, below the folder of package kernel.
var (
	inputs  = []string{"_asm/*.go", "_asm/go.mod", "_asm/go.sum", "abi/*.go"}
	outputs = []string{"kernel*_amd64.s", "kernel_amd64.go"}
)

// sums is the file of checksums, in the form of sha256sum. With it, a test of package kernel finds in no time that a
// source has changed and the kernels have not. Only a run of the generator writes it.
const sums = "kernel_amd64.sha256"

// writeSums writes the checksums of all inputs, in the folder above this one, and of the outputs in a folder.
func writeSums(written string) error {
	var text strings.Builder
	for _, of := range []struct {
		folder   string
		patterns []string
	}{{"..", inputs}, {written, outputs}} {
		names, err := matching(of.folder, of.patterns)
		if err != nil {
			return err
		}
		for _, name := range names {
			content, err := os.ReadFile(filepath.Join(of.folder, name))
			if err != nil {
				return err
			}
			fmt.Fprintf(&text, "%x  %s\n", sha256.Sum256(content), name)
		}
	}
	return os.WriteFile(filepath.Join(written, sums), []byte(text.String()), 0o644)
}

// matching returns the names of the files in a folder that match patterns. Tests are none of them.
func matching(folder string, patterns []string) ([]string, error) {
	var names []string
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(folder, pattern))
		if err != nil {
			return nil, err
		}
		for _, path := range found {
			name, err := filepath.Rel(folder, path)
			if err != nil {
				return nil, err
			}
			names = append(names, name)
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasSuffix(name, "_test.go") }), nil
}
