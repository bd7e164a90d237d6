package service

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
)

// Client is a connection to a service. It is not safe for concurrent use.
type Client struct {
	c      *net.UnixConn
	number uint32
	buffer []byte // holds the last answer
}

// Dial connects to the service at a socket. The service must run as this user or as
// root.
func Dial(socket string) (*Client, error) {
	c, err := dialTrusted(socket)
	if err != nil {
		return nil, fmt.Errorf("the optimizer service at %s: %w", socket, err)
	}
	return &Client{c: c, buffer: make([]byte, maximumPacket)}, nil
}

// Hangup closes the connection. The session stays.
func (c *Client) Hangup() error { return c.c.Close() }

// ErrLost reports that the service is gone. Connect again and open the session again.
var ErrLost = errors.New("the optimizer service is gone")

// send sends a request, for a caller that reads the answer later.
func (c *Client) send(kind Kind, body []byte, files ...*os.File) (packet, error) {
	c.number++
	request := packet{kind: kind, number: c.number, body: body}
	return request, writePacket(c.c, request.encode(), files...)
}

// call sends a request and waits for its answer. The result is valid until the next
// call.
func (c *Client) call(kind Kind, body []byte, files ...*os.File) ([]byte, []*os.File, error) {
	request, err := c.send(kind, body, files...)
	if err != nil {
		return nil, nil, lost(err)
	}
	data, received, err := readPacket(c.c, c.buffer)
	if err != nil {
		return nil, nil, lost(err)
	}
	result, err := parseAnswer(data, request)
	if err != nil {
		closeAll(received)
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

// done sends a request whose answer has no result.
func (c *Client) done(kind Kind, body []byte, files ...*os.File) error {
	_, received, err := c.call(kind, body, files...)
	closeAll(received)
	return err
}

// Overview returns the status of the service.
func (c *Client) Overview() (*Overview, error) {
	result, files, err := c.call(Stat, nil)
	if err != nil {
		return nil, err
	}
	defer closeAll(files)
	if len(files) != 1 || len(result) != 8 {
		return nil, fmt.Errorf("the answer to stat has %d bytes and %d files", len(result), len(files))
	}
	length := binary.LittleEndian.Uint64(result)
	o := &Overview{}
	if err := json.UnmarshalRead(io.NewSectionReader(files[0], 0, int64(length)), o); err != nil {
		return nil, fmt.Errorf("the answer to stat: %w", err)
	}
	return o, nil
}

// Restore tries again to restore a session that was set aside. With discard it gives
// the session's memory back instead.
func (c *Client) Restore(name string, discard bool) error {
	body, err := json.Marshal(restoreBody{name, discard})
	if err != nil {
		return err
	}
	return c.done(Restore, body)
}

// dialTrusted connects to a socket if its directory and its listener can be trusted.
func dialTrusted(socket string) (*net.UnixConn, error) {
	if err := trustedDirectory(filepath.Dir(socket)); err != nil {
		return nil, err
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	credentials, err := peer(c)
	if err == nil && !trusted(int(credentials.Uid)) {
		err = fmt.Errorf("process %d of user %d answers, who would have the weights: expected user %d or root",
			credentials.Pid, credentials.Uid, os.Geteuid())
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}
