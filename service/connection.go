package service

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/ledger"
)

// connection is a client.
type connection struct {
	server  *Server
	c       *net.UnixConn
	process int
	session *session
	// answering is one request at most: a step, which the worker answers that
	// finishes it. It saves a thread from being woken for that.
	answering sync.WaitGroup
	// abandoned ends when another client wants the session of this one, which has
	// hung up: what can be broken off is.
	abandoned context.Context
	abandon   context.CancelFunc
	// kind is that of the request that is being handled, 0 for none.
	kind atomic.Uint32
	// idleSince is when the last request was answered, in nanoseconds; 0 where one
	// is under way, or there is a session.
	idleSince atomic.Int64
	// unanswered counts it, and what is being handled, for those who ask.
	unanswered atomic.Int64
}

func newConnection(s *Server, c *net.UnixConn) *connection {
	client := &connection{server: s, c: c}
	client.idleSince.Store(time.Now().UnixNano())
	client.abandoned, client.abandon = context.WithCancel(context.Background())
	return client
}

// doing is what is being handled, for messages.
func (c *connection) doing() string {
	if kind := Kind(c.kind.Load()); kind != 0 {
		return "request " + kind.String()
	}
	return "last request"
}

// peer reads who is at the other end.
func peer(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var credentials *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		credentials, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return credentials, errors.Join(err, failed)
}

// run answers requests until the client goes, or says something that is none.
func (c *connection) run() {
	defer c.abandon()
	defer c.c.Close()
	defer c.release()
	credentials, err := peer(c.c)
	if errors.Is(err, net.ErrClosed) {
		return // to make room
	}
	if err != nil {
		c.server.say("a client whose credentials cannot be read: %v", err)
		return
	}
	c.process = int(credentials.Pid)
	stranger := int(credentials.Uid) != os.Getuid()
	if stranger {
		c.idleSince.Store(1) // the first to go where there are too many
	}
	buffer := make([]byte, maximumPacket)
	for {
		data, files, err := readPacket(c.c, buffer)
		c.answering.Wait() // answers come in order
		var wrong *Error
		if err != nil && !errors.As(err, &wrong) {
			if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
				c.server.say("process %d: %v", c.process, err)
			}
			return
		}
		p, faulty := parsePacket(data) // also where only its kind and number are left, which the answer has
		if err == nil {
			err = faulty
		}
		switch {
		case stranger:
			err = fail(NotPermitted, "this service belongs to user %d, and process %d to user %d", os.Getuid(),
				c.process, credentials.Uid)
		case err == nil && p.answer:
			err = fail(Malformed, "an answer, where a request was expected")
		}
		c.idleSince.Store(0)
		if !c.serve(p, files, err) {
			return
		}
		if c.session == nil {
			c.idleSince.Store(time.Now().UnixNano())
		}
	}
}

// errLater says that the answer to a request is sent when it is there.
var errLater = errors.New("answered later")

// errEnding says that the service ends instead of answering: whoever waits for
// the answer asks the next one again, if there is one.
var errEnding = errors.New("the service is ending")

// serve handles a request, unless it is faulty already, and says whether
// another may come.
func (c *connection) serve(p packet, files []*os.File, fault error) (more bool) {
	c.server.requests.Add(1)
	c.unanswered.Add(1)
	var result []byte
	var out []*os.File
	if fault == nil {
		c.kind.Store(uint32(p.kind))
		result, out, fault = c.handle(p, files)
		c.kind.Store(0)
	}
	closeAll(files)
	switch fault {
	case errLater:
		return true
	case errEnding:
		return false
	}
	status := Done
	if fault != nil {
		c.server.refused.Add(1)
		status = Internal
		var e *Error
		if errors.As(fault, &e) {
			status = e.Status
		}
		message := fault.Error()
		result, out = []byte(message[:min(len(message), 4096)]), nil
		if status == Internal || status == Malformed || status == NotPermitted {
			c.server.say("process %d: %v: %s", c.process, p.kind, message)
		}
	}
	err := c.answer(p, status, result, out...)
	if p.kind == Stat {
		closeAll(out) // those of open are the arenas' own
	}
	if err != nil {
		return false // it is gone
	}
	return status != Malformed && status != NotPermitted && p.kind != Close
}

// answer sends the answer to a request.
func (c *connection) answer(p packet, status Status, result []byte, files ...*os.File) error {
	reply := packet{kind: p.kind, number: p.number, answer: true, body: append(encode(uint32(status)), result...)}
	if c.server.ending() {
		c.hurry()
	}
	defer c.unanswered.Add(-1)
	return writePacket(c.c, reply.encode(), files...)
}

// waiting is how many bytes of requests nobody has read yet.
func (c *connection) waiting() ledger.Bytes {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return 0 // it is closed
	}
	waiting := 0
	_ = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return ledger.Bytes(waiting)
}

// hurry has a client that reads no answers waited for no longer than this.
func (c *connection) hurry() { _ = c.c.SetWriteDeadline(time.Now().Add(2 * time.Second)) }

// step begins a step. Its answer is sent when it has begun or, where the client
// wants to wait, when it is done.
func (c *connection) step(p packet) ([]byte, error) {
	body, err := decodeStep(p.kind, p.body)
	if err != nil {
		return nil, err
	}
	if body.Flags&waitForStep == 0 {
		_, err := c.session.step(body, nil)
		return encode(body.Step, 0.0), err
	}
	c.answering.Add(1)
	begun, err := c.session.step(body, func(took time.Duration) {
		_ = c.answer(p, Done, encode(body.Step, took.Seconds())) // where it is gone, run hears of it
		c.answering.Done()
	})
	if begun {
		return nil, errLater
	}
	c.answering.Done()
	return encode(body.Step, 0.0), err
}

// release lets go of the session, which stays.
func (c *connection) release() {
	if c.session == nil {
		return
	}
	c.session.release()
	c.server.letGo(c.session)
	c.session = nil
}

// gone says whether the client has hung up: its session will be free soon.
func (c *connection) gone() bool {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return true
	}
	hung := true // a closed connection
	_ = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		hung = err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
	})
	return hung
}
