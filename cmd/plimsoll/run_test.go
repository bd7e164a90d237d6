//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/launch"
)

// runningJob is a run of the program. A variable of its own in the environment identifies its processes.
type runningJob struct {
	command        *exec.Cmd
	mark           string
	stdout, stderr bytes.Buffer
}

// newJob returns plimsoll run with these arguments, outside of any launcher.
func newJob(t *testing.T, arguments ...string) *runningJob {
	t.Helper()
	j := &runningJob{
		command: exec.Command(program(t), append([]string{"run"}, arguments...)...),
		mark:    fmt.Sprintf("PLIMSOLL_TEST=%s-%d", t.Name(), time.Now().UnixNano()),
	}
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); !strings.HasPrefix(name, "SLURM_") && name != "MASTER_PORT" {
			j.command.Env = append(j.command.Env, entry)
		}
	}
	j.command.Env = append(j.command.Env, j.mark)
	j.command.Stdout, j.command.Stderr = &j.stdout, &j.stderr
	t.Cleanup(func() { j.kill(t) })
	return j
}

// processes returns the living processes of the job.
func (j *runningJob) processes(t *testing.T) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, file := range files {
		var pid int
		environment, err := os.ReadFile(file)
		if err == nil && bytes.Contains(environment, []byte(j.mark)) {
			fmt.Sscanf(file, "/proc/%d/", &pid)
			found = append(found, pid)
		}
	}
	return found
}

// overdue is in the message about ranks that had to be killed.
const overdue = "did not end within"

// ends waits for the job and checks its end: the exit code, the texts on stderr, and that no process is left. The
// ranks must have done as they were asked.
func (j *runningJob) ends(t *testing.T, code int, says ...string) {
	t.Helper()
	err := j.wait(t)
	if got := j.command.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d (%v), want %d", got, err, code)
	}
	for _, text := range says {
		if !strings.Contains(j.stderr.String(), text) {
			t.Errorf("stderr does not say %q", text)
		}
	}
	if strings.Contains(j.stderr.String(), overdue) && !strings.Contains(strings.Join(says, "\n"), overdue) {
		t.Error("ranks had to be killed")
	}
	j.isGone(t)
	if t.Failed() {
		t.Logf("stdout:\n%s\nstderr:\n%s", &j.stdout, &j.stderr)
	}
}

// wait waits for the job to end.
func (j *runningJob) wait(t *testing.T) error {
	t.Helper()
	watch := time.AfterFunc(hung, func() { j.kill(t) })
	err := j.command.Wait()
	if !watch.Stop() {
		t.Error("the job hung")
	}
	return err
}

// kill ends all processes of the job.
func (j *runningJob) kill(t *testing.T) {
	for _, pid := range j.processes(t) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// await waits for a condition. It returns false when the time is over.
func await(so func() bool) bool {
	for begin := time.Now(); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Since(begin) > hung {
			return false
		}
	}
	return true
}

// isGone waits until all processes of the job are gone.
func (j *runningJob) isGone(t *testing.T) {
	t.Helper()
	for left := j.processes(t); len(left) > 0; left = j.processes(t) {
		if !awaitEnd(t, left[0]) {
			t.Errorf("processes %v are left", left)
			return
		}
	}
}

func (j *runningJob) start(t *testing.T) *runningJob {
	t.Helper()
	if err := j.command.Start(); err != nil {
		t.Fatal(err)
	}
	return j
}

// has waits until the job has made that many files.
func (j *runningJob) has(t *testing.T, count int, name string) {
	t.Helper()
	begun := func() int {
		files, _ := filepath.Glob(name + "*")
		return len(files)
	}
	if !awaitFiles(t, filepath.Dir(name), func() bool { return begun() >= count }) {
		t.Fatalf("%d of %d ranks have begun", begun(), count)
	}
}

func TestRankThatFails(t *testing.T) {
	t.Parallel()
	newJob(t, "--nproc", "2", "--", "sh", "-c", "[ $RANK = 0 ] && exec sleep 1000; exit 3").start(t).
		ends(t, 3, "rank 1 ended with exit code 3")
	newJob(t, "--nproc", "2", "--", "sh", "-c", "[ $RANK = 1 ] && exec sleep 1000; kill -SEGV $$").start(t).
		ends(t, 139, "rank 0 was ended by signal 11", "exit code 139 (SIGSEGV, a segmentation fault)")
	newJob(t, "--", "sh", "-c", "kill -KILL $$").start(t).
		ends(t, 137, "exit code 137: killed by SIGKILL, and the kernel's OOM killer counted no kill")
}

