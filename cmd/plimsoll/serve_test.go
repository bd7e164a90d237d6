//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/servicetest"
)

// serving starts plimsoll serve from a copy of this program. It returns the path of the copy, and a function that
// waits for the service and opens a session.
func serving(t *testing.T, flags ...string) (program string, open func() *servicetest.Session) {
	t.Helper()
	return servingTo(t, os.Stderr, flags...)
}

// servingTo is serving with another stderr.
func servingTo(t *testing.T, stderr io.Writer, flags ...string) (program string, open func() *servicetest.Session) {
	t.Helper()
	directory, err := os.MkdirTemp("", "plimsoll-test-") // a short path for the socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	program = filepath.Join(directory, "plimsoll")
	content, err := os.ReadFile("/proc/self/exe")
	if err := errors.Join(err, os.WriteFile(program, content, 0o755)); err != nil {
		t.Fatal(err)
	}
	private := filepath.Join(directory, "private")
	if err := os.Mkdir(private, 0o700); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(private, "socket")
	keeper := exec.Command(program, append([]string{"serve", "--socket", socket}, flags...)...)
	keeper.Stderr = stderr
	if err := keeper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(keeper.Process.Signal(syscall.SIGTERM), keeper.Wait()); err != nil {
			t.Error(err)
		}
	})
	t.Setenv(service.SocketVariable, socket)
	t.Setenv("PLIMSOLL_JOB", "test")
	return program, func() *servicetest.Session {
		t.Helper()
		if !awaitFiles(t, private, func() bool { // the last socket that the keeper makes
			_, err := os.Stat(socket + ".notify")
			return err == nil
		}) {
			t.Fatal("the keeper does not listen")
		}
		s, err := openLittle(littleElements)
		for deadline := time.Now().Add(time.Minute); errors.Is(err, client.ErrLost) && time.Now().Before(deadline); {
			s, err = openLittle(littleElements) // of the next service, for which the call waits
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

// checkAfterKill kills the service, calls then, and looks for the state.
func checkAfterKill(t *testing.T, open func() *servicetest.Session, then func() error) {
	t.Helper()
	s := open()
	overview, err := s.Overview()
	if err := errors.Join(err, s.SetStep(5), s.Detach()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Kill(overview.Process, syscall.SIGKILL), then()); err != nil {
		t.Fatal(err)
	}
	s = open()
	if !s.Welcome.Attached || s.Welcome.Step != 5 {
		t.Errorf("the session is %+v", s.Welcome)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestServiceOfAnotherRelease replaces or removes the file of the running program, as an upgrade does. After a kill,
// the next service must still run the old program, which matches the state.
func TestServiceOfAnotherRelease(t *testing.T) {
	for name, upgrade := range map[string]func(program string) error{
		"removed": os.Remove,
		"replaced": func(program string) error {
			return errors.Join(os.WriteFile(program+"-new", []byte("#!/bin/sh\nexit 1\n"), 0o755),
				os.Rename(program+"-new", program))
		},
		"as it was": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			program, open := serving(t)
			if err := errors.Join(open().Close(), upgrade(program)); err != nil { // while the service runs
				t.Fatal(err)
			}
			checkAfterKill(t, open, func() error { return nil })
		})
	}
}

// TestMetricsCannotBeAnswered lets another process take the address of the metrics after the service was killed. A
// service with state serves without metrics.
func TestMetricsCannotBeAnswered(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	_, open := serving(t, "--metrics", address)
	checkAfterKill(t, open, func() error {
		for range 10 { // the next service may be faster than this test
			for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
				if listener, err = net.Listen("tcp", address); err == nil {
					t.Cleanup(func() { _ = listener.Close() })
					return nil
				}
			}
			s := open()
			overview, err := s.Overview()
			if err := errors.Join(err, s.Detach(), syscall.Kill(overview.Process, syscall.SIGKILL)); err != nil {
				return err
			}
		}
		return err
	})
}

// TestRestore shows a session that cannot be restored, tries it again and gives it back.
func TestRestore(t *testing.T) {
	_, open := serving(t)
	s := open()
	overview, err := s.Overview()
	if err := errors.Join(err, s.SetStep(5), s.Detach()); err != nil {
		t.Fatal(err)
	}
	journal := fileOf(t, overview.Process, "/memfd:plimsoll/rank0/bf16/step_journal (deleted)")
	magic := make([]byte, 8)
	if _, err := journal.ReadAt(magic, 0); err != nil {
		t.Fatal(err)
	}
	put := func(what []byte) {
		t.Helper()
		if _, err := journal.WriteAt(what, 0); err != nil {
			t.Fatal(err)
		}
	}
	put(make([]byte, 8))
	if err := syscall.Kill(overview.Process, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	says := func(want string, code int, arguments ...string) {
		t.Helper()
		command := exec.Command(program(t), arguments...)
		text, _ := command.CombinedOutput()
		if !strings.Contains(string(text), want) || command.ProcessState.ExitCode() != code {
			t.Errorf("%v ends with %d, want %d, and says\n%s\nwant\n%s", arguments, command.ProcessState.ExitCode(),
				code, text, want)
		}
	}
	if !await(func() bool {
		now, err := dialService("")
		if err == nil {
			_, err = now.Overview()
			err = errors.Join(err, now.Hangup())
		}
		return err == nil
	}) {
		t.Fatal("no other service serves")
	}
	const what = "session 1 (job test, rank0/bf16)"
	says("set aside          "+what+", ", 0, "stat")
	says("restore: "+what+": arena rank0/bf16/step_journal: it is no journal: its first 8 bytes are others; "+
		"its memory is kept, and "+
		`"plimsoll restore --discard 1" frees it`, 2, "restore", "1")
	says("no session is named", 2, "restore")
	put(magic)
	says("session 1 is restored", 0, "restore", "1")
	if s = open(); !s.Welcome.Attached || s.Welcome.Step != 5 {
		t.Errorf("the session is %+v", s.Welcome)
	}
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	says(`no session is set aside as "1"`, 2, "restore", "--discard", "1")
}

// fileOf opens a file that another process has open.
func fileOf(t *testing.T, process int, target string) *os.File {
	t.Helper()
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process))
	for _, name := range names {
		if found, _ := os.Readlink(name); found == target {
			file, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { file.Close() })
			return file
		}
	}
	t.Fatalf("process %d has no %s", process, target)
	return nil
}

// TestServiceReservesCores: the service has no worker on cores that are left to the system.
func TestServiceReservesCores(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.UsableCores()) < 2 {
		t.Skip("needs two cores")
	}
	_, open := serving(t, "--reserve", "1")
	s := open()
	overview, err := s.Overview()
	if err != nil {
		t.Fatal(err)
	}
	first := h.CPUs.List()[0]
	if cpus := overview.Sessions[0].CPUs; len(cpus) == 0 || slices.Contains(cpus, first) {
		t.Errorf("workers are on CPUs %v; %d is reserved", cpus, first)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
