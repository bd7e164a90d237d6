//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/machine/host"
)

// A failure is a job that really fails, and the explanation that it must get. Nothing is prepared but "plimsoll run".
type failure struct {
	// shell is what a shell does before it starts plimsoll run, which is "$@" to it.
	shell  string
	groups *controlGroups // that the job runs in, or nil
	run    []string       // the arguments of plimsoll run
	once   bool           // it takes seconds, and is not run again without a recording
	exit   int            // its exit code

	right    []explain.Resource
	atMost   explain.Confidence
	sure     bool // the answer must be certain
	rank     int
	phases   []ledger.PhaseName // that are right; an unknown one is right, too
	victims  int                // how many ranks the failed one has taken along
	says     string             // a pattern of what run itself says at the end
	evidence string             // a pattern of an evidence; empty where the answer is that nothing proves the cause
	holder   string             // a pattern of the first holder; empty where it is not judged
	edit     string             // a pattern of the key of the first edit; empty where it is not judged
}

// startAlone is the shell's part of a failure that needs no preparation.
const startAlone = `exec "$@"`

// fails runs the job, and compares what run says and what explain makes of the recording with what is right. It runs
// the job once more without a recording: run must say the same.
func (f failure) fails(t *testing.T) {
	t.Helper()
	recording := filepath.Join(t.TempDir(), "run.jsonl")
	f.ends(t, "--record", recording)
	if !f.once {
		f.ends(t)
	}
	got := explained(t, recording)
	// The document comes first: the end of a long log is what a reader sees.
	fault := func(format string, values ...any) { t.Errorf("%s\n"+format, append([]any{show(got)}, values...)...) }
	if !slices.Contains(f.right, got.Cause.Resource) {
		fault("the resource is %q, expected one of %q", got.Cause.Resource, f.right)
	}
	order := []explain.Confidence{explain.Unknown, explain.Likely, explain.Certain}
	if slices.Index(order, got.Confidence) > slices.Index(order, f.atMost) {
		fault("the confidence is %s, expected %s at most", got.Confidence, f.atMost)
	}
	if got.Cause.Rank == nil || *got.Cause.Rank != f.rank {
		fault("the rank is not %d", f.rank)
	}
	if phase := got.Cause.Phase; phase != nil && !slices.Contains(f.phases, *phase) {
		fault("the phase is %q, expected one of %q or none", *phase, f.phases)
	}
	if len(got.Victims) != f.victims {
		fault("%d victims, expected %d", len(got.Victims), f.victims)
	}
	if f.sure && got.Confidence != explain.Certain {
		fault("the confidence is %s, and the kernel's log is here", got.Confidence)
	}
	proves := func(e explain.Evidence) bool {
		return regexp.MustCompile(f.evidence).MatchString(e.Text + "\n" + e.Says)
	}
	if !slices.ContainsFunc(got.Evidence, proves) {
		fault("no evidence has %q", f.evidence)
	}
	if f.holder != "" && (len(got.Holders) == 0 ||
		!regexp.MustCompile(f.holder).MatchString(got.Holders[0].Component+" "+got.Holders[0].Text)) {
		fault("the first holder is not %q", f.holder)
	}
	if f.edit != "" && (len(got.Edits) == 0 || !regexp.MustCompile(f.edit).MatchString(got.Edits[0].Key)) {
		fault("the first edit is not %q", f.edit)
	}
}

// ends runs the job until it ends, with flags, and checks how it ends and what run says.
func (f failure) ends(t *testing.T, flags ...string) {
	t.Helper()
	j := newJob(t, append(flags, f.run...)...)
	command := append([]string{"sh", "-c", f.shell, "sh", j.command.Path}, j.command.Args[1:]...)
	j.command.Path, j.command.Args = "/bin/sh", command
	if f.groups != nil {
		f.groups.contain(j.command)
	}
	j.start(t).ends(t, f.exit)
	if !regexp.MustCompile(f.says).MatchString(j.stderr.String()) {
		t.Errorf("plimsoll run %v does not say %q:\n%s", flags, f.says, &j.stderr)
	}
}

