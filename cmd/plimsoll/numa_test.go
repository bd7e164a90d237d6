package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"plimsoll/binding"
	"plimsoll/host"
	"plimsoll/launch"
)

// touchMemory is a program that takes as many MiB as it is told, and sleeps for
// as many seconds. TestMain makes it available as "touch-memory".
func touchMemory() {
	size, _ := strconv.Atoi(os.Args[1])
	seconds, _ := strconv.ParseFloat(os.Args[2], 64)
	memory := make([]byte, size<<20)
	for i := 0; i < len(memory); i += 4096 {
		memory[i] = 1
	}
	time.Sleep(time.Duration(seconds * float64(time.Second)))
	fmt.Println(memory[0])
}

// needNodes is the host if it has two NUMA nodes with CPUs and memory.
func needNodes(t *testing.T) *host.Host {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	withCPUs := slices.DeleteFunc(slices.Clone(h.Nodes), func(n host.NUMANode) bool { return n.CPUs.Intersection(h.CPUs).IsEmpty() })
	if len(withCPUs) < 2 {
		t.Skip("needs two NUMA nodes; make test-numa emulates them")
	}
	return h
}

// TestEmulatedMachine holds discovery against the machine of scripts/test-numa.
func TestEmulatedMachine(t *testing.T) {
	if os.Getenv("PLIMSOLL_EMULATED") != "2x4x2" {
		t.Skip("make test-numa runs it")
	}
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Packages) != 2 || len(h.Cores) != 8 || h.CPUs.String() != "0-15" || len(h.Nodes) != 3 {
		t.Errorf("%d packages, %d cores, CPUs %s, %d nodes", len(h.Packages), len(h.Cores), h.CPUs, len(h.Nodes))
	}
	for i, c := range h.Cores {
		if want := fmt.Sprintf("%d-%d", 2*i, 2*i+1); c.Siblings.String() != want {
			t.Errorf("core %d has threads %s, want %s", i, c.Siblings, want)
		}
	}
	for i, want := range []host.NodeClass{host.NodeOrdinary, host.NodeOrdinary, host.NodeMemory} {
		if h.Nodes[i].Class != want {
			t.Errorf("node %d is %v, want %v", i, h.Nodes[i].Class, want)
		}
	}
}

// planOf are the ranks that the verb binding plans.
func planOf(t *testing.T, arguments ...string) []binding.Rank {
	t.Helper()
	out, err := exec.Command(program(t), append([]string{"binding", "--json"}, arguments...)...).Output()
	var plan binding.Plan
	if err == nil {
		err = json.Unmarshal(out, &plan)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return plan.Ranks
}

// TestNUMARun starts ranks that touch memory, and reads where it is.
func TestNUMARun(t *testing.T) {
	needNodes(t)
	const size = 64 << 20
	run := func(arguments ...string) []launch.Proof {
		file := filepath.Join(t.TempDir(), "report.json")
		command := exec.Command(program(t), slices.Concat([]string{"run", "--report", file}, arguments, []string{"--", filepath.Join(programs(t), "touch-memory"), "64", "6"})...)
		if out, err := command.CombinedOutput(); err != nil || strings.Contains(string(out), "rank ") && strings.Contains(string(out), "plimsoll: ") {
			t.Fatalf("%v: %v\n%s", arguments, err, out)
		}
		var report struct {
			Ranks []struct {
				Found launch.Proof `json:"found"`
			} `json:"ranks"`
		}
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &report)
		}
		if err != nil {
			t.Fatal(err)
		}
		var proofs []launch.Proof
		for _, r := range report.Ranks {
			proofs = append(proofs, r.Found)
		}
		return proofs
	}
	for _, policy := range []string{binding.PolicyPreferred, binding.PolicyBind} {
		plan := planOf(t, "--ranks", "2", "--trainer-cores", "1.0")
		for i, found := range run("--nproc", "2", "--memory-policy", policy) {
			node := plan[i].NUMANodes
			if len(node) != 1 || found.Memory[node[0]] < size || found.Elsewhere > size/8 || found.Threads == 0 || len(found.Outside) > 0 {
				t.Errorf("%s: rank %d of nodes %v: %+v", policy, i, node, found)
			}
		}
	}
	for _, found := range run("--memory-policy", binding.PolicyInterleave) {
		if found.Memory[0] < size/2-size/16 || found.Memory[1] < size/2-size/16 {
			t.Errorf("interleaved: %v", found.Memory)
		}
	}
}

// TestNUMARehearsal reads, while steps run, where the arenas of two ranks are
// and on which CPUs their workers.
func TestNUMARehearsal(t *testing.T) {
	needNodes(t)
	model := "config.json"
	if _, err := os.Stat(model); err != nil {
		model = filepath.Join("..", "..", "examples", model)
	}
	plan := planOf(t, "--ranks", "2", "--trainer-cores", "0")
	command := exec.Command(program(t), "rehearse", "--model", model, "--ranks", "2", "--steps", "1000")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	}()
	// All arenas are there when the last of them is whole.
	var pages [2]map[int]int64
	for begin := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		pages = arenaPages(t, command.Process.Pid)
		if sum := pages[0][0] + pages[0][1] + pages[1][0] + pages[1][1]; sum*4096 > 39_592_448*14 {
			break
		}
		if time.Since(begin) > 60*time.Second {
			t.Fatalf("after a minute the arenas have pages %v", pages)
		}
	}
	for rank, byNode := range pages {
		var all int64
		for _, count := range byNode {
			all += count
		}
		if own := byNode[plan[rank].NUMANodes[0]]; 100*own < 99*all {
			t.Errorf("rank %d of node %v has pages %v", rank, plan[rank].NUMANodes, byNode)
		}
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", command.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	bound := map[string]bool{}
	for _, thread := range threads {
		if id, err := strconv.Atoi(filepath.Base(thread)); err == nil {
			if cpus, err := host.Affinity(id); err == nil {
				bound[cpus.String()] = true
			}
		}
	}
	for _, rank := range plan {
		for _, cpu := range rank.OptimizerCPUs.List() {
			if !bound[strconv.Itoa(cpu)] {
				t.Errorf("no worker is on CPU %d of rank %d; threads are on %v", cpu, rank.Rank, bound)
			}
		}
	}
}

// arenaPages are the pages of the arenas of two ranks, by NUMA node.
func arenaPages(t *testing.T, pid int) (pages [2]map[int]int64) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/numa_maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for rank := range pages {
		pages[rank] = map[int]int64{}
	}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		_, name, ok := strings.Cut(lines.Text(), "memfd:plimsoll/rank")
		if !ok {
			continue
		}
		rank := int(name[0] - '0')
		for _, field := range strings.Fields(lines.Text()) {
			var node int
			var count int64
			if n, _ := fmt.Sscanf(field, "N%d=%d", &node, &count); n == 2 {
				pages[rank][node] += count
			}
		}
	}
	return pages
}
