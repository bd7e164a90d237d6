package report_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
	"plimsoll/internal/show/report"
)

func topologyText(t *testing.T, m hosttest.Machine) string {
	t.Helper()
	var out bytes.Buffer
	if err := report.NewTopology("test", m.Discover(t)).Page().Write(&out, report.Text); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestTopologyIsReadable: the tree of every machine fits on a screen and names every GPU.
func TestTopologyIsReadable(t *testing.T) {
	machines := hosttest.Corpus(t)
	all := []hosttest.Machine{}
	for _, m := range machines {
		all = append(all, m.Machine)
	}
	for _, s := range hosttest.Scenarios(t, machines) {
		all = append(all, s.Machine)
	}
	for _, m := range all {
		text := topologyText(t, m)
		if lines := strings.Count(text, "\n"); lines > 50 {
			t.Errorf("%s takes %d lines", m.Name, lines)
		}
		h := m.Discover(t)
		for _, gpu := range h.GPUs {
			if !strings.Contains(text, gpu.Address) {
				t.Errorf("%s does not name GPU %s", m.Name, gpu.Address)
			}
		}
		if usable := "usable CPUs        " + h.CPUs.String() + ":"; !strings.Contains(text, usable) {
			t.Errorf("%s does not say %q", m.Name, usable)
		}
	}
}

// TestTopologyTree shows how much the tree tells of equal neighbours.
func TestTopologyTree(t *testing.T) {
	caches := []hosttest.Core{} // two sockets of three caches of two cores
	for core := range 12 {
		caches = append(caches, hosttest.Core{CPUs: []int{core}, Package: core / 6, Node: core / 6, Cache: core / 2})
	}
	for _, test := range []struct {
		machine hosttest.Machine
		want    string
	}{
		{hosttest.Grid(2, 4, 1), `
┌─ package 0, NUMA node 0 (64.0 GiB), L3: 4 cores, CPUs 0-3
└─ package 1, NUMA node 1 (64.0 GiB), L3: 4 cores, CPUs 4-7
`},
		{hosttest.Grid(32, 2, 2), `
── 32 alike: packages 0-31, NUMA nodes 0-31 (64.0 GiB), L3: each 2 cores of 2 threads, CPUs 0-127
`},
		{hosttest.Build("caches", caches), `
┌─ package 0, NUMA node 0 (64.0 GiB), 3 × L3: 6 cores, CPUs 0-5
└─ package 1, NUMA node 1 (64.0 GiB), 3 × L3: 6 cores, CPUs 6-11
`},
	} {
		if text := topologyText(t, test.machine); !strings.Contains(text, test.want) {
			t.Errorf("%s: got\n%s\nwant%s", test.machine.Name, text, test.want)
		}
	}
	// Near to all CPUs, as in virtual machines, and near to none.
	devices := hosttest.Grid(2, 2, 1)
	for address, near := range map[string]string{"0000:01:00.0": "0-3", "0000:02:00.0": "", "0000:03:00.0": "2-3"} {
		for name, text := range map[string]string{"class": "0x030200", "vendor": "0x10de", "device": "0x2330",
			"local_cpulist": near} {
			devices.Files.Set("sys/bus/pci/devices/"+address+"/"+name, []byte(text+"\n"))
		}
	}
	if text, want := topologyText(t, devices), `
├─ package 1, NUMA node 1 (64.0 GiB), L3: 2 cores, CPUs 2-3
│  └─ GPU 0000:03:00.0 (10de:2330)
└─ attached to no CPUs in particular
   ├─ GPU 0000:01:00.0 (10de:2330)
   └─ GPU 0000:02:00.0 (10de:2330)
`; !strings.Contains(text, want) {
		t.Errorf("got\n%s\nwant%s", text, want)
	}
	part := hosttest.Grid(2, 2, 2)
	part.Affinity = part.Affinity.Difference(hosttest.Grid(1, 3, 1).Affinity) // 0-2
	want := "package 0, NUMA node 0 (64.0 GiB), L3: 2 cores of 2 threads, CPUs 0-1,4-5, usable 4-5 " +
		"(2 cores, 2 of them with some threads only)"
	if text := topologyText(t, part); !strings.Contains(text, want) ||
		!strings.Contains(text, "not usable         0-2: not in the affinity mask") {
		t.Errorf("got\n%s\nwant %s", text, want)
	}
}

// TestUnnamed: a group without a name from the firmware or the kernel has no number, and no empty place.
func TestUnnamed(t *testing.T) {
	m := hosttest.Grid(1, 4, 1)
	for cpu, die := range []string{"0-1", "0-1", "2-3", "2-3"} {
		m.Files.Set(fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/die_cpus_list", cpu), []byte(die+"\n"))
	}
	if text := topologyText(t, m); strings.Contains(text, "-1") || !strings.Contains(text, "die") {
		t.Errorf("a die without an id:\n%s", text)
	}
	h := m.Discover(t)
	request := binding.Request{Ranks: 1}
	plan, err := binding.Split(h, request)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := report.NewBinding("test", h, request, plan, nil).Page().Write(&out, report.Text); err != nil {
		t.Fatal(err)
	}
	want := "SEPARATE: no core has two ranks or two roles\n\n" +
		"host               unknown processor, 4 usable cores (CPUs 0-3), memory not known\n"
	if !strings.HasPrefix(out.String(), want) {
		t.Errorf("got\n%s\nwant %s", &out, want)
	}
}

// TestIsolatedCPUsAreShown expects isolated CPUs in the text, usable or not.
func TestIsolatedCPUsAreShown(t *testing.T) {
	for affinity, says := range map[string]string{
		"0-1": "none of them usable", "0-3": "all of them usable", "0-2": "of them usable 2",
	} {
		m := hosttest.Grid(1, 4, 1)
		m.Affinity, _ = host.ParseList(affinity)
		m.Files.Set("sys/devices/system/cpu/isolated", []byte("2-3\n"))
		m.Files.Set("sys/devices/system/cpu/nohz_full", []byte("3\n"))
		text := topologyText(t, m)
		for _, want := range []string{"isolated           2-3: ", says, "nohz_full          3: "} {
			if !strings.Contains(text, want) {
				t.Errorf("affinity %s: %q is missing:\n%s", affinity, want, text)
			}
		}
	}
}