// explained is the document of plimsoll explain for files. The files must show a failure.
func explained(t *testing.T, files ...string) *explain.Explanation {
	t.Helper()
	command := exec.Command(program(t), append([]string{"explain", "--json"}, files...)...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	if code := command.ProcessState.ExitCode(); code != 5 {
		t.Fatalf("plimsoll explain ended with %d (%v), expected 5 for a failure:\n%s", code, err, out)
	}
	var e explain.Explanation
	if err := json.Unmarshal(out, &e); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return &e
}

func show(e *explain.Explanation) string {
	text, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// program of testdata/failures, with its arguments, for plimsoll run.
func failing(python, name string, arguments ...string) []string {
	return append([]string{"--", python, filepath.Join("testdata", "failures", name)}, arguments...)
}

// mounting mounts a small file system over a directory, which only the job sees.
func mounting(t *testing.T, directory, options string) string {
	t.Helper()
	if out, err := exec.Command("unshare", "-m", "true").CombinedOutput(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: %s", err, out)
		}
		t.Skipf("no file system can be mounted here: %v: %s", err, out)
	}
	return fmt.Sprintf("exec unshare -m sh -c 'mount -t tmpfs -o %s tmpfs %s && %s' sh \"$@\"", options, directory,
		`exec "$@"`)
}

// notShort leaves a case of a training to the tests without -short: each imports torch, which takes seconds.
func notShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("imports torch")
	}
}

// inLoop are the phases of a training loop.
var inLoop = []ledger.PhaseName{ledger.Forward, ledger.Backward, ledger.Step}