func TestSignalsArePassedOn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		arguments []string
		signal    syscall.Signal
		script    string
		code      int
		says      string
	}{
		{[]string{"--nproc", "2"}, syscall.SIGTERM, `trap "exit 5" TERM`, 5, "passed on"},
		{[]string{"--nproc", "2"}, syscall.SIGTERM, "", 128 + 15, "passed on"},
		{[]string{"--nproc", "1"}, syscall.SIGINT, `trap "exit 6" INT`, 6, "passed on"},
		// Its children get no signal: state S is a process that sleeps.
		{[]string{"--nproc", "2"}, syscall.SIGTERM, `sleep 1000 & child=$!
			trap 'sleep 0.1; [ "$(cut -d" " -f3 /proc/$child/stat)" = S ] && exit 5; exit 6' TERM`, 5, "passed on"},
		{[]string{"--nproc", "2"}, syscall.SIGUSR1, `trap "exit 0" USR1`, 0, "passed on"},
		{[]string{"--nproc", "2", "--grace", "200ms"}, syscall.SIGTERM, `trap "" TERM`, 128 + 9,
			"2 ranks " + overdue + " 200ms"},
	} {
		begun := filepath.Join(t.TempDir(), "begun")
		script := c.script + "\n: > " + begun + "$RANK\nwhile :; do sleep 0.05; done"
		j := newJob(t, append(c.arguments, "--", "sh", "-c", script)...).start(t)
		j.has(t, int(c.arguments[1][0]-'0'), begun)
		if err := j.command.Process.Signal(c.signal); err != nil {
			t.Fatal(err)
		}
		j.ends(t, c.code, c.says)
		if strings.Contains(j.stderr.String(), "exit code 137") {
			t.Errorf("plimsoll says that another has killed what it has killed itself:\n%s", &j.stderr)
		}
	}
}

// TestSIGTERMComesOnce: a rank that saves its state after SIGTERM or Ctrl-C gets the time to finish. Neither the end
// of another rank nor a second request changes that.
func TestSIGTERMComesOnce(t *testing.T) {
	for _, c := range []struct {
		name    string
		trapped string // rank 0 saves at this signal; SIGTERM ends it otherwise
		send    []syscall.Signal
		other   string // commands of rank 1, behind which HAS BEGUN says that it is ready
		code    int
	}{
		{"the other rank ends first", "TERM", []syscall.Signal{syscall.SIGTERM},
			`trap "sleep 0.5; exit 9" TERM; HAS BEGUN; while :; do sleep 0.05; done`, 9},
		{"the other rank is interrupted", "INT", []syscall.Signal{syscall.SIGINT}, "HAS BEGUN; exec sleep 1000",
			128 + 2},
		{"the user asks twice", "TERM", []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM},
			"HAS BEGUN; exec sleep 1000", 128 + 15},
		{"the other rank fails", "TERM", nil, "exit 3", 3},
		{"the other rank fails, and the user asks", "TERM", []syscall.Signal{syscall.SIGTERM}, "exit 3", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			directory := t.TempDir()
			begun, saving, saved := filepath.Join(directory, "begun"), filepath.Join(directory, "saving"),
				filepath.Join(directory, "saved")
			other := c.other
			if c.other == "exit 3" {
				other = "HAS BEGUN; while [ ! -e " + begun + "0 ]; do sleep 0.05; done; exit 3"
			}
			other = strings.Replace(other, "HAS BEGUN", ": > "+begun+"1", 1)
			script := fmt.Sprintf(`[ $RANK = 1 ] && { %[2]s; }
				trap 'trap - TERM INT; : > %[3]s; sleep 2; : > %[4]s; exit 0' %[5]s
				: > %[1]s0; while :; do sleep 0.05; done`, begun, other, saving, saved, c.trapped)
			j := newJob(t, "--nproc", "2", "--", "sh", "-c", script).start(t)
			j.has(t, 2, begun)
			for i, s := range c.send {
				if i > 0 || c.code == 3 {
					j.has(t, 1, saving)
				}
				if err := j.command.Process.Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			j.ends(t, c.code)
			if _, err := os.Stat(saved); err != nil {
				t.Errorf("rank 0 was ended while it saved:\n%s", &j.stderr)
			}
		})
	}
}

