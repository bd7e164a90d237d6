//go:build linux

package protocol

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// MaximumFiles is how many files a packet may carry. It exceeds the number of arenas
// that a trainer maps.
const MaximumFiles = 16

// ReadPacket receives one packet into data, and the files that came with it. A packet
// longer than data is an error, and its rest is lost. A faulty packet is returned with
// the error, as far as it was read.
func ReadPacket(c Conn, data []byte) ([]byte, []*os.File, error) {
	if pipes, ok := c.(*Pipes); ok {
		return pipes.read(data)
	}
	data, files, _, err := ReadWithSender(c.(*net.UnixConn), data)
	return data, files, err
}

// ReadWithSender is ReadPacket, and also returns the sender if the socket has SO_PASSCRED.
func ReadWithSender(c *net.UnixConn, data []byte) ([]byte, []*os.File, *unix.Ucred, error) {
	control := make([]byte, unix.CmsgSpace(4*MaximumFiles)+unix.CmsgSpace(unix.SizeofUcred))
	n, controls, flags, _, err := c.ReadMsgUnix(data, control)
	if err != nil {
		return nil, nil, nil, err
	}
	files, sender, err := readControl(control[:controls])
	switch {
	case err != nil:
	case flags&unix.MSG_TRUNC != 0:
		err = Malformed.Errorf("a packet of more than %d bytes", len(data))
	case flags&unix.MSG_CTRUNC != 0 || len(files) > MaximumFiles:
		err = Malformed.Errorf("a packet with more than %d file descriptors, or more than this process may open",
			MaximumFiles)
	case n == 0 && len(files) == 0:
		err = io.EOF
	}
	if err != nil {
		CloseAll(files)
		return data[:n], nil, sender, err
	}
	return data[:n], files, sender, nil
}

// readControl returns the files and the sender of a packet.
func readControl(control []byte) (files []*os.File, sender *unix.Ucred, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, nil, Malformed.Errorf("control messages that cannot be read: %v", err)
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET {
			continue
		}
		switch m.Header.Type {
		case unix.SCM_CREDENTIALS:
			if sender, err = unix.ParseUnixCredentials(&m); err != nil {
				CloseAll(files)
				return nil, nil, Malformed.Errorf("credentials that cannot be read: %v", err)
			}
		case unix.SCM_RIGHTS:
			descriptors, err := unix.ParseUnixRights(&m)
			if err != nil {
				CloseAll(files)
				return nil, nil, Malformed.Errorf("file descriptors that cannot be read: %v", err)
			}
			for _, fd := range descriptors {
				unix.CloseOnExec(fd)
				files = append(files, os.NewFile(uintptr(fd), "received"))
			}
		}
	}
	return files, sender, nil
}

// WritePacket sends one packet with files.
func WritePacket(c Conn, data []byte, files ...*os.File) error {
	if pipes, ok := c.(*Pipes); ok {
		return pipes.write(data, files)
	}
	return writeToSocket(c.(*net.UnixConn), data, files)
}

func writeToSocket(c *net.UnixConn, data []byte, files []*os.File) error {
	var rights []byte
	if len(files) > 0 {
		descriptors := make([]int, len(files))
		for i, f := range files {
			descriptors[i] = int(f.Fd())
		}
		rights = unix.UnixRights(descriptors...)
	}
	n, _, err := c.WriteMsgUnix(data, rights, nil)
	if err == nil && n != len(data) {
		err = fmt.Errorf("%d of %d bytes of a packet were sent", n, len(data))
	}
	return err
}

// CheckSeals checks that a file is a memfd of at least size bytes, with seals that keep it
// so. A mapping of it can then be read safely.
func CheckSeals(f *os.File, size int64, seals int) error {
	has, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return errors.New("the file is no memfd that can be sealed: expected memfd_create(..., MFD_ALLOW_SEALING)")
	}
	if has&seals != seals {
		return fmt.Errorf("the memfd has the seals %#x: expected %#x among them (fcntl(F_ADD_SEALS))", has, seals)
	}
	return CheckSize(f, size)
}

// CheckSize checks that a file has at least size bytes.
func CheckSize(f *os.File, size int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() < size {
		return fmt.Errorf("the file has %d bytes: expected at least %d", info.Size(), size)
	}
	return nil
}

// SealedFile returns a memfd with a text. Its seals forbid any change.
func SealedFile(name string, text []byte) (*os.File, error) {
	descriptor, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	file := os.NewFile(uintptr(descriptor), name)
	_, err = file.Write(text)
	if err == nil {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
