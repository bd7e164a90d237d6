//go:build linux

// Package datagram makes Unix sockets whose messages carry the kernel's word on their sender.
package datagram

import (
	"errors"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Listen creates a socket at a path, for this user alone. The kernel adds the credentials of the sender to every
// message (SO_PASSCRED, unix(7)).
func Listen(path string) (*net.UnixConn, error) {
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	raw, err := c.SyscallConn()
	if err == nil {
		var failed error
		err = raw.Control(func(descriptor uintptr) {
			failed = unix.SetsockoptInt(int(descriptor), unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
		})
		err = errors.Join(err, failed)
	}
	if err = errors.Join(err, os.Chmod(path, 0o600)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}
