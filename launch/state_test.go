package launch

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestDeadDirectories: a job removes the directories of dead ones, and nothing
// that is called alike.
func TestDeadDirectories(t *testing.T) {
	parent := t.TempDir()
	listen := func(directory, name string) *net.UnixListener {
		if err := os.MkdirAll(filepath.Join(parent, directory), 0o700); err != nil {
			t.Fatal(err)
		}
		listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(parent, directory, name), Net: "unixpacket"})
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
	defer listen("plimsoll-1-2", "socket").Close()
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

	var left []string
	entries, err := os.ReadDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		left = append(left, entry.Name())
	}
	if want := []string{"plimsoll-1-2", "plimsoll-2-1", "plimsoll-2-2", "plimsoll-2-3", "plimsoll-my-service", "plimsoll-my-work"}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
	for _, name := range []string{"plimsoll-my-work/socket/socket.go", "plimsoll-2-1/socket/socket.go", "plimsoll-2-2/socket", "plimsoll-2-3/notes"} {
		if _, err := os.Stat(filepath.Join(parent, name)); err != nil {
			t.Error(err)
		}
	}
}
