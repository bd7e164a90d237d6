//go:build linux

package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/base/torchtest"
)

// A way is how people start a program: plimsoll run sees the way, and the program is below it.
type way struct {
	name    string
	command []string // before that of the program
	exit    int
	torch   bool // imports torch, which takes seconds and memory
}

// ways are other than the plain one, which has the tests of the failures themselves.
func ways(python string) []way {
	return []way{
		{"tee", []string{"bash", "-c", `"$@" 2>&1 | tee /dev/null`, "bash"}, 0, false},
		{"a shell that loses the exit code", []string{"sh", "-c", `"$@"; echo "finished with $?"`, "sh"}, 0, false},
		{"a shell that ignores it", []string{"sh", "-c", `"$@" || true`, "sh"}, 0, false},
		{"a shell with an exit code of its own", []string{"sh", "-c", `"$@" || exit 1`, "sh"}, 1, false},
		{"subprocess", []string{python, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"}, 1,
			false},
		{"torchrun", []string{python, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--no-python"}, 1, true},
	}
}

// wayward is a failure that is started in every way. Each way must get the same answer.
type wayward struct {
	name    string
	shell   string   // what a shell does before it starts plimsoll run
	command []string // of the program
	memory  int      // the limit of the control group that the job runs in, in MiB; 0 for none
	threads int      // the limit of the control group that the program runs in; 0 for none

	right    explain.Resource
	holder   string // a pattern of the first holder; empty where nobody holds
	edit     string // a pattern of the first edit
	evidence string
}

// TestFailuresHoweverStarted makes each failure in every way. Each must get the same answer: the resource, the rank,
// who held most, and the first change. With -short each failure takes one way, another one each.
func TestFailuresHoweverStarted(t *testing.T) {
	python := torchtest.Python(t)
	for i, f := range waywardFailures(t, python) {
		for k, w := range ways(python) {
			t.Run(f.name+" through "+w.name, func(t *testing.T) {
				if testing.Short() && (w.torch || k != i%(len(ways(python))-1)) {
					t.Skip("with -short one way of each failure")
				}
				if w.torch && f.threads > 0 {
					t.Skip("a rank of torchrun cannot enter the control group: the kernel answers EIO")
				}
				f.through(t, w)
			})
		}
	}
}

func waywardFailures(t *testing.T, python string) []wayward {
	touch := filepath.Join(programs(t), "touch-memory")
	shm := "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64 << 20); " +
		"m.buf[:] = bytes(64 << 20)"
	open := "kept = [open('/dev/null') for _ in range(9999)]"
	write := "f = open('/dev/full', 'w'); f.write('x' * 10**6)"
	thread := "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
	return []wayward{
		{name: "cgroup", command: []string{touch, "2000", "0"}, memory: 1500,
			right: explain.CGroup, holder: "touch-memory|touch", edit: "memory.max", evidence: "(?i)oom_kill|killed"},
		{name: "host", command: []string{python, "-c", "import numpy; numpy.ones((10**6, 10**7))"},
			right: explain.Host, holder: ".", edit: "ranks on a node", evidence: "72.8 TiB"},
		{name: "locked memory", shell: "ulimit -l 1024; " + withoutLocks,
			command: failing(python, "lock.py", "64")[1:],
			right:   explain.LockedMemory, edit: "ulimit -l", evidence: "mlock"},
		{name: "address space", shell: "ulimit -v 9000000; " + startAlone,
			command: []string{python, "-c", "kept = bytearray(16 << 30)"},
			right:   explain.AddressSpace, edit: "ulimit -v", evidence: "MemoryError"},
		{name: "descriptors", command: []string{"sh", "-c", `ulimit -n 20; exec "$@"`, "sh", python, "-c", open},
			right: explain.NotMemory, edit: "ulimit -n", evidence: "file descriptor"},
		{name: "stacks of threads", shell: "ulimit -v 9000000; " + startAlone, // stacks of plimsoll's own stay small
			command: []string{"sh", "-c", `ulimit -s 1000000; exec "$@"`, "sh", python, "-c", thread},
			right:   explain.AddressSpace, edit: "ulimit -v", evidence: "thread"},
		{name: "threads", command: []string{python, "-c", thread}, threads: 60,
			right: explain.Processes, edit: "ulimit -u|pids.max", evidence: "thread"},
		{name: "a full device", command: []string{python, "-c", write},
			right: explain.Disk, edit: "save_total_limit", evidence: "No space left on device"},
		{name: "/dev/shm", shell: mounting(t, "/dev/shm", "size=16m"),
			command: []string{python, "-X", "faulthandler", "-c", shm}, right: explain.SharedMemory,
			holder: "/dev/shm", edit: "--shm-size", evidence: "(?i)bus error|SIGBUS"},
	}
}

// withoutLocks starts a program that may not lock more than its limit: root may.
const withoutLocks = `if [ $(id -u) = 0 ]; then exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"; ` +
	`else exec "$@"; fi`

func (f wayward) through(t *testing.T, w way) {
	command := f.command
	if f.threads > 0 { // the Go runtime of plimsoll run ends where it cannot start a thread
		groups := newControlGroups(t)
		groups.limitThreads(t, f.threads)
		enter := fmt.Sprintf(`/bin/echo $$ > %s/child/cgroup.procs && exec "$@"`, groups.parents[len(groups.parents)-1])
		command = append([]string{"sh", "-c", enter, "sh"}, command...)
	}
	job := failure{shell: startAlone, run: slices.Concat([]string{"--"}, w.command, command), exit: w.exit, once: true,
		right: []explain.Resource{f.right}, atMost: explain.Certain, evidence: f.evidence, phases: inLoop,
		holder: f.holder, edit: f.edit}
	if f.shell != "" {
		job.shell = f.shell
	}
	if f.memory > 0 {
		groups := limited(t, f.memory<<20)
		job.groups = &groups
	}
	job.fails(t)
}

// TestRunIsKilled kills plimsoll run, guard and keeper, while a rank holds memory. Its recording stays. Explain says
// that there is no end, and what is known: what the host had left, and who held most.
func TestRunIsKilled(t *testing.T) {
	python := torchtest.Python(t)
	for _, victim := range []string{"guard", "both"} {
		t.Run(victim, func(t *testing.T) {
			folder := t.TempDir()
			recording, ready := filepath.Join(folder, "run.jsonl"), filepath.Join(folder, "ready")
			hold := fmt.Sprintf("import time; kept = b'x' * (200 << 20); open(%q, 'w').close(); time.sleep(600)", ready)
			j := newJob(t, "--record", recording, "--interval", "100ms", "--", python, "-c", hold)
			j.start(t)
			j.has(t, 1, ready)
			victims := []int{j.command.Process.Pid}
			if victim == "both" {
				victims = append(victims, j.childOf(t, victims[0]))
			}
			if !await(func() bool { return holdsMost(t, recording) }) {
				t.Fatal("no sample has the memory of the rank")
			}
			for _, pid := range victims {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			_ = j.wait(t)
			j.isGone(t)
			e := explained(t, recording)
			if e.Cause.Resource != explain.Undetermined || e.Confidence != explain.Unknown || len(e.Holders) == 0 ||
				!strings.Contains(e.Holders[0].Text, "python") || e.Holders[0].Bytes < 200<<20 || len(e.Collect) == 0 ||
				!regexp.MustCompile(`the host had .* available`).MatchString(show(e)) {
				t.Errorf("expected what the last sample has, and no cause:\n%s", show(e))
			}
		})
	}
}

// holdsMost reports whether a recording has a sample with 200 MiB of a rank.
func holdsMost(t *testing.T, recording string) bool {
	records, _ := recordingOf(t, recording)
	return slices.ContainsFunc(records, func(r samples.Record) bool {
		return r.Sample != nil && slices.ContainsFunc(r.Sample.Processes, func(p samples.Process) bool {
			return p.Role == samples.RankProcess && p.Proportional.Anonymous >= 200<<20
		})
	})
}
