//go:build linux

package protocol

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Trusted reports whether a user may run the service that this user connects to, or own
// its directory.
func Trusted(user int) bool { return user == os.Geteuid() || user == 0 }

// OwnerOf returns the user that a file belongs to.
func OwnerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

// TrustedDirectory refuses a directory in which another user could replace the service's socket. It also refuses a
// symbolic link that another user could redirect.
func TrustedDirectory(name string) error {
	for _, look := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		info, err := look(name)
		if err != nil {
			return fmt.Errorf("the directory of the socket: %w", err)
		}
		if owner := OwnerOf(info); !Trusted(owner) {
			return fmt.Errorf("the directory of the socket, %s, belongs to user %d, who could put another "+
				"service there: expected user %d or root", name, owner, os.Geteuid())
		}
		if mode := info.Mode(); mode.IsDir() && mode.Perm()&0o022 != 0 {
			return fmt.Errorf("the directory of the socket, %s, has mode %#o, so that other users could put another "+
				"service there: expected 0700 (chmod 700 %s)", name, mode.Perm(), name)
		}
	}
	return nil
}

// Peer returns the credentials of the process at the other end.
func Peer(c Conn) (*unix.Ucred, error) {
	if pipes, ok := c.(*Pipes); ok {
		return pipes.peer()
	}
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
