package arena

import (
	"errors"
	"syscall"
	"time"

	"plimsoll/internal/base/ledger"
)

// PopulateUnit is the unit of the ranges of [Arena.Populate]: their ends are
// multiples of it, or the end of the arena.
const PopulateUnit = HugetlbSize

const (
	// joined is how much memory one call collapses into huge pages. The call begins
	// with work on every CPU of the host.
	joined = 64 * ledger.MiB
	// patience is how long a call may take. If free memory is fragmented, the kernel
	// first moves other pages out of the way, or searches in vain.
	patience = time.Second
)

// Joins reports whether the kernel collapses pages of shared memory into huge ones.
// It tries one.
func Joins() bool {
	a, err := New("trial", HugetlbSize, TransparentHugePages)
	if err != nil {
		return false
	}
	defer a.Close()
	touch(a.whole, HugetlbSize)
	return collapse(a.whole) == nil
}

// Populate has the kernel give a range of the arena its pages, on the NUMA node of
// the calling thread. The range must hold nothing but zeros, as it does afterwards.
// Other threads may populate other ranges at the same time.
func (a *Arena) Populate(first, end ledger.Bytes) {
	memory := a.whole[first:min(end, a.Mapped())]
	if a.pages == TransparentHugePages {
		a.join(memory)
	}
	touch(memory, BasePages.Size())
}

// join has the kernel collapse a range into huge pages. It first touches one byte of
// each: so nothing need be moved, and the pages come from the right node. Linux does
// so from 6.1 on, even if shared memory gets no huge pages by itself. The rest of the
// range gets ordinary pages.
func (a *Arena) join(memory []byte) {
	for len(memory) >= int(HugetlbSize) && !a.gaveUp.Load() {
		part := memory[:min(len(memory), int(joined))]
		part = part[:len(part)/int(HugetlbSize)*int(HugetlbSize)]
		memory = memory[len(part):]
		touch(part, HugetlbSize)
		begin := time.Now()
		err := collapse(part)
		if errors.Is(err, syscall.EAGAIN) {
			err = collapse(part)
		}
		if errors.Is(err, syscall.EINVAL) || time.Since(begin) > patience {
			a.gaveUp.Store(true)
		}
	}
}

func touch(memory []byte, every ledger.Bytes) {
	for i := 0; i < len(memory); i += int(every) {
		memory[i] = 0
	}
}