// TestFailuresOfMemory makes each resource run out for a real program with real PyTorch.
func TestFailuresOfMemory(t *testing.T) {
	python := torchtest.Python(t)
	t.Run("cgroup", func(t *testing.T) {
		groups := limited(t, 256<<20)
		touch := filepath.Join(programs(t), "touch-memory")
		failure{shell: startAlone, groups: &groups, run: []string{"--", touch, "512", "0"}, exit: 137,
			right: []explain.Resource{explain.CGroup}, atMost: explain.Certain,
			says: groups.name, evidence: `(?i)oom_kill|killed`}.fails(t)
	})
	t.Run("training in a cgroup", func(t *testing.T) {
		notShort(t)
		groups := limited(t, 1200<<20)
		failure{shell: startAlone, groups: &groups, run: failing(python, "train.py", "400"), exit: 137, once: true,
			phases: inLoop, right: []explain.Resource{explain.CGroup}, atMost: explain.Certain,
			says: groups.name, evidence: `(?i)oom_kill|killed`}.fails(t)
	})
	t.Run("worker of a data loader in a cgroup", func(t *testing.T) {
		notShort(t)
		groups := limited(t, 1200<<20)
		failure{shell: startAlone, groups: &groups, run: failing(python, "loader.py", "250"), exit: 1, once: true,
			right: []explain.Resource{explain.CGroup}, atMost: explain.Certain,
			says: groups.name, evidence: `(?i)oom_kill|killed`}.fails(t)
	})
	t.Run("dev shm", func(t *testing.T) {
		notShort(t)
		failure{shell: mounting(t, "/dev/shm", "size=16m"), run: failing(python, "loader.py", "16"), exit: 1,
			once: true, right: []explain.Resource{explain.SharedMemory}, atMost: explain.Certain,
			says: "/dev/shm", evidence: "No space left on device"}.fails(t)
	})
	t.Run("address space", func(t *testing.T) {
		notShort(t)
		failure{shell: "ulimit -v 6000000; " + startAlone, run: failing(python, "train.py", "2000"), exit: 1,
			once:   true,
			phases: inLoop, right: []explain.Resource{explain.AddressSpace}, atMost: explain.Certain,
			says: "RLIMIT_AS|address space", evidence: "can't allocate memory"}.fails(t)
	})
	t.Run("address space of the program alone", func(t *testing.T) {
		notShort(t)
		run := []string{"--", "bash", "-c", `ulimit -v 6000000; exec "$@"`, "bash"}
		failure{shell: startAlone, run: append(run, failing(python, "train.py", "2000")[1:]...), exit: 1,
			once:   true,
			phases: inLoop, right: []explain.Resource{explain.AddressSpace}, atMost: explain.Certain,
			// The limit is known only where a sample was taken after the shell had set it.
			says: "RLIMIT_AS|a limit of the process", evidence: "can't allocate memory"}.fails(t)
	})
	t.Run("locked memory", func(t *testing.T) {
		shell := "ulimit -l 1024; " + startAlone
		if os.Geteuid() == 0 { // root may lock more than its limit, so the job loses that capability
			shell = `ulimit -l 1024; exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"`
		}
		failure{shell: shell, run: failing(python, "lock.py", "64"), exit: 1,
			right: []explain.Resource{explain.LockedMemory}, atMost: explain.Certain,
			says: "RLIMIT_MEMLOCK|locked memory", evidence: "mlock of 67108864 bytes"}.fails(t)
	})
	t.Run("disk", func(t *testing.T) {
		folder := t.TempDir()
		full := "dd if=/dev/zero of=" + filepath.Join(folder, "checkpoint.pt") + " bs=1M count=32"
		failure{shell: mounting(t, folder, "size=16m"), run: []string{"--", "sh", "-c", full}, exit: 1,
			right: []explain.Resource{explain.Disk}, atMost: explain.Certain,
			says: "disk", evidence: "No space left on device"}.fails(t)
	})
	t.Run("size of a file", func(t *testing.T) {
		write := "dd if=/dev/zero of=" + filepath.Join(t.TempDir(), "checkpoint.pt") + " bs=1M count=32"
		failure{shell: "ulimit -f 1000; " + startAlone, run: []string{"--", "sh", "-c", write + "; exit $?"}, exit: 153,
			right: []explain.Resource{explain.Disk}, atMost: explain.Certain,
			says: "RLIMIT_FSIZE", evidence: "(?i)file size limit exceeded|153"}.fails(t)
	})
	t.Run("more than the host, through tee", func(t *testing.T) {
		allocate := python + " -c 'import numpy; numpy.ones((10**6, 10**7))' 2>&1 | tee /dev/stderr"
		failure{shell: startAlone, run: []string{"--", "bash", "-c", allocate}, exit: 0,
			right: []explain.Resource{explain.Host}, atMost: explain.Likely,
			evidence: "Unable to allocate"}.fails(t)
	})
	t.Run("a device that is full", func(t *testing.T) {
		write := "f = open('/dev/full', 'w'); f.write('x' * 10**6)"
		failure{shell: startAlone, run: []string{"--", python, "-c", write}, exit: 1,
			right: []explain.Resource{explain.Disk}, atMost: explain.Likely,
			says: "disk", evidence: "No space left on device"}.fails(t)
	})
	t.Run("dev shm that a program maps", func(t *testing.T) {
		fill := "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64 << 20); " +
			"m.buf[:] = bytes(64 << 20)"
		failure{shell: mounting(t, "/dev/shm", "size=16m"), run: []string{"--", python, "-c", fill}, exit: 135,
			right: []explain.Resource{explain.SharedMemory, explain.Undetermined}, atMost: explain.Likely,
			says: "SIGBUS", evidence: "signal 7"}.fails(t)
	})
	t.Run("disk of a training", func(t *testing.T) {
		notShort(t)
		folder := t.TempDir()
		failure{shell: mounting(t, folder, "size=16m"),
			run: failing(python, "train.py", "16", filepath.Join(folder, "checkpoint.pt")), exit: 1, once: true,
			phases: []ledger.PhaseName{ledger.Checkpoint},
			right:  []explain.Resource{explain.Disk}, atMost: explain.Certain,
			says: "disk", evidence: "unexpected pos|file write failed|iostream"}.fails(t)
	})
	t.Run("processes", func(t *testing.T) {
		groups := newControlGroups(t)
		groups.limitThreads(t, 100)
		// Only the rank is in the group: the Go runtime of plimsoll run ends where it cannot start a thread.
		enter := fmt.Sprintf(`echo $$ > %s/child/cgroup.procs && exec "$@"`, groups.parents[len(groups.parents)-1])
		run := append([]string{"--", "sh", "-c", enter, "sh"}, failing(python, "fork.py")[1:]...)
		failure{shell: startAlone, run: run, exit: 1,
			right: []explain.Resource{explain.Processes}, atMost: explain.Certain,
			says: "could not start another process", evidence: "Resource temporarily unavailable"}.fails(t)
	})
}

// limited is a control group with a limit on memory.
func limited(t *testing.T, memory int) controlGroups {
	t.Helper()
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	groups := newControlGroups(t)
	groups.limit(t, h.CPUs.String(), "400000", "100000", strconv.Itoa(memory))
	return groups
}

