package arena

import (
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/ledger"
)

func TestArenaIsExact(t *testing.T) {
	page := BasePages.Size()
	for _, size := range []ledger.Bytes{1, page - 1, page, page + 1, 5*page + 4} {
		a, err := New("test", size, BasePages)
		if err != nil {
			t.Fatal(err)
		}
		if a.Size() != size || ledger.Bytes(len(a.Bytes())) != size || a.Mapped() != BasePages.Round(size) || a.Mapped() < size || a.Mapped() >= size+page {
			t.Errorf("%d bytes: size %d, slice %d, mapped %d", size, a.Size(), len(a.Bytes()), a.Mapped())
		}
		for i := range a.Whole() {
			a.Whole()[i] = 1 // to the end of the last page
		}
		if err := unix.Ftruncate(int(a.File().Fd()), int64(2*size+page)); err == nil {
			t.Error("a sealed arena was resized")
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestArenasDifferInCachePlace holds arenas of the same power of two against
// each other: no two may be at the same place in any cache.
func TestArenasDifferInCachePlace(t *testing.T) {
	for _, pages := range []Pages{BasePages, TransparentHugePages} {
		seen := map[uintptr]bool{}
		for range 8 {
			a, err := New("stagger", 64<<20, pages)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			start := uintptr(unsafe.Pointer(unsafe.SliceData(a.Bytes())))
			// The hash of the address by which AMD's processors tell lines apart.
			place := start >> 12 & 0xff
			for bit := range 8 {
				place ^= start >> (27 - bit) & 1 << bit
			}
			if seen[place] {
				t.Errorf("%v: two arenas have the place %#x", pages, place)
			}
			seen[place] = true
			if pages == TransparentHugePages && start%uintptr(HugetlbSize) != 0 {
				t.Errorf("%#x is no place for a huge page", start)
			}
		}
	}
}

// TestArenaIsSharedByDescriptor maps the file of an arena a second time, as
// another process does.
func TestArenaIsSharedByDescriptor(t *testing.T) {
	a, err := New("shared", 8, BasePages)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	View[float32](a)[1] = 1.5
	other, err := unix.Mmap(int(a.File().Fd()), 0, 8, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(other)
	if other[6] != 0xc0 || other[7] != 0x3f {
		t.Errorf("the second mapping holds % x", other)
	}
	if n := len(View[uint16](a)); n != 4 {
		t.Errorf("8 bytes are %d 16-bit elements", n)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, size := range []ledger.Bytes{0, -1, 1 << 62} {
		if a, err := New("nonsense", size, BasePages); err == nil {
			a.Close()
			t.Errorf("an arena of %d bytes was made", size)
		} else if !strings.Contains(err.Error(), "nonsense") {
			t.Errorf("the error does not name the arena: %v", err)
		}
	}
	descriptors, _ := os.ReadDir("/proc/self/fd")
	for _, d := range descriptors {
		if target, _ := os.Readlink("/proc/self/fd/" + d.Name()); strings.Contains(target, "nonsense") {
			t.Errorf("descriptor %s of a refused arena is still open", d.Name())
		}
	}
}

// TestHugePages asks for both kinds; the kernel need not have any.
func TestHugePages(t *testing.T) {
	a, err := New("transparent", 3*ledger.MiB, TransparentHugePages)
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
	if a, err = New("hugetlb", 3*ledger.MiB, HugetlbPages); err == nil {
		if a.Mapped() != 4*ledger.MiB {
			t.Errorf("3 MiB on 2 MiB pages map %v", a.Mapped())
		}
		a.Whole()[len(a.Whole())-1] = 1
		a.Close()
	} else if !strings.Contains(err.Error(), "hugetlb of 3.00 MiB: mmap") {
		t.Errorf("no pool, and the error is: %v", err)
	}
}
