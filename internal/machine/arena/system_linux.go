package arena

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
)

// memfd makes an empty file in memory.
func memfd(name string, pages Pages) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if pages == HugetlbPages {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	descriptor, err := unix.MemfdCreate(name, flags)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(descriptor), name), nil
}

// seals fix the size of an arena. Every process that maps it relies on that.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func fixSize(file *os.File) error {
	_, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
	return err
}

func hasFixedSize(file *os.File) (bool, error) {
	found, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	return found&seals == seals, err
}

// allocate gives a file its size, and all blocks that it needs.
func allocate(file *os.File, size int64) error {
	err := unix.Fallocate(int(file.Fd()), 0, 0, size)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < size; at += int64(len(zeros)) {
		if _, err := file.WriteAt(zeros[:min(int64(len(zeros)), size-at)], at); err != nil {
			return err
		}
	}
	return nil
}

func askForHugePages(memory []byte) error { return unix.Madvise(memory, unix.MADV_HUGEPAGE) }

// collapse has the kernel collapse the pages of a range into huge ones.
func collapse(memory []byte) error { return unix.Madvise(memory, unix.MADV_COLLAPSE) }

// residentBytes returns how much memory the kernel has given to a file in memory.
func residentBytes(file *os.File) (ledger.Bytes, error) {
	const block = 512 // bytes of one of st_blocks, whatever the blocks of the file system
	var stat unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &stat)
	return ledger.Bytes(stat.Blocks * block), err
}

func unmap(memory []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(memory)), uintptr(len(memory)))
}

// addressSpaceLimit describes this process's limit of address space. It returns ""
// if there is none.
func addressSpaceLimit() string {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &limit); err != nil || limit.Cur == unix.RLIM_INFINITY {
		return ""
	}
	return fmt.Sprintf(" (this process may use %v of it: raise ulimit -v, and limit memory with a cgroup instead)",
		ledger.Bytes(limit.Cur))
}

// mapAt maps size bytes that begin some bytes behind an alignment.
func (a *Arena) mapAt(size, behind uintptr) error {
	reserved := size + behind + alignment
	reservation, err := unix.MmapPtr(-1, 0, nil, reserved,
		unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("reserving %v of address space: %w%s", ledger.Bytes(reserved), err, addressSpaceLimit())
	}
	before := -uintptr(reservation)%alignment + behind
	start := unsafe.Add(reservation, before)
	if _, err := unix.MmapPtr(int(a.file.Fd()), 0, start, size,
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return errors.Join(fmt.Errorf("mmap: %w", err), unix.MunmapPtr(reservation, reserved))
	}
	a.whole = unsafe.Slice((*byte)(start), size)
	// Give back the rest of the reservation.
	if before > 0 {
		err = unix.MunmapPtr(reservation, before)
	}
	after := reserved - before - size // at least a page: the kernel aligns a reservation to pages
	return errors.Join(err, unix.MunmapPtr(unsafe.Add(start, size), after))
}