// TestEndedByUser: ranks that a signal to the job has ended are not started again. Neither is a rank that the
// terminal has interrupted.
func TestEndedByUser(t *testing.T) {
	// Under nohup, jobs would ignore SIGHUP as they are told to.
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1} {
		begun := filepath.Join(t.TempDir(), "begun")
		j := newJob(t, "--nproc", "2", "--restarts", "1", "--", "sh", "-c",
			": > "+begun+"$RANK; exec sleep 1000").start(t)
		j.has(t, 2, begun)
		if err := j.command.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		j.ends(t, 128+int(s), "passed on")
	}
	newJob(t, "--restarts", "1", "--", "sh", "-c", "kill -INT $$").start(t).ends(t, 130)
	begun := filepath.Join(t.TempDir(), "begun")
	newJob(t, "--restarts", "1", "--", "sh", "-c",
		"[ -e "+begun+" ] && exit 0; : > "+begun+"; kill -TERM $$").start(t).ends(t, 0, "starts all ranks again")
}

// TestInterruptedEarly interrupts jobs at many instants of their start: no job may ignore the interrupt.
func TestInterruptedEarly(t *testing.T) {
	t.Parallel()
	pause := 4 * time.Millisecond
	if testing.Short() {
		pause *= 3
	}
	for after := time.Duration(0); after < 120*time.Millisecond; after += pause {
		s := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM}[after/pause%2]
		j := newJob(t, "--nproc", "2", "--", "sleep", "1000").start(t)
		time.Sleep(after)
		if err := j.command.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		_ = j.wait(t)
		j.isGone(t)
		status := j.command.ProcessState.Sys().(syscall.WaitStatus)
		if !status.Signaled() && status.ExitStatus() != 128+int(s) || status.Signaled() && status.Signal() != s {
			t.Errorf("%v after %v: status %v\n%s", s, after, status, &j.stderr)
		}
		if t.Failed() {
			return
		}
	}
}

// TestQuitEarly: a SIGQUIT that comes when the keeper has just been started ends the job, and prints no stacks.
func TestQuitEarly(t *testing.T) {
	t.Parallel()
	for range 5 {
		j := newJob(t, "--nproc", "2", "--", "sleep", "1000").start(t)
		if !await(func() bool { return len(j.processes(t)) > 1 }) {
			t.Fatal("the keeper does not start")
		}
		if err := j.command.Process.Signal(syscall.SIGQUIT); err != nil {
			t.Fatal(err)
		}
		_ = j.wait(t)
		j.isGone(t)
		if code := j.command.ProcessState.ExitCode(); code != 131 || strings.Contains(j.stderr.String(), "goroutine") {
			t.Fatalf("exit code %d, expected 131:\n%s", code, &j.stderr)
		}
	}
}

// TestInterruptedWhileWaiting interrupts commands that wait for another process.
func TestInterruptedWhileWaiting(t *testing.T) {
	silent := filepath.Join(t.TempDir(), "socket") // of a stopped service
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: silent, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	stat := newJob(t)
	stat.command.Args = []string{"plimsoll", "stat", "--socket", silent}
	stat.start(t)
	asks, err := listener.Accept()
	if err == nil {
		defer asks.Close()
		_, err = asks.Read(make([]byte, 1))
	}
	if err != nil {
		t.Fatal(err)
	}
	stat.isEndedBySIGTERM(t)

	j := newJob(t, "--", "sleep", "1000") // waits for another rank, which does not come
	j.command.Env = append(j.command.Env, "RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2")
	j.start(t)
	// It calls read some 200 times before it waits, and then again and again.
	if !await(func() bool { return callsOf(t, j.command.Process.Pid) > 400 }) {
		t.Fatal("the command does not look for the other rank")
	}
	j.isEndedBySIGTERM(t)
}

// callsOf returns how often a process has called read.
func callsOf(t *testing.T, pid int) (calls int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "syscr: ")
	fmt.Sscan(after, &calls)
	return calls
}

// isEndedBySIGTERM sends the signal, which the command must leave to the kernel.
func (j *runningJob) isEndedBySIGTERM(t *testing.T) {
	t.Helper()
	if err := j.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = j.wait(t)
	if status := j.command.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() ||
		status.Signal() != syscall.SIGTERM {
		t.Errorf("%q: status %v, stderr:\n%s", j.command.Args, status, &j.stderr)
	}
}

// childOf returns the process of the job with that parent.
func (j *runningJob) childOf(t *testing.T, parent int) int {
	t.Helper()
	for _, pid := range j.processes(t) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && strings.Contains(string(status), fmt.Sprintf("\nPPid:\t%d\n", parent)) {
			return pid
		}
	}
	t.Fatalf("process %d has no child", parent)
	return 0
}

