//go:build linux

package servicetest

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/machine/arena"
)

// TestPagesOfAnArena attaches arenas whose size is a multiple of a huge page: the size
// does not tell the kind of pages. Huge pages cannot be mapped as ordinary ones.
func TestPagesOfAnArena(t *testing.T) {
	for flags, want := range map[int]arena.Pages{0: arena.BasePages,
		unix.MFD_HUGETLB | unix.MFD_HUGE_2MB: arena.HugetlbPages} {
		descriptor, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|flags)
		if err != nil {
			t.Logf("%v: memfd_create: %v", want, err) // a kernel without hugetlbfs
			continue
		}
		file := os.NewFile(uintptr(descriptor), "test")
		defer file.Close()
		if err := file.Truncate(int64(arena.HugetlbSize)); err != nil {
			t.Fatal(err)
		}
		if got, err := pagesOf(file); got != want || err != nil {
			t.Errorf("%v (%v), want %v", got, err, want)
		}
	}
}
