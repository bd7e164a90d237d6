package host_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

func TestCorpus(t *testing.T) {
	machines := hosttest.Corpus(t)
	for _, m := range machines {
		t.Run(m.Name, func(t *testing.T) { checkFacts(t, m.Discover(t), m) })
	}
	for _, s := range hosttest.Scenarios(t, machines) {
		t.Run(s.Name, func(t *testing.T) { checkScenario(t, s.Discover(t), s) })
	}
}

func checkFacts(t *testing.T, h *host.Host, m hosttest.Recorded) {
	want := m.Facts
	equal(t, "online", h.Online.String(), want.Online)
	equal(t, "usable", h.CPUs.String(), m.Affinity.String())
	equal(t, "cpuset", h.Cpuset.String(), want.AllowedCPUs)
	equal(t, "isolated", h.Isolated.String(), want.Isolated)
	equal(t, "PUs", h.Online.Size(), want.PUs)
	if want.Packages != nil {
		equal(t, "packages", len(h.Packages), *want.Packages)
		packages := []string{}
		for _, p := range h.Packages {
			packages = append(packages, p.CPUs.String())
		}
		same(t, "packages", packages, want.PackageCPUs)
	}
	cores, threads := []string{}, cpuset.New()
	for _, core := range h.Cores {
		cores = append(cores, core.Siblings.String())
		threads = threads.Union(cpuset.New(core.Siblings.Size()))
	}
	equal(t, "cores", len(cores), want.PhysicalCores)
	same(t, "cores", cores, want.SMTSiblings)
	equal(t, "threads a core", cmp.Diff(threads.List(), want.ThreadsPerCore), "")

	byLevel := map[int][]string{}
	for _, cache := range h.Caches {
		byLevel[cache.Level] = append(byLevel[cache.Level], cache.CPUs.String())
	}
	same(t, "L3 groups", byLevel[3], want.L3Groups)
	if len(want.L3Groups) == 0 {
		same(t, "L2 groups", byLevel[2], want.L2Groups)
	}

	equal(t, "nodes", len(h.Nodes), len(want.Nodes))
	noNode := h.Online
	for i, node := range h.Nodes {
		w := want.Nodes[i]
		equal(t, "node id", node.ID, w.ID)
		equal(t, "node CPUs", node.CPUs.String(), w.CPUs)
		class := host.NodeOrdinary
		switch {
		case w.GPUMemory:
			class = host.NodeGPU
		case w.CPULess && w.MemoryLess:
			class = host.NodeEmpty
		case w.CPULess:
			class = host.NodeMemory
		case w.MemoryLess:
			class = host.NodeCPUs
		}
		equal(t, "node class", node.Class, class)
		if w.MemKB != nil {
			equal(t, "node memory", node.MemTotal, ledger.Bytes(*w.MemKB)*ledger.KiB)
		}
		if class == host.NodeMemory && w.Nearest != "" {
			near := cpuset.New()
			for _, id := range node.Near {
				near = near.Union(h.Node(id).CPUs)
			}
			equal(t, "nearest CPUs", near.String(), w.Nearest)
		}
		if len(w.Distance) == len(want.Nodes) {
			equal(t, "distances", cmp.Diff(node.Distances, w.Distance), "")
		}
		allowed := want.AllowedMemory
		if want.StatusMemory != nil {
			allowed = *want.StatusMemory
		}
		// Readers that disagree about the nodes disagree about this as well.
		if len(want.Disagreements) == 0 {
			equal(t, "node allowed", node.Allowed, list(t, allowed).Contains(node.ID))
		}
		noNode = noNode.Difference(node.CPUs)
	}
	if len(h.Nodes) > 0 {
		equal(t, "CPUs of no node", noNode.String(), want.CPUsOfNoNode)
	}

	gpus := []string{}
	for _, gpu := range want.GPUs {
		if gpu.Vendor == "0x1a03" || gpu.Vendor == "0x102b" {
			continue // management controllers
		}
		gpus = append(gpus, gpu.Address)
		i := slices.IndexFunc(h.GPUs, func(d host.Device) bool { return d.Address == gpu.Address })
		if i < 0 {
			t.Errorf("GPU %s not found", gpu.Address)
			continue
		}
		if gpu.Node != nil {
			equal(t, gpu.Address+" node", h.GPUs[i].Node, *gpu.Node)
		}
		equal(t, gpu.Address+" CPUs", h.GPUs[i].CPUs.String(), list(t, gpu.CPUs).Intersection(h.Online).String())
	}
	equal(t, "GPUs", len(h.GPUs), len(gpus))

	if len(want.Kinds) == 0 {
		equal(t, "kinds", len(h.Kinds), 1)
	} else {
		kinds := []string{}
		for _, kind := range h.Kinds {
			kinds = append(kinds, kind.CPUs.String())
		}
		equal(t, "kinds", cmp.Diff(kinds, hybrids[m.Name]), "")
	}
	checkInvariants(t, h)
}

