//go:build linux

package watch

import (
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// disk reads the size of the file system that a directory is on. A network file system that hangs holds up no sample.
type disk struct {
	directory string
	asking    bool
	answers   chan samples.FileSystem
	last      samples.FileSystem
}

// diskPatience is how long a sample waits for the size.
const diskPatience = 20 * time.Millisecond

func newDisk(directory string) disk {
	return disk{directory: directory, answers: make(chan samples.FileSystem, 1)}
}

// size returns the size, or the last one known.
func (d *disk) size() samples.FileSystem {
	if d.directory == "" {
		return d.last
	}
	if !d.asking {
		d.asking = true
		go func() { d.answers <- sizeOf(d.directory) }()
	}
	select {
	case d.last = <-d.answers:
		d.asking = false
	case <-time.After(diskPatience):
	}
	return d.last
}

// sizeOf returns the size of a file system as a user who is not root has it. It is 0 if the directory is gone.
func sizeOf(directory string) samples.FileSystem {
	var s unix.Statfs_t
	if unix.Statfs(directory, &s) != nil {
		return samples.FileSystem{}
	}
	block := ledger.Bytes(s.Frsize)
	return samples.FileSystem{Size: ledger.Bytes(s.Blocks-s.Bfree+s.Bavail) * block,
		Used: ledger.Bytes(s.Blocks-s.Bfree) * block}
}
