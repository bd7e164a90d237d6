//go:build linux

package arena

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
)

func TestArenaIsExact(t *testing.T) {
	page := BasePages.Size()
	for _, size := range []ledger.Bytes{1, page - 1, page, page + 1, 5*page + 4} {
		a, err := New("test", size, BasePages)
		if err != nil {
			t.Fatal(err)
		}
		if a.Size() != size || ledger.Bytes(len(a.Bytes())) != size || a.Mapped() != BasePages.Round(size) ||
			a.Mapped() < size || a.Mapped() >= size+page {
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

// TestArenasDifferInCachePlace: no two arenas of the same power of two may be at the same
// place in any cache.
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

// TestAttachedArenaIsTheSame attaches an arena from its file. Closing the attached arena
// leaves the file open.
func TestAttachedArenaIsTheSame(t *testing.T) {
	a, err := New("attached", 5000, BasePages)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Attach("attached", 5000, BasePages, a.File())
	if err != nil {
		t.Fatal(err)
	}
	View[float32](b)[7] = 1.5
	if View[float32](a)[7] != 1.5 || b.Name() != a.Name() || b.Size() != a.Size() || b.Mapped() != a.Mapped() {
		t.Error("the attached arena is another")
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if c, err := Attach("attached", 5000, BasePages, a.File()); err != nil {
		t.Errorf("the arena's file went with the attached one: %v", err)
	} else {
		c.Close()
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

func TestForeignFilesAreNotAttached(t *testing.T) {
	page := BasePages.Size()
	a, err := New("foreign", page+1, BasePages)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	descriptor, err := unix.MemfdCreate("unsealed", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	unsealed := os.NewFile(uintptr(descriptor), "unsealed")
	defer unsealed.Close()
	for want, test := range map[string]struct {
		size ledger.Bytes
		file *os.File
	}{
		"foreign: 0 bytes": {0, a.File()},
		fmt.Sprintf("its file has %d bytes, expected %d", 2*page, 3*page): {2*page + 1, a.File()},
		fmt.Sprintf("its file has %d bytes, expected %d", 2*page, page):   {page, a.File()},
		"arena foreign of 100 B: its file is no memfd":                    {100, plain},
		"arena foreign of 100 B: its file is not sealed against resizing": {100, unsealed},
	} {
		if b, err := Attach("foreign", test.size, BasePages, test.file); err == nil {
			b.Close()
			t.Errorf("attached; want an error of %q", want)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %q, want %q", err, want)
		}
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
