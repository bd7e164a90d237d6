// Package arena holds optimizer state in host memory of exactly the size it
// needs. An arena is a named memfd: /proc/PID/smaps shows it by name, so that
// it can be accounted for to the byte, and its file descriptor can be passed to
// another process, so that no byte need be held twice.
package arena

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/ledger"
)

// Pages is the kind of pages an arena asks for.
type Pages uint8

const (
	// BasePages are the system's ordinary pages.
	BasePages Pages = iota
	// TransparentHugePages are ordinary pages that the kernel is asked to
	// join into huge ones. They are granted where there is room; see
	// [Arena.Populate].
	TransparentHugePages
	// HugetlbPages come from the host's reserved pool of 2 MiB pages. There
	// must be enough of them: a missing page is a fatal signal on first touch.
	HugetlbPages
)

func (p Pages) String() string {
	return [...]string{"base pages", "transparent huge pages", "hugetlb pages"}[p]
}

// HugetlbSize is the size of a page of the hugetlb pool in use.
const HugetlbSize = 2 * ledger.MiB

// Size is the size of a page.
func (p Pages) Size() ledger.Bytes {
	if p == HugetlbPages {
		return HugetlbSize
	}
	return ledger.Bytes(os.Getpagesize())
}

// Round is size rounded up to whole pages: what an arena of that size maps.
func (p Pages) Round(size ledger.Bytes) ledger.Bytes {
	page := p.Size()
	return (size + page - 1) / page * page
}

// NamePrefix begins the name of every arena, so that its mappings can be found.
const NamePrefix = "plimsoll/"

// Arena is one mapping. Its memory is outside of the Go heap: slices of it must
// not be used after Close.
type Arena struct {
	name  string
	size  ledger.Bytes
	pages Pages
	file  *os.File
	// borrowed says that the file is somebody else's, who closes it.
	borrowed bool
	whole    []byte
	// gaveUp says that joining pages into huge ones takes too long, or cannot be.
	gaveUp atomic.Bool
}

// New maps an arena of size bytes, untouched: a page belongs to the NUMA node
// of the thread that populates it, or writes to it first.
func New(name string, size ledger.Bytes, pages Pages) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("arena %s: %d bytes", name, size)
	}
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if pages == HugetlbPages {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	descriptor, err := unix.MemfdCreate(NamePrefix+name, flags)
	if err != nil {
		return nil, fmt.Errorf("arena %s: memfd_create: %w", name, err)
	}
	a := &Arena{name: name, size: size, pages: pages, file: os.NewFile(uintptr(descriptor), NamePrefix+name)}
	if err := a.open(pages); err != nil {
		return nil, errors.Join(fmt.Errorf("arena %s of %v: %w", name, size, err), a.Close())
	}
	return a, nil
}

// seals fix the size of an arena, on which all who map it rely.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func (a *Arena) open(pages Pages) error {
	if err := a.file.Truncate(int64(pages.Round(a.size))); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	if _, err := unix.FcntlInt(a.file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("sealing: %w", err)
	}
	return a.mapFile()
}

// Attach maps an arena that another process has made, from its file. It opens no
// further descriptor: the file stays the caller's until [Arena.Adopt].
func Attach(name string, size ledger.Bytes, pages Pages, file *os.File) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("arena %s: %d bytes", name, size)
	}
	a := &Arena{name: name, size: size, pages: pages, file: file, borrowed: true}
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

// check holds a file against what [New] makes. A file that could shrink would
// end whoever has mapped it with a signal.
func (a *Arena) check(pages Pages) error {
	found, err := unix.FcntlInt(a.file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("its file is no memfd: %w", err)
	}
	if found&seals != seals {
		return errors.New("its file is not sealed against resizing")
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
		if err := unix.Madvise(a.whole, unix.MADV_HUGEPAGE); err != nil {
			return fmt.Errorf("madvise(MADV_HUGEPAGE): %w", err)
		}
	}
	return nil
}

// alignment is that of the stretches of address space in which arenas lie. It
// covers every address bit that processors choose a place in their caches by.
const alignment = 256 << 20

