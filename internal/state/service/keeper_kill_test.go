//go:build linux

package service

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestKillDuringAStart kills a service at moments at which the keeper does not know its process yet.
func TestKillDuringAStart(t *testing.T) {
	for name, moment := range map[string]func(k *Keeper, end func()) func(*exec.Cmd) error{
		"before it runs": func(k *Keeper, end func()) func(*exec.Cmd) error {
			return func(command *exec.Cmd) error {
				end()
				k.Kill()
				return command.Start()
			}
		},
		"while it starts": func(k *Keeper, end func()) func(*exec.Cmd) error {
			return func(command *exec.Cmd) error {
				defer k.Kill()
				defer end()
				return command.Start()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			var log output
			ctx, cancel := context.WithCancel(t.Context())
			k := &Keeper{
				Socket:  filepath.Join(t.TempDir(), "d", "socket"),
				Logf:    func(format string, values ...any) { fmt.Fprintf(&log, format+"\n", values...) },
				Command: func() *exec.Cmd { return exec.Command("sh", "-c", `trap "" TERM; exec sleep 600`) },
			}
			k.Start = moment(k, cancel)
			if err := k.Listen(); err != nil {
				t.Fatal(err)
			}
			if err := k.Run(ctx); err != nil {
				t.Error(err)
			}
			if strings.Contains(log.String(), "no sign of life") {
				t.Errorf("the service was not killed at once: %s", log.String())
			}
		})
	}
}

// TestNoServiceStartsAtTheEnd checks that a keeper whose context has ended starts no service.
func TestNoServiceStartsAtTheEnd(t *testing.T) {
	k := &Keeper{
		Socket:  filepath.Join(t.TempDir(), "d", "socket"),
		Command: func() *exec.Cmd { return exec.Command("true") },
		Start: func(*exec.Cmd) error {
			t.Error("a service was started")
			return nil
		},
	}
	if err := k.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil {
		t.Error(err)
	}
}