// TestKilled kills a process of a job. Each rank has one child, and another child in a session of its own. The guard
// is the process that was started, the keeper is its child, and the ranks are the keeper's children.
func TestKilled(t *testing.T) {
	for name, c := range map[string]struct {
		generation int // of the killed process
		code       int
		says       string
	}{
		"guard":  {0, -1, "plimsoll run was killed, and its ranks with it"},
		"keeper": {1, 137, "signal 9 (killed) ended the keeper of the ranks"},
		"rank":   {2, 137, "was ended by signal 9"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := filepath.Join(t.TempDir(), "begun")
			j := newJob(t, "--nproc", "2", "--", "sh", "-c",
				"setsid sleep 1000 & sleep 1000 & : > "+begun+"$RANK; wait").start(t)
			j.has(t, 2, begun)
			if !await(func() bool { return len(j.processes(t)) == 2+2*3 }) {
				t.Fatal("the children of the ranks have not begun")
			}
			pid := j.command.Process.Pid
			for range c.generation {
				pid = j.childOf(t, pid)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			j.ends(t, c.code, c.says)
		})
	}
}

// TestScores reads oom_score_adj of a job's processes. The kernel must prefer ranks and their children when it kills
// for want of memory, by as much as the range allows.
func TestScores(t *testing.T) {
	t.Parallel()
	for _, inherited := range []int{0, 300, 1000} {
		t.Run(fmt.Sprint(inherited), func(t *testing.T) {
			t.Parallel()
			checkScores(t, inherited)
		})
	}
}

// checkScores runs a job in a process with a score, and looks at those of its processes.
func checkScores(t *testing.T, inherited int) {
	t.Helper()
	begun := filepath.Join(t.TempDir(), "begun")
	j := newJob(t, "--", "sh", "-c", "leave-state; sleep 1000 & : > "+begun+"; wait")
	j.command.Args = []string{"sh", "-c", fmt.Sprintf(`echo %d > /proc/self/oom_score_adj; exec "$0" "$@"`,
		inherited), j.command.Path, "run", "--", "sh", "-c", j.command.Args[5]}
	j.command.Path = "/bin/sh"
	j.start(t)
	j.has(t, 1, begun)
	pids := map[string]int{"guard": j.command.Process.Pid, "service": j.named(t, "plimsoll serve")}
	pids["keeper"] = j.named(t, "plimsoll keep-ranks")
	pids["rank"] = j.named(t, "sh -c")
	pids["child of the rank"] = j.childOf(t, pids["rank"])
	guard := scoreOf(t, pids["guard"])
	if guard != inherited && guard != inherited-1000 { // where that is allowed
		t.Errorf("%d was inherited, and the guard has %d", inherited, guard)
	}
	for name, want := range map[string]int{"keeper": guard + 1, "service": guard + 1, "rank": guard + 1000,
		"child of the rank": guard + 1000} {
		if got := scoreOf(t, pids[name]); got != min(want, 1000) {
			t.Errorf("%d was inherited and the guard has %d: the %s has %d, want %d", inherited, guard, name, got,
				min(want, 1000))
		}
	}
	_ = j.command.Process.Signal(syscall.SIGTERM)
	j.ends(t, 128+15)
}

func scoreOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(scoreFile(pid))
	if err != nil {
		t.Fatal(err)
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return score
}

// TestNothingIsLeftBehind runs ranks with children that a signal to the rank does not reach: one in a session of its
// own, and one that holds the output open.
func TestNothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	newJob(t, "--nproc", "2", "--grace", "500ms", "--", "sh", "-c",
		"setsid sleep 1000 & (trap '' TERM; exec sleep 1000) & exit $RANK").start(t).
		ends(t, 1, "rank 1 ended with exit code 1", "that the ranks had left behind")
}

func TestProgramThatCannotBeStarted(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	newJob(t, "--nproc", "2", "--", "no-such-program-here").start(t).ends(t, 127, "rank 0 cannot be started",
		"no-such-program-here")
	newJob(t, "--", plain).start(t).ends(t, 126, "rank 0 cannot be started", "permission denied")
}

