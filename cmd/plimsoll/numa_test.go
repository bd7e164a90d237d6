//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/launch"
)

// touchMemory is a program that takes a number of MiB and then sleeps for a number of seconds. On a slow machine it
// sleeps longer: until plimsoll run, whose pauses double, has looked again. TestMain makes it available as
// "touch-memory".
func touchMemory() {
	size, _ := strconv.Atoi(os.Args[1])
	seconds, _ := strconv.ParseFloat(os.Args[2], 64)
	begin := time.Now()
	memory := make([]byte, size<<20)
	for i := 0; i < len(memory); i += 4096 {
		memory[i] = 1
	}
	time.Sleep(time.Duration(seconds*float64(time.Second)) + 2*time.Since(begin))
	fmt.Println(memory[0])
}

// needNodes returns the host if it has two NUMA nodes with CPUs and memory, and otherwise skips the test.
func needNodes(t *testing.T) *host.Host {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	withCPUs := slices.DeleteFunc(slices.Clone(h.Nodes),
		func(n host.NUMANode) bool { return n.CPUs.Intersection(h.CPUs).IsEmpty() })
	if len(withCPUs) < 2 {
		t.Skip("needs two NUMA nodes; make test-numa emulates them")
	}
	return h
}

// needEmulated skips the test except on the machine of scripts/test-numa.
func needEmulated(t *testing.T) {
	if os.Getenv("PLIMSOLL_EMULATED") != "2x4x2" {
		t.Skip("make test-numa runs it")
	}
}

// TestEmulatedMachine runs the commands on the machine of scripts/test-numa. The expected results are written down,
// not computed.
func TestEmulatedMachine(t *testing.T) {
	needEmulated(t)
	var found, want struct {
		CPUs     string                  `json:"usable_cpus"`
		Packages []struct{ CPUs string } `json:"packages"`
		Cores    []struct{ CPUs string } `json:"cores"`
		Nodes    []struct {
			Class, CPUs string
			Distances   []int
		} `json:"numa_nodes"`
		MemoryNodes []int `json:"memory_nodes"`
	}
	if err := json.Unmarshal([]byte(`{
		"usable_cpus": "0-15",
		"packages": [{"cpus": "0-7"}, {"cpus": "8-15"}],
		"cores": [
			{"cpus": "0-1"}, {"cpus": "2-3"}, {"cpus": "4-5"}, {"cpus": "6-7"},
			{"cpus": "8-9"}, {"cpus": "10-11"}, {"cpus": "12-13"}, {"cpus": "14-15"}
		],
		"numa_nodes": [
			{"class": "cpus and memory", "cpus": "0-7", "distances": [10, 21, 24]},
			{"class": "cpus and memory", "cpus": "8-15", "distances": [21, 10, 14]},
			{"class": "memory only", "cpus": "", "distances": [24, 14, 10]}
		],
		"memory_nodes": [0, 1]
	}`), &want); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(program(t), "topology", "--json").Output()
	if err == nil {
		err = json.Unmarshal(out, &found)
	}
	if err != nil || !reflect.DeepEqual(found, want) {
		t.Errorf("%v\nfound    %+v\nexpected %+v", err, found, want)
	}
	for share, ranks := range map[string]string{
		"0":   "0:  |0,2,4,6 [0]; 1:  |8,10,12,14 [1]; ",
		"0.5": "0: 0-3 |4,6 [0]; 1: 8-11 |12,14 [1]; ",
		"1.0": "0: 0-7 | [0]; 1: 8-15 | [1]; ",
	} {
		if got := describe(planOf(t, "--ranks", "2", "--trainer-cores", share)); got != ranks {
			t.Errorf("with %s of the cores for the trainer: %q, want %q", share, got, ranks)
		}
	}
}

