//go:build linux

package probe

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

func TestParseStat(t *testing.T) {
	const rest = " S 4 1 1 0 -1 4194560 5 0 0 0 150 50 0 0 20 0 12 0 987 1 1\n"
	for text, want := range map[string]stat{
		"7 (python)" + rest:          {Identity{7, 987}, "python", 'S', 4, 2 * time.Second, 12},
		"7 (a) S 1 (b c)" + rest:     {Identity{7, 987}, "a) S 1 (b c", 'S', 4, 2 * time.Second, 12},
		"7 ()" + rest:                {Identity{7, 987}, "", 'S', 4, 2 * time.Second, 12},
		"":                           {},
		"7 python" + rest:            {},
		"7 )python(" + rest:          {},
		"7 (python) S 4 1 1 0":       {},
		"7 (python) Sleeps" + rest:   {},
		"-7 (python)" + rest:         {},
		"7 (python)" + rest[:44]:     {},
		"4294967296 (python)" + rest: {},
	} {
		if got, err := parseStat(text); (err == nil) != (want != stat{}) || err == nil && got != want {
			t.Errorf("%q: got %+v, %v, want %+v", text, got, err, want)
		}
	}
}

func TestParseResourceLimits(t *testing.T) {
	for text, want := range map[string][2]ledger.Bytes{
		"": {-1, -1},
		"Max address space         1048576              unlimited            bytes     \n": {1048576, -1},
		"Max locked memory         65536                65536                bytes     \n": {-1, 65536},
		"Max locked memory         unlimited            unlimited            bytes     \n": {-1, -1},
		"Max locked memory         0                    0                    bytes     \n": {-1, 0},
	} {
		if space, locked := parseResourceLimits(text); space != want[0] || locked != want[1] {
			t.Errorf("%q: got %d and %d, want %v", text, space, locked, want)
		}
	}
}

func TestParseNUMAMaps(t *testing.T) {
	for text, want := range map[string]map[int]ledger.Bytes{
		"7f00 default\n": {},
		"7f00 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4\n" +
			"7f01 default file=/N3=7 N17=3 huge kernelpagesize_kB=2048\n": {0: 500 << 12, 1: 12 << 12, 17: 3 << 21},
		"7f00 bind:0 anon=3 N0=3 kernelpagesize_kB=64\n7f01 default N0=1 kernelpagesize_kB=4\n": {0: 3<<16 + 1<<12},
		"7f00 default N0=3\n":                      nil,
		"7f00 default N0=3 kernelpagesize_kB=x\n":  nil,
		"7f00 default N0=3 kernelpagesize_kB=0\n":  nil,
		"7f00 default N0=-3 kernelpagesize_kB=4\n": nil,
		"7f00 default Nx=3 kernelpagesize_kB=4\n":  nil,
	} {
		got, err := parseNUMAMaps(strings.NewReader(text))
		if (err == nil) != (want != nil) || err == nil && !maps.Equal(got, want) {
			t.Errorf("%q: got %v, %v, want %v", text, got, err, want)
		}
	}
}

func TestArenaOf(t *testing.T) {
	for name, want := range map[string][2]string{
		"/memfd:plimsoll/rank0/exp_avg":            {"exp_avg", ""},
		"/memfd:plimsoll/rank12/bf16/exp_avg_sq":   {"exp_avg_sq", "bf16"},
		"memfd:plimsoll/rank0/fp32/master_weights": {"master_weights", "fp32"},
		"/memfd:plimsoll/other":                    {},
		"/memfd:other/rank0/exp_avg":               {},
		"/dev/shm/plimsoll/rank0/exp_avg":          {},
		"":                                         {},
	} {
		if component, part := arenaOf(name); string(component) != want[0] || part != want[1] {
			t.Errorf("%q: got %q and %q, want %q", name, component, part, want)
		}
	}
}