// TestKillBehindPipeline: the shell of a pipeline ends with 0 although the kernel has killed its first command.
func TestKillBehindPipeline(t *testing.T) {
	groups := limited(t, 256<<20)
	touch := filepath.Join(programs(t), "touch-memory")
	recording := filepath.Join(t.TempDir(), "run.jsonl")
	j := newJob(t, "--record", recording, "bash", "-c", touch+" 512 0 2>&1 | cat")
	groups.contain(j.command)
	j.start(t).ends(t, 0, "exit code 0, but the kernel's OOM killer killed a process of cgroup", groups.name,
		"pipefail")
	if got := explained(t, recording); got.Cause.Resource != explain.CGroup {
		t.Errorf("the resource is %q, expected %q:\n%s", got.Cause.Resource, explain.CGroup, show(got))
	}
}

// TestFailuresThatLookLikeMemory makes ends that look as if memory had run out. The answer must not be sure of it.
func TestFailuresThatLookLikeMemory(t *testing.T) {
	open := []explain.Resource{explain.Undetermined, explain.NotMemory}
	t.Run("exit code 137", func(t *testing.T) {
		failure{shell: startAlone, run: []string{"--", "sh", "-c", "exit 137"}, exit: 137,
			right: open, atMost: explain.Likely, says: "137", evidence: "137"}.fails(t)
	})
	t.Run("SIGTERM of somebody", func(t *testing.T) {
		failure{shell: startAlone, run: []string{"--", "sh", "-c", "kill -TERM $$"}, exit: 143,
			right: open, atMost: explain.Unknown, says: "signal 15", evidence: "signal 15"}.fails(t)
	})
	t.Run("descriptors", func(t *testing.T) {
		open := "kept = [open('/dev/null') for _ in range(9999)]"
		failure{shell: "ulimit -n 64; " + startAlone, run: []string{"--", "sh", "-c", `ulimit -n 20; exec "$@"`, "sh",
			torchtest.Python(t), "-c", open}, exit: 1, right: []explain.Resource{explain.NotMemory},
			atMost: explain.Likely, says: "Too many open files", evidence: "file descriptor"}.fails(t)
	})
	t.Run("exit code 137 of one of two ranks", func(t *testing.T) {
		run := []string{"--nproc", "2", "--", "sh", "-c", "[ $RANK = 1 ] && exit 137; exec sleep 100"}
		failure{shell: startAlone, run: run, exit: 137, rank: 1, victims: 1,
			right: open, atMost: explain.Likely, says: "137", evidence: "137"}.fails(t)
	})
	t.Run("SIGKILL of somebody", func(t *testing.T) {
		failure{shell: startAlone, run: []string{"--", "sh", "-c", "kill -KILL $$"}, exit: 137,
			right: open, atMost: explain.Likely, says: "SIGKILL|signal 9", evidence: "SIGKILL|signal 9"}.fails(t)
	})
	t.Run("worker of a data loader that somebody killed", func(t *testing.T) {
		notShort(t)
		failure{shell: startAlone, run: failing(torchtest.Python(t), "loader.py", "1", "kill"), exit: 1, once: true,
			right: open, atMost: explain.Likely, says: "worker", evidence: "is killed by signal: Killed"}.fails(t)
	})
	t.Run("truncated mapped file", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "mapped")
		failure{shell: startAlone, run: failing(torchtest.Python(t), "truncated.py", file), exit: 135,
			right: append(open, explain.SharedMemory, explain.Disk), atMost: explain.Likely,
			says: "SIGBUS|signal 7|bus error", evidence: "(?i)SIGBUS|signal 7|bus error"}.fails(t)
	})
	t.Run("truncated file that a loader maps, with stacks", func(t *testing.T) {
		load := "import mmap, sys\ndef load_weights(f):\n m = mmap.mmap(f.fileno(), 1 << 20)\n f.truncate(0)\n " +
			"return m[4096]\nf = open(sys.argv[1], 'w+b')\nf.truncate(1 << 20)\nload_weights(f)"
		file := filepath.Join(t.TempDir(), "mapped")
		run := []string{"--", torchtest.Python(t), "-X", "faulthandler", "-c", load, file}
		failure{shell: startAlone, run: run, exit: 135, right: []explain.Resource{explain.NotMemory},
			atMost: explain.Likely, says: "SIGBUS|signal 7|bus error", evidence: "in load_weights"}.fails(t)
	})
	t.Run("kill within a wrapper", func(t *testing.T) {
		run := []string{"--", "bash", "-c", `sh -c 'kill -KILL $$'; exit 1`}
		failure{shell: startAlone, run: run, exit: 1, right: open, atMost: explain.Likely,
			says: "rank 0 ended with exit code 1", evidence: "Killed"}.fails(t)
	})
	t.Run("worker of a pool", func(t *testing.T) {
		pool := "import concurrent.futures as c, os, signal\nwith c.ProcessPoolExecutor(1) as p: " +
			"p.submit(signal.raise_signal, 9).result()"
		failure{shell: startAlone, run: []string{"--", torchtest.Python(t), "-c", pool}, exit: 1, right: open,
			atMost: explain.Unknown, says: "terminated abruptly", evidence: "terminated abruptly"}.fails(t)
	})
	t.Run("crash with stacks", func(t *testing.T) {
		run := []string{"--", torchtest.Python(t), "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"}
		failure{shell: startAlone, run: run, exit: 139, right: []explain.Resource{explain.NotMemory},
			atMost: explain.Likely, says: "signal 11", evidence: "(?i)segmentation fault"}.fails(t)
	})
	t.Run("error of one of two ranks", func(t *testing.T) {
		raise := "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no labels')\ntime.sleep(100)"
		failure{shell: startAlone, run: []string{"--nproc", "2", "--", torchtest.Python(t), "-c", raise}, exit: 1,
			rank: 1, victims: 1, right: []explain.Resource{explain.NotMemory}, atMost: explain.Likely,
			says: "no labels", evidence: "ValueError"}.fails(t)
	})
	t.Run("empty pool of huge pages", func(t *testing.T) {
		pool, err := os.ReadFile("/proc/sys/vm/nr_hugepages")
		if err != nil || strings.TrimSpace(string(pool)) != "0" {
			t.Skipf("the pool of huge pages is not empty: %s %v", pool, err)
		}
		failure{shell: startAlone, run: failing(torchtest.Python(t), "hugetlb.py"), exit: 135,
			right: append(open, explain.SharedMemory, explain.Host), atMost: explain.Likely,
			says: "SIGBUS|signal 7|bus error", evidence: "(?i)SIGBUS|signal 7|bus error"}.fails(t)
	})
}

