//go:build linux

package launch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/host"
	"plimsoll/service"
)

// TestSocketParent checks that a directory of the environment is used if a rank can
// connect to a socket in it from anywhere.
func TestSocketParent(t *testing.T) {
	parent := t.TempDir()
	t.Chdir(parent)
	file, long := filepath.Join(parent, "file"), filepath.Join(parent, strings.Repeat("x", 60))
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Mkdir(long, 0o700),
		os.Mkdir("relative", 0o700)); err != nil {
		t.Fatal(err)
	}
	good, err := os.MkdirTemp("/tmp", "good")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(good)
	for _, c := range []struct{ runtime, temporary, want string }{
		{good, "", good}, {"", good, good}, {good, "/tmp", good}, {"", "", "/tmp"},
		{"relative", good, good}, {file, good, good}, {long, good, good}, {"/no/such/directory", good, good},
		{"", "relative", "/tmp"}, {"", file, "/tmp"}, {"", long, "/tmp"}, {"", "/no/such/directory", "/tmp"},
	} {
		t.Setenv("XDG_RUNTIME_DIR", c.runtime)
		t.Setenv("TMPDIR", c.temporary)
		if got := socketParent(); got != c.want {
			t.Errorf("XDG_RUNTIME_DIR=%s TMPDIR=%s: %s, want %s", c.runtime, c.temporary, got, c.want)
		}
	}
}

// TestDeadDirectories checks that a job removes the directories of dead jobs, and
// nothing that only has a similar name.
func TestDeadDirectories(t *testing.T) {
	parent := t.TempDir()
	listen := func(directory, name string) *net.UnixListener {
		if err := os.MkdirAll(filepath.Join(parent, directory), 0o700); err != nil {
			t.Fatal(err)
		}
		listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(parent, directory, name),
			Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		return listener
	}
	dead := func(directory string) {
		for _, name := range []string{"socket", "socket.notify"} {
			if err := listen(directory, name).Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	write := func(name string) {
		name = filepath.Join(parent, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dead("plimsoll-1-1")
	living := listen("plimsoll-1-2", "socket")
	defer living.Close()
	dead("plimsoll-my-service")
	write("plimsoll-my-work/socket/socket.go")
	write("plimsoll-2-1/socket/socket.go")
	write("plimsoll-2-2/socket")
	dead("plimsoll-2-3")
	write("plimsoll-2-3/notes")
	sockets, err := filepath.Glob(filepath.Join(parent, "*", "socket"))
	if err != nil {
		t.Fatal(err)
	}
	for _, socket := range sockets {
		if err := os.Chtimes(socket, time.Time{}, time.Now().Add(-time.Hour)); err != nil {
			t.Fatal(err)
		}
	}

	removeDeadDirectories(parent)
	if err := living.SetDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := living.Accept(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the service of a living job was asked to start (%v)", err)
	}

	var left []string
	entries, err := os.ReadDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		left = append(left, entry.Name())
	}
	if want := []string{"plimsoll-1-2", "plimsoll-2-1", "plimsoll-2-2", "plimsoll-2-3", "plimsoll-my-service",
		"plimsoll-my-work"}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
	for _, name := range []string{"plimsoll-my-work/socket/socket.go", "plimsoll-2-1/socket/socket.go",
		"plimsoll-2-2/socket", "plimsoll-2-3/notes"} {
		if _, err := os.Stat(filepath.Join(parent, name)); err != nil {
			t.Error(err)
		}
	}
}

// TestASavingServiceIsNotKilledAtOnce: after the ranks, one signal is told and
// waits for the service; the second one kills it.
func TestASavingServiceIsNotKilledAtOnce(t *testing.T) {
	for signals, wantSaved := range map[int]bool{0: true, 1: true, 2: false} {
		directory := t.TempDir()
		saved, begun := filepath.Join(directory, "saved"), filepath.Join(directory, "begun")
		var said strings.Builder
		j := &Job{Logf: func(format string, values ...any) { fmt.Fprintf(&said, format+"\n", values...) }}
		cpus, err := host.Affinity(0)
		if err != nil {
			t.Fatal(err)
		}
		saves := `sleep 0.5; touch "$0"; exit`
		if !wantSaved { // a slow host has any time to kill it
			saves = `while :; do sleep 0.1; done`
		}
		script := `trap '` + saves + `' TERM; touch "$1"; while :; do sleep 0.01; done`
		newService := func(socket, _ string, logf func(string, ...any)) (*service.Keeper, error) {
			command := func() *exec.Cmd { return exec.Command("sh", "-c", script, saved, begun) }
			return &service.Keeper{Socket: socket, Command: command, Logf: logf}, nil
		}
		s, err := j.startState(filepath.Join(directory, "service", "socket"), "metrics", cpus, newService)
		if err != nil {
			t.Fatal(err)
		}
		for !exists(begun) {
			time.Sleep(time.Millisecond)
		}
		sent := make(chan os.Signal, signals)
		for range signals {
			sent <- syscall.SIGTERM
		}
		j.stopState(s, sent)
		if exists(saved) != wantSaved {
			t.Errorf("after %d signals: saved is %t, want %t", signals, !wantSaved, wantSaved)
		}
		if told := strings.Contains(said.String(), "a second signal kills it"); told != (signals > 0) {
			t.Errorf("after %d signals it was said: %s", signals, &said)
		}
	}
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}
