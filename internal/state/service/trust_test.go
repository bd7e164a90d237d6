//go:build linux

package service

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/service/client"
)

// impersonate listens at a socket as another user, and prints that it does.
func impersonate(socket string) error {
	listener, err := net.Listen("unixpacket", socket)
	if err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString("listening"); err != nil {
		return err
	}
	for {
		if _, err := listener.Accept(); err != nil { // it never answers
			return err
		}
	}
}

// ofNobody starts this program as another user who listens at a socket.
func ofNobody(t *testing.T, socket string) {
	t.Helper()
	program, err := os.Open(os.Args[0]) // the other user may have no access to its folder
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	command := exec.Command("/proc/self/fd/3")
	command.ExtraFiles = []*os.File{program}
	command.Env = append(os.Environ(), impersonateVariable+"="+socket)
	command.Dir = "/"
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	output, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait() // ends, as it was killed
	})
	if _, err := output.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
}

const nobody = 65534

// TestServiceOfAnotherUser has another user listen in place of this user's service. The
// client sends nothing.
func TestServiceOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a process of another user")
	}
	parent, err := os.MkdirTemp("", "plimsoll-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(parent) })
	theirs, ours := filepath.Join(parent, "theirs"), filepath.Join(parent, "ours")
	for _, directory := range []string{theirs, ours} {
		if err := errors.Join(os.Mkdir(directory, 0o777), os.Chmod(directory, 0o777)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Chmod(parent, 0o755), os.Chown(theirs, nobody, nobody),
		os.Chmod(theirs, 0o755)); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(parent, "link")
	if err := errors.Join(os.Symlink(ours, link), os.Lchown(link, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	ofNobody(t, filepath.Join(ours, "socket"))
	for _, c := range []struct {
		directory string
		mode      os.FileMode
		want      string
	}{
		{theirs, 0o755, "belongs to user 65534, who could put another service there: expected user 0 or root"},
		{ours, 0o777, "has mode 0777, so that other users could put another service there"},
		{link, 0o700, "belongs to user 65534, who could put another service there: expected user 0 or root"},
		{ours, 0o700, "of user 65534 answers and would get the weights: expected user 0 or root"},
	} {
		if err := os.Chmod(ours, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err := client.Dial(filepath.Join(c.directory, "socket"))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the error is %v, want %q", c.directory, err, c.want)
		}
	}
}

// TestDirectoryOfAnotherUser has a keeper listen where another user could replace the
// socket.
func TestDirectoryOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to give a directory to another user")
	}
	parent := t.TempDir()
	private, link := filepath.Join(parent, "private"), filepath.Join(parent, "link")
	if err := errors.Join(os.Mkdir(private, 0o700), os.Symlink(private, link)); err != nil {
		t.Fatal(err)
	}
	listen := func(directory string) error {
		k := Keeper{Socket: filepath.Join(directory, "socket")}
		err := k.Listen()
		if err == nil {
			k.Close()
		}
		return err
	}
	if err := listen(link); err != nil {
		t.Errorf("a link of this user: %v", err)
	}
	if err := os.Lchown(link, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	if err := listen(link); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a link of another user: %v", err)
	}
}

// TestIdleClientsMakeRoom connects many silent clients. Each takes a file, and sessions
// need files: the service closes the oldest connections first.
func TestIdleClientsMakeRoom(t *testing.T) {
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument(small))
	most := portion(mostIdle)
	clients := make([]*client.Client, 2*most)
	for i := range clients {
		c, err := client.Dial(socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Hangup()
		clients[i] = c
	}
	// The service takes connections in their order: once it answers the last one, it has taken all.
	if _, err := clients[len(clients)-1].Overview(); err != nil {
		t.Errorf("the last that came: %v", err)
	}
	await(t, "clients to go", func() bool { return server.Overview().Clients <= most+1 })
	if _, err := clients[0].Overview(); !errors.Is(err, client.ErrLost) {
		t.Errorf("the first that came is there: %v", err)
	}
	mustStep(t, s, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestPortionOfTheFiles checks that sessions always keep some files.
func TestPortionOfTheFiles(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if n := portion(1 << 30); n > int(limit.Cur)/8 {
		t.Errorf("%d of %d", n, limit.Cur)
	}
	if n := portion(3); n > 3 {
		t.Errorf("%d, want 3 at most", n)
	}
}