// TestFlagsOfTheCommand: flags after the first word of the command are the command's, with and without "--".
func TestFlagsOfTheCommand(t *testing.T) {
	for _, before := range [][]string{{}, {"--"}, {"--nproc", "1"}, {"--nproc", "1", "--"}} {
		j := newJob(t, append(before, "printf", "%s;", "--epochs", "--nproc", "7", "--", "-x", "--json")...).start(t)
		j.ends(t, 0)
		if got := j.stdout.String(); got != "--epochs;--nproc;7;--;-x;--json;" {
			t.Errorf("%q: the command got %q", before, got)
		}
	}
	newJob(t, "--epochs", "3", "--", "true").start(t).ends(t, 2, "--epochs")
}

// TestBytesOfArguments: file names and values of variables are bytes, not text.
func TestBytesOfArguments(t *testing.T) {
	j := newJob(t, "--nproc", "2", "--", "sh", "-c", `printf '%s,%s,%s\n' "$1" "$2" "$LATIN"`, "sh", "", "\xe4\xff.txt")
	j.command.Env = append(j.command.Env, "LATIN=\xfc=\n")
	j.start(t).ends(t, 0)
	for _, rank := range []string{"0", "1"} {
		if want := "[rank " + rank + "] ,\xe4\xff.txt,\xfc=\n"; !strings.Contains(j.stdout.String(), want) {
			t.Errorf("got %q, want %q", &j.stdout, want)
		}
	}
}

func TestBusyPort(t *testing.T) {
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	begun := filepath.Join(t.TempDir(), "begun")
	j := newJob(t, "--nproc", "2", "--", "sh", "-c", ": > "+begun+"$RANK")
	port := listener.Addr().(*net.TCPAddr).Port
	j.command.Env = append(j.command.Env, fmt.Sprintf("MASTER_PORT=%d", port))
	j.start(t).ends(t, 2, fmt.Sprintf("port %d", port), "hint")
	if files, _ := filepath.Glob(begun + "*"); files != nil {
		t.Errorf("ranks were started: %v", files)
	}
}

// TestOutputIsWholeAndLabelled has two ranks print at the same time.
func TestOutputIsWholeAndLabelled(t *testing.T) {
	t.Parallel()
	const lines, width = 2000, 200
	j := newJob(t, "--nproc", "2", "--", "awk", fmt.Sprintf(
		`BEGIN { for (i = 0; i < %d; i++) { s = ""; while (length(s) < %d) s = s ENVIRON["RANK"]; print s } printf "end%%s", ENVIRON["RANK"] }`, lines, width)).start(t)
	j.ends(t, 0)
	count := map[string]int{}
	for line := range strings.Lines(j.stdout.String()) {
		count[line]++
	}
	for _, rank := range []string{"0", "1"} {
		if count["[rank "+rank+"] "+strings.Repeat(rank, width)+"\n"] != lines ||
			count["[rank "+rank+"] end"+rank+"\n"] != 1 {
			t.Errorf("rank %s: %d lines of %d, and %d ends", rank,
				count["[rank "+rank+"] "+strings.Repeat(rank, width)+"\n"], lines,
				count["[rank "+rank+"] end"+rank+"\n"])
		}
	}
	if len(count) != 4 {
		t.Errorf("%d different lines, want 4", len(count))
	}
}

// TestFullDisk: ranks whose output cannot be written end as if nobody read it, and a message gives the reason.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	j := newJob(t, "--nproc", "2", "--", "sh", "-c", "while :; do echo line; done")
	j.command.Stdout = full
	j.start(t).ends(t, 128+13, "the output of rank ", "no space left on device", "was ended by signal 13")
}

// TestSlowReader reads the output only after the ranks have ended. The pipes hold as much of it as they can, and none
// of it may be lost.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	// The output of a rank fits its pipe, or its pipe and half of ours. The output of all ranks exceeds our output
	// pipe, plus the copy in progress where there are several.
	for ranks, lines := range map[int]int{1: 800, 2: 630} {
		begun := filepath.Join(t.TempDir(), "begun")
		j := newJob(t, "--nproc", strconv.Itoa(ranks), "--", "sh", "-c",
			fmt.Sprintf(`for i in $(seq %d); do printf '%%099d\n' $i; done; : > %s$RANK`, lines, begun))
		reader, writer, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer reader.Close()
		j.command.Stdout = writer
		j.start(t)
		writer.Close()
		j.has(t, ranks, begun)
		for rank := j.named(t, "sh -c"); rank != 0; rank = j.named(t, "sh -c") {
			awaitEnd(t, rank)
		}
		if !testing.Short() {
			time.Sleep(2 * time.Second) // nothing gives the reader up
		}
		text, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		j.ends(t, 0)
		if got := bytes.Count(text, []byte("\n")); got != ranks*lines {
			t.Errorf("%d lines of %d", got, ranks*lines)
		}
	}
}

