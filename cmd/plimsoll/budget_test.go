//go:build linux

package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A budget is what a command may take at most. Times are those of the CPU: other processes do not count.
type budget struct {
	memory int64 // peak of the resident set, in MiB
	time   time.Duration
}

// spends runs the program, and holds what it takes against a budget.
func (b budget) spends(t *testing.T, exit int, arguments ...string) {
	t.Helper()
	command := exec.Command(program(t), arguments...)
	out, _ := command.CombinedOutput()
	if code := command.ProcessState.ExitCode(); code != exit {
		t.Errorf("%v: exit code %d, expected %d:\n%s", arguments, code, exit, out[:min(len(out), 1000)])
	}
	used := command.ProcessState.SysUsage().(*syscall.Rusage)
	took := command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	t.Logf("%v: %d MiB, %v", arguments, used.Maxrss>>10, took)
	if used.Maxrss>>10 > b.memory || took > b.time {
		t.Errorf("%v: %d MiB and %v, expected %d MiB and %v at most", arguments, used.Maxrss>>10, took, b.memory,
			b.time)
	}
}

// needsItsOwnSpeed skips a test of what the program takes where the race detector takes several times as much.
func needsItsOwnSpeed(t *testing.T) {
	t.Helper()
	if raceDetector {
		t.Skip("the race detector takes most of the time and the memory")
	}
}

// TestBudgetOfKills: the time for pairs of lines about kills is linear, as is that for ends of ranks.
func TestBudgetOfKills(t *testing.T) {
	needsItsOwnSpeed(t)
	log := filepath.Join(t.TempDir(), "dmesg.txt")
	write(t, log, func(w io.Writer) {
		for i := range 30_000 {
			fmt.Fprintf(w, "[%d.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,"+
				"global_oom,task_memcg=/user.slice,task=python,pid=%d,uid=1000\n", i, i+1)
			fmt.Fprintf(w, "[%d.2] Out of memory: Killed process %d (python) total-vm:9kB, anon-rss:6kB, "+
				"file-rss:8kB, shmem-rss:0kB, UID:1000 pgtables:14kB oom_score_adj:0\n", i, i+1)
			fmt.Fprintf(w, "srun: error: node%d: task %d: Killed\n", i, i)
		}
	})
	budget{300, 15 * time.Second}.spends(t, exitFailed, "explain", log)
}

// TestBudgetOfRecordings: verbs that read a recording take less memory than it has bytes, or far less.
func TestBudgetOfRecordings(t *testing.T) {
	needsItsOwnSpeed(t)
	size := 40 << 20
	if !testing.Short() {
		size = 300 << 20
	}
	recording := filepath.Join(t.TempDir(), "run.jsonl")
	write(t, recording, func(w io.Writer) { writeLongRecording(t, w, size) })
	time := time.Duration(size>>20) * 200 * time.Millisecond
	budget{120, time}.spends(t, exitDone, "explain", recording)
	budget{120, time}.spends(t, exitDone, "watch", "--replay", recording)
	samples := 50 + int64(size)*3/5>>20 // what is kept of them
	budget{samples, time}.spends(t, exitDone, "compare", recording)
	budget{samples, time}.spends(t, exitDone, "export", "--to", "html", "--out", os.DevNull, recording)
}

// recordTime is the time at the beginning of a record.
var recordTime = regexp.MustCompile(`^\{"time_ns":(\d+),`)

// writeLongRecording repeats the example recording, one run after the other, up to a size.
func writeLongRecording(t *testing.T, w io.Writer, size int) {
	t.Helper()
	text, err := os.ReadFile(exampleRecording)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	put := func(line string, passed int64) (now int64) {
		time := recordTime.FindStringSubmatch(line)
		now, err := strconv.ParseInt(time[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		now += passed
		fmt.Fprintf(w, `{"time_ns":%d,%s`+"\n", now, line[len(time[0]):])
		return now
	}
	last := len(lines) - 1
	put(lines[0], 0)
	passed := int64(0)
	for written := 0; written < size; written += len(text) {
		var now int64
		for _, line := range lines[1:last] {
			now = put(line, passed)
		}
		passed = now + int64(time.Second)
	}
	put(lines[last], passed)
}

// TestBudgetOfCompression: a small compressed file that claims gigabytes is refused, and takes no memory.
func TestBudgetOfCompression(t *testing.T) {
	needsItsOwnSpeed(t)
	if testing.Short() {
		t.Skip("decompresses a gigabyte")
	}
	log := filepath.Join(t.TempDir(), "log.gz")
	write(t, log, func(w io.Writer) {
		zipped := gzip.NewWriter(w)
		block := bytes.Repeat([]byte("a"), 1<<20)
		for range 1100 {
			if _, err := zipped.Write(block); err != nil {
				t.Fatal(err)
			}
		}
		if err := zipped.Close(); err != nil {
			t.Fatal(err)
		}
	})
	budget{100, 30 * time.Second}.spends(t, exitInput, "explain", log)
}

const (
	outOfMemoryLines = "out of memory"
	barLines         = "bars"
)

// TestBudgetOfLines: logs of lines that come millions of times take at most 5 s for 100 MB.
func TestBudgetOfLines(t *testing.T) {
	needsItsOwnSpeed(t)
	size := 10_000_000
	if !testing.Short() {
		size = 100_000_000
	}
	for name, line := range map[string]string{
		barLines: "\r 17%|###       | 17/100000 [00:34<04:10,  2.85s/it]",
		"empty":  "\n",
		"losses": "{'loss': 1.1, 'grad_norm': 0.9, 'learning_rate': 1.2e-05, 'epoch': 0.1}\n",
		outOfMemoryLines: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 139.00 MiB. GPU 1 has a " +
			"total capacity of 79.15 GiB of which 262.31 MiB is free. Process 5021 has 78.91 GiB memory in use. Of " +
			"the allocated memory 70.65 GiB is allocated by PyTorch, and 7.98 GiB is reserved by PyTorch but " +
			"unallocated. If reserved but unallocated memory is large try setting " +
			"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory " +
			"Management  " +
			"(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)\n",
	} {
		t.Run(name, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "train.log")
			write(t, log, func(w io.Writer) {
				for written := 0; written < size; written += len(line) {
					fmt.Fprint(w, line)
				}
			})
			b, code := budget{100, time.Second + 5*time.Second*time.Duration(size)/100_000_000}, exitDone
			switch name {
			case outOfMemoryLines: // the first ones are kept, and the last one
				b.memory, code = 200, exitFailed
			case barLines: // the log stops long before the last step
				code = exitFailed
			}
			b.spends(t, code, "explain", log)
		})
	}
}

// write makes a file.
func write(t *testing.T, name string, content func(io.Writer)) {
	t.Helper()
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	buffered := bufio.NewWriter(file)
	content(buffered)
	if err := buffered.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
}
