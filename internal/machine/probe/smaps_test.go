//go:build linux

package probe

import (
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/arena"
)

const smaps = `00400000-0076f000 r-xp 00000000 fe:00 31471    /usr/bin/some program (deleted)
Size:               3516 kB
KernelPageSize:        4 kB
Rss:                2044 kB
Pss:                1022 kB
Pss_Dirty:             0 kB
THPeligible:           0
VmFlags: rd ex mr mw me
7f0000000000-7f0000200000 rw-s 00000000 00:01 1031  /memfd:plimsoll/rank0/exp_avg (deleted)
Size:               2048 kB
Rss:                2048 kB
Pss:                1024 kB
ShmemPmdMapped:     2048 kB
7f0000200000-7f0000400000 rw-s 00200000 00:01 1031  /memfd:plimsoll/rank0/exp_avg (deleted)
Rss:                 512 kB
Pss:                 512 kB
7f0000400000-7f0000800000 rw-s 00000000 00:0e 1032  /memfd:pool (deleted)
Rss:                   0 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    2048 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0
Rss:                  16 kB
Pss:                  16 kB
`

func TestSmaps(t *testing.T) {
	memory, err := Process(fstest.MapFS{"proc/7/smaps": {Data: []byte(smaps)}, "proc/7/status": {}}, "7")
	if err != nil {
		t.Fatal(err)
	}
	got := memory.Mappings
	for _, want := range []Mapping{
		{"/usr/bin/some program", 1022 * ledger.KiB, 2044 * ledger.KiB, 0},
		{"/memfd:plimsoll/rank0/exp_avg", 1536 * ledger.KiB, 2560 * ledger.KiB, 2048 * ledger.KiB},
		{"/memfd:pool", 4096 * ledger.KiB, 4096 * ledger.KiB, 4096 * ledger.KiB},
		{"", 16 * ledger.KiB, 16 * ledger.KiB, 0},
	} {
		if got[want.Name] != want {
			t.Errorf("%q: %+v, want %+v", want.Name, got[want.Name], want)
		}
	}
	if len(got) != 4 {
		t.Errorf("%d names, want 4", len(got))
	}
}

func TestBrokenFilesAreNamed(t *testing.T) {
	for name, root := range map[string]fstest.MapFS{
		"/proc/7/smaps: line 1: a field before": {"proc/7/smaps": {Data: []byte("Rss: 4 kB\n")}},
		"/proc/7/smaps: line 1: \"what\"":       {"proc/7/smaps": {Data: []byte("what\n")}},
		"/proc/7/smaps: line 2: Rss":            {"proc/7/smaps": {Data: []byte("0-1 rw-p 0 00:00 0\nRss: x kB\n")}},
		"out of range": {"proc/7/smaps": {Data: []byte("0-1 rw-p 0 00:00 " +
			"0\nRss: 9223372036854775807 kB\n")}},
		"/proc/7/status: VmPTE":             {"proc/7/smaps": {}, "proc/7/status": {Data: []byte("VmPTE: much\n")}},
		"proc/7/smaps: file does not exist": {},
	} {
		if _, err := Process(root, "7"); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("want an error with %q, got %v", name, err)
		}
	}
}

// TestThisProcess measures an arena of a known size.
func TestThisProcess(t *testing.T) {
	const size = 3*ledger.MiB + 100
	a, err := arena.New("probe-test", size, arena.BasePages)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, touched := range []ledger.Bytes{0, size} {
		clear(a.Bytes()[:touched])
		want := arena.BasePages.Round(touched)
		m, err := Process(os.DirFS("/"), "self")
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Mappings["/memfd:plimsoll/probe-test"]; got.Proportional != want || got.Resident != want {
			t.Errorf("%v touched: %+v, want %v", touched, got, want)
		}
		if m.Peak == 0 || m.PageTables == 0 {
			t.Errorf("peak %v, page tables %v", m.Peak, m.PageTables)
		}
	}
}

func FuzzSmaps(f *testing.F) {
	f.Add(smaps)
	f.Add("0-1 rw-p 0 00:00 0\nRss: 1 kB")
	f.Fuzz(func(t *testing.T, text string) {
		table, sum := mappingTable{}, samples.Kinds{}
		err := eachArea(strings.NewReader(text), func(a area) {
			if sum.File += a.resident; sum.File < 1<<50 { // beyond, sums may overflow
				table.add(a, nil)
			}
		})
		if err != nil || sum.File >= 1<<50 {
			return
		}
		for _, m := range table.list() {
			sum.File -= m.Resident
			if m.Resident < 0 {
				t.Errorf("%+v", m)
			}
		}
		if sum.File > 0 {
			t.Errorf("%v are in no mapping", sum.File)
		}
		parseStatus(strings.NewReader(text))
	})
}