func TestSingleRankHasTheTerminal(t *testing.T) {
	t.Parallel()
	j := newJob(t, "--", "cat")
	j.command.Stdin = strings.NewReader("one\ntwo")
	j.start(t).ends(t, 0)
	if j.stdout.String() != "one\ntwo" {
		t.Errorf("got %q", &j.stdout)
	}
}

// TestRanksAreBoundAndLookedAt lets one rank leave its CPUs, and reads what the report says of both ranks.
func TestRanksAreBoundAndLookedAt(t *testing.T) {
	t.Parallel()
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.UsableCores()) < 2 {
		t.Skip("needs two cores")
	}
	file, seen := filepath.Join(t.TempDir(), "report.json"), filepath.Join(t.TempDir(), "seen")
	script := fmt.Sprintf("taskset -cp $$; [ $RANK = 1 ] && taskset -cp %s $$; until [ -e %s ]; do sleep 0.05; done",
		h.CPUs, seen)
	j := newJob(t, "--nproc", "2", "--report", file, "--", "sh", "-c", script)
	j.command.Stderr = io.MultiWriter(&j.stderr, &noticing{text: "threads anew", then: func() {
		if err := os.WriteFile(seen, nil, 0o600); err != nil {
			t.Error(err)
		}
	}})
	j.start(t)
	j.ends(t, 0, "rank 1: ", "threads anew, and they may leave CPUs")
	if strings.Contains(j.stderr.String(), "rank 0: ") {
		t.Errorf("stderr: %s", &j.stderr)
	}
	var report struct {
		Schema string `json:"schema"`
		Ranks  []struct {
			Binding struct {
				CPUs string `json:"trainer_cpus"`
			} `json:"binding"`
			Found launch.PlacementCheck `json:"found"`
		} `json:"ranks"`
		ExitCode *int `json:"exit_code"`
	}
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, &report)
	}
	if err != nil {
		t.Fatal(err)
	}
	if report.Schema != "plimsoll.run/1" || len(report.Ranks) != 2 || report.ExitCode == nil || *report.ExitCode != 0 {
		t.Fatalf("%s", data)
	}
	for i, r := range report.Ranks {
		if !strings.Contains(j.stdout.String(), "affinity list: "+r.Binding.CPUs+"\n") {
			t.Errorf("rank %d did not find itself on CPUs %s:\n%s", i, r.Binding.CPUs, &j.stdout)
		}
		if r.Found.Threads == 0 || (len(r.Found.Outside) > 0) != (i == 1) || len(r.Found.Memory) == 0 {
			t.Errorf("rank %d: %+v", i, r.Found)
		}
	}
}

// noticing is a writer that does something once a text is written.
type noticing struct {
	text    string
	then    func()
	written strings.Builder
	noticed bool
}

func (n *noticing) Write(data []byte) (int, error) {
	n.written.Write(data)
	if !n.noticed && strings.Contains(n.written.String(), n.text) {
		n.noticed = true
		n.then()
	}
	return len(data), nil
}

// TestReserve leaves a core to the system, whichever command runs.
func TestReserve(t *testing.T) {
	t.Parallel()
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.UsableCores()) < 2 {
		t.Skip("needs two cores")
	}
	reserved := fmt.Sprint(h.CPUs.List()[0])
	j := newJob(t, "--reserve", "1", "--smt", "off", "--", "sh", "-c",
		"grep Cpus_allowed_list /proc/self/status | cut -f 2").start(t)
	j.ends(t, 0)
	cpus, err := host.ParseList(strings.TrimSpace(j.stdout.String()))
	if err != nil || cpus.IsEmpty() || strings.Contains(","+cpus.String()+",", ","+reserved+",") ||
		cpus.Size() >= h.CPUs.Size() {
		t.Errorf("the rank is on CPUs %s of %s (%v)", cpus, h.CPUs, err)
	}
	newJob(t, "--nproc", "2", "--reserve", fmt.Sprint(len(h.UsableCores())), "--", "true").start(t).ends(t, 2,
		"--reserve is")
	newJob(t, "--smt", "maybe", "--", "true").start(t).ends(t, 2, `"maybe" is neither on nor off`)
	for _, c := range []struct {
		says      string
		arguments []string
	}{
		{"not usable         0,2: left to the system (--reserve)\n", []string{"topology", "--reserve", "1"}},
		{"not usable         3: further hardware threads of cores (--smt off)\n",
			[]string{"topology", "--smt", "off", "--reserve", "1"}},
		{"CPUs 0,2 are left to the system, as asked\n", []string{"binding", "--reserve", "1"}},
	} {
		out, err := exec.Command(program(t), append(c.arguments, "--fsroot", fourCPUs(t))...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), c.says) {
			t.Errorf("%v does not say %q (%v):\n%s", c.arguments, c.says, err, out)
		}
	}
	out, err := exec.Command(program(t), "rehearse", "--model", smallModel(), "--steps", "0", "--reserve", "1").Output()
	if err != nil || strings.Contains(string(out), "on CPU "+reserved) ||
		strings.Contains(string(out), "on CPUs "+reserved) {
		t.Errorf("a worker is on CPU %s (%v):\n%s", reserved, err, out)
	}
}

