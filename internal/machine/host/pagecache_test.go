package host_test

import (
	"testing"
	"testing/fstest"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

func TestSparePageCache(t *testing.T) {
	const meminfo = "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"
	group := map[string]string{
		"proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": "11 1 0:9 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"sys/fs/cgroup/pod/memory.max": "6442450944\n", "sys/fs/cgroup/pod/memory.current": "2147483648\n",
	}
	// In pages: 10 % and 20 % of 16 GiB, and all of it.
	const tenth, fifth, whole = "419430", "838861", "4194304"
	for name, test := range map[string]struct {
		background, limit string
		files             map[string]string
		want              ledger.Bytes
	}{
		"as kernels are set":        {tenth, fifth, nil, 16 * ledger.GiB * 15 / 100},
		"half of what is available": {whole, whole, nil, 8 * ledger.GiB},
		"a control group's part":    {tenth, fifth, group, 4 * ledger.GiB * 15 / 100},
		"half of a control group's": {whole, whole, group, 2 * ledger.GiB},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
		root["proc/vmstat"] = &fstest.MapFile{Data: []byte("nr_dirty 7\nnr_dirty_threshold " + test.limit +
			"\nnr_dirty_background_threshold " + test.background + "\n")}
		for file, text := range test.files {
			root[file] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := host.SparePageCache(root); max(got, test.want)-min(got, test.want) > ledger.MiB {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	for name, root := range map[string]fstest.MapFS{
		"nothing":   {},
		"no limits": {"proc/meminfo": {Data: []byte(meminfo)}},
		"no memory": {"proc/vmstat": {Data: []byte("nr_dirty_threshold 7\nnr_dirty_background_threshold 3\n")}},
	} {
		if got := host.SparePageCache(root); got != 0 {
			t.Errorf("%s: %v, want none", name, got)
		}
	}
}
