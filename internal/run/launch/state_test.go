//go:build linux

package launch

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/service"
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
	if isAskedToStart(t, living) {
		t.Error("the service of a living job was asked to start")
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

// isAskedToStart reports whether a client waits at a socket. A connection is there when the client's call returns.
func isAskedToStart(t *testing.T, listener *net.UnixListener) bool {
	t.Helper()
	file, err := listener.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	waiting, err := unix.Poll([]unix.PollFd{{Fd: int32(file.Fd()), Events: unix.POLLIN}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return waiting > 0
}

// TestASavingServiceIsNotKilledAtOnce: after the ranks, one signal is told and
// waits for the service; the second one kills it.
func TestASavingServiceIsNotKilledAtOnce(t *testing.T) {
	for signals, wantSaved := range []bool{true, true, false} {
		s := startSaving(t)
		sent := make(chan os.Signal, signals)
		for range signals {
			sent <- syscall.SIGTERM
		}
		stopped := make(chan struct{})
		go func() {
			s.job.stopState(s.service, sent)
			close(stopped)
		}()
		told := ""
		if signals > 0 {
			told = <-s.said
		}
		if wantSaved { // else the service waits for this until it is killed
			s.finish.Close()
		}
		<-stopped
		if saved := s.answers.Scan() && s.answers.Text() == "saved"; saved != wantSaved {
			t.Errorf("after %d signals: saved is %t, want %t", signals, saved, wantSaved)
		}
		if signals > 0 && !strings.Contains(told, "a second signal kills it") {
			t.Errorf("after %d signals it was said: %s", signals, told)
		}
		if left := len(s.said); left > 0 {
			t.Errorf("after %d signals it was also said: %s", signals, <-s.said)
		}
	}
}

// saving is a service that saves when it is asked to end, and ends when the test lets it finish.
type saving struct {
	job     *Job
	service *stateService
	said    chan string    // to the user
	answers *bufio.Scanner // what the service prints
	finish  *os.File       // the service finishes when this is closed
}

func startSaving(t *testing.T) *saving {
	t.Helper()
	directory := t.TempDir()
	input, finish := pipeOf(t)
	output, printed := pipeOf(t)
	s := &saving{said: make(chan string, 10), answers: bufio.NewScanner(output), finish: finish}
	s.job = &Job{Logf: func(format string, values ...any) { s.said <- fmt.Sprintf(format, values...) }}
	cpus, err := host.Affinity(0)
	if err != nil {
		t.Fatal(err)
	}
	newService := func(socket, _ string, logf func(string, ...any)) (*service.Keeper, error) {
		command := exec.Command(os.Args[0])
		command.Env = append(os.Environ(), savingVariable+"=1")
		command.Stdin, command.Stdout = input, printed
		return &service.Keeper{Socket: socket, Command: func() *exec.Cmd { return command }, Logf: logf}, nil
	}
	s.service, err = s.job.startState(filepath.Join(directory, "service", "socket"), "metrics", cpus, newService)
	if err != nil {
		t.Fatal(err)
	}
	if !s.answers.Scan() || s.answers.Text() != "begun" {
		t.Fatalf("the service has said %q (%v)", s.answers.Text(), s.answers.Err())
	}
	// Only the service holds these now, so the test sees its end.
	if err := errors.Join(input.Close(), printed.Close()); err != nil {
		t.Fatal(err)
	}
	return s
}

// savingVariable makes this test's program a service that saves.
const savingVariable = "PLIMSOLL_TEST_SAVING"

func TestMain(m *testing.M) {
	if does := os.Getenv(peerVariable); does != "" {
		bePeer(does)
		return
	}
	if os.Getenv(savingVariable) == "" {
		os.Exit(m.Run())
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	fmt.Println("begun")
	<-asked
	_, _ = io.ReadAll(os.Stdin)
	fmt.Println("saved")
}
