//go:build linux

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/datagram"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/service/protocol"
)

// The keeper and the service talk as systemd and its services do: the socket
// and kept files are inherited from descriptor 3 on (LISTEN_FDS,
// LISTEN_FDNAMES), and the service sends files that shall be kept to
// NOTIFY_SOCKET (FDSTORE=1). So systemd can take the keeper's place. See
// sd_listen_fds(3) and sd_notify(3).
const (
	firstInherited   = 3
	socketName       = "socket"
	inheritedCount   = "LISTEN_FDS"
	inheritedNames   = "LISTEN_FDNAMES"
	inheritedProcess = "LISTEN_PID"
	notifySocket     = "NOTIFY_SOCKET"
	watchdogTime     = "WATCHDOG_USEC"
	watchdogProcess  = "WATCHDOG_PID"
	restartCount     = "PLIMSOLL_RESTARTS"
	mostKept         = "FDSTORE"

	barrier        = "BARRIER=1"
	barrierSession = "X_PLIMSOLL_SESSION" // systemd ignores names that begin with X_
)

// SocketVariable names the socket of the service to the trainer.
const SocketVariable = "PLIMSOLL_SOCKET"

// Keeper starts a service, keeps its files, and restarts it when it dies.
type Keeper struct {
	// Socket is the path of the socket that clients connect to.
	Socket string
	// Folders have the files of arenas, and the first one the named pipe that clients connect to, in place of a socket.
	Folders []string
	// Lazy delays the start of the service until the first client connects.
	Lazy bool
	// Command returns the command of the service, without the files and variables that
	// the keeper adds.
	Command func() *exec.Cmd
	// Start starts the service from the calling thread, whose binding the service
	// inherits. With nil the service may use all CPUs of this process.
	Start func(*exec.Cmd) error
	// Logf tells the user something.
	Logf func(format string, values ...any)
	// Watchdog is how long the service may give no sign of life, while it serves and
	// while it ends. Then the keeper kills it. 0 means a minute.
	Watchdog time.Duration

	made     bool // the keeper created the directory of the socket
	listener *os.File
	locked   *os.File      // the first folder
	notify   *net.UnixConn // receives the messages of services
	kept     []keptFile
	ready    bool // the running service has begun to serve
	restarts int
	pause    time.Duration // before the second start in a row; 0 is firstPause
	signs    atomic.Int64  // signs of life from the running service
	process  atomic.Int64  // ID of the running service; 0 for none
	kills    atomic.Int64  // calls of Kill
}

// Process returns the process ID of the service, or 0 if none runs.
func (k *Keeper) Process() int { return int(k.process.Load()) }

// Kill sends SIGKILL to the service that runs or is being started. Run restarts it unless Run's context has ended.
func (k *Keeper) Kill() {
	k.kills.Add(1) // start looks at it
	k.killRunning()
}

func (k *Keeper) killRunning() {
	if process := k.Process(); process != 0 {
		_ = syscall.Kill(process, syscall.SIGKILL) // fails if it has ended
	}
}

type keptFile struct {
	name string
	file *os.File
}

