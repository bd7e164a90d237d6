// Package arena holds optimizer state in host memory of exactly the size it
// needs. An arena is a named memfd. /proc/PID/smaps shows it by name, so it can be
// accounted for to the byte. Its file descriptor can be passed to another process,
// so no byte need be held twice.
//
// # Caveats
//
// Slices of an arena ([Arena.Bytes], [Arena.Whole], [View]) point into mapped memory
// outside of the Go heap. [Arena.Close] unmaps it: reading a slice afterwards ends the
// process with a signal. The garbage collector does not know these slices. It neither
// keeps an arena mapped for them nor unmaps one that is dropped without Close.
//
// Any goroutine may call [New] and [Attach]. Any goroutine may use an open arena, but
// [Arena.Adopt] and Close take no lock: no other goroutine may use the arena meanwhile.
// Goroutines may call [Arena.Populate] at the same time for different ranges. It
// writes zeros, so the range must not hold anything yet.
//
// An arena does not order stores. Goroutines and processes that share one must agree
// by themselves on who writes when. Memory is given back when the last process that
// maps the memfd, or holds its file open, has let go of it.
//
// A missing hugetlb page ends the process with a signal on first touch: see
// [HugetlbPages].
package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/base/ledger"
)

// Pages is the kind of pages an arena asks for.
type Pages uint8

const (
	// BasePages are the system's ordinary pages.
	BasePages Pages = iota
	// TransparentHugePages are ordinary pages that the kernel is asked to
	// collapse into huge ones. It does so where there is room: see [Arena.Populate].
	TransparentHugePages
	// HugetlbPages come from the host's reserved pool of 2 MiB pages. The pool
	// must have enough of them: a missing page is a fatal signal on first touch.
	HugetlbPages
)

func (p Pages) String() string {
	return [...]string{"base pages", "transparent huge pages", "hugetlb pages"}[p]
}

// HugetlbSize is the size of a page of the hugetlb pool in use.
const HugetlbSize = 2 * ledger.MiB

// Size returns the size of a page.
func (p Pages) Size() ledger.Bytes {
	if p == HugetlbPages {
		return HugetlbSize
	}
	return ledger.Bytes(os.Getpagesize())
}

// Round returns size rounded up to full pages: what an arena of that size maps.
func (p Pages) Round(size ledger.Bytes) ledger.Bytes {
	page := p.Size()
	return (size + page - 1) / page * page
}

// Plan is an arena before it is mapped.
type Plan struct {
	Name      string // of the arena
	Component ledger.Component
	Size      ledger.Bytes
	Why       string
}

// NamePrefix begins the name of every arena, so that its mappings can be found.
const NamePrefix = "plimsoll/"

// Arena is one mapping.
type Arena struct {
	name     string
	size     ledger.Bytes
	pages    Pages
	place    Place
	file     *os.File
	unnamed  bool        // the file in a folder has no name of its owner's yet
	borrowed bool        // the caller of Attach owns the file and closes it
	whole    []byte      // all mapped pages
	gaveUp   atomic.Bool // collapsing pages takes too long, or is impossible
}

// New maps an arena of size bytes and touches none of them. A page belongs to the
// NUMA node of the thread that populates it or writes to it first.
func New(name string, size ledger.Bytes, pages Pages) (*Arena, error) {
	return Memory.New(name, size, pages)
}

// Attach maps an arena that another process has made in memory, from its file. It opens no
// other descriptor. The caller owns the file until [Arena.Adopt].
func Attach(name string, size ledger.Bytes, pages Pages, file *os.File) (*Arena, error) {
	return Memory.Attach(name, size, pages, file)
}

// Place is where arenas are: the folder of their files, or [Memory]. A file in a folder outlives all processes. Only
// base pages are in files.
type Place string

// Memory is the place of arenas that are memfds.
const Memory Place = ""

// unnamed begins the name of a file in a folder until its owner renames it.
const unnamed = "new-"

// New is [New] at a place. All blocks of a file in a folder are allocated: a disk that is full would end every process
// that writes to the mapping with a signal. [Arena.Close] removes the file unless [Arena.Rename] has named it.
func (p Place) New(name string, size ledger.Bytes, pages Pages) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("arena %s: %d bytes", name, size)
	}
	file, err := p.create(name, pages)
	if err != nil {
		return nil, err
	}
	a := &Arena{name: name, size: size, pages: pages, place: p, file: file, unnamed: p != Memory}
	if err := a.open(pages); err != nil {
		return nil, errors.Join(fmt.Errorf("arena %s of %v: %w", name, size, err), a.Close())
	}
	return a, nil
}

func (p Place) create(name string, pages Pages) (*os.File, error) {
	if p == Memory {
		file, err := memfd(NamePrefix+name, pages)
		if err != nil {
			return nil, fmt.Errorf("arena %s: memfd_create: %w", name, err)
		}
		return file, nil
	}
	if pages != BasePages {
		return nil, fmt.Errorf("arena %s: a file in a folder has no %v", name, pages)
	}
	file, err := os.CreateTemp(string(p), unnamed)
	if err != nil {
		return nil, fmt.Errorf("arena %s: %w", name, err)
	}
	return file, nil
}

// RemoveUnnamed removes the files that a process left in the folder before they were renamed.
func (p Place) RemoveUnnamed() error {
	left, err := filepath.Glob(filepath.Join(string(p), unnamed+"*"))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}

