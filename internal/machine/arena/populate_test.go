//go:build linux

package arena

import (
	"bytes"
	"fmt"
	"testing"
	"unsafe"

	"plimsoll/internal/base/ledger"
)

// TestPopulate populates ranges of arenas of both kinds. The kernel reports which pages
// it has given: no others.
func TestPopulate(t *testing.T) {
	for _, pages := range []Pages{BasePages, TransparentHugePages} {
		for _, size := range []ledger.Bytes{1, 5 * ledger.KiB, 2 * ledger.MiB, 7*ledger.MiB + 12345, 150 * ledger.MiB} {
			t.Run(fmt.Sprintf("%v/%v", pages, size), func(t *testing.T) {
				a, err := New("populate", size, pages)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				middle := min(a.Mapped(), (a.Mapped()/2+PopulateUnit-1)/PopulateUnit*PopulateUnit)
				for _, part := range [][2]ledger.Bytes{{middle, a.Mapped() + 1}, {0, middle}} {
					before := resident(t, a)
					a.Populate(part[0], part[1])
					got, want := resident(t, a)-before, min(part[1], a.Mapped())-part[0]
					// If shared memory gets huge pages by itself, the last may exceed the end.
					if got < want || got > want && got%HugetlbSize != 0 {
						t.Errorf("%v to %v: the kernel gave %v, want %v", part[0], part[1], got, want)
					}
				}
				if !bytes.Equal(a.Whole(), make([]byte, a.Mapped())) {
					t.Error("it holds something")
				}
			})
		}
	}
}

func resident(t *testing.T, a *Arena) ledger.Bytes {
	t.Helper()
	size, err := a.Resident()
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// TestPopulateGivesUp if the kernel collapses no pages: all pages are there all the same.
func TestPopulateGivesUp(t *testing.T) {
	a, err := New("small", 4*ledger.MiB, BasePages) // its address is that of no huge page, most likely
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.pages = TransparentHugePages
	odd := uintptr(unsafe.Pointer(&a.whole[0]))%uintptr(HugetlbSize) != 0
	a.Populate(0, a.Mapped())
	if a.gaveUp.Load() != odd {
		t.Errorf("it gave up: %v, and its address is that of no huge page: %v", a.gaveUp.Load(), odd)
	}
	if got := resident(t, a); got != a.Mapped() {
		t.Errorf("the kernel gave %v of %v", got, a.Mapped())
	}
}
