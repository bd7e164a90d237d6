//go:build linux

package service

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
)

// serveFolder returns a service in this process that clients reach by pipes, and what ends it.
func serveFolder(t *testing.T, folders ...string) (*Server, string, func()) {
	t.Helper()
	k := &Keeper{Folders: folders, Logf: t.Logf}
	if err := k.Listen(); err != nil {
		t.Fatal(err)
	}
	listener, err := protocol.NewPipeListener(k.listener)
	if err != nil {
		t.Fatal(err)
	}
	given := &Inherited{Listener: listener, Files: map[string]*os.File{}, store: &store{}}
	if err := given.UseFolders(folders); err != nil {
		t.Fatal(err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	given.store.pipe = write
	server, err := NewServer("test", given, testHost, allForUpdates, Tier{}, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx) }()
	return server, filepath.Join(folders[0], protocol.RequestsName), func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		k.Close()
		if err := errors.Join(read.Close(), write.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestClientsMeetAServiceAtAPipe also after another client has made nonsense of the pipe.
func TestClientsMeetAServiceAtAPipe(t *testing.T) {
	_, requests, end := serveFolder(t, filepath.Join(t.TempDir(), "state"))
	defer end()
	pipe, err := os.OpenFile(requests, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	nonsense := "\n../../etc/passwd\nclient-1-zz\nclient-1-0\n" + strings.Repeat("x", 3000) + "\n"
	if _, err := pipe.WriteString(nonsense); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, err := client.Dial(requests)
		if err != nil {
			t.Fatal(err)
		}
		overview, err := c.Overview()
		if err != nil || overview.Process != os.Getpid() || overview.Clients != 1 && overview.Clients != 2 {
			t.Errorf("stat over pipes: %+v, %v", overview, err)
		}
		if err := c.Hangup(); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(requests))
	for _, entry := range entries {
		if protocol.ClientPipes(entry.Name()) {
			t.Errorf("%s is left", entry.Name())
		}
	}
	if err != nil {
		t.Error(err)
	}
}

// TestPlacesWithRoom: a session is in the first folder that has room, and is refused with what each has.
func TestPlacesWithRoom(t *testing.T) {
	base := t.TempDir()
	good, closed := filepath.Join(base, "good"), filepath.Join(base, "closed")
	if err := os.Mkdir(closed, 0o777); err != nil { // others may enter it
		t.Fatal(err)
	}
	if err := os.Chmod(closed, 0o777); err != nil {
		t.Fatal(err)
	}
	in := &Inherited{folders: []arena.Place{arena.Place(closed), arena.Place(good)}}
	plan := func(size ledger.Bytes) []arena.Plan { return []arena.Plan{{Name: "a", Size: size}} }
	place, pages, err := in.placeOf(plan(4096), arena.TransparentHugePages)
	if err != nil || place != arena.Place(good) || pages != arena.BasePages {
		t.Errorf("4 KiB are in %q, %v, %v: expected %q", place, pages, err, good)
	}
	_, _, err = in.placeOf(plan(1<<50), arena.BasePages)
	if err == nil || !strings.Contains(err.Error(), closed) || !strings.Contains(err.Error(), good) {
		t.Errorf("a PiB: %v; expected an error that names both folders", err)
	}
	if place, pages, err := (&Inherited{}).placeOf(plan(1), arena.HugetlbPages); place != arena.Memory ||
		pages != arena.HugetlbPages || err != nil {
		t.Errorf("without folders: %q, %v, %v", place, pages, err)
	}
}

// TestUntilClosed: the last word counts.
func TestUntilClosed(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "keep\n": true, "keep\ndiscard\n": false, "discard\nkeep\n": true, "keeper\n": false,
	} {
		if got := UntilClosed(strings.NewReader(text)); got != want {
			t.Errorf("after %q the state stays: %v, expected %v", text, got, want)
		}
	}
}

// TestFilesOfAnotherBoot: what the kernel had written when the host died is of different instants, so it is refused.
func TestFilesOfAnotherBoot(t *testing.T) {
	folder := t.TempDir()
	for range 2 { // the first makes the note
		if err := checkBoot(folder); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, bootName), []byte("another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := checkBoot(folder); err == nil || !strings.Contains(err.Error(), "before this host was started") {
		t.Errorf("files of another boot: %v", err)
	}
}
