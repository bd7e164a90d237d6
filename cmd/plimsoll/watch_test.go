//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"plimsoll/internal/base/samples"
)

// launcherScript starts two ranks as torchrun does, and each starts a child. They end when a file is there.
const launcherScript = `for rank in 0 1; do
	RANK=$rank sh -c 'sh -c "until [ -e $1 ]; do sleep 0.05; done; exit 0" & : > $0$RANK; wait' "$1" "$2" &
	done; wait`

// startLauncher starts the launcher outside of plimsoll run. It returns when both ranks run.
func startLauncher(t *testing.T, job string) (launcher *exec.Cmd, end string) {
	t.Helper()
	begun, end := filepath.Join(t.TempDir(), "begun"), filepath.Join(t.TempDir(), "end")
	j := newJob(t)
	launcher = exec.Command("sh", "-c", launcherScript, "sh", begun, end)
	launcher.Env = append(slices.Clone(j.command.Env), "PLIMSOLL_JOB="+job)
	if err := launcher.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = launcher.Wait() })
	j.has(t, 2, begun)
	return launcher, end
}

// TestWatchRecords records a job that plimsoll has not started, by its PID and by its name, until it ends.
func TestWatchRecords(t *testing.T) {
	t.Parallel()
	const job = "job of TestWatchRecords"
	launcher, end := startLauncher(t, job)
	var watches []*exec.Cmd
	var recordings []string
	for _, word := range []string{strconv.Itoa(launcher.Process.Pid), job} {
		file := filepath.Join(t.TempDir(), "samples.jsonl")
		c := exec.Command(program(t), "watch", word, "--record", file, "--interval", "100ms")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		watches, recordings = append(watches, c), append(recordings, file)
	}
	for i, file := range recordings {
		shows := func() bool {
			text, err := os.ReadFile(file)
			if err != nil || !bytes.Contains(text, []byte{'\n'}) {
				return false
			}
			records, _ := recordingOf(t, file)
			seen := rolesIn(records)
			return !slices.ContainsFunc([]string{"rank 0", "rank 1", "child 0", "child 1", "child -1"},
				func(who string) bool { return !seen[who] })
		}
		if !awaitFiles(t, filepath.Dir(recordings[i]), shows) {
			records, _ := recordingOf(t, file)
			t.Errorf("watch %d: the samples have %v", i, rolesIn(records))
		}
	}
	if err := exec.Command("touch", end).Run(); err != nil {
		t.Fatal(err)
	}
	for i, c := range watches {
		if err := c.Wait(); err != nil {
			t.Errorf("watch %d: %v", i, err)
		}
		records, cut := recordingOf(t, recordings[i])
		last := ending(t, records)
		if cut || !last.Unknown || last.Detached || last.ExitCode != 0 || len(last.Ranks) != 2 ||
			!last.Ranks[0].Unknown {
			t.Errorf("watch %d: cut: %t, end %+v", i, cut, last)
		}
	}
}

// rolesIn returns which roles of which ranks the samples have.
func rolesIn(records []samples.Record) map[string]bool {
	seen := map[string]bool{}
	for _, r := range records {
		if r.Sample == nil {
			continue
		}
		for _, p := range r.Sample.Processes {
			seen[fmt.Sprintf("%s %d", p.Role, p.Rank)] = true
		}
	}
	return seen
}

// TestWatchIsInterrupted: the recording says that the job went on.
func TestWatchIsInterrupted(t *testing.T) {
	t.Parallel()
	launcher, end := startLauncher(t, "")
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	c := exec.Command(program(t), "watch", strconv.Itoa(launcher.Process.Pid), "--record", file, "--interval", "100ms")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if !awaitFiles(t, filepath.Dir(file), func() bool { return holds(t, file, `"sample"`) }) {
		t.Fatal("no sample is recorded")
	}
	if err := c.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if _ = c.Wait(); c.ProcessState.ExitCode() != exitInterrupt {
		t.Errorf("exit code %v", c.ProcessState)
	}
	records, _ := recordingOf(t, file)
	if last := ending(t, records); !last.Detached || !last.Unknown || len(last.Ranks) != 0 {
		t.Errorf("the end is %+v", last)
	}
	if err := exec.Command("touch", end).Run(); err != nil {
		t.Fatal(err)
	}
}

// TestWatchOnce shows a job of plimsoll run, and a process that no launcher has started.
func TestWatchOnce(t *testing.T) {
	t.Parallel()
	begun := filepath.Join(t.TempDir(), "begun")
	j := newJob(t, "--nproc", "2", "--", "sh", "-c", ": > "+begun+"$RANK; exec sleep 1000").start(t)
	j.has(t, 2, begun)
	for _, c := range []struct {
		pid  int
		says []string
	}{
		{j.command.Process.Pid, []string{"\nkeeper ", "\n0 ", "\n1 ", " sleep ", "HEADROOM: "}},
		{j.childOf(t, j.childOf(t, j.command.Process.Pid)), []string{"\n0 ", " sleep "}},
	} {
		stdout, stderr, code := runs("watch", strconv.Itoa(c.pid), "--once")
		for _, text := range c.says {
			if !strings.Contains(stdout, text) {
				t.Errorf("%q is missing", text)
			}
		}
		if code != 0 || stderr != "" || t.Failed() {
			t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
		}
	}
	if err := j.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 128+15)
}

// TestWatchRefuses names what is missing.
func TestWatchRefuses(t *testing.T) {
	for _, c := range []struct {
		arguments []string
		says      string
	}{
		{[]string{"999999999", "--once"}, "no process 999999999 is running"},
		{[]string{"no such job", "--once"}, "no process has PLIMSOLL_JOB=no such job in its environment"},
		{[]string{"1", "--once", "--record", "file"}, "--once and --record are both given"},
		{[]string{"1", "--replay", "file"}, "takes either a job or --replay"},
		{[]string{"--replay", "file", "--record", "file"}, "--replay and --record are both given"},
		{[]string{"1", "--once", "--interval", "1ms"}, "--interval is 1ms"},
		{[]string{"1", "--record", "file", "--json"}, "--json and --format are for --once and a job"},
		{nil, "takes one PID or one job: found 0 arguments"},
		{[]string{"1", "2"}, "takes one PID or one job: found 2 arguments"},
	} {
		_, stderr, code := runs(append([]string{"watch"}, c.arguments...)...)
		if code != exitInput || !strings.Contains(stderr, c.says) {
			t.Errorf("%q: exit code %d: %s", c.arguments, code, stderr)
		}
	}
	if _, _, code := runs("watch", "1", "--once", "--json"); code != 0 {
		t.Errorf("--json: exit code %d", code)
	}
}