// fourCPUs returns a recorded machine of two cores with two hardware threads each.
func fourCPUs(t *testing.T) string {
	t.Helper()
	text := "-- sys/devices/system/cpu/online --\n0-3\n"
	for cpu := range 4 {
		text += fmt.Sprintf("-- sys/devices/system/cpu/cpu%d/topology/core_cpus_list --\n%d,%d\n", cpu, cpu%2, cpu%2+2)
	}
	file := filepath.Join(t.TempDir(), "machine.txtar")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestThreadsOfPyTorchMayUseAllCores: threads that the main thread starts after it has loaded torch inherit its mask.
func TestThreadsOfPyTorchMayUseAllCores(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("imports torch")
	}
	const program = `
import os, threading, torch
torch.randn(1 << 20).exp().sum()
worker = threading.Thread(target=lambda: print("cpus", sorted(os.sched_getaffinity(0))))
worker.start(); worker.join()`
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	j := newJob(t, "--", torchtest.Python(t), "-c", program).start(t)
	j.ends(t, 0)
	want := "cpus [" + strings.Join(strings.Fields(strings.Trim(fmt.Sprint(h.CPUs.List()), "[]")), ", ") + "]\n"
	if j.stdout.String() != want {
		t.Errorf("got %q, want %q", &j.stdout, want)
	}
}

// TestTorchrun starts torchrun from plimsoll run, and plimsoll run from torchrun.
func TestTorchrun(t *testing.T) {
	if testing.Short() {
		t.Skip("imports torch")
	}
	torchrun := filepath.Join(filepath.Dir(torchtest.Python(t)), "torchrun")
	ask := []string{"--no-python", "sh", "-c",
		`echo "rank=$RANK of=$WORLD_SIZE cpus=$(grep Cpus_allowed_list /proc/self/status)"`}
	j := newJob(t, append([]string{"--", torchrun, "--standalone", "--nproc-per-node", "2"}, ask...)...).start(t)
	j.ends(t, 0, "torchrun starts the ranks")
	for _, rank := range []string{"rank=0 of=2", "rank=1 of=2"} {
		if !strings.Contains(j.stdout.String(), rank) {
			t.Errorf("%q is missing:\n%s", rank, &j.stdout)
		}
	}

	j = newJob(t, "--", "true")
	inner := append([]string{torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", j.command.Path, "run",
		"--"}, ask[1:]...)
	j.command.Path, j.command.Args = torchrun, inner
	j.start(t).ends(t, 0)
	cpus := map[string]bool{}
	for line := range strings.Lines(j.stdout.String()) {
		if _, list, ok := strings.Cut(line, "cpus="); ok {
			cpus[list] = true
		}
	}
	if h, err := host.Local(); err == nil && len(h.UsableCores()) >= 2 && len(cpus) != 2 {
		t.Errorf("the ranks of torchrun are on the same CPUs:\n%s", &j.stdout)
	}
}