// TestEmulatedCpuset uses cores of both sockets in a cpuset of version 2. Its limits are on the parent of the group
// that the program is in.
func TestEmulatedCpuset(t *testing.T) {
	needEmulated(t)
	groups := newControlGroups(t)
	groups.limit(t, "2-5,8-11", "1200000", "100000", "536870912")
	var topology struct {
		CPUs     string  `json:"usable_cpus"`
		Cores    int     `json:"usable_cores"`
		Quota    float64 `json:"quota_cpus"`
		Excluded []struct{ CPUs, Reason string }
	}
	groups.run(t, &topology, "topology", "--json")
	if topology.CPUs != "2-5,8-11" || topology.Cores != 4 || topology.Quota != 12 ||
		len(topology.Excluded) != 1 || topology.Excluded[0].CPUs != "0-1,6-7,12-15" ||
		!strings.Contains(topology.Excluded[0].Reason, groups.name) {
		t.Errorf("%+v", topology)
	}
	var plan binding.Assignment
	groups.run(t, &plan, "binding", "--ranks", "2", "--json")
	if got, want := describe(plan.Ranks), "0: 2-3 |4 [0]; 1: 8-9 |10 [1]; "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// describe puts the resources of the ranks on one line: the trainer's CPUs, the optimizer's CPUs, and the NUMA nodes.
func describe(ranks []binding.Rank) string {
	var b strings.Builder
	for _, r := range ranks {
		fmt.Fprintf(&b, "%d: %s |%s %v; ", r.Rank, r.TrainerCPUs, r.OptimizerCPUs, r.NUMANodes)
	}
	return b.String()
}

// planOf returns the ranks that the binding command plans.
func planOf(t *testing.T, arguments ...string) []binding.Rank {
	t.Helper()
	out, err := exec.Command(program(t), append([]string{"binding", "--json"}, arguments...)...).Output()
	var plan binding.Assignment
	if err == nil {
		err = json.Unmarshal(out, &plan)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return plan.Ranks
}

// TestNUMARun starts ranks that touch memory. It reads from /proc where the ranks and their memory are, and compares
// the program's report with that.
func TestNUMARun(t *testing.T) {
	needNodes(t)
	for _, c := range []struct{ policy, kernel, share string }{
		{binding.PolicyPreferred, "prefer (many):%d", "1.0"},
		{binding.PolicyBind, "bind:%d", "0.5"},
	} {
		plan := planOf(t, "--ranks", "2", "--trainer-cores", c.share)
		ranks, reported := touch(t, "--nproc", "2", "--memory-policy", c.policy, "--trainer-cores", c.share)
		for i, rank := range ranks {
			node := plan[i].NUMANodes[0]
			if all := rank.memory[0] + rank.memory[1] + rank.memory[2]; 100*rank.memory[node] < 99*all {
				t.Errorf("%s: rank %d of node %d has memory on nodes %v", c.policy, i, node, rank.memory)
			}
			// Even without a policy the memory would be near, as the CPUs are.
			if want := fmt.Sprintf(c.kernel, node); rank.policy != want &&
				rank.policy != strings.Replace(want, " (many)", "", 1) {
				t.Errorf("%s: rank %d has the memory policy %q, want %q", c.policy, i, rank.policy, want)
			}
			for _, cpus := range rank.threads {
				if cpus != plan[i].TrainerCPUs.String() {
					t.Errorf("%s: a thread of rank %d is on CPUs %s, want %s", c.policy, i, cpus, plan[i].TrainerCPUs)
				}
			}
			if want := plan[i].OptimizerCPUs.String(); rank.optimizerCPUs != want {
				t.Errorf("rank %d has PLIMSOLL_OPTIMIZER_CPUS=%s, want %s", i, rank.optimizerCPUs, want)
			}
			if r := reported[i]; r.Memory[node] < touched || r.Elsewhere > touched/8 || r.Threads == 0 ||
				len(r.Outside) > 0 {
				t.Errorf("%s: of rank %d is reported: %+v", c.policy, i, r)
			}
		}
	}
	ranks, _ := touch(t, "--memory-policy", binding.PolicyInterleave)
	if memory := ranks[0].memory; memory[0] < touched/2-touched/16 || memory[1] < touched/2-touched/16 {
		t.Errorf("interleaved: %v", memory)
	}
}

// touched is the memory that every rank of touch takes.
const touched = 64 << 20

// placement is the place of a rank.
type placement struct {
	threads       []string // the CPUs of each thread
	memory        map[int]int64
	policy        string // memory policy in the kernel's form
	optimizerCPUs string
}

// touch runs ranks that take memory. It returns their places, as read from /proc and as the program reports them.
func touch(t *testing.T, arguments ...string) (ranks []placement, reported []launch.PlacementCheck) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "report.json")
	j := newJob(t, slices.Concat([]string{"--report", file}, arguments,
		[]string{"--", filepath.Join(programs(t), "touch-memory"), fmt.Sprint(touched >> 20), "4"})...).start(t)
	ranks = make([]placement, 1)
	if i := slices.Index(arguments, "--nproc"); i >= 0 {
		count, _ := strconv.Atoi(arguments[i+1])
		ranks = make([]placement, count)
	}
	whole := map[int]bool{} // ranks that have touched all of their memory
	look := func() bool {
		for _, pid := range j.processes(t) {
			variables := environment(pid)
			number, err := strconv.Atoi(variables["RANK"])
			if err != nil || whole[number] {
				continue // the launcher, or a rank that may be ending
			}
			ranks[number] = placement{threadCPUs(pid), nodeBytes(pid, " anon="), memoryPolicy(pid),
				variables["PLIMSOLL_OPTIMIZER_CPUS"]}
			if ranks[number].memory[0]+ranks[number].memory[1]+ranks[number].memory[2] >= touched {
				whole[number] = true
			}
		}
		return len(whole) == len(ranks)
	}
	if !await(look) {
		t.Fatalf("the ranks have %v", ranks)
	}
	if err := j.wait(t); err != nil || strings.Contains(j.stderr.String(), "rank ") {
		t.Fatalf("%v: %v\n%s", arguments, err, &j.stderr)
	}
	var report struct {
		Ranks []struct {
			Found launch.PlacementCheck `json:"found"`
		} `json:"ranks"`
	}
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, &report)
	}
	if err != nil || len(report.Ranks) != len(ranks) {
		t.Fatalf("%v\n%s", err, data)
	}
	for _, r := range report.Ranks {
		reported = append(reported, r.Found)
	}
	return ranks, reported
}

