//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/machine/host"
)

// TestRealControlGroups runs the program inside cgroups that the test makes. The parent is limited to one CPU, a
// quota of 1.5 CPUs and 512 MiB. The program is in the child, which has no limits.
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
	if out, _ := rehearsal.CombinedOutput(); rehearsal.ProcessState.ExitCode() != exitDoesNotFit ||
		!strings.Contains(string(out), groups.name) {
		t.Errorf("a rehearsal of %d bytes ended with %v, want exit code 3 for the limit of %s:\n%s", smallModelState,
			rehearsal.ProcessState, groups.name, out)
	}
}

// TestLimitsAreNamed: a limit that would end the program after its start is named before anything is allocated or
// started.
func TestLimitsAreNamed(t *testing.T) {
	rehearsal := []string{"rehearse", "--model", smallModel(), "--steps", "1"}
	job := []string{"run", "--nproc", "2", "--", "true"}
	t.Run("threads of a control group", func(t *testing.T) {
		h, err := host.Local()
		if err != nil {
			t.Fatal(err)
		}
		groups := newControlGroups(t)
		groups.limit(t, h.CPUs.String(), "400000", "100000", "1073741824")
		groups.limitThreads(t, 20)
		for _, arguments := range [][]string{rehearsal, job} {
			command := groups.command(t, arguments...)
			out, _ := command.CombinedOutput()
			if command.ProcessState.ExitCode() != exitDoesNotFit ||
				!strings.Contains(string(out), groups.name+" pids.max") {
				t.Errorf("%v: %v, want exit code 3 for pids.max\n%s", arguments, command.ProcessState, out)
			}
		}
	})
	for limit, name := range map[string]string{"-v 2000000": "RLIMIT_AS", "-f 1000": "RLIMIT_FSIZE"} {
		t.Run(name, func(t *testing.T) {
			script := "ulimit " + limit + ` && exec "$0" "$@"`
			command := exec.Command("bash", append([]string{"-c", script, program(t)}, rehearsal...)...)
			out, _ := command.CombinedOutput()
			if command.ProcessState.ExitCode() != exitDoesNotFit || !strings.Contains(string(out), name) {
				t.Errorf("ulimit %s: %v, want exit code 3 for %s\n%s", limit, command.ProcessState, name, out)
			}
		})
	}
}

// TestOutOfMemoryIsExplained makes the kernel kill a process of a job for its memory limit: the rank that takes too
// much, or a process that the test makes the kernel prefer. The kernel may kill another process after that, when the
// freed memory comes too late.
func TestOutOfMemoryIsExplained(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	groups := newControlGroups(t)
	groups.limit(t, h.CPUs.String(), "400000", "100000", "134217728")
	for _, c := range []struct {
		victim, says string
		generation   int
	}{
		{"rank", "was ended by signal 9", 2}, // or the keeper after it
		{"keeper", "signal 9 (killed) ended the keeper of the ranks", 1},
		{"guard", "", 0}, // the keeper may see the end of the rank first
	} {
		t.Run(c.victim, func(t *testing.T) {
			var missing []string
			for range 3 { // the kernel may kill guard and keeper both, and then no process is left to explain
				if missing = runOutOfMemory(t, groups, c.generation, c.says); len(missing) == 0 {
					return
				}
				t.Logf("stderr does not say %q", missing)
			}
			t.Errorf("of three jobs none said all of %q", missing)
		})
	}
}