// TestPeers starts ranks as torchrun does, with masks that are equal, overlap or are disjoint. The test itself is the
// launcher.
func TestPeers(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.UsableCores()) < 2 {
		t.Skip("needs two cores")
	}
	cores := h.UsableCores()
	first, last := cores[0].Usable, cores[len(cores)-1].Usable
	for name, given := range map[string][]string{
		"the same": {h.CPUs.String(), h.CPUs.String()},
		"overlap":  {h.CPUs.String(), last.String()},
		"apart":    {first.String(), last.String()},
	} {
		jobs, lists := []*runningJob{}, []string{}
		// A rank stays until the other rank has found it.
		begun := filepath.Join(t.TempDir(), "begun")
		script := fmt.Sprintf(`grep Cpus_allowed_list /proc/self/status | cut -f 2; : > %s$RANK; while [ ! -e %[1]s0 ] || [ ! -e %[1]s1 ]; do sleep 0.05; done`, begun)
		for rank, cpus := range given {
			j := newJob(t, "--", "sh", "-c", script)
			j.command.Args = append([]string{"taskset", "-c", cpus, j.command.Path}, j.command.Args[1:]...)
			if j.command.Path, err = exec.LookPath("taskset"); err != nil {
				t.Fatal(err)
			}
			j.command.Env = append(j.command.Env, fmt.Sprint("RANK=", rank), "WORLD_SIZE=2",
				fmt.Sprint("LOCAL_RANK=", rank), "LOCAL_WORLD_SIZE=2")
			jobs = append(jobs, j.start(t))
		}
		for i, j := range jobs {
			j.ends(t, 0)
			lists = append(lists, strings.TrimSpace(j.stdout.String()))
			mine, err := host.ParseList(lists[i])
			allowed, err2 := host.ParseList(given[i])
			if err != nil || err2 != nil || mine.IsEmpty() || !mine.IsSubsetOf(allowed) {
				t.Errorf("%s: rank %d has CPUs %q of %s", name, i, lists[i], allowed)
			}
			if name == "apart" && !mine.Equals(allowed) {
				t.Errorf("%s: rank %d has CPUs %q and not all of %s", name, i, lists[i], allowed)
			}
		}
		a, _ := host.ParseList(lists[0])
		b, _ := host.ParseList(lists[1])
		if !a.Intersection(b).IsEmpty() {
			t.Errorf("%s: both ranks have CPUs of %v", name, lists)
		}
	}
}

// TestMPI lets a real mpirun start the ranks, bound and unbound.
func TestMPI(t *testing.T) {
	mpirun, err := exec.LookPath("mpirun")
	if err != nil {
		t.Skip("needs mpirun (Debian: openmpi-bin)")
	}
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	if len(h.UsableCores()) < 2 {
		t.Skip("needs two cores")
	}
	for _, binding := range []string{"core", "none"} {
		j := newJob(t, "--", "true")
		arguments := []string{mpirun, "--allow-run-as-root", "--bind-to", binding, "-n", "2", j.command.Path, "run",
			"--"}
		j.command.Path, j.command.Args = mpirun,
			append(arguments, "sh", "-c",
				`echo "rank=$RANK of=$WORLD_SIZE cpus=$(grep Cpus_allowed_list /proc/self/status)"`)
		j.start(t).ends(t, 0)
		cpus := map[string]bool{}
		for line := range strings.Lines(j.stdout.String()) {
			if _, list, ok := strings.Cut(line, "of=2 cpus="); ok {
				cpus[list] = true
			}
		}
		if len(cpus) != 2 {
			t.Errorf("bound to %s: the ranks are not on CPUs of their own:\n%s", binding, &j.stdout)
		}
	}
}

// TestHangUpIsIgnoredUnderNohup starts the program as nohup does: the job must survive the end of the terminal.
func TestHangUpIsIgnoredUnderNohup(t *testing.T) {
	directory := t.TempDir()
	begun, proceed := filepath.Join(directory, "begun"), filepath.Join(directory, "proceed")
	j := newJob(t, "--nproc", "2", "--", "sh", "-c",
		": > "+begun+"$RANK; while [ ! -e "+proceed+" ]; do sleep 0.05; done; sleep 0.5")
	j.command.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$0" "$@"`}, j.command.Args...)
	j.command.Args[3] = j.command.Path
	j.command.Path = "/bin/sh"
	j.start(t)
	j.has(t, 2, begun)
	if err := j.command.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(proceed, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 0)
}

// TestReaderThatGoesAway closes the output. The ranks must learn of it as if they wrote to it themselves.
func TestReaderThatGoesAway(t *testing.T) {
	t.Parallel()
	j := newJob(t, "--nproc", "2", "--", "sh", "-c", "while :; do echo line; done")
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	j.command.Stdout = writer
	j.start(t)
	writer.Close()
	if _, err := reader.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	reader.Close()
	j.ends(t, 128+13, "was ended by signal 13")
	if strings.Contains(j.stderr.String(), "keeper") {
		t.Errorf("stderr: %s", &j.stderr)
	}
}
