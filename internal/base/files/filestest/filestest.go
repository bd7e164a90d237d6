// Package filestest creates special files: paths that are not regular
// documents. It also writes documents of tests.
package filestest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// Special holds functions, by kind, that create a special file at an unused
// path.
var Special = map[string]func(path string) error{
	"a pipe":      mkfifo,
	"a link":      linked,
	"/dev/zero":   func(path string) error { return os.Symlink("/dev/zero", path) },
	"/dev/null":   func(path string) error { return os.Symlink("/dev/null", path) },
	"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
	"a loop":      func(path string) error { return os.Symlink(filepath.Base(path), path) },
	"a sparse file": func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40))
	},
	"a socket": socket,
}

// linked creates a symbolic link to a pipe.
func linked(path string) error {
	return errors.Join(mkfifo(path+".pipe"), os.Symlink(filepath.Base(path)+".pipe", path))
}

// socket creates a socket without a listener. Paths of sockets must be short,
// so it uses a short one.
func socket(path string) error {
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	listener, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), filepath.Base(path)))
	if err != nil {
		return err
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	return listener.Close()
}