// Listen creates the socket. From now on clients can connect; they wait for the
// service.
func (k *Keeper) Listen() error {
	if len(k.Folders) > 0 {
		return k.listenInFolders()
	}
	if length := len(k.Socket); length > longestSocket {
		return fmt.Errorf("the socket of the service, %s, has a path of %d bytes: expected at most %d, as the kernel "+
			"takes no more; choose a shorter one, such as /tmp/plimsoll/socket", k.Socket, length, longestSocket)
	}
	var err error
	if k.made, err = privateDirectory(filepath.Dir(k.Socket)); err != nil {
		return err
	}
	// Several keepers may find the dead sockets of another one. One at a time may look.
	directory, err := lockDirectory(filepath.Dir(k.Socket))
	if err != nil {
		return err
	}
	defer directory.Close()
	for _, name := range []string{k.Socket, k.notifyPath()} {
		if err := removeDeadSocket(name); err != nil {
			return err
		}
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: k.Socket, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("the socket of the service: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	err = os.Chmod(k.Socket, 0o600)
	if err == nil {
		k.listener, err = listener.File()
	}
	if err = errors.Join(err, listener.Close()); err != nil {
		return err
	}
	k.notify, err = datagram.Listen(k.notifyPath()) // services send their files there
	return err
}

const (
	notifySuffix = ".notify"
	// longestSocket leaves room for the suffix and a zero.
	longestSocket = len(unix.RawSockaddrUnix{}.Path) - len(notifySuffix) - 1
)

func (k *Keeper) notifyPath() string { return k.Socket + notifySuffix }

// notifyAddress is where the service sends its messages; in folders a pipe is there for them.
func (k *Keeper) notifyAddress() string {
	if len(k.Folders) > 0 {
		return ""
	}
	return k.notifyPath()
}

// privateDirectory creates the directory. If it exists, other users must not have
// access to it.
func privateDirectory(name string) (made bool, err error) {
	_, err = os.Stat(name)
	made = errors.Is(err, os.ErrNotExist)
	if err := os.MkdirAll(name, 0o700); err != nil {
		return false, fmt.Errorf("the directory of the socket: %w", err)
	}
	if err := protocol.TrustedDirectory(name); err != nil {
		return false, err
	}
	info, err := os.Stat(name)
	if err != nil {
		return made, err
	}
	if owner := protocol.OwnerOf(info); info.Mode().Perm()&0o077 != 0 || owner != os.Getuid() {
		return false, fmt.Errorf("the directory of the socket, %s, has mode %#o and belongs to user %d: expected 0700 "+
			"and user %d, or others could reach the service", name, info.Mode().Perm(), owner, os.Getuid())
	}
	return made, nil
}

// lockDirectory locks a directory until it is closed or its process ends.
func lockDirectory(name string) (*os.File, error) {
	directory, err := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("the directory of the socket: %w", err)
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(directory.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the directory of the socket, %s: flock: %w", name, err), directory.Close())
	}
	return directory, nil
}

// removeDeadSocket removes a socket that a killed service left. A socket of a living
// service is an error.
func removeDeadSocket(name string) error {
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&os.ModeSocket == 0:
		return fmt.Errorf("%s exists and is no socket", name)
	}
	for _, network := range []string{"unixpacket", "unixgram"} {
		c, err := net.Dial(network, name)
		switch {
		case err == nil:
			return errors.Join(fmt.Errorf("a service listens at %s already", name), c.Close())
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("a service listens at %s already, and is too busy to answer", name)
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EPROTOTYPE): // no listener, or one of another type
		default:
			return fmt.Errorf("cannot find out whether a service listens at %s: %w", name, err)
		}
	}
	return os.Remove(name)
}

// failedStarts is how many services in a row may die before they serve, if the keeper
// holds no state. With state the keeper never gives up.
const failedStarts = 10

// The pauses between starts of services that die before they serve.
const (
	// firstPause is the pause after a service that died before it served. Each further
	// one in a row adds as much, up to longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
)

// Run starts the service and returns when the service has ended by itself. If the
// context ends, Run asks the service to end.
func (k *Keeper) Run(ctx context.Context) error {
	defer k.Close()
	if k.Lazy {
		if err := waitForClient(ctx, k.listener); err != nil {
			return nil // the context ended before a client came
		}
	}
	for failed := 0; ; k.restarts++ {
		err := k.runOnce(ctx)
		switch {
		case ctx.Err() != nil, err == nil:
			return nil
		case k.ready:
			failed = 0
		default:
			failed++
		}
		switch {
		case len(k.kept) > 0 && failed > 1:
			k.Logf("the optimizer service has ended %d times before it served (%v); the keeper starts it again and "+
				"keeps its state in %d files", failed, err, len(k.kept))
		case failed >= failedStarts:
			return fmt.Errorf("the optimizer service ended %d times before it served: %w", failed, err)
		default:
			k.Logf("the optimizer service has ended (%v); the keeper starts it again", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(time.Duration(failed)*cmp.Or(k.pause, firstPause), longestPause)):
		}
	}
}

func waitForClient(ctx context.Context, listener *os.File) error {
	for {
		fds := []unix.PollFd{{Fd: int32(listener.Fd()), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 100)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !errors.Is(err, unix.EINTR):
			return err
		case n > 0:
			return nil
		}
	}
}

