package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/host"
)

// TestRealControlGroups runs the program inside control groups that the test
// makes: one CPU, 1.5 CPUs of quota and 512 MiB on a parent, nothing on the
// child that the program is in.
func TestRealControlGroups(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	groups := newControlGroups(t)
	last := fmt.Sprint(h.CPUs.List()[h.CPUs.Size()-1])
	groups.limit(t, last, "150000", "100000", "536870912")

	var topology struct {
		Usable  string  `json:"usable_cpus"`
		Cpuset  string  `json:"cpuset_cpus"`
		Quota   float64 `json:"quota_cpus"`
		From    string  `json:"quota_from"`
		Room    int64   `json:"headroom_bytes"`
		Limited string  `json:"headroom_from"`
	}
	groups.run(t, &topology, "topology", "--json")
	if topology.Usable != last || topology.Cpuset != last {
		t.Errorf("usable %q, cpuset %q, want %q", topology.Usable, topology.Cpuset, last)
	}
	if topology.Quota != 1.5 || !strings.Contains(topology.From, groups.name) {
		t.Errorf("quota %v from %q, want 1.5 from %s", topology.Quota, topology.From, groups.name)
	}
	if topology.Room <= 0 || topology.Room > 512<<20 || !strings.Contains(topology.Limited, groups.name) {
		t.Errorf("%d bytes left by %q, want at most 512 MiB by %s", topology.Room, topology.Limited, groups.name)
	}
	var plan struct {
		Ranks []struct {
			Trainer   string `json:"trainer_cpus"`
			Optimizer string `json:"optimizer_cpus"`
		} `json:"ranks"`
	}
	groups.run(t, &plan, "binding", "--ranks", "2", "--json")
	for i, rank := range plan.Ranks {
		if rank.Trainer != last || rank.Optimizer != last {
			t.Errorf("rank %d has %+v, want CPU %s", i, rank, last)
		}
	}
	rehearsal := groups.command(t, "rehearse", "--model", smallModel())
	if out, _ := rehearsal.CombinedOutput(); rehearsal.ProcessState.ExitCode() != exitDoesNotFit || !strings.Contains(string(out), groups.name) {
		t.Errorf("a rehearsal of %d bytes ended with %v, want exit code 3 for the limit of %s:\n%s", smallModelState, rehearsal.ProcessState, groups.name, out)
	}
}

// TestOutOfMemoryIsExplained lets the kernel kill a rank for its memory limit.
func TestOutOfMemoryIsExplained(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	groups := newControlGroups(t)
	groups.limit(t, h.CPUs.String(), "400000", "100000", "134217728")
	command := groups.command(t, "run", "--", filepath.Join(programs(t), "touch-memory"), "512", "0")
	out, err := command.CombinedOutput()
	if command.ProcessState.ExitCode() != 137 || !strings.Contains(string(out), "for want of memory (cgroup") || !strings.Contains(string(out), groups.name+" was reached") {
		t.Errorf("%v\n%s", err, out)
	}
}

// controlGroups is a parent with a child in each hierarchy that is needed.
type controlGroups struct {
	name    string
	unified bool     // version 2
	parents []string // directories
}

// newControlGroups needs root. Where that is missing the test is skipped, but
// not in continuous integration.
func newControlGroups(t *testing.T) controlGroups {
	const mounts = "/sys/fs/cgroup"
	g := controlGroups{name: fmt.Sprintf("plimsoll-test-%d", os.Getpid())}
	roots := []string{mounts}
	if _, err := os.Stat(mounts + "/cgroup.controllers"); err == nil {
		g.unified = true
		// Children have the controllers that their parent hands down.
		_ = os.WriteFile(mounts+"/cgroup.subtree_control", []byte("+cpuset +cpu +memory"), 0o644)
	} else {
		roots = []string{mounts + "/cpuset", mounts + "/cpu", mounts + "/memory"}
	}
	for _, root := range roots {
		parent := filepath.Join(root, g.name)
		if err := os.Mkdir(parent, 0o755); err != nil {
			g.cannot(t, err)
		}
		t.Cleanup(func() { g.remove(t, parent) })
		g.parents = append(g.parents, parent)
		if g.unified {
			if err := os.WriteFile(parent+"/cgroup.subtree_control", []byte("+cpuset +cpu +memory"), 0o644); err != nil {
				g.cannot(t, err)
			}
		}
		if err := os.Mkdir(parent+"/child", 0o755); err != nil {
			g.cannot(t, err)
		}
		t.Cleanup(func() { g.remove(t, parent+"/child") })
	}
	return g
}

func (controlGroups) remove(t *testing.T, directory string) {
	if err := os.Remove(directory); err != nil {
		t.Errorf("a control group is left over: %v", err)
	}
}

func (controlGroups) cannot(t *testing.T, err error) {
	if os.Getenv("CI") == "true" {
		t.Fatalf("no control group can be made here: %v", err)
	}
	t.Skipf("no control group can be made here: %v", err)
}

// limit sets the limits of the parents. In version 1 the child's cpuset must be
// filled as well.
func (g controlGroups) limit(t *testing.T, cpus, quota, period, memory string) {
	write := func(directory, name, text string) {
		if err := os.WriteFile(filepath.Join(directory, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if g.unified {
		write(g.parents[0], "cpuset.cpus", cpus)
		write(g.parents[0], "cpu.max", quota+" "+period)
		write(g.parents[0], "memory.max", memory)
		return
	}
	for _, directory := range []string{g.parents[0], g.parents[0] + "/child"} {
		mems, err := os.ReadFile(filepath.Join(filepath.Dir(g.parents[0]), "cpuset.mems"))
		if err != nil {
			t.Fatal(err)
		}
		write(directory, "cpuset.mems", string(mems))
		write(directory, "cpuset.cpus", cpus)
	}
	write(g.parents[1], "cpu.cfs_period_us", period)
	write(g.parents[1], "cpu.cfs_quota_us", quota)
	write(g.parents[2], "memory.limit_in_bytes", memory)
}

// run starts the program in the children and reads its document.
func (g controlGroups) run(t *testing.T, into any, arguments ...string) {
	t.Helper()
	command := g.command(t, arguments...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err == nil {
		err = json.Unmarshal(out, into)
	}
	if err != nil {
		t.Fatalf("%v: %v\n%s", arguments, err, out)
	}
}

// command is the program in the children.
func (g controlGroups) command(t *testing.T, arguments ...string) *exec.Cmd {
	script := ""
	for _, parent := range g.parents {
		script += "echo $$ > " + parent + "/child/cgroup.procs && "
	}
	return exec.Command("sh", append([]string{"-c", script + `exec "$0" "$@"`, program(t)}, arguments...)...)
}
