package arena

import (
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/ledger"
)

// PopulateUnit is what [Arena.Populate] takes whole multiples of, but for the
// end of an arena.
const PopulateUnit = HugetlbSize

const (
	// joined is how much is joined into huge pages by one call, which begins
	// with work on every CPU of the host.
	joined = 64 * ledger.MiB
	// patience is what that may take. Where free memory is in pieces the kernel
	// moves other pages out of the way first, or looks for some in vain.
	patience = time.Second
)

// Joins tries whether the kernel joins pages of shared memory into huge ones.
func Joins() bool {
	a, err := New("trial", HugetlbSize, TransparentHugePages)
	if err != nil {
		return false
	}
	defer a.Close()
	touch(a.whole, HugetlbSize)
	return unix.Madvise(a.whole, unix.MADV_COLLAPSE) == nil
}

// Populate has the kernel give a stretch of the arena its pages, on the NUMA
// node of the calling thread. There must be nothing in it yet but zeros, which it
// then holds. Others may populate other stretches at the same time.
func (a *Arena) Populate(first, end ledger.Bytes) {
	stretch := a.whole[first:min(end, a.Mapped())]
	if a.pages == TransparentHugePages {
		a.join(stretch)
	}
	touch(stretch, BasePages.Size())
}

// join has the kernel make huge pages of a stretch, of which one byte in each is
// touched before: so nothing need be moved, and they come from the right node.
// Linux does so from 6.1 on, also where shared memory gets no huge pages by
// itself. What it does not join comes in ordinary pages.
func (a *Arena) join(stretch []byte) {
	for len(stretch) >= int(HugetlbSize) && !a.gaveUp.Load() {
		part := stretch[:min(len(stretch), int(joined))]
		part = part[:len(part)/int(HugetlbSize)*int(HugetlbSize)]
		stretch = stretch[len(part):]
		touch(part, HugetlbSize)
		begin := time.Now()
		err := unix.Madvise(part, unix.MADV_COLLAPSE)
		if err == unix.EAGAIN {
			err = unix.Madvise(part, unix.MADV_COLLAPSE)
		}
		if err == unix.EINVAL || time.Since(begin) > patience {
			a.gaveUp.Store(true)
		}
	}
}

func touch(stretch []byte, every ledger.Bytes) {
	for i := 0; i < len(stretch); i += int(every) {
		stretch[i] = 0
	}
}