// runOnce runs a service until it ends. It keeps the files that the service sent.
func (k *Keeper) runOnce(ctx context.Context) error {
	command := k.Command()
	names := []string{socketName}
	command.ExtraFiles = append(command.ExtraFiles, k.listener)
	// In this order every descriptor of the child is at most that of its parent. So
	// none is in the way of another, which would need one more descriptor.
	slices.SortFunc(k.kept, func(a, b keptFile) int { return cmp.Compare(a.file.Fd(), b.file.Fd()) })
	for _, kept := range k.kept {
		names = append(names, kept.name)
		command.ExtraFiles = append(command.ExtraFiles, kept.file)
	}
	if command.Env == nil {
		command.Env = os.Environ()
	}
	var signs *os.File // of life
	if len(k.Folders) > 0 {
		var told *os.File
		var err error
		if signs, told, err = os.Pipe(); err != nil {
			return err
		}
		defer told.Close()
		names, command.ExtraFiles = append(names, notifyName), append(command.ExtraFiles, told)
	}
	command.Env = append(command.Env,
		inheritedCount+"="+strconv.Itoa(len(names)),
		inheritedNames+"="+strings.Join(names, ":"),
		inheritedProcess+"=", // not known before the start
		notifySocket+"="+k.notifyAddress(),
		mostKept+"=", // systemd's limit is for this process, not for the service
		watchdogTime+"="+strconv.FormatInt(k.patience().Microseconds(), 10),
		watchdogProcess+"=", // as above
		restartCount+"="+strconv.Itoa(k.restarts))
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.Setpgid = true // the terminal signals the keeper alone
	command.SysProcAttr.Pdeathsig = syscall.SIGKILL
	k.ready = false
	k.signs.Store(0)
	kills := host.LocalMemoryCounters()
	ended, err := k.start(ctx, command)
	if err != nil {
		return fmt.Errorf("start the optimizer service: %w", err)
	}
	read := make(chan struct{})
	if signs != nil {
		_ = command.ExtraFiles[1].Close() // the service's alone: its death ends the pipe
		go func() {
			k.readPipe(signs)
			close(read)
		}()
		err = explained(k.watch(ctx, command.Process, ended), kills)
		<-read
		return err
	}
	go func() {
		k.read(command.Process.Pid)
		close(read)
	}()
	err = explained(k.watch(ctx, command.Process, ended), kills)
	if sent := k.sendLast(); sent != nil {
		return errors.Join(err, sent)
	}
	<-read
	return err
}

// sendLast sends the keeper its own last message. When that comes back, the keeper has read all that the service sent.
func (k *Keeper) sendLast() error {
	_, err := k.notify.WriteToUnix([]byte(lastMessage), &net.UnixAddr{Name: k.notifyPath(), Net: "unixgram"})
	return err
}

// explained returns how a process ended. It names the limit if the kernel killed the
// process for want of memory; kills are the counters from before.
func explained(err error, kills []host.MemoryCounter) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return errors.New(host.ExplainKill(kills, host.LocalMemoryCounters()))
	}
	return err
}

const lastMessage = "X_PLIMSOLL_LAST=1"

// start starts a process that ends with this one, unless the context has ended. The channel receives how the process
// ended.
func (k *Keeper) start(ctx context.Context, command *exec.Cmd) (<-chan error, error) {
	kills := k.kills.Load()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	started, ended := make(chan error), make(chan error, 1)
	go func() {
		// The death signal is tied to the thread that starts the process. The process
		// inherits that thread's binding.
		runtime.LockOSThread()
		start := (*exec.Cmd).Start
		if k.Start != nil {
			start = k.Start
		}
		err := start(command)
		if err == nil {
			k.process.Store(int64(command.Process.Pid))
			if k.kills.Load() != kills { // Kill may have come too early to see the process
				k.killRunning()
			}
		}
		started <- err
		if err == nil {
			err = command.Wait()
			k.process.Store(0)
			ended <- err
		}
	}()
	return ended, <-started
}

func (k *Keeper) patience() time.Duration { return cmp.Or(k.Watchdog, time.Minute) }