// hybrids lists the kinds of cores, fastest first, of the machines with several kinds.
var hybrids = map[string][]string{
	"gb10-grace-blackwell": {"5-9,15-19", "0-4,10-14"},
	"raptorlake-p6e8":      {"0-11", "12-19"},
	"xeon-snc2-40c":        {"0-15,20-35,40-55,60-75", "16-19,36-39,56-59,76-79"},
}

// checkInvariants checks what holds on every machine.
func checkInvariants(t *testing.T, h *host.Host) {
	t.Helper()
	var inCores, inPackages, inKinds []int
	usable := cpuset.New()
	for _, core := range h.Cores {
		inCores = append(inCores, core.Siblings.List()...)
		usable = usable.Union(core.Usable)
		if core.Kind >= len(h.Kinds) || core.Package >= len(h.Packages) || core.Cache >= len(h.Caches) {
			t.Errorf("core %v points outside", core.Siblings)
		}
	}
	for _, p := range h.Packages {
		inPackages = append(inPackages, p.CPUs.List()...)
	}
	for _, kind := range h.Kinds {
		inKinds = append(inKinds, kind.CPUs.List()...)
	}
	for what, cpus := range map[string][]int{"cores": inCores, "packages": inPackages, "kinds": inKinds} {
		slices.Sort(cpus)
		if !slices.Equal(cpus, h.Online.List()) {
			t.Errorf("%s do not divide the online CPUs", what)
		}
	}
	equal(t, "usable CPUs of the cores", usable.String(), h.CPUs.String())
}

func checkScenario(t *testing.T, h *host.Host, s hosttest.Scenario) {
	want := s.Expected
	equal(t, "usable", h.CPUs.String(), want.UsableCPUs)
	whole, first := 0, []int{}
	for _, core := range h.UsableCores() {
		if core.Whole() {
			whole++
		}
		first = append(first, core.Usable.List()[0])
	}
	equal(t, "usable cores", len(first), want.UsableCores)
	equal(t, "whole cores", whole, want.WholeCores)
	equal(t, "one thread a core", cpuset.New(first...).String(), want.OneThreadPerCore)
	allowed := []int{}
	for _, node := range h.Nodes {
		if node.Allowed {
			allowed = append(allowed, node.ID)
		}
	}
	equal(t, "allowed nodes", cpuset.New(allowed...).String(), want.AllowedMemory)
	nodes := want.MemoryNodes
	if nodes == "" {
		nodes = want.AllowedMemory // fall back on the allowed nodes
	}
	equal(t, "memory nodes", cpuset.New(h.MemoryNodes()...).String(), nodes)
	quota := 0.0
	if want.Quota != nil {
		quota = *want.Quota
	}
	equal(t, "quota", h.Quota, quota)
	var limit ledger.Bytes
	for _, l := range h.Memory.Limits {
		if limit == 0 || l.Limit < limit {
			limit = l.Limit
		}
	}
	if want.MemoryLimit != nil {
		equal(t, "memory limit", limit, ledger.Bytes(*want.MemoryLimit))
	}
	checkInvariants(t, h)
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// same compares without regard to order.
func same(t *testing.T, what string, got, want []string) {
	t.Helper()
	equal(t, what, cmp.Diff(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))), "")
}

func list(t *testing.T, text string) cpuset.CPUSet {
	t.Helper()
	set, err := host.ParseList(text)
	if err != nil {
		t.Fatal(err)
	}
	return set
}
