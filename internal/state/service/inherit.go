//go:build linux

package service

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/protocol"
)

// Inherited is what a keeper, or systemd, gives a service at its start.
type Inherited struct {
	Listener protocol.Listener
	// Files are the files that earlier services had kept, by name; see keptName.
	Files    map[string]*os.File
	Restarts int
	watchdog time.Duration // the keeper expects a sign of life this often; 0 is never
	store    *store
	folders  []arena.Place // where arenas are, the first one first; none is memory
}

// Inherit returns what was given to this process, or nil if nothing was. It unsets the
// variables, so that no child of this process takes them for its own.
func Inherit() (*Inherited, error) {
	count, err := strconv.Atoi(os.Getenv(inheritedCount))
	if err != nil || count < 1 {
		return nil, nil
	}
	if process := os.Getenv(inheritedProcess); process != "" && process != strconv.Itoa(os.Getpid()) {
		return nil, nil // meant for another process
	}
	names := strings.Split(os.Getenv(inheritedNames), ":")
	if len(names) != count {
		return nil, fmt.Errorf("%s is %d, but %s names %d files", inheritedCount, count, inheritedNames, len(names))
	}
	in := &Inherited{Files: map[string]*os.File{}}
	restarts, isKeeper := os.LookupEnv(restartCount) // systemd does not set it
	in.Restarts, _ = strconv.Atoi(restarts)
	if process := os.Getenv(watchdogProcess); process == "" || process == strconv.Itoa(os.Getpid()) {
		microseconds, _ := strconv.ParseInt(os.Getenv(watchdogTime), 10, 64) // 0 if unset
		in.watchdog = time.Duration(microseconds) * time.Microsecond
	}
	if address := os.Getenv(notifySocket); address != "" {
		if in.store, err = newStore(address); err != nil {
			return nil, err
		}
		in.store.answers = isKeeper
		in.store.most, _ = strconv.Atoi(os.Getenv(mostKept)) // systemd sets it from version 254 on
	}
	for i, name := range names {
		descriptor := firstInherited + i
		unix.CloseOnExec(descriptor)
		file := os.NewFile(uintptr(descriptor), name)
		switch {
		case i == 0: // whatever its unit calls it
			if in.Listener, err = inheritedListener(file); err != nil {
				return nil, err
			}
		case name == notifyName:
			in.store = &store{pipe: file, address: name}
		default:
			in.Files[name] = file
		}
	}
	for _, name := range []string{
		inheritedCount, inheritedNames, inheritedProcess, notifySocket, restartCount, mostKept, watchdogTime,
		watchdogProcess,
	} {
		if err := os.Unsetenv(name); err != nil {
			return nil, err
		}
	}
	return in, nil
}

// inheritedListener returns the listener of an inherited socket, or of a named pipe.
func inheritedListener(file *os.File) (protocol.Listener, error) {
	info, err := file.Stat()
	if err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		return protocol.NewPipeListener(file)
	}
	listener, err := net.FileListener(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("the inherited socket: %w", err)
	}
	unixListener, ok := listener.(*net.UnixListener)
	if !ok || listener.Addr().Network() != "unixpacket" {
		return nil, fmt.Errorf("the inherited socket is of type %s: expected unixpacket "+
			"(ListenSequentialPacket=)", listener.Addr().Network())
	}
	unixListener.SetUnlinkOnClose(false) // the keeper owns it
	return protocol.SocketListener{UnixListener: unixListener}, nil
}

// store keeps files that must outlive the service, in its keeper or in systemd.
type store struct {
	socket  int
	address string
	// pipe is to the keeper of a service in folders, which keep the files: nothing but signs of life goes there.
	pipe    *os.File
	folders []arena.Place
	// answers is set if a [Keeper] keeps them: it answers how many files it has kept.
	answers bool
	// most is how many files can be kept; 0 if unknown.
	most int
	// silent is set if the keeper did not take a message in time, until it is seen to take some again.
	silent atomic.Bool

	mu sync.Mutex
	// owed are the names that the keeper has yet to forget: it took no message when they were given back.
	owed []string
}

func newStore(address string) (*store, error) {
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: socket: %w", notifySocket, err)
	}
	// A keeper that does not read, such as a stopped one, must not block the service.
	timeout := unix.NsecToTimeval(int64(keeperPart()))
	if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: SO_SNDTIMEO: %w", notifySocket, err), unix.Close(socket))
	}
	return &store{socket: socket, address: address}, nil
}

// keeperPatience is how long the service waits for the keeper to take a message.
var keeperPatience = 20 * time.Second

// keeperPart is how long one call waits for it.
func keeperPart() time.Duration { return keeperPatience / 20 }

// keep has the file of an arena kept. A nil store does nothing.
func (s *store) keep(name string, a *arena.Arena) error {
	if s != nil && s.folders != nil {
		return a.Rename(name)
	}
	return s.send("FDSTORE=1\nFDPOLL=0\nFDNAME="+name, a.File())
}