// TestEmulatedFailures makes the failures that need a machine of their own: its memory, or that of a NUMA node, is
// full. In the emulated machine, control groups are those of version 2.
func TestEmulatedFailures(t *testing.T) {
	needEmulated(t)
	touch := filepath.Join(programs(t), "touch-memory")
	t.Run("NUMA node", func(t *testing.T) {
		run := []string{"--nproc", "2", "--memory-policy", "bind", "--", "sh", "-c",
			"[ $RANK = 1 ] && exec " + touch + " 1000 0; exec sleep 100"}
		failure{shell: startAlone, run: run, exit: 137, rank: 1, victims: 1,
			right: []explain.Resource{explain.NUMANode}, atMost: explain.Certain,
			sure: true,
			says: "NUMA node", evidence: `MEMORY_POLICY`}.fails(t)
	})
	t.Run("host", func(t *testing.T) {
		run := []string{"--", "sh", "-c", touch + " 500 100 & exec " + touch + " 1600 0"}
		failure{shell: startAlone, run: run, exit: 137,
			right: []explain.Resource{explain.Host}, atMost: explain.Certain,
			sure: true,
			says: "host", evidence: `Killed process`}.fails(t)
	})
	t.Run("cgroup", func(t *testing.T) {
		groups := limited(t, 256<<20)
		failure{shell: startAlone, groups: &groups, run: []string{"--", touch, "512", "0"}, exit: 137,
			right: []explain.Resource{explain.CGroup}, atMost: explain.Certain,
			says: groups.name, evidence: `(?i)oom_kill|killed`}.fails(t)
	})
	t.Run("exit code 137", func(t *testing.T) {
		failure{shell: startAlone, run: []string{"--", "sh", "-c", "exit 137"}, exit: 137,
			right:  []explain.Resource{explain.Undetermined, explain.NotMemory},
			atMost: explain.Likely, says: "137", evidence: "137"}.fails(t)
	})
}
