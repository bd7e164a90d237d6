package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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