// runOutOfMemory runs a job until the kernel kills a process of it for want of memory: the guard, the keeper or the
// rank, by their generation. It returns what the job's standard error should say and does not.
func runOutOfMemory(t *testing.T, groups controlGroups, generation int, says string) (missing []string) {
	t.Helper()
	directory := t.TempDir()
	begun, proceed := filepath.Join(directory, "begun"), filepath.Join(directory, "proceed")
	script := fmt.Sprintf(": > %s; while [ ! -e %s ]; do sleep 0.05; done; exec %s 512 0", begun, proceed,
		filepath.Join(programs(t), "touch-memory"))
	j := newJob(t, "--", "sh", "-c", script)
	groups.contain(j.command)
	j.start(t)
	j.has(t, 1, begun)
	guard := j.command.Process.Pid
	keeper := j.childOf(t, guard)
	rank := j.childOf(t, keeper)
	// The keeper has the rank's score while it starts the rank, and takes its own back after that.
	if !await(func() bool { return scoreOf(t, keeper) != scoreOf(t, rank) }) {
		t.Fatal("the keeper kept the rank's score")
	}
	preferVictim(t, rank, 0)
	preferVictim(t, []int{guard, keeper, rank}[generation], 1000)
	if generation == 0 {
		// Protect the keeper: if the kernel killed both, no process could explain. The guard protects itself, where
		// that is allowed.
		_ = os.WriteFile(scoreFile(keeper), []byte("-1000"), 0o644)
	}
	if err := os.WriteFile(proceed, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	err := j.wait(t)
	// The guard's exit code, or the signal that killed the guard.
	if status := j.command.ProcessState.Sys().(syscall.WaitStatus); status.ExitStatus() != 137 &&
		status.Signal() != syscall.SIGKILL {
		t.Errorf("it ended with %v, want exit code 137", err)
	}
	j.isGone(t)
	for _, text := range []string{says, "exit code 137: the kernel's OOM killer killed it (",
		groups.name + " was reached"} {
		if !strings.Contains(j.stderr.String(), text) {
			missing = append(missing, text)
		}
	}
	if len(missing) > 0 {
		t.Logf("stderr:\n%s", &j.stderr)
	}
	return missing
}

// TestStateIsSpared lets a rank that is small beside the optimizer state reach the memory limit. The kernel must kill
// the rank: killing the service, whose state is kept, would free nothing. Sometimes it kills both, because it looks
// for another process before all memory of the first is free. It must not do so every time.
func TestStateIsSpared(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	groups := newControlGroups(t)
	limit := 192 * mebibyte
	if raceDetector {
		limit = 320 * mebibyte // the program itself takes more
	}
	groups.limit(t, h.CPUs.String(), "400000", "100000", fmt.Sprint(limit))
	var said string
	for range 4 {
		j := newJob(t, "--", "sh", "-c", "leave-state && exec dd if=/dev/zero of=/dev/null bs=150M count=1")
		groups.contain(j.command)
		j.start(t).ends(t, 137, "rank 0 was ended by signal 9", groups.name+" was reached")
		if said = j.stderr.String(); !strings.Contains(said, "the optimizer service has ended") {
			return
		}
	}
	t.Errorf("the kernel has killed the service every time:\n%s", said)
}

// leaveState opens a session of 14 bytes a parameter and dies; the state stays.
func leaveState() {
	if _, err := openLittle(9_000_000); err != nil {
		fmt.Fprintln(os.Stderr, "leave-state:", err)
		os.Exit(1)
	}
}

func scoreFile(pid int) string { return fmt.Sprintf("/proc/%d/oom_score_adj", pid) }

// preferVictim makes the kernel prefer a process when memory runs out. With a score of 1000 it comes before all
// processes with a lower score.
func preferVictim(t *testing.T, pid, score int) {
	t.Helper()
	if err := os.WriteFile(scoreFile(pid), []byte(strconv.Itoa(score)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// controlGroups is a parent with a child in each hierarchy that the test needs.
type controlGroups struct {
	name    string
	unified bool     // version 2
	parents []string // directories
}

// newControlGroups needs root. Without root the test is skipped, except in continuous integration.
func newControlGroups(t *testing.T) controlGroups {
	const mounts = "/sys/fs/cgroup"
	g := controlGroups{name: fmt.Sprintf("plimsoll-test-%d", os.Getpid())}
	roots := []string{mounts}
	if _, err := os.Stat(mounts + "/cgroup.controllers"); err == nil {
		g.unified = true
		// Children have only the controllers that their parent delegates.
		_ = os.WriteFile(mounts+"/cgroup.subtree_control", []byte("+cpuset +cpu +memory +pids"), 0o644)
	} else {
		roots = []string{mounts + "/cpuset", mounts + "/cpu", mounts + "/memory", mounts + "/pids"}
	}
	for _, root := range roots {
		parent := filepath.Join(root, g.name)
		if err := os.Mkdir(parent, 0o755); err != nil {
			g.cannot(t, err)
		}
		t.Cleanup(func() { g.remove(t, parent) })
		g.parents = append(g.parents, parent)
		if g.unified {
			if err := os.WriteFile(parent+"/cgroup.subtree_control", []byte("+cpuset +cpu +memory +pids"),
				0o644); err != nil {
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
	// A killed process may stay in its group for a moment after it leaves /proc.
	err := os.Remove(directory)
	for deadline := time.Now().Add(20 * time.Second); errors.Is(err, syscall.EBUSY) &&
		time.Now().Before(deadline); err = os.Remove(directory) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("a control group is left over: %v", err)
	}
}

func (controlGroups) cannot(t *testing.T, err error) {
	if os.Getenv("CI") == "true" {
		t.Fatalf("no control group can be made here: %v", err)
	}
	t.Skipf("no control group can be made here: %v", err)
}

// limit sets the limits of the parents. In version 1 the child's cpuset must be filled, too.
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

// limitThreads limits the processes and threads of the parents.
func (g controlGroups) limitThreads(t *testing.T, most int) {
	directory := g.parents[len(g.parents)-1]
	if err := os.WriteFile(filepath.Join(directory, "pids.max"), []byte(strconv.Itoa(most)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// run runs the program in the children and reads its document.
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

// command returns the program, to be started in the children.
func (g controlGroups) command(t *testing.T, arguments ...string) *exec.Cmd {
	command := exec.Command(program(t), arguments...)
	g.contain(command)
	return command
}

// contain makes a command start in the children.
func (g controlGroups) contain(command *exec.Cmd) {
	script := ""
	for _, parent := range g.parents {
		script += "echo $$ > " + parent + "/child/cgroup.procs && "
	}
	command.Args = append([]string{"sh", "-c", script + `exec "$0" "$@"`, command.Path}, command.Args[1:]...)
	command.Path = "/bin/sh"
}