// forget asks the keeper to close the files of a name. A keeper that takes no message now is asked again with the next
// sign of life, or it would hold the memory for as long as it lives.
func (s *store) forget(name string) error {
	if s == nil {
		return nil
	}
	if s.folders != nil {
		return removeFrom(s.folders, name)
	}
	var err error
	if !s.silent.Load() {
		err = s.send(forgotten(name))
	} else if !s.hint(forgotten(name)) {
		err = s.silence()
	}
	if errors.Is(err, errSilent) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.owed = append(s.owed, name)
	}
	return err
}

// forgotten is the message that asks for the files of a name to be closed.
func forgotten(name string) string { return "FDSTOREREMOVE=1\nFDNAME=" + name }

// settle asks the keeper once more to forget what it did not forget. It waits for nothing.
func (s *store) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.owed) > 0 && s.hint(forgotten(s.owed[0])) {
		s.owed = s.owed[1:]
	}
}

// confirm returns when the keeper has taken all earlier messages. systemd then closes
// the descriptor that comes with BARRIER=1. A [Keeper] first writes to it how many
// files of the session it has kept: it may have run out of descriptors.
func (s *store) confirm(session string, files int) error {
	if s == nil || s.folders != nil {
		return nil
	}
	answer, asked, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("ask the keeper which files it has kept: %w", err)
	}
	defer answer.Close()
	text := barrier
	if s.answers {
		text += "\n" + barrierSession + "=" + session
	}
	err = errors.Join(s.send(text, asked), asked.Close(), answer.SetReadDeadline(time.Now().Add(keeperPatience)))
	if err != nil {
		return err
	}
	told, err := io.ReadAll(answer)
	switch want := strconv.Itoa(files); {
	case errors.Is(err, os.ErrDeadlineExceeded):
		s.silent.Store(true)
		return s.silence()
	case err != nil:
		return fmt.Errorf("the keeper at %s has not said which files it has kept: %w", s.address, err)
	case s.answers && len(told) == 0:
		return fmt.Errorf("the keeper at %s has not answered; %s", s.address, moreDescriptors)
	case s.answers && string(told) != want:
		return fmt.Errorf("the keeper at %s has kept %s of %s files; %s", s.address, told, want, moreDescriptors)
	}
	s.silent.Store(false)
	return nil
}

// moreDescriptors is the hint for a limit on open files.
const moreDescriptors = "raise the hard limit on open files (ulimit -Hn, LimitNOFILE= of systemd)"

func (s *store) ready() error { return s.send("READY=1") }

func (s *store) stopping() error { return s.send("STOPPING=1") }

// alive reports that the service is not stuck.
func (s *store) alive() {
	if s.hint("WATCHDOG=1") {
		s.silent.Store(false)
		s.settle()
	}
}

// extend reports that an ending service still makes progress. It is good for as long as
// systemd and the keeper wait for the next message.
func (s *store) extend() { s.hint("EXTEND_TIMEOUT_USEC=30000000") }

// hint sends a message that may be lost, and reports whether it was sent: a keeper that does not read has enough of
// them queued.
func (s *store) hint(text string) bool {
	if s != nil && s.pipe != nil {
		return s.tell(text) == nil
	}
	return s != nil &&
		unix.Sendmsg(s.socket, []byte(text), nil, &unix.SockaddrUnix{Name: s.address}, unix.MSG_DONTWAIT) == nil
}

// errSilent is in the error about a keeper that takes no message.
var errSilent = errors.New("is it stopped?")

func (s *store) silence() error {
	return fmt.Errorf("the keeper of the service, which listens at %s, has taken no message for %v; %w",
		s.address, keeperPatience, errSilent)
}

func (s *store) send(text string, files ...*os.File) error {
	if s == nil {
		return nil
	}
	if s.pipe != nil {
		return s.tell(text)
	}
	var rights []byte
	for _, f := range files {
		rights = append(rights, unix.UnixRights(int(f.Fd()))...)
	}
	// A signal interrupts a call that has a timeout, and the next call waits for all of it again. So one call waits
	// for a part of the patience.
	until := time.Now().Add(keeperPatience)
	if s.silent.Load() {
		until = time.Now().Add(keeperPart()) // the keeper did not take the last one, either
	}
	flags, err := 0, error(unix.EINTR)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) && flags == 0 {
		if !time.Now().Before(until) {
			flags = unix.MSG_DONTWAIT
		}
		// The address is made anew for each call, as sending writes to it.
		err = unix.Sendmsg(s.socket, []byte(text), rights, &unix.SockaddrUnix{Name: s.address}, flags)
	}
	if errors.Is(err, unix.EAGAIN) {
		s.silent.Store(true)
		return s.silence()
	}
	if err != nil {
		return fmt.Errorf("tell the keeper at %s: %w", s.address, err)
	}
	return nil
}