func (a *Arena) open(pages Pages) error {
	if a.place != Memory {
		if err := allocate(a.file, int64(pages.Round(a.size))); err != nil {
			return fmt.Errorf("allocate it in %s: %w", a.place, err)
		}
		return a.mapFile()
	}
	if err := a.file.Truncate(int64(pages.Round(a.size))); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	if err := fixSize(a.file); err != nil {
		return fmt.Errorf("sealing: %w", err)
	}
	return a.mapFile()
}

// Attach is [Attach] at a place. The size of a file in a folder is checked, but nothing keeps another program from
// changing it: the folder must be its owner's alone.
func (p Place) Attach(name string, size ledger.Bytes, pages Pages, file *os.File) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("arena %s: %d bytes", name, size)
	}
	a := &Arena{name: name, size: size, pages: pages, place: p, file: file, borrowed: true}
	err := a.check(pages)
	if err == nil {
		err = a.mapFile()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("arena %s of %v: %w", name, size, err), a.Close())
	}
	return a, nil
}

// Adopt makes the file of an attached arena the arena's own: Close closes it.
func (a *Arena) Adopt() { a.borrowed = false }

// check compares a file with what [New] makes. A file that shrank would end every
// process that maps it with a signal.
func (a *Arena) check(pages Pages) error {
	if a.place == Memory {
		fixed, err := hasFixedSize(a.file)
		if err != nil {
			return fmt.Errorf("its file is no memfd: %w", err)
		}
		if !fixed {
			return errors.New("its file is not sealed against resizing")
		}
	}
	info, err := a.file.Stat()
	if err != nil {
		return err
	}
	if mapped := int64(pages.Round(a.size)); info.Size() != mapped {
		return fmt.Errorf("its file has %d bytes, expected %d", info.Size(), mapped)
	}
	return nil
}

func (a *Arena) mapFile() error {
	if err := a.mapAt(uintptr(a.pages.Round(a.size)), staggered(a.pages)); err != nil {
		return err
	}
	if a.pages == TransparentHugePages {
		if err := askForHugePages(a.whole); err != nil {
			return fmt.Errorf("madvise(MADV_HUGEPAGE): %w", err)
		}
	}
	return nil
}

// alignment is the alignment of the address ranges that arenas lie in. It covers
// every address bit by which processors choose a place in their caches.
const alignment = 256 << 20

var arenas atomic.Uint32 // how many were mapped, modulo 2^32

// staggered returns how far behind an alignment the next arena begins. Each arena
// begins a page further than the one before.
//
// An update walks several arenas in step. AMD's processors since Zen tell the lines
// in a set of the first-level cache apart by a hash of the address bits 12 to 27
// (M. Lipp et al., "Take A Way: Exploring the Security Implications of AMD's Cache
// Way Predictors", AsiaCCS 2020). In adjacent arenas whose size is a power of two
// those bits are the same. Each access then evicts the line of another arena: a step
// took twice as long.
func staggered(pages Pages) uintptr {
	step := uintptr(pages.Size())
	if pages != BasePages {
		step = uintptr(HugetlbSize)
	}
	return uintptr(arenas.Add(1)%32) * step
}

// Name returns the arena's name. /proc/PID/smaps shows it after "/memfd:plimsoll/".
func (a *Arena) Name() string { return a.name }

// Size returns the number of bytes that were asked for.
func (a *Arena) Size() ledger.Bytes { return a.size }

// Mapped returns the number of bytes that are mapped: full pages.
func (a *Arena) Mapped() ledger.Bytes { return ledger.Bytes(len(a.whole)) }

// Resident returns how much memory the kernel has given to the arena, swapped-out
// pages included. fstat reads a number that the kernel keeps. Reading
// /proc/PID/smaps instead has the kernel visit every page: half a second for 7 GiB.
func (a *Arena) Resident() (ledger.Bytes, error) {
	bytes, err := residentBytes(a.file)
	if err != nil {
		return 0, fmt.Errorf("arena %s: fstat: %w", a.name, err)
	}
	return bytes, nil
}

// Bytes returns the arena's memory, without the rest of the last page.
func (a *Arena) Bytes() []byte { return a.whole[:a.size:a.size] }

// Whole returns the arena's memory to the end of the last page.
func (a *Arena) Whole() []byte { return a.whole }

// File returns the memfd, to be passed to another process.
func (a *Arena) File() *os.File { return a.file }

// Rename gives the file in a folder its name there. From now on it outlives the arena.
func (a *Arena) Rename(name string) error {
	if err := os.Rename(a.file.Name(), filepath.Join(string(a.place), name)); err != nil {
		return err
	}
	a.unnamed = false
	return nil
}

// Close unmaps the arena. It also closes the file, unless the arena was attached and
// not adopted.
func (a *Arena) Close() error {
	var err error
	if a.whole != nil {
		err = unmap(a.whole)
		a.whole = nil
	}
	if a.borrowed {
		return err
	}
	if a.unnamed {
		err = errors.Join(err, os.Remove(a.file.Name()))
	}
	return errors.Join(err, a.file.Close())
}

// View returns the arena as elements of type T.
func View[T uint16 | float32 | float64](a *Arena) []T {
	var t T
	b := a.Bytes()
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}
