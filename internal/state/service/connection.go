//go:build linux

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

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/service/protocol"
)

// connection is the connection of one client.
type connection struct {
	server  *Server
	c       protocol.Conn
	process int
	session *session
	// answering counts the step whose answer is still to come; there is at most one.
	// The worker that finishes the step sends the answer, so that no thread has to be
	// woken.
	answering sync.WaitGroup
	// abandoned ends when another client wants the session of this client, which hung
	// up. It cancels what can be cancelled.
	abandoned context.Context
	abandon   context.CancelFunc
	// kind is the kind of the request that is being handled, or 0.
	kind atomic.Uint32
	// idleSince is when the last request was answered, in nanoseconds. It is 0 during a
	// request, and while the connection has a session.
	idleSince atomic.Int64
	// unanswered counts the requests that are being handled or await their answer, for
	// Overview.
	unanswered atomic.Int64
}

func newConnection(s *Server, c protocol.Conn) *connection {
	client := &connection{server: s, c: c}
	client.idleSince.Store(time.Now().UnixNano())
	client.abandoned, client.abandon = context.WithCancel(context.Background())
	return client
}

// doing names the request that is being handled, for messages.
func (c *connection) doing() string {
	if kind := protocol.Kind(c.kind.Load()); kind != 0 {
		return "request " + kind.String()
	}
	return "last request"
}

// run answers requests until the client hangs up or sends a malformed packet.
func (c *connection) run() {
	defer c.abandon()
	defer c.c.Close()
	defer c.release()
	credentials, err := protocol.Peer(c.c)
	if errors.Is(err, net.ErrClosed) {
		return // hangUpOnIdle closed it
	}
	if err != nil {
		c.server.logf("a client whose credentials cannot be read: %v", err)
		return
	}
	c.process = int(credentials.Pid)
	stranger := int(credentials.Uid) != os.Getuid()
	if stranger {
		c.idleSince.Store(1) // hangUpOnIdle closes it first
	}
	buffer := make([]byte, protocol.MaximumPacket)
	for {
		data, files, err := protocol.ReadPacket(c.c, buffer)
		c.answering.Wait() // answers come in order
		var wrong *protocol.Error
		if err != nil && !errors.As(err, &wrong) {
			if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
				c.server.logf("process %d: %v", c.process, err)
			}
			return
		}
		p, faulty := protocol.ParsePacket(data) // if err != nil, the answer still needs kind and number
		if err == nil {
			err = faulty
		}
		switch {
		case stranger:
			err = protocol.NotPermitted.Errorf("this service belongs to user %d, but process %d to user %d",
				os.Getuid(),
				c.process, credentials.Uid)
		case err == nil && p.Answer:
			err = protocol.Malformed.Errorf("found an answer, expected a request")
		}
		c.idleSince.Store(0)
		if !c.serve(p, files, err) {
			return
		}
		if c.session == nil {
			c.idleSince.Store(time.Now().UnixNano())
			c.server.hangUpOnIdle(portion(mostIdle)) // others may have come during the request
		}
	}
}

// errLater reports that a worker will send the answer to this request.
var errLater = errors.New("answered later")

// errEnding reports that the service ends without an answer. The client repeats the
// request to the next service, if there is one.
var errEnding = errors.New("the service is ending")

// serve handles a request, unless it is already at fault. It reports whether another
// request may follow.
func (c *connection) serve(p protocol.Packet, files []*os.File, fault error) (more bool) {
	c.server.requests.Add(1)
	c.unanswered.Add(1)
	var out reply
	if fault == nil {
		c.kind.Store(uint32(p.Kind))
		out, fault = c.handle(request{p, files, c.server.given.inFolders()})
		c.kind.Store(0)
	}
	protocol.CloseAll(files)
	switch fault {
	case errLater:
		return true
	case errEnding:
		return false
	}
	status := protocol.Done
	if fault != nil {
		c.server.refused.Add(1)
		status = protocol.Internal
		var e *protocol.Error
		if errors.As(fault, &e) {
			status = e.Status
		}
		message := fault.Error()
		out = reply{result: []byte(message[:min(len(message), 4096)])}
		if status == protocol.Internal || status == protocol.Malformed || status == protocol.NotPermitted {
			c.server.logf("process %d: %v: %s", c.process, p.Kind, message)
		}
	}
	err := c.answer(p, status, out.result, out.files...)
	if out.temporary {
		protocol.CloseAll(out.files)
	}
	switch {
	case err != nil: // the client is gone
		return false
	case status == protocol.Malformed || status == protocol.NotPermitted: // the kind may be none of this version
		return false
	}
	return !requests[p.Kind].is(last)
}

// answer sends the answer to a request.
func (c *connection) answer(p protocol.Packet, status protocol.Status, result []byte, files ...*os.File) error {
	reply := protocol.Packet{Kind: p.Kind, Number: p.Number, Answer: true,
		Body: append(protocol.Encode(uint32(status)), result...)}
	if c.server.ending() {
		c.hurry()
	}
	defer c.unanswered.Add(-1)
	return protocol.WritePacket(c.c, reply.Encode(), files...)
}

// waiting returns the size of the requests that have arrived and are unread.
func (c *connection) waiting() ledger.Bytes {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return 0 // the connection is closed
	}
	waiting := 0
	_ = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return ledger.Bytes(waiting)
}

// hurry limits how long the service waits for a client that reads no answers.
func (c *connection) hurry() { _ = c.c.SetWriteDeadline(time.Now().Add(2 * time.Second)) }

// step begins a step. It answers when the step has begun or, if the client wants to
// wait, when the step is done.
func (c *connection) step(r request) (reply, error) {
	body, err := protocol.DecodeStep(r.Kind, r.Body)
	if err != nil {
		return reply{}, err
	}
	at := reply{result: protocol.Encode(body.Step, 0.0)}
	shard := c.session.contents.(*heldShard) // before has refused others
	if body.Flags&protocol.WaitForStep == 0 {
		_, err := shard.step(body, nil)
		return at, err
	}
	c.answering.Add(1)
	begun := false
	defer func() { // also if the step finds damage, with which it panics
		if !begun {
			c.answering.Done()
		}
	}()
	begun, err = shard.step(body, func(took time.Duration) {
		status, result := protocol.Done, protocol.Encode(body.Step, took.Seconds())
		if err := shard.refuseDamaged(r.Kind); err != nil {
			status, result = protocol.Refused, []byte(err.Error())
		}
		_ = c.answer(r.Packet, status, result) // if the client is gone, run notices
		c.answering.Done()
	})
	if begun {
		return reply{}, errLater
	}
	return at, err
}

// release lets go of the session. The service keeps the session.
func (c *connection) release() {
	if c.session == nil {
		return
	}
	c.session.release()
	c.server.letGo(c.session)
	c.session = nil
}

// gone reports whether the client has hung up; its session will soon be free.
func (c *connection) gone() bool {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return true
	}
	hung := true // if the connection is closed
	_ = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		hung = err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
	})
	return hung
}