// watch waits until a service has ended. It asks the service to end when the context
// ends, and kills the service after too long without a sign of life. It counts time in
// ticks: while this process or the host is stopped, there are none.
func (k *Keeper) watch(ctx context.Context, service *os.Process, ended <-chan error) error {
	const ticks = 20
	tick := time.NewTicker(k.patience() / ticks)
	defer tick.Stop()
	asked, stopping := ctx.Done(), false
	for quiet, signs := 0, int64(0); ; {
		select {
		case err := <-ended:
			if quiet >= ticks {
				return fmt.Errorf("it gave no sign of life for %v, and was killed", k.patience())
			}
			return err
		case <-asked:
			asked, stopping, quiet = nil, true, 0
			_ = service.Signal(syscall.SIGTERM) // fails if it has ended
			_ = service.Signal(syscall.SIGCONT) // it may be stopped
		case <-tick.C:
			now := k.signs.Load()
			if now != signs || !stopping && now == 0 { // a starting service has no deadline before its first sign
				quiet, signs = 0, now
				continue
			}
			quiet++
			switch {
			case quiet == ticks:
				if stopping {
					k.Logf("the optimizer service does not end: it gave no sign of life for %v, and is killed",
						k.patience())
				}
				_ = service.Kill()
			case quiet == 2*ticks && stopping:
				return fmt.Errorf("process %d, the optimizer service, does not end by SIGKILL: "+
					"it waits for a device or a file system that does not answer", service.Pid)
			}
		}
	}
}

// read takes the messages of a service until the keeper's own last message. It ignores
// other processes: their messages could give state away or lose it.
func (k *Keeper) read(process int) {
	for {
		data, files, sender, err := protocol.ReadWithSender(k.notify, make([]byte, 4096))
		var wrong *protocol.Error
		switch {
		case errors.As(err, &wrong) || errors.Is(err, io.EOF): // a message that is too long or empty is dropped
		case err != nil:
			return
		case sender == nil || int(sender.Uid) != os.Getuid():
			protocol.CloseAll(files)
		case int(sender.Pid) == os.Getpid() && string(data) == lastMessage:
			protocol.CloseAll(files)
			return
		case int(sender.Pid) == process:
			k.take(parseNotification(string(data)), files)
		default:
			protocol.CloseAll(files)
		}
	}
}

// parseNotification reads the lines of a message of sd_notify(3).
func parseNotification(text string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok {
			fields[name] = value
		}
	}
	return fields
}

func (k *Keeper) take(fields map[string]string, files []*os.File) {
	if fields["READY"] == "1" {
		k.ready = true
	}
	if fields["WATCHDOG"] == "1" || fields["EXTEND_TIMEOUT_USEC"] != "" {
		k.signs.Add(1)
	}
	name := fields["FDNAME"]
	switch {
	case fields["FDSTORE"] == "1" && len(files) == 1 && leavesRoom(files[0]):
		k.kept = append(k.kept, keptFile{name, files[0]})
		return
	case fields["BARRIER"] == "1" && len(files) == 1:
		_, _ = files[0].WriteString(strconv.Itoa(k.keptOf(fields[barrierSession]))) // the service may be gone
	case fields["FDSTOREREMOVE"] == "1":
		left := k.kept[:0]
		for _, kept := range k.kept {
			if kept.name == name {
				_ = kept.file.Close() // a memfd has nothing to flush
			} else {
				left = append(left, kept)
			}
		}
		k.kept = left
	}
	protocol.CloseAll(files)
}

// descriptorsToStart is how many descriptors the keeper needs, beside the kept files,
// to start a service.
const descriptorsToStart = 16

// leavesRoom reports whether enough descriptors are left after this one.
func leavesRoom(file *os.File) bool {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return err == nil && uint64(file.Fd())+descriptorsToStart < limit.Cur
}

// keptOf returns how many files of a session are kept.
func (k *Keeper) keptOf(session string) int {
	files := 0
	for _, kept := range k.kept {
		if keptSession(kept.name) == session {
			files++
		}
	}
	return files
}

// Close gives everything back that the keeper has, the state with it.
func (k *Keeper) Close() {
	for _, kept := range k.kept {
		_ = kept.file.Close()
	}
	k.kept = nil
	_ = k.listener.Close()
	if len(k.Folders) > 0 {
		_ = os.Remove(filepath.Join(k.Folders[0], protocol.RequestsName))
		_ = k.locked.Close()
		return
	}
	_ = k.notify.Close()
	_ = os.Remove(k.Socket)
	_ = os.Remove(k.notifyPath())
	if k.made {
		_ = os.Remove(filepath.Dir(k.Socket)) // fails if others use it by now
	}
}
