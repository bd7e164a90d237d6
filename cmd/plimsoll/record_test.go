//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// recordingOf reads a recording.
func recordingOf(t *testing.T, file string) (records []samples.Record, cut bool) {
	t.Helper()
	opened, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	cut, err = samples.Read(file, opened, func(r *samples.Record) error {
		records = append(records, *r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return records, cut
}

// printed returns the lines that a rank has printed to a stream.
func printed(records []samples.Record, rank int, stream string) (lines []string) {
	for _, r := range records {
		if r.Output != nil && r.Output.Rank == rank && r.Output.Stream == stream {
			lines = append(lines, r.Output.Lines...)
		}
	}
	return lines
}

// holds is whether a file, which need not be there yet, has a text.
func holds(t *testing.T, file, text string) bool {
	t.Helper()
	all, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return bytes.Contains(all, []byte(text))
}

// ending returns the last record, which must be the end.
func ending(t *testing.T, records []samples.Record) *samples.End {
	t.Helper()
	last := records[len(records)-1]
	if last.End == nil {
		t.Fatalf("the last record is %+v", last)
	}
	return last.End
}

// TestRecording records two ranks: what they hold, their marks, what they print, and who was first to end.
func TestRecording(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	script := `echo out $RANK; echo error $RANK >&2
		[ $RANK = 0 ] && exec sleep 1000
		until [ "$(grep -c '"sample":' ` + file + `)" -ge 10 ]; do sleep 0.05; done
		printf last; exit 3`
	newJob(t, "--record", file, "--interval", "100ms", "--nproc", "2", "--", "sh", "-c", script).start(t).
		ends(t, 3, "rank 1 ended with exit code 3")
	records, cut := recordingOf(t, file)
	if cut {
		t.Error("the recording is cut")
	}
	start := records[0].Start
	if len(start.Command) != 3 || len(start.Ranks) != 2 || start.Limits == nil || start.WorkingDirectory == "" ||
		start.Job == "" || len(start.Counters) == 0 {
		t.Errorf("the start is %+v", start)
	}
	for rank := range 2 {
		out, failed := fmt.Sprintf("out %d", rank), fmt.Sprintf("error %d", rank)
		if lines := printed(records, rank, "stdout"); len(lines) == 0 || lines[0] != out {
			t.Errorf("rank %d has printed %q", rank, lines)
		}
		if lines := printed(records, rank, "stderr"); !slices.Equal(lines, []string{failed}) {
			t.Errorf("rank %d has printed %q to stderr", rank, lines)
		}
	}
	if lines := printed(records, 1, "stdout"); lines[len(lines)-1] != "last" {
		t.Errorf("the last line is missing: %q", lines)
	}
	taken := 0
	var before time.Duration
	for _, r := range records {
		if r.Sample == nil {
			continue
		}
		taken++
		if r.Time < before {
			t.Errorf("a sample of %v is after one of %v", r.Time, before)
		}
		before = r.Time
		if r.Sample.Disk.Size == 0 || r.Sample.Node.Memory == 0 {
			t.Errorf("the sample at %v misses disk or memory", r.Time)
		}
	}
	for _, who := range []string{"rank 0", "rank 1", "keeper -1"} {
		if seen := rolesIn(records); !seen[who] {
			t.Errorf("no sample has %s: %v", who, seen)
		}
	}
	if taken < 10 {
		t.Errorf("%d samples", taken)
	}
	end := ending(t, records)
	if end.ExitCode != 3 || end.ByUser || end.Unknown || len(end.Ranks) != 2 || len(end.Counters) == 0 {
		t.Fatalf("the end is %+v", end)
	}
	if first, second := end.Ranks[0], end.Ranks[1]; first.Rank != 1 || first.ExitCode != 3 || first.Asked ||
		second.Rank != 0 || second.Signal != 15 || !second.Asked || second.Time < first.Time {
		t.Errorf("the ranks ended as %+v", end.Ranks)
	}
}

// TestRecordingHasMarks sends a mark as the client does.
func TestRecordingHasMarks(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file, told := filepath.Join(folder, "samples.jsonl"), filepath.Join(folder, "told")
	j := newJob(t, "--record", file, "--interval", "100ms", "--", "sh", "-c",
		`printf %s "$PLIMSOLL_MARKS" > `+told+".part; mv "+told+".part "+told+"; until [ -e "+told+"2 ]; do sleep 0.05; done")
	j.start(t)
	if !awaitFiles(t, filepath.Dir(told), func() bool { return exists(filepath.Dir(told), "told") }) {
		t.Fatal("the rank has not begun")
	}
	socket, err := os.ReadFile(told)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unixgram", string(socket))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, text := range []string{`{"rank": 0, "phase": "forward", "iteration": "first", "step": 1}`, "no mark", "none"} {
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
	}
	marked := func() (marks []*samples.Mark, phases int) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, err = samples.Read(file, bytes.NewReader(text), func(r *samples.Record) error {
			if r.Mark != nil {
				marks = append(marks, r.Mark)
			}
			if r.Sample != nil && slices.ContainsFunc(r.Sample.Processes, func(p samples.Process) bool {
				return p.Rank == 0 && p.Phase == ledger.Forward && p.Iteration == ledger.First && p.Step == 1
			}) {
				phases++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return marks, phases
	}
	if !awaitFiles(t, folder, func() bool { _, phases := marked(); return phases > 2 }) {
		t.Error("no sample has the phase")
	}
	if err := os.WriteFile(told+"2", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 0, "has sent a mark that is none", "2 messages to PLIMSOLL_MARKS were no marks")
	if marks, _ := marked(); len(marks) != 1 || marks[0].PID != os.Getpid() || marks[0].Source != samples.FromClient {
		t.Errorf("%d marks", len(marks))
	}
}

// TestRecordingOfRestarts has all attempts, and the end that the user has asked for.
func TestRecordingOfRestarts(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	j := newJob(t, "--record", file, "--restarts", "2", "--", "sh", "-c", "exit $((4 + PLIMSOLL_ATTEMPT))")
	j.start(t).ends(t, 6)
	records, _ := recordingOf(t, file)
	var codes []int
	for i, e := range ending(t, records).Ranks {
		codes = append(codes, e.ExitCode)
		if e.Attempt != i {
			t.Errorf("attempt %d, want %d", e.Attempt, i)
		}
	}
	if !slices.Equal(codes, []int{4, 5, 6}) {
		t.Errorf("exit codes %v", codes)
	}

	begun := filepath.Join(t.TempDir(), "begun")
	j = newJob(t, "--record", file, "--", "sh", "-c", ": > "+begun+"; exec sleep 1000").start(t)
	j.has(t, 1, begun)
	if err := j.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 128+15)
	records, _ = recordingOf(t, file)
	if end := ending(t, records); !end.ByUser || end.ExitCode != 128+15 || len(end.Ranks) != 1 || !end.Ranks[0].Asked {
		t.Errorf("the end is %+v", end)
	}
}

// TestRecordingOfProgramThatCannotBeStarted ends, too.
func TestRecordingOfProgramThatCannotBeStarted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	newJob(t, "--record", file, "--", "/no/such/program").start(t).ends(t, 127)
	records, _ := recordingOf(t, file)
	if end := ending(t, records); end.ExitCode != 127 || len(end.Ranks) != 0 {
		t.Errorf("the end is %+v", end)
	}
}

// TestRecordingIsWholeAfterAnyKill kills the guard, the keeper or a rank at random instants. Every line that is there
// can be read. A recording without the guard is cut; any other has its end.
func TestRecordingIsWholeAfterAnyKill(t *testing.T) {
	t.Parallel()
	kills := 12
	if testing.Short() {
		kills = 3
	}
	for kill := range kills {
		file := filepath.Join(t.TempDir(), "samples.jsonl")
		begun := filepath.Join(t.TempDir(), "begun")
		j := newJob(t, "--record", file, "--interval", "100ms", "--nproc", "2", "--", "sh", "-c", ": > "+begun+
			"$RANK; yes 'a line of some length, so that there is much to record' | head -c 10000000; exec sleep 1000")
		j.command.Stdout = nil
		j.start(t)
		j.has(t, 2, begun)
		time.Sleep(rand.N(400 * time.Millisecond))
		victim := j.command.Process.Pid
		who := []string{"guard", "keeper", "rank"}[kill%3]
		for range kill % 3 { // the keeper is the guard's child, and a rank the keeper's
			victim = j.childOf(t, victim)
		}
		if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = j.wait(t)
		j.isGone(t)
		records, _ := recordingOf(t, file)
		last := records[len(records)-1]
		if who == "guard" {
			if last.End != nil {
				t.Errorf("%s: a killed guard has written the end %+v", who, last.End)
			}
			continue
		}
		end := ending(t, records)
		if end.ExitCode != 137 || end.ByUser {
			t.Errorf("%s: the end is %+v", who, end)
		}
		unasked := slices.DeleteFunc(slices.Clone(end.Ranks), func(e samples.RankEnd) bool { return e.Asked })
		switch {
		case who == "keeper" && len(unasked) > 0: // it may not have told of the ranks yet
			t.Errorf("%s: the ranks did not end by themselves: %+v", who, end.Ranks)
		case who == "rank" && (len(end.Ranks) != 2 || len(unasked) != 1 || unasked[0].PID != victim ||
			end.Ranks[0].PID != victim || unasked[0].Signal != 9):
			t.Errorf("%s %d was killed first, but the end has %+v", who, victim, end.Ranks)
		}
		if t.Failed() {
			t.Logf("stderr:\n%s", &j.stderr)
		}
	}
}

// TestRecordingOnAFullDisk: the job does not notice that its recording cannot be written.
func TestRecordingOnAFullDisk(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	j := newJob(t)
	limited := exec.Command("sh", "-c", `ulimit -f 20; exec "$@"`, "sh", j.command.Path, "run", "--record", file,
		"--interval", "100ms", "--", "sh", "-c", "sleep 2; echo done")
	limited.Env, limited.Stdout, limited.Stderr = j.command.Env, &j.stdout, &j.stderr
	j.command = limited
	j.start(t).ends(t, 0, "the recording ends here, as it cannot be written: ", "file too large")
	if j.stdout.String() != "done\n" || strings.Count(j.stderr.String(), "\n") != 1 {
		t.Errorf("stdout %q, stderr %q", &j.stdout, &j.stderr)
	}
	if records, _ := recordingOf(t, file); len(records) < 2 {
		t.Errorf("%d records", len(records))
	}
}

// TestRecordIsRefused: nothing is started if the recording cannot be made.
func TestRecordIsRefused(t *testing.T) {
	for _, c := range []struct{ file, interval, says string }{
		{"/no/such/folder/file", "1s", "--record: "},
		{t.TempDir(), "1s", "--record: "},
		{"file", "1ms", "--interval is 1ms: expected 100ms or more"},
	} {
		j := newJob(t, "--record", c.file, "--interval", c.interval, "--", "echo", "it ran").start(t)
		j.ends(t, 2, c.says)
		if j.stdout.Len() > 0 {
			t.Errorf("%s: %s", c.file, &j.stdout)
		}
	}
}

// TestBytesOfASingleRankStay: what one rank prints through a pipe is the same, in the same order.
func TestBytesOfASingleRankStay(t *testing.T) {
	t.Parallel()
	const script = `for i in 1 2 3 4 5 6 7 8 9; do printf "out $i\r"; printf "error $i \377\0" >&2; done
		yes | head -c 1000000`
	want, err := exec.Command("sh", "-c", "{ "+script+"; } 2>&1").Output()
	if err != nil {
		t.Fatal(err)
	}
	both := newJob(t, "--", "sh", "-c", script)
	both.command.Stderr = both.command.Stdout // one pipe for both
	both.start(t).ends(t, 0)
	if !bytes.Equal(both.stdout.Bytes(), want) {
		t.Errorf("%d bytes differ from %d", both.stdout.Len(), len(want))
	}
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	newJob(t, "--record", file, "--", "printenv", "PYTHONUNBUFFERED").start(t).ends(t, 0)
	apart := newJob(t, "--record", file, "--", "sh", "-c", script).start(t)
	apart.ends(t, 0)
	if apart.stdout.Len()+apart.stderr.Len() != len(want) ||
		!strings.HasPrefix(apart.stderr.String(), "error 1 \377\x00e") {
		t.Errorf("%d and %d bytes of %d in all", apart.stdout.Len(), apart.stderr.Len(), len(want))
	}
}

// TestProcessesLeftBehindMayPrint: a process that outlives its rank still prints when it is asked to end.
func TestProcessesLeftBehindMayPrint(t *testing.T) {
	t.Parallel()
	begun := filepath.Join(t.TempDir(), "begun")
	j := newJob(t, "--", "sh", "-c", `sh -c 'trap "sleep 1.5; echo saved; exit" TERM; : > `+begun+
		`; while :; do sleep 0.05; done' & until [ -e `+begun+` ]; do sleep 0.05; done`).start(t)
	j.ends(t, 0, "that the ranks had left behind")
	if j.stdout.String() != "saved\n" {
		t.Errorf("stdout %q", &j.stdout)
	}
}

// TestStoppedGuardHoldsNobodyUp: ranks go on while the guard is stopped. The recording has what came before and after.
func TestStoppedGuardHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file, begun := filepath.Join(folder, "samples.jsonl"), filepath.Join(folder, "begun")
	done := filepath.Join(folder, "done")
	script := "echo first; : > " + begun + "; until [ -e " + folder + "/go ]; do sleep 0.02; done; " +
		"yes | head -c 20000000; echo last; : > " + done
	j := newJob(t, "--record", file, "--", "sh", "-c", script)
	j.command.Stdout = nil
	j.start(t)
	j.has(t, 1, begun)
	if !awaitFiles(t, folder, func() bool { return holds(t, file, `["first"]`) }) {
		t.Fatal("the recording does not have the first line")
	}
	if err := j.command.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j.has(t, 1, done)
	if err := j.command.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 0)
	records, _ := recordingOf(t, file)
	lines := printed(records, 0, "stdout")
	if lines[0] != "first" || lines[len(lines)-1] != "last" || len(lines) > 200_000 {
		t.Errorf("%d lines, from %q to %q", len(lines), lines[0], lines[len(lines)-1])
	}
	var skipped int64
	for _, r := range records {
		if r.Output != nil {
			skipped += r.Output.Skipped
		}
	}
	if skipped == 0 {
		t.Error("the recording does not say that lines are left out")
	}
}

