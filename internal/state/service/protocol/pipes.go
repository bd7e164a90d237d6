//go:build linux

package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is what packets go over: a Unix socket, or two pipes where sockets are forbidden.
type Conn interface {
	io.Closer
	CloseRead() error
	SetDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	SyscallConn() (syscall.RawConn, error) // of what is read from
}

// Listener accepts clients.
type Listener interface {
	io.Closer
	SetDeadline(time.Time) error
	AcceptClient() (Conn, error)
}

// SocketListener accepts clients at a Unix socket.
type SocketListener struct{ *net.UnixListener }

// AcceptClient returns the next client.
func (l SocketListener) AcceptClient() (Conn, error) { return l.AcceptUnix() }

// Clients without sockets meet the service in a folder that is the user's alone. RequestsName is a named pipe there,
// which its keeper holds open. A client makes two named pipes, NAME.to and NAME.from, and writes NAME and a newline to
// RequestsName. The service opens both, removes their names, and sends its process, four bytes. NAME is "client-", the
// client's process, "-" and hexadecimal digits.
//
// A packet follows a head: the bytes of the packet, the number of its files, and for each file the descriptor that the
// sender has of it, and its device and inode. The receiver opens it through /proc. The sender keeps it open meanwhile.
const (
	RequestsName = "requests"

	toSuffix, fromSuffix = ".to", ".from"
)

var clientName = regexp.MustCompile(`^client-([0-9]{1,10})-[0-9a-f]{1,32}$`)

// ClientPipes reports whether a file in the folder is a pipe of a client that has not been answered.
func ClientPipes(name string) bool {
	base, ofClient := strings.CutSuffix(name, toSuffix)
	if !ofClient {
		base, ofClient = strings.CutSuffix(name, fromSuffix)
	}
	return ofClient && clientName.MatchString(base)
}

// Pipes is a connection without sockets, to a process of this user.
type Pipes struct {
	in, out *os.File
	process int
	sending sync.Mutex
	sent    []*os.File // copies of the files that were sent last, for the receiver to open
}

// sentFiles is how many files that were sent stay open. A client has opened those of an answer before it sends more
// requests than that.
const sentFiles = 8 * MaximumFiles

type head struct{ Length, Files uint32 }

type sentFile struct{ Descriptor, Device, Inode uint64 }

// Close closes both pipes.
func (p *Pipes) Close() error {
	p.sending.Lock()
	defer p.sending.Unlock()
	CloseAll(p.sent)
	p.sent = nil
	return errors.Join(p.in.Close(), p.out.Close())
}

// CloseRead ends reading.
func (p *Pipes) CloseRead() error { return p.in.Close() }

// SetDeadline limits how long a packet is waited for, and how long one waits for the receiver.
func (p *Pipes) SetDeadline(t time.Time) error {
	return errors.Join(p.in.SetReadDeadline(t), p.out.SetWriteDeadline(t))
}

// SetWriteDeadline limits how long a packet waits for the receiver.
func (p *Pipes) SetWriteDeadline(t time.Time) error { return p.out.SetWriteDeadline(t) }

// SyscallConn returns the pipe that is read from.
func (p *Pipes) SyscallConn() (syscall.RawConn, error) { return p.in.SyscallConn() }

// peer returns the process at the other end. It is of this user, as nobody else may enter the folder.
func (p *Pipes) peer() (*unix.Ucred, error) {
	return &unix.Ucred{Pid: int32(p.process), Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}, nil
}

func (p *Pipes) write(data []byte, files []*os.File) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	message := bytes.NewBuffer(Encode(head{uint32(len(data)), uint32(len(files))}))
	for _, f := range files {
		var stat unix.Stat_t
		descriptor, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			p.sent = append(p.sent, os.NewFile(uintptr(descriptor), f.Name()))
			err = unix.Fstat(descriptor, &stat)
		}
		if err != nil {
			return err
		}
		message.Write(Encode(sentFile{uint64(descriptor), stat.Dev, stat.Ino}))
	}
	if old := len(p.sent) - sentFiles; old > 0 {
		CloseAll(p.sent[:old])
		p.sent = append([]*os.File{}, p.sent[old:]...)
	}
	message.Write(data)
	_, err := p.out.Write(message.Bytes())
	return err
}

func (p *Pipes) read(data []byte) (packet []byte, files []*os.File, err error) {
	defer func() {
		if errors.Is(err, os.ErrClosed) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = io.EOF // this process closed it, or the sender has died
		}
		if err != nil {
			CloseAll(files)
			files = nil
		}
	}()
	var h head
	if err := p.readInto(&h); err != nil {
		return nil, nil, err
	}
	if int(h.Length) > len(data) || h.Files > MaximumFiles {
		return nil, nil, Malformed.Errorf("a packet of more than %d bytes or %d files", len(data), MaximumFiles)
	}
	sent := make([]sentFile, h.Files)
	if err := p.readInto(sent); err != nil {
		return nil, nil, err
	}
	packet = data[:h.Length]
	if _, err := io.ReadFull(p.in, packet); err != nil {
		return nil, nil, err
	}
	for _, s := range sent {
		file, err := p.open(s)
		if err != nil {
			return packet, files, Malformed.Errorf("descriptor %d of process %d: %v", s.Descriptor, p.process, err)
		}
		files = append(files, file)
	}
	return packet, files, nil
}