// TestMappings divides the mappings of smaps by name and kind.
func TestMappings(t *testing.T) {
	const text = smaps + `7f1000000000-7f1000400000 rw-p 00000000 08:01 99  /usr/lib/big.so
Rss:                4096 kB
Pss:                2560 kB
Anonymous:          2048 kB
7f1000500000-7f1000600000 rw-p 00000000 08:01 98  /usr/lib/small.so
Rss:                  40 kB
Pss:                  20 kB
Anonymous:             8 kB
7f2000000000-7f2000400000 rw-s 00000000 00:1b 99  /tmp/in memory
Rss:                3072 kB
Pss:                3072 kB
Locked:             3072 kB
7f3000000000-7f3000400000 rw-s 00000000 00:01 99  /dev/zero (deleted)
Rss:                5120 kB
Pss:                5120 kB
7f4000000000-7f4000400000 rw-p 00000000 00:00 0   [heap]
Rss:                   4 kB
Pss:                   4 kB
7f5000000000-7f5000400000 rw-p 00000000 00:0f 7   /anon_hugepage (deleted)
Rss:                   0 kB
VmFlags: rd wr mr mw me dc de ht sd
`
	table := mappingTable{}
	inMemory := map[string]bool{"00:1b": true}
	if err := eachArea(strings.NewReader(text), func(a area) { table.add(a, inMemory) }); err != nil {
		t.Fatal(err)
	}
	got := map[mappingKey]samples.Mapping{}
	for _, m := range table.list() {
		got[mappingKey{m.Name, m.Kind}] = m
	}
	const kb = ledger.KiB
	for _, want := range []samples.Mapping{
		{Name: "memfd:plimsoll/rank0/exp_avg", Arena: ledger.ExpAvg, Kind: samples.SharedMapping, Resident: 2560 * kb,
			Proportional: 1536 * kb, Huge: 2048 * kb, Count: 2},
		{Name: "memfd:pool", Kind: samples.HugetlbMapping, Resident: 4096 * kb, Proportional: 4096 * kb,
			Huge: 4096 * kb, Count: 1},
		{Name: "/usr/lib/big.so", Kind: samples.AnonymousMapping, Resident: 2048 * kb,
			Proportional: 2048 * kb, Count: 1},
		{Name: "/usr/lib/big.so", Kind: samples.FileMapping, Resident: 2048 * kb, Proportional: 512 * kb, Count: 1},
		{Name: "/tmp/in memory", Kind: samples.SharedMapping, Resident: 3072 * kb, Proportional: 3072 * kb,
			Locked: 3072 * kb, Count: 1},
		{Name: "/dev/zero", Kind: samples.SharedMapping, Resident: 5120 * kb, Proportional: 5120 * kb, Count: 1},
		{Name: "[heap]", Kind: samples.AnonymousMapping, Resident: 4 * kb, Proportional: 4 * kb, Count: 1},
		{Name: "[other]", Kind: samples.AnonymousMapping, Resident: 24 * kb, Proportional: 24 * kb, Count: 2},
		{Name: "[other]", Kind: samples.FileMapping, Resident: 32 * kb, Proportional: 12 * kb, Count: 1},
		{Name: "[other]", Kind: samples.HugetlbMapping, Count: 1},
		{Name: "/usr/bin/some program", Kind: samples.FileMapping, Resident: 2044 * kb,
			Proportional: 1022 * kb, Count: 1},
	} {
		key := mappingKey{want.Name, want.Kind}
		if got[key] != want {
			t.Errorf("got %+v, want %+v", got[key], want)
		}
		delete(got, key)
	}
	if len(got) > 0 {
		t.Errorf("not expected: %+v", got)
	}
}

// FuzzProcFiles reads any text as each of the small files.
func FuzzProcFiles(f *testing.F) {
	f.Add("7 (python) S 4 1 1 0 -1 4194560 5 0 0 0 150 50 0 0 20 0 12 0 987 1 1\n")
	f.Add("7f00 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4\n")
	f.Add("some avg10=0.00 avg60=0.00 avg300=0.00 total=20\nfull total=8\n")
	f.Add("Max address space         1048576              unlimited            bytes     \n")
	f.Add("VmRSS:\t8 kB\nRssAnon:\t4 kB\nVmLck:\t9223372036854775807 kB\n")
	f.Add("Rss: 8 kB\nPss_Anon: 4 kB\nShared_Hugetlb: 9007199254740991 kB\n")
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := parseStat(text); err == nil && (s.PID < 0 || s.parent < 0 || s.cpu < 0 || s.threads < 0) {
			t.Errorf("%+v", s)
		}
		if nodes, err := parseNUMAMaps(strings.NewReader(text)); err == nil && len(text) < 1<<16 {
			for node, bytes := range nodes {
				if node < 0 || bytes < 0 {
					t.Errorf("node %d: %d bytes", node, bytes)
				}
			}
		}
		if p := parsePressure(text); p.Some < 0 || p.Full < 0 {
			t.Errorf("%+v", p)
		}
		if space, locked := parseResourceLimits(text); space < -1 || locked < -1 {
			t.Errorf("%d, %d", space, locked)
		}
		var p samples.Process
		if err := setStatus(&p, text); err == nil && (p.Resident.Anonymous < 0 || p.Locked < 0 || p.Peak < 0) {
			t.Errorf("%+v", p)
		} else if err != nil && !errors.Is(err, errNoMemory) && !errors.Is(err, errNoKinds) {
			t.Error(err)
		}
		if r, err := parseRollup(text); err == nil && (r.proportional.Anonymous < 0 || r.swap < 0) {
			t.Errorf("%+v", r)
		}
	})
}
