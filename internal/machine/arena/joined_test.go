//go:build linux

package arena_test

import (
	"os"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/probe"
)

// TestPopulateJoinsPages if the kernel can. All pages are there in any case.
func TestPopulateJoinsPages(t *testing.T) {
	a, err := arena.New("joined", 64*ledger.MiB, arena.TransparentHugePages)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Populate(0, a.Mapped())
	memory, err := probe.Process(os.DirFS("/"), "self")
	if err != nil {
		t.Fatal(err)
	}
	huge := memory.Mappings["/memfd:"+arena.NamePrefix+"joined"].Huge
	joins := arena.Joins()
	if joins && huge == 0 {
		t.Error("no page is huge, and the kernel makes one when it is tried")
	}
	if got, err := a.Resident(); got != a.Mapped() || err != nil {
		t.Errorf("the kernel gave %v of %v (%v)", got, a.Mapped(), err)
	}
	t.Logf("%v of %v are on huge pages, and the kernel joins them when it is tried: %v", huge, a.Mapped(), joins)
}
