// Package tiertest has disks for tests: they lose power, drop and reorder what was not brought to the disk, and fail.
package tiertest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/tier"
)

// ErrPower is the error of everything after the power is off.
var ErrPower = errors.New("the power is off")

// Sector is what a disk writes as a whole.
const Sector = 512

// Fault is what happens to a call.
type Fault int

// The faults.
const (
	PowerOff Fault = iota // from this call on; of a write, some sectors may reach the disk
	Fail                  // with Disk.Err, and nothing has happened
	Short                 // a read or write of some of the bytes; other calls fail
)

// Disk is a disk in memory. It forgets what was not brought to it when the power goes off.
type Disk struct {
	mutex sync.Mutex
	names map[string]*inode // as they are
	safe  map[string]*inode // as they are on the disk
	calls int
	off   bool

	// At is the number of the call that Fault happens to; negative for none.
	At    int
	Fault Fault
	Err   error
	// Free is the room that is left.
	Free ledger.Bytes
}

type inode struct {
	now     []byte // what is read
	safe    []byte // what is on the disk
	pending []write
}

type write struct {
	offset int64
	data   []byte
}

// New returns an empty disk with room for much.
func New() *Disk {
	return &Disk{names: map[string]*inode{}, safe: map[string]*inode{}, At: -1, Free: ledger.GiB}
}

// Calls returns how many calls there were.
func (d *Disk) Calls() int {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.calls
}

// call counts a call, and returns its fault. The caller holds the mutex.
func (d *Disk) call() (faulty bool, err error) {
	number := d.calls
	d.calls++
	switch {
	case d.off:
		return false, ErrPower
	case number != d.At:
		return false, nil
	case d.Fault == PowerOff:
		d.off = true
		return true, ErrPower
	case d.Fault == Short:
		return true, nil
	}
	return true, d.Err
}

// Reboot returns the disk as it may be found after the power went off: every sector that was written and not brought to
// the disk has what was written there, by one write or another, or what it had before. So does every name.
func (d *Disk) Reboot(random *rand.Rand) *Disk {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	after := New()
	after.Free = d.Free
	keep := random.Float64() // of what was not brought to the disk
	copies := map[*inode]*inode{}
	survivor := func(i *inode) *inode {
		if copies[i] == nil {
			copies[i] = i.reboot(random, keep)
		}
		return copies[i]
	}
	paths := slices.Collect(maps.Keys(d.names))
	for path := range d.safe {
		if d.names[path] == nil {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths) // one seed is one disk
	for _, path := range paths {
		found := d.safe[path]
		if random.Float64() < keep {
			found = d.names[path]
		}
		if found != nil {
			after.safe[path] = survivor(found)
			after.names[path] = after.safe[path]
		}
	}
	return after
}

// Copy returns the disk as it is: what was not brought to it may still be lost.
func (d *Disk) Copy() *Disk {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	same, copies := New(), map[*inode]*inode{}
	same.Free = d.Free
	of := func(i *inode) *inode {
		if copies[i] == nil {
			copies[i] = &inode{slices.Clone(i.now), slices.Clone(i.safe), slices.Clone(i.pending)}
		}
		return copies[i]
	}
	for path, found := range d.names {
		same.names[path] = of(found)
	}
	for path, found := range d.safe {
		same.safe[path] = of(found)
	}
	return same
}

func (i *inode) reboot(random *rand.Rand, keep float64) *inode {
	safe := slices.Clone(i.safe)
	for _, n := range random.Perm(len(i.pending)) { // in any order
		w := i.pending[n]
		for at := 0; at < len(w.data); at += Sector {
			if random.Float64() < keep {
				copy(safe[w.offset+int64(at):], w.data[at:min(at+Sector, len(w.data))])
			}
		}
	}
	return &inode{now: slices.Clone(safe), safe: safe}
}

// Flip flips a bit of a file, as it may flip on a disk.
func (d *Disk) Flip(path string, bit int64) {
	file := d.names[path]
	file.now[bit/8] ^= 1 << (bit % 8)
	copy(file.safe, file.now)
}

// Size returns the size of a file.
func (d *Disk) Size(path string) int64 { return int64(len(d.names[path].now)) }

// Paths returns the paths of all files.
func (d *Disk) Paths() []string { return slices.Sorted(maps.Keys(d.names)) }

// Create makes a file.
func (d *Disk) Create(path string, size int64) (tier.File, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if faulty, err := d.call(); err != nil || faulty {
		return nil, errors.Join(err, io.ErrShortWrite)
	}
	if d.names[path] != nil {
		return nil, fs.ErrExist
	}
	if ledger.Bytes(size) > d.Free {
		return nil, errors.New("no space left on device")
	}
	d.Free -= ledger.Bytes(size)
	d.names[path] = &inode{now: make([]byte, size), safe: make([]byte, size)}
	return &file{d, path, d.names[path]}, nil
}

// Open opens a file.
func (d *Disk) Open(path string) (tier.File, int64, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if faulty, err := d.call(); err != nil || faulty {
		return nil, 0, errors.Join(err, io.ErrUnexpectedEOF)
	}
	found := d.names[path]
	if found == nil {
		return nil, 0, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
	}
	return &file{d, path, found}, int64(len(found.now)), nil
}

// Rename renames a file.
func (d *Disk) Rename(from, to string) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if faulty, err := d.call(); err != nil || faulty {
		return errors.Join(err, io.ErrShortWrite)
	}
	d.names[to] = d.names[from]
	delete(d.names, from)
	return nil
}

