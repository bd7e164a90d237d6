package service

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/arena"
)

// TestPagesOfAnArena: its size does not say which pages it is of, where it is a whole
// number of huge ones. As ordinary pages these cannot be mapped.
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
