//go:build linux

// Package client is the Go client of the optimizer service. Trainers use the Python
// client; this one asks for the status of a service, and restores sessions.
package client

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/service/protocol"
)

// Client is a connection to a service. It is not safe for concurrent use.
type Client struct {
	Conn   protocol.Conn // for packets beside Call
	number uint32
	buffer []byte // holds the last answer
}

// Dial connects to the service at a socket. The service must run as this user or as
// root.
func Dial(socket string) (*Client, error) {
	c, err := dialTrusted(socket)
	if err != nil {
		return nil, fmt.Errorf("the optimizer service at %v: %w", fault.File(socket), err)
	}
	return &Client{Conn: c, buffer: make([]byte, protocol.MaximumPacket)}, nil
}

// dialTrusted connects to a socket if its directory and its listener can be trusted.
func dialTrusted(socket string) (protocol.Conn, error) {
	if err := protocol.TrustedDirectory(filepath.Dir(socket)); err != nil {
		return nil, err
	}
	if info, err := os.Stat(socket); err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		return protocol.DialPipes(socket)
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if failed := (*net.OpError)(nil); errors.As(err, &failed) {
		return nil, failed.Err // without the path, which is said already
	}
	if err != nil {
		return nil, err
	}
	credentials, err := protocol.Peer(c)
	if err == nil && !protocol.Trusted(int(credentials.Uid)) {
		err = fmt.Errorf("process %d of user %d answers and would get the weights: expected user %d or root",
			credentials.Pid, credentials.Uid, os.Geteuid())
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Hangup closes the connection. The session stays.
func (c *Client) Hangup() error { return c.Conn.Close() }

// ErrLost reports that the service is gone. Connect again and open the session again.
var ErrLost = errors.New("the optimizer service is gone")

// Send sends a request, for a caller that reads the answer later.
func (c *Client) Send(kind protocol.Kind, body []byte, files ...*os.File) (protocol.Packet, error) {
	c.number++
	request := protocol.Packet{Kind: kind, Number: c.number, Body: body}
	return request, protocol.WritePacket(c.Conn, request.Encode(), files...)
}

// Call sends a request and waits for its answer. The result is valid until the next
// Call.
func (c *Client) Call(kind protocol.Kind, body []byte, files ...*os.File) ([]byte, []*os.File, error) {
	request, err := c.Send(kind, body, files...)
	if err != nil {
		return nil, nil, lost(err)
	}
	data, received, err := protocol.ReadPacket(c.Conn, c.buffer)
	if err != nil {
		return nil, nil, lost(err)
	}
	result, err := protocol.ParseAnswer(data, request)
	if err != nil {
		protocol.CloseAll(received)
		return nil, nil, err
	}
	return result, received, nil
}

// lost wraps errors of a connection that ended in [ErrLost].
func lost(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.ENOTCONN) {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

// Do sends a request whose answer has no result.
func (c *Client) Do(kind protocol.Kind, body []byte, files ...*os.File) error {
	_, received, err := c.Call(kind, body, files...)
	protocol.CloseAll(received)
	return err
}

// Overview returns the status of the service.
func (c *Client) Overview() (*protocol.Overview, error) {
	result, files, err := c.Call(protocol.Stat, nil)
	if err != nil {
		return nil, err
	}
	defer protocol.CloseAll(files)
	if len(files) != 1 || len(result) != 8 {
		return nil, fmt.Errorf("the answer to stat has %d bytes and %d files", len(result), len(files))
	}
	length := binary.LittleEndian.Uint64(result)
	o := &protocol.Overview{}
	if err := json.UnmarshalRead(io.NewSectionReader(files[0], 0, int64(length)), o); err != nil {
		return nil, fmt.Errorf("the answer to stat: %w", err)
	}
	return o, nil
}

// Restore tries again to restore a session that was set aside. With discard it gives
// the session's memory back instead.
func (c *Client) Restore(name string, discard bool) error {
	body, err := json.Marshal(protocol.RestoreBody{Session: name, Discard: discard})
	if err != nil {
		return err
	}
	return c.Do(protocol.Restore, body)
}