// Remove removes a file.
func (d *Disk) Remove(path string) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if faulty, err := d.call(); err != nil || faulty {
		return errors.Join(err, io.ErrShortWrite)
	}
	if d.names[path] == nil {
		return fs.ErrNotExist
	}
	delete(d.names, path)
	return nil
}

// SyncFolder brings the names in a folder to the disk.
func (d *Disk) SyncFolder(folder string) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if faulty, err := d.call(); err != nil || faulty {
		return errors.Join(err, io.ErrShortWrite)
	}
	maps.DeleteFunc(d.safe, func(path string, _ *inode) bool { return filepath.Dir(path) == folder })
	for path, found := range d.names {
		if filepath.Dir(path) == folder {
			d.safe[path] = found
		}
	}
	return nil
}

// Room returns the room that is left.
func (d *Disk) Room(string) (ledger.Bytes, uint64, error) { return d.Free, 1, nil }

type file struct {
	disk *Disk
	path string
	*inode
}

func (f *file) Name() string { return f.path }

func (f *file) Close() error { return nil }

// check panics where direct I/O fails.
func check(p []byte, offset int64) {
	address := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	if address%tier.Block != 0 || len(p)%tier.Block != 0 || offset%tier.Block != 0 {
		panic(fmt.Sprintf("%d bytes at %d are not aligned", len(p), offset))
	}
}

func (f *file) ReadAt(p []byte, offset int64) (int, error) {
	check(p, offset)
	f.disk.mutex.Lock()
	defer f.disk.mutex.Unlock()
	faulty, err := f.disk.call()
	if err != nil {
		return 0, err
	}
	if faulty {
		return copy(p[:len(p)/2], f.now[offset:]), nil
	}
	n := copy(p, f.now[offset:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *file) WriteAt(p []byte, offset int64) (int, error) {
	check(p, offset)
	f.disk.mutex.Lock()
	defer f.disk.mutex.Unlock()
	faulty, err := f.disk.call()
	if err != nil && !(faulty && f.disk.off) {
		return 0, err
	}
	if faulty && err == nil {
		p = p[:len(p)/2]
	}
	if offset+int64(len(p)) > int64(len(f.now)) {
		panic("a write beyond the end of a file")
	}
	f.pending = append(f.pending, write{offset, slices.Clone(p)})
	return copy(f.now[offset:], p), err
}

// Sync brings what was written to the disk.
func (f *file) Sync() error {
	f.disk.mutex.Lock()
	defer f.disk.mutex.Unlock()
	if faulty, err := f.disk.call(); err != nil || faulty {
		return errors.Join(err, io.ErrShortWrite)
	}
	copy(f.safe, f.now)
	f.pending = nil
	return nil
}