// TestRecorderLeavesTheRanksTheirCores: the guard, which samples, runs on the CPUs of the optimizer service. Its thread
// that does nothing keeps the CPUs that the launcher gave.
func TestRecorderLeavesTheRanksTheirCores(t *testing.T) {
	told := filepath.Join(t.TempDir(), "told")
	j := newJob(t, "--trainer-cores", "1", "--", "sh", "-c", `printf %s "$PLIMSOLL_OPTIMIZER_CPUS" > `+told+
		".part; mv "+told+".part "+told+"; exec sleep 1000").start(t)
	if !awaitFiles(t, filepath.Dir(told), func() bool { return exists(filepath.Dir(told), "told") }) {
		t.Fatal("the rank has not begun")
	}
	cpus, err := os.ReadFile(told)
	if err != nil {
		t.Fatal(err)
	}
	if len(cpus) == 0 {
		t.Skip("this host has no core to leave")
	}
	guard := j.command.Process.Pid
	elsewhere := func(own string) bool { return own != string(cpus) }
	bound := func() bool {
		busy := threadCPUs(guard, "idle")
		return len(threadCPUs(guard)) == len(busy)+1 && !slices.ContainsFunc(busy, elsewhere)
	}
	if !await(bound) {
		t.Errorf("the guard's threads run on %q, want one that is idle, and others on %s", threadCPUs(guard), cpus)
	}
	if err := j.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	j.ends(t, 128+15)
}
