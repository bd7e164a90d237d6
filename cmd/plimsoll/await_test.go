//go:build linux

package main

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hung is longer than any job of these tests takes on a slow and busy machine. It is shorter than the "sleep 1000"
// for which the jobs must not wait.
const hung = 2 * time.Minute

// awaitFiles waits for a condition on the files of a folder: it looks again whenever one of them is made, written,
// moved or removed. It returns false when the time is over.
func awaitFiles(t *testing.T, folder string, so func() bool) bool {
	t.Helper()
	const changes = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE
	watch := watched(t, folder, changes)
	defer unix.Close(watch)
	for events := make([]byte, 4096); !so(); {
		if !readable(t, watch) {
			return false
		}
		for err := error(nil); err == nil; { // all that has come; one more look is enough for it
			_, err = unix.Read(watch, events)
		}
	}
	return true
}

// readsOf returns a function that waits until a process reads a file after this call.
func readsOf(t *testing.T, file string) (await func() bool) {
	t.Helper()
	watch := watched(t, file, unix.IN_ACCESS)
	t.Cleanup(func() { unix.Close(watch) })
	return func() bool { return readable(t, watch) }
}

// watched returns a descriptor that has events of a file, or of the files of a folder, to read.
func watched(t *testing.T, path string, events uint32) int {
	t.Helper()
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.InotifyAddWatch(watch, path, events); err != nil {
		unix.Close(watch)
		t.Fatal(err)
	}
	return watch
}

// awaitEnd waits for a process, which need not be a child, to end. It returns false when the time is over.
func awaitEnd(t *testing.T, pid int) bool {
	t.Helper()
	process, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(process)
	return readable(t, process)
}

// readable waits for a descriptor. It returns false when the time is over.
func readable(t *testing.T, descriptor int) bool {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(descriptor), Events: unix.POLLIN}}, int(hung/time.Millisecond))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return n > 0
	}
}
