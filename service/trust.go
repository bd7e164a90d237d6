package service

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// trusted reports whether a user may run the service that this user connects to, or own
// its directory.
func trusted(user int) bool { return user == os.Geteuid() || user == 0 }

func ownerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

// trustedDirectory refuses a directory in which another user could replace the
// service's socket. It also refuses a link that another user could redirect.
func trustedDirectory(name string) error {
	for _, look := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		info, err := look(name)
		if err != nil {
			return fmt.Errorf("the directory of the socket: %w", err)
		}
		if owner := ownerOf(info); !trusted(owner) {
			return fmt.Errorf("the directory of the socket, %s, belongs to user %d, who could put another "+
				"service there: "+
				"expected user %d or root", name, owner, os.Geteuid())
		}
		if mode := info.Mode(); mode.IsDir() && mode.Perm()&0o022 != 0 {
			return fmt.Errorf("the directory of the socket, %s, has mode %#o, so that other users could put another "+
				"service there: "+
				"expected 0700 (chmod 700 %s)", name, mode.Perm(), name)
		}
	}
	return nil
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
		err = fmt.Errorf("process %d of user %d answers and would get the weights: expected user %d or root",
			credentials.Pid, credentials.Uid, os.Geteuid())
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}
