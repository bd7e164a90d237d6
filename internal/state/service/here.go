//go:build linux

package service

import (
	"errors"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/service/protocol"
)

// Here is one life of a service in this process: serve is the service, with what it inherits. The keeper keeps its
// files as those of a process of its own. From killed on, the keeper takes no message any more, as from a process that
// is gone. A simulation needs this: processes cannot be stopped between two stores.
func (k *Keeper) Here(serve func(given *Inherited, killed func()) error) error {
	given, err := k.give()
	if err != nil {
		return err
	}
	const nobody = -1
	read := make(chan struct{})
	go func() {
		defer close(read)
		k.read(os.Getpid())
		k.read(nobody)
	}()
	gone := false
	err = serve(given, func() {
		gone = true
		_ = k.sendLast()
	})
	if !gone {
		err = errors.Join(err, k.sendLast())
	}
	err = errors.Join(err, k.sendLast())
	<-read
	return errors.Join(err, unix.Close(given.store.socket))
}

// give returns what a service in this process inherits.
func (k *Keeper) give() (*Inherited, error) {
	listener, err := net.FileListener(k.listener)
	if err != nil {
		return nil, err
	}
	socket := protocol.SocketListener{UnixListener: listener.(*net.UnixListener)}
	given := &Inherited{Listener: socket, Files: map[string]*os.File{}, Restarts: k.restarts}
	socket.SetUnlinkOnClose(false)
	k.restarts++
	for _, kept := range k.kept {
		descriptor, err := unix.FcntlInt(kept.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, errors.Join(err, listener.Close())
		}
		given.Files[kept.name] = os.NewFile(uintptr(descriptor), "memfd "+strconv.Itoa(descriptor))
	}
	if given.store, err = newStore(k.notifyPath()); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	given.store.answers = true
	return given, nil
}

// Kept calls yield for every file that the keeper keeps, while no service lives.
func (k *Keeper) Kept(yield func(name string, file *os.File) bool) {
	for _, kept := range k.kept {
		if !yield(kept.name, kept.file) {
			return
		}
	}
}
