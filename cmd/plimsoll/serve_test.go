package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"plimsoll/service"
)

// TestServiceOfAnotherRelease has another program put where the running one was, as
// an upgrade does, or none left there. The service that comes after one that was
// killed is of the program that runs, as the state is.
func TestServiceOfAnotherRelease(t *testing.T) {
	for name, upgrade := range map[string]func(program string) error{
		"removed": os.Remove,
		"replaced": func(program string) error {
			return errors.Join(os.WriteFile(program+"-new", []byte("#!/bin/sh\nexit 1\n"), 0o755), os.Rename(program+"-new", program))
		},
		"as it was": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			directory, err := os.MkdirTemp("", "plimsoll-test-") // a short path for the socket
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(directory)
			program := filepath.Join(directory, "plimsoll")
			content, err := os.ReadFile("/proc/self/exe")
			if err := errors.Join(err, os.WriteFile(program, content, 0o755)); err != nil {
				t.Fatal(err)
			}
			socket := filepath.Join(directory, "private", "socket")
			keeper := exec.Command(program, "serve", "--socket", socket)
			keeper.Stderr = os.Stderr
			if err := keeper.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := errors.Join(keeper.Process.Signal(syscall.SIGTERM), keeper.Wait()); err != nil {
					t.Error(err)
				}
			}()
			t.Setenv(service.SocketVariable, socket)
			t.Setenv("PLIMSOLL_JOB", "test")
			open := func() *service.Session {
				t.Helper()
				for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
					s, err := openLittle(littleElements)
					if err == nil {
						return s
					}
					if time.Now().After(deadline) {
						t.Fatal(err)
					}
				}
			}
			s := open()
			if err := s.SetStep(5); err != nil {
				t.Fatal(err)
			}
			overview, err := s.Overview()
			if err := errors.Join(err, s.Detach(), upgrade(program), syscall.Kill(overview.Process, syscall.SIGKILL)); err != nil {
				t.Fatal(err)
			}
			s = open()
			if !s.Welcome.Attached || s.Welcome.Step != 5 {
				t.Errorf("the session is %+v", s.Welcome)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
