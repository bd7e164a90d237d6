//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/foreign"
)

// TestConvertToAFullDisk expects the exit code for "does not fit".
func TestConvertToAFullDisk(t *testing.T) {
	directory := t.TempDir()
	if err := unix.Mount("tmpfs", directory, "tmpfs", 0, "size=16k"); err != nil {
		if os.Getenv("CI") == "true" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skip("no file system can be mounted here: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(directory, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	command := exec.Command(program(t), "checkpoint", "convert", filepath.Join("..", "..", "examples", "checkpoints"),
		directory)
	out, _ := command.CombinedOutput()
	if command.ProcessState.ExitCode() != exitDoesNotFit ||
		!strings.Contains(string(out), directory+": the checkpoint takes") {
		t.Errorf("%v\n%s", command.ProcessState, out)
	}
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("%v, %v are left", left, err)
	}
}

// TestConversionIsKilled kills conversions at instants that come later and later. OUT is not there then, or it is
// complete.
func TestConversionIsKilled(t *testing.T) {
	t.Parallel()
	binary, examples := program(t), filepath.Join("..", "..", "examples")
	megatron, zero := filepath.Join(examples, "megatron"), filepath.Join(examples, "deepspeed")
	read := map[string]func(context.Context, string, func(int64)) (*checkpoint.Checkpoint, error){
		"megatron": foreign.OpenMegatron, "deepspeed": foreign.OpenDeepSpeed, "dcp": foreign.OpenDistributed,
		"zero": foreign.OpenDeepSpeed,
		"torch": func(ctx context.Context, path string, progress func(int64)) (*checkpoint.Checkpoint, error) {
			return foreign.OpenTorch(ctx, path, foreign.BesideTorch{}, progress)
		},
	}
	for format, open := range read {
		arguments := []string{"checkpoint", "convert", megatron, "", "--from", "megatron", "--to", format}
		switch format {
		case "megatron":
			arguments = append(arguments, "--like", megatron)
		case "zero": // of ZeRO's own files
			arguments = []string{
				"checkpoint", "convert", zero, "", "--from", "deepspeed", "--to", "deepspeed", "--like", zero,
			}
		}
		complete, killed := 0, 0
		for wait := time.Duration(0); complete == 0; wait += time.Millisecond + wait/3 {
			directory := t.TempDir()
			arguments[3] = filepath.Join(directory, "out")
			command := exec.Command(binary, arguments...)
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait) // the first is killed before it can be complete
			_ = command.Process.Kill()
			switch err := command.Wait(); {
			case err == nil:
				complete++
			case command.ProcessState.ExitCode() == -1: // by the signal
				killed++
			default:
				t.Fatalf("%v: %v", command, err)
			}
			path := arguments[3]
			if format != "dcp" && format != "torch" { // names itself in the end
				found, _ := filepath.Glob(filepath.Join(path, "[^.]*[0-9]"))
				if len(found) == 0 {
					continue
				}
				path = found[0]
			}
			if _, err := os.Stat(path); err != nil {
				continue
			}
			if c, err := open(t.Context(), path, nil); err != nil || c.Step() != 3 {
				t.Errorf("%s, killed after %v: %v", format, wait, err)
			}
		}
		if killed == 0 {
			t.Errorf("no conversion to %s was killed", format)
		}
	}
}