var arenas atomic.Uint32

// staggered is how far an arena begins behind such an alignment: a page more
// for each.
//
// An update walks several arenas in step. AMD's processors since Zen tell the
// lines in a set of the first-level cache apart by a hash of the address bits
// 12 to 27 (M. Lipp et al., "Take A Way: Exploring the Security Implications of
// AMD's Cache Way Predictors", AsiaCCS 2020). Where those are the same, as in
// arenas of a power of two that lie one behind the other, each access evicts
// the line of another arena: a step took twice as long.
func staggered(pages Pages) uintptr {
	step := uintptr(pages.Size())
	if pages != BasePages {
		step = uintptr(HugetlbSize)
	}
	return uintptr(arenas.Add(1)%32) * step
}

// addressSpaceLimit names the limit of this process, where it has one.
func addressSpaceLimit() string {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &limit); err != nil || limit.Cur == unix.RLIM_INFINITY {
		return ""
	}
	return fmt.Sprintf(" (this process may use %v of it: raise ulimit -v, and limit memory with a cgroup instead)",
		ledger.Bytes(limit.Cur))
}

// mapAt maps the arena that far behind an alignment.
func (a *Arena) mapAt(size, behind uintptr) error {
	reserved := size + behind + alignment
	reservation, err := unix.MmapPtr(-1, 0, nil, reserved, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("reserving %v of address space: %w%s", ledger.Bytes(reserved), err, addressSpaceLimit())
	}
	before := -uintptr(reservation)%alignment + behind
	start := unsafe.Add(reservation, before)
	if _, err := unix.MmapPtr(int(a.file.Fd()), 0, start, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return errors.Join(fmt.Errorf("mmap: %w", err), unix.MunmapPtr(reservation, reserved))
	}
	a.whole = unsafe.Slice((*byte)(start), size)
	// The rest of the reservation has done its duty.
	if before > 0 {
		err = unix.MunmapPtr(reservation, before)
	}
	after := reserved - before - size // at least a page: the kernel's alignment is that of a page
	return errors.Join(err, unix.MunmapPtr(unsafe.Add(start, size), after))
}

// Name is the arena's name as it stands in /proc/PID/smaps after
// "/memfd:plimsoll/".
func (a *Arena) Name() string { return a.name }

// Size is the number of bytes that were asked for.
func (a *Arena) Size() ledger.Bytes { return a.size }

// Mapped is the number of bytes that are mapped: whole pages.
func (a *Arena) Mapped() ledger.Bytes { return ledger.Bytes(len(a.whole)) }

// Resident is how much memory the kernel has given to the arena, be it swapped
// out. It asks for a number that the kernel keeps, where /proc/PID/smaps has it
// visit every page: half a second for 7 GiB.
func (a *Arena) Resident() (ledger.Bytes, error) {
	const block = 512 // of st_blocks, whatever the file system's are
	var stat unix.Stat_t
	if err := unix.Fstat(int(a.file.Fd()), &stat); err != nil {
		return 0, fmt.Errorf("arena %s: fstat: %w", a.name, err)
	}
	return ledger.Bytes(stat.Blocks * block), nil
}

// Bytes is the arena's memory, without the rest of the last page.
func (a *Arena) Bytes() []byte { return a.whole[:a.size:a.size] }

// Whole is the arena's memory to the end of the last page.
func (a *Arena) Whole() []byte { return a.whole }

// File is the memfd, to be passed to another process.
func (a *Arena) File() *os.File { return a.file }

// Close unmaps the arena and closes its file, unless that is borrowed. The memory is
// given back when no other process holds it.
func (a *Arena) Close() error {
	var err error
	if a.whole != nil {
		err = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(a.whole)), uintptr(len(a.whole)))
		a.whole = nil
	}
	if a.borrowed {
		return err
	}
	return errors.Join(err, a.file.Close())
}

// View is the arena as elements of type T. T must be a type without pointers.
func View[T uint16 | float32 | float64](a *Arena) []T {
	var t T
	b := a.Bytes()
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}