func (p *Pipes) readInto(fields any) error { return binary.Read(p.in, binary.LittleEndian, fields) }

// open opens a file that the sender has open.
func (p *Pipes) open(sent sentFile) (*os.File, error) {
	file, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", p.process, sent.Descriptor), os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var stat unix.Stat_t
	err = unix.Fstat(int(file.Fd()), &stat)
	if err == nil && (stat.Dev != sent.Device || stat.Ino != sent.Inode) {
		err = errors.New("it is of another file by now")
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// PipeListener accepts clients in a folder.
type PipeListener struct {
	folder   string
	requests *os.File
	read     []byte // of requests, not taken yet
}

// ListenAtPipe makes the named pipe of a folder, for the keeper to hold, and returns it.
func ListenAtPipe(folder string) (*os.File, error) {
	name := filepath.Join(folder, RequestsName)
	if err := unix.Mkfifo(name, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("mkfifo %s: %w", name, err)
	}
	if info, err := os.Lstat(name); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		return nil, errors.Join(fmt.Errorf("%s is no named pipe", name), err)
	}
	return os.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0) // both ends, so that it never ends
}

// NewPipeListener returns a listener at the named pipe of a folder, which it takes over.
func NewPipeListener(requests *os.File) (*PipeListener, error) {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", requests.Fd()))
	if err != nil {
		return nil, err
	}
	// As it came, it need not be one that waiting for can be broken off.
	own, err := os.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err = errors.Join(err, requests.Close()); err != nil {
		return nil, err
	}
	return &PipeListener{folder: filepath.Dir(name), requests: own}, nil
}

// Folder returns the folder.
func (l *PipeListener) Folder() string { return l.folder }

// Close breaks off AcceptClient.
func (l *PipeListener) Close() error { return l.requests.Close() }

// SetDeadline limits how long AcceptClient waits.
func (l *PipeListener) SetDeadline(t time.Time) error { return l.requests.SetReadDeadline(t) }

// AcceptClient returns the next client that is still there.
func (l *PipeListener) AcceptClient() (Conn, error) {
	for {
		line, rest, found := bytes.Cut(l.read, []byte("\n"))
		if !found {
			buffer := make([]byte, unix.PathMax)
			n, err := l.requests.Read(buffer)
			if err != nil {
				return nil, err
			}
			l.read = append(l.read, buffer[:n]...)
			continue
		}
		name := string(line)
		l.read = rest
		if client := l.connect(name); client != nil {
			return client, nil
		}
	}
}

// connect returns the connection of the client that has made the pipes of a name, or nil if it is gone.
func (l *PipeListener) connect(name string) *Pipes {
	match := clientName.FindStringSubmatch(name)
	if match == nil {
		return nil
	}
	process, _ := strconv.Atoi(match[1])
	to, from := filepath.Join(l.folder, name+toSuffix), filepath.Join(l.folder, name+fromSuffix)
	out, err := os.OpenFile(from, os.O_WRONLY|unix.O_NONBLOCK, 0) // fails if nobody reads it
	if err != nil {
		return nil
	}
	in, err := os.OpenFile(to, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		_ = out.Close()
		return nil
	}
	p := &Pipes{in: in, out: out, process: process}
	if errors.Join(os.Remove(to), os.Remove(from), p.write(Encode(uint32(os.Getpid())), nil)) != nil {
		_ = p.Close()
		return nil
	}
	return p
}

// announceEvery is how often a client says that it is there: a service that dies may have read its name.
const announceEvery = 500 * time.Millisecond

// DialPipes connects to the service whose named pipe this is. It waits for a service that is being started again, as
// long as a keeper holds the pipe.
func DialPipes(requests string) (_ *Pipes, err error) {
	base := fmt.Sprintf("client-%d-%x", os.Getpid(), time.Now().UnixNano())
	name := filepath.Join(filepath.Dir(requests), base)
	to, from := name+toSuffix, name+fromSuffix
	// Both ends of both pipes, until the service has its own: a pipe without a writer is at its end.
	var files []*os.File
	defer func() {
		if err != nil {
			CloseAll(files)
		}
	}()
	for _, name := range []string{to, from} {
		if err := unix.Mkfifo(name, 0o600); err != nil {
			return nil, err
		}
		defer os.Remove(name)
		both, err := os.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, both)
	}
	in, err := os.OpenFile(from, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p := &Pipes{in: in, out: files[0]}
	if p.process, err = p.announce(requests, base); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	if err := errors.Join(files[1].Close(), in.SetReadDeadline(time.Time{})); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return p, nil
}

// announce tells the service the name of a client's pipes until it answers. It returns the service's process.
func (p *Pipes) announce(requests, name string) (process int, err error) {
	for {
		listener, err := os.OpenFile(requests, os.O_WRONLY|unix.O_NONBLOCK, 0) // fails if no keeper holds it
		if err != nil {
			return 0, err
		}
		_, err = listener.WriteString(name + "\n")
		if err = errors.Join(err, listener.Close(), p.in.SetReadDeadline(time.Now().Add(announceEvery))); err != nil {
			return 0, err
		}
		greeting, _, err := p.read(make([]byte, MaximumPacket))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return 0, err
		}
		if len(greeting) != 4 {
			return 0, Malformed.Errorf("a greeting of %d bytes: expected the service's process", len(greeting))
		}
		return int(binary.LittleEndian.Uint32(greeting)), nil
	}
}
