//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/files/filestest"
)

// TestSpecialFilesAreRefused gives every command that reads a file something endless or without content. Each command
// must refuse it at once.
func TestSpecialFilesAreRefused(t *testing.T) {
	plimsoll, plan := program(t), []string{"plan", "--model", "gpt2", "--gpu", "H100-80GB"}
	for _, command := range [][]string{
		{"plan", "--gpu", "H100-80GB", "--model", "FILE"},
		{"plan", "--gpu", "H100-80GB", "--model", "FILE.safetensors"},
		{"plan", "--gpu", "H100-80GB", "--model", "FILE.index.json"},
		append(plan, "--deepspeed", "FILE"),
		append(plan, "--training-args", "FILE"),
		append(plan, "--accelerate", "FILE.yaml"),
		append(plan, "--adapter", "FILE"),
		append(plan, "--quantization", "FILE"),
		{"rehearse", "--steps", "0", "--model", "FILE"},
		{"run", "--plan", "FILE", "--", "true"},
		{"topology", "--fsroot", "FILE"},
		{"binding", "--fsroot", "FILE"},
		{"checkpoint", "inspect", "FILE"},
		{"checkpoint", "verify", "FILE"},
		{"checkpoint", "convert", "FILE", "out"},
		{"checkpoint", "convert", "FILE", "out", "--from", "torch"},
	} {
		for kind, make := range filestest.Special {
			t.Run(strings.Join(command, " ")+" with "+kind, func(t *testing.T) {
				t.Parallel()
				checkRefused(t, plimsoll, command, make)
			})
		}
	}
}

func checkRefused(t *testing.T, plimsoll string, command []string, make func(path string) error) {
	folder := t.TempDir()
	var arguments []string
	for _, argument := range command {
		if name, ok := strings.CutPrefix(argument, "FILE"); ok {
			argument = filepath.Join(folder, "file"+name)
			if err := make(argument); err != nil {
				t.Fatal(err)
			}
		}
		arguments = append(arguments, argument)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	started := exec.CommandContext(ctx, plimsoll, arguments...)
	var said bytes.Buffer
	started.Dir, started.Stderr = folder, &said
	err := started.Run()
	var ended *exec.ExitError
	if !errors.As(err, &ended) || ended.ExitCode() != 2 || !strings.Contains(said.String(), folder) ||
		strings.Contains(said.String(), "goroutine") {
		t.Errorf("%v: %s", err, said.String())
	}
}