// TestNUMARehearsal reads, while steps run, where the arenas of two ranks are and on which CPUs their workers run.
func TestNUMARehearsal(t *testing.T) {
	h := needNodes(t)
	plan := planOf(t, "--ranks", "2", "--trainer-cores", "0")
	command := exec.Command(program(t), "rehearse", "--model", smallModel(), "--ranks", "2", "--steps", "1000")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	}()
	// All arenas are there when the last arena is complete.
	var memory [2]map[int]int64
	whole := func() bool {
		var sum int64
		for rank := range memory {
			memory[rank] = nodeBytes(command.Process.Pid, fmt.Sprintf("/memfd:plimsoll/rank%d/", rank))
			for _, size := range memory[rank] {
				sum += size
			}
		}
		return sum > smallModelState
	}
	if !await(whole) {
		t.Fatalf("the arenas have %v", memory)
	}
	for rank, byNode := range memory {
		if own := byNode[plan[rank].NUMANodes[0]]; 2*own < smallModelState/100*99 {
			t.Errorf("rank %d of node %v has memory on nodes %v", rank, plan[rank].NUMANodes, byNode)
		}
	}
	// Workers are bound; the threads of the Go runtime are not.
	workers := slices.DeleteFunc(threadCPUs(command.Process.Pid),
		func(cpus string) bool { return cpus == h.CPUs.String() })
	var want []string
	for _, rank := range plan {
		for _, cpu := range rank.OptimizerCPUs.List() {
			want = append(want, strconv.Itoa(cpu))
		}
	}
	slices.Sort(workers)
	slices.Sort(want)
	if !slices.Equal(workers, want) {
		t.Errorf("workers are on CPUs %v, want %v", workers, want)
	}
}

// smallModelState is the bytes of optimizer state of smallModel.
const smallModelState = 39_592_448 * 14

// smallModel returns a config.json: beside the test on an emulated machine, otherwise in the repository.
func smallModel() string {
	const name = "config.json"
	if _, err := os.Stat(name); err == nil {
		return name
	}
	return filepath.Join("..", "..", "examples", name)
}

// environment returns the variables of a process; none when it has ended.
func environment(pid int) map[string]string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	variables := map[string]string{}
	for _, entry := range strings.Split(string(data), "\x00") {
		name, value, _ := strings.Cut(entry, "=")
		variables[name] = value
	}
	return variables
}

// threadCPUs returns the CPUs of each thread of a process, but not of threads of a name that is left out.
func threadCPUs(pid int, leftOut ...string) (threads []string) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, file := range files {
		status, _ := os.ReadFile(file)
		name, _, _ := strings.Cut(strings.TrimPrefix(string(status), "Name:\t"), "\n")
		_, rest, ok := strings.Cut(string(status), "Cpus_allowed_list:\t")
		if cpus, _, _ := strings.Cut(rest, "\n"); ok && !slices.Contains(leftOut, name) {
			threads = append(threads, cpus)
		}
	}
	return threads
}

// memoryPolicy returns the memory policy of a process. In numa_maps it stands between the address of a mapping and
// the figures of its pages.
func memoryPolicy(pid int) string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/numa_maps", pid))
	_, rest, _ := strings.Cut(string(data), " ")
	policy, _, _ := strings.Cut(rest, " file=")
	return policy
}

// nodeBytes returns the memory of a process by NUMA node, for the mappings whose line in numa_maps has a text.
func nodeBytes(pid int, text string) map[int]int64 {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/numa_maps", pid))
	bytes := map[int]int64{}
	for line := range strings.Lines(string(data)) {
		_, size, _ := strings.Cut(line, "kernelpagesize_kB=")
		page, _ := strconv.ParseInt(strings.TrimSpace(size), 10, 64)
		for _, field := range strings.Fields(line) {
			var node int
			var pages int64
			if n, _ := fmt.Sscanf(field, "N%d=%d", &node, &pages); n == 2 && strings.Contains(line, text) {
				bytes[node] += pages * page << 10
			}
		}
	}
	return bytes
}
