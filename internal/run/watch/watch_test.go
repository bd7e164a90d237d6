//go:build linux

package watch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/probe"
)

// fakeSampler returns one process for each root.
type fakeSampler struct {
	lock  sync.Mutex
	name  string       // of a mapped file; empty if mappings are not read
	grows ledger.Bytes // by what its pages grow in each sample
	file  ledger.Bytes
}

func (f *fakeSampler) Sample(roots []probe.Root) samples.Sample {
	f.lock.Lock()
	defer f.lock.Unlock()
	f.file += f.grows
	s := samples.Sample{Processes: []samples.Process{}}
	for _, root := range roots {
		process := samples.Process{PID: root.PID, Rank: root.Rank, Role: root.Role}
		if f.name != "" {
			process.Mappings = []samples.Mapping{{Name: f.name, Kind: samples.FileMapping, Resident: f.file}}
		}
		s.Processes = append(s.Processes, process)
		s.Processes = append(s.Processes, samples.Process{PID: root.PID + 1000, Parent: root.PID, Rank: root.Rank,
			Role: samples.Child})
	}
	return s
}

func (*fakeSampler) Close() {}

// limitedFile is a file on a disk with a number of free bytes.
type limitedFile struct {
	lock sync.Mutex
	bytes.Buffer
	free int
}

func (f *limitedFile) Write(data []byte) (int, error) {
	f.lock.Lock()
	defer f.lock.Unlock()
	n, _ := f.Buffer.Write(data[:min(len(data), f.free)])
	if f.free -= n; n < len(data) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

// begin begins a recording that samples only when something happens.
func begin(t *testing.T, free int) (r *Recorder, file *limitedFile, said *[]string) {
	file, said = &limitedFile{free: free}, new([]string)
	var lock sync.Mutex
	r = Begin(Config{Start: samples.Start{Command: []string{"train"}}, Interval: time.Hour, Sampler: &fakeSampler{},
		File: file, Logf: func(format string, values ...any) {
			lock.Lock()
			defer lock.Unlock()
			*said = append(*said, fmt.Sprintf(format, values...))
		}})
	t.Cleanup(r.Stop)
	return r, file, said
}

func rankRoot(rank, pid int) probe.Root {
	return probe.Root{Identity: probe.Identity{PID: pid}, Rank: rank, Role: samples.RankProcess}
}

// readBack reads a recording.
func readBack(t *testing.T, text []byte) (records []samples.Record, cut bool) {
	t.Helper()
	cut, err := samples.Read("recording", bytes.NewReader(text), func(r *samples.Record) error {
		records = append(records, *r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return records, cut
}

// describe returns a record in short.
func describe(r samples.Record) string {
	switch {
	case r.Start != nil:
		return "start " + strings.Join(r.Start.Command, " ")
	case r.Mark != nil:
		m := r.Mark
		return fmt.Sprintf("mark %d %d %s %s %d %s", m.Rank, m.PID, m.Phase, m.Iteration, m.Step, m.Source)
	case r.Output != nil:
		return fmt.Sprintf("output %d %s %d %q", r.Output.Rank, r.Output.Stream, r.Output.Skipped, r.Output.Lines)
	case r.End != nil:
		return fmt.Sprintf("end %d %v", r.End.ExitCode, r.End.Ranks)
	}
	return "sample"
}

func without(records []samples.Record, left func(samples.Record) bool) (rest []string) {
	for _, r := range records {
		if !left(r) {
			rest = append(rest, describe(r))
		}
	}
	return rest
}

func isSample(r samples.Record) bool { return r.Sample != nil }

func check[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n%v\nwant\n%v", what, got, want)
	}
}

// TestRecorder records a job of two ranks. The file and the memory have the same.
func TestRecorder(t *testing.T) {
	r, file, said := begin(t, 1<<20)
	r.Started(rankRoot(0, 10))
	r.Started(rankRoot(1, 11))
	r.Printed(0, "stdout", 0, []byte("one\nste"))
	r.Printed(0, "stdout", 0, []byte("p: 2 loss: 1 memory: 5.00GiB(1.0%)\n"))
	r.Printed(1, "stderr", 0, []byte("out of memory"))
	for i, rank := range []int{1, 0} { // rank 0 ended first
		at := r.began.Add(time.Hour - time.Duration(i)*time.Minute)
		r.Ended(samples.RankEnd{Rank: rank, PID: 10 + rank, Signal: 9}, at)
	}
	r.End(samples.End{ExitCode: 137})

	want := []string{"start train", `output 0 stdout 0 ["one"]`, `mark 0 10  steady 2 log`,
		`output 0 stdout 0 ["step: 2 loss: 1 memory: 5.00GiB(1.0%)"]`,
		`output 1 stderr 0 ["out of memory"]`,
		"end 137 [{0 10 59m0s 0 9 false 0 false} {1 11 1h0m0s 0 9 false 0 false}]"}
	written, cut := readBack(t, file.Bytes())
	for name, got := range map[string][]samples.Record{"the file": written, "the memory": r.Recording()} {
		check(t, name, strings.Join(without(got, isSample), "\n"), strings.Join(want, "\n"))
	}
	if cut || len(*said) > 0 {
		t.Errorf("cut: %t; said: %q", cut, *said)
	}
	last := written[len(written)-2].Sample
	if last == nil || len(last.Processes) != 0 {
		t.Errorf("the last sample has %+v", last)
	}
}

// TestFullDisk: on any free space, the file has whole records up to where it is cut, and the memory has all of them.
func TestFullDisk(t *testing.T) {
	stride := 37
	if testing.Short() {
		stride = 7 * 37
	}
	for free := 0; free < 4000; free += stride {
		r, file, said := begin(t, free)
		r.Started(rankRoot(0, 10))
		for i := range 20 {
			r.Printed(0, "stdout", 0, fmt.Appendf(nil, "step: %d memory: 1.00GiB(1%%)\n", i+1))
		}
		r.End(samples.End{ExitCode: 1})
		all := r.Recording()
		if n := len(slices.DeleteFunc(slices.Clone(all), isSample)); n != 1+20+20+1 {
			t.Fatalf("%d bytes: %d records in memory", free, n)
		}
		full := file.free == 0
		if told := len(*said) == 1 && strings.Contains((*said)[0], "no space left on device"); told != full {
			t.Fatalf("%d bytes: full: %t, said %q", free, full, *said)
		}
		if !bytes.Contains(file.Bytes(), []byte{'\n'}) {
			continue // not even the start is whole
		}
		written, cut := readBack(t, file.Bytes())
		if cut != full && file.Bytes()[file.Len()-1] != '\n' || !full && len(written) != len(all) {
			t.Fatalf("%d bytes: cut: %t, %d records of %d", free, cut, len(written), len(all))
		}
	}
}

// TestManySamples: the file has all samples, and the memory the last ones.
func TestManySamples(t *testing.T) {
	r, file, _ := begin(t, 1<<30)
	for rank := range 8 {
		r.Started(rankRoot(rank, 10+rank))
	}
	const taken = 5 * keptSamples / 2
	for range taken {
		r.sample()
	}
	r.End(samples.End{})
	if all := len(r.Recording()); all != 1+keptSamples+1 {
		t.Errorf("%d records in memory", all)
	}
	records, _ := readBack(t, file.Bytes())
	if n := len(records); n < 1+taken+1 || len(records[n/2].Sample.Processes) != 16 {
		t.Errorf("%d records in the file", n)
	}
}

// nothing has no meaning.
func nothing(lines []string) []bool { return make([]bool, len(lines)) }

// TestOutput prints in one piece and byte by byte.
func TestOutput(t *testing.T) {
	for text, want := range map[string]string{
		"one\ntwo\r\n\nthree":               `one|two||three`,
		"  0%\r 50%\r100%\r\ndone\n":        `100%|done`,
		"\r  0%\r 50%\r100%\ndone\n":        `100%|done`,
		"\r  0%\r 50%":                      ` 50%`,
		"\xff\n":                            "\uFFFD",
		strings.Repeat("x", 5000) + "\nb\n": strings.Repeat("x", longestLine) + "|b",
		"":                                  "",
	} {
		for _, pieces := range [][]string{{text}, strings.Split(text, "")} {
			if text == "\xff\n" && len(pieces) > 1 {
				pieces = []string{"\xff", "\n"}
			}
			o := newOutput(0)
			var got []string
			for i, piece := range pieces {
				o.print(time.Duration(i), "stdout", 0, []byte(piece), nothing)
				for _, r := range o.take(time.Duration(i), false) {
					got = append(got, r.Output.Lines...)
				}
			}
			for _, r := range o.take(time.Hour, true) {
				got = append(got, r.Output.Lines...)
			}
			check(t, fmt.Sprintf("%q", text), strings.Join(got, "|"), want)
		}
	}
}

// TestMuchOutput: of 100 MB the recording has the first lines, those that mean something, and the last 64 KiB.
func TestMuchOutput(t *testing.T) {
	o, now := newOutput(0), time.Duration(0)
	var written []samples.Record
	important := 0
	means := func(line string) bool { return strings.HasSuffix(line, "means something") }
	read := func(lines []string) (all []bool) {
		for _, line := range lines {
			all = append(all, means(line))
		}
		return all
	}
	const lines = 1_000_000
	for i := range lines {
		text := fmt.Sprintf("%99d\n", i)
		if i%100_000 == 50_000 {
			text = fmt.Sprintf("%d means something\n", i)
		}
		o.print(now, "stdout", 0, []byte(text), read)
		if now += time.Microsecond; i%1000 == 0 {
			written = append(written, o.take(now, false)...)
		}
	}
	written = append(written, o.take(now, true)...)
	var size, skipped, recorded int64
	last := ""
	for _, r := range written {
		skipped += r.Output.Skipped
		for _, line := range r.Output.Lines {
			recorded, size, last = recorded+1, size+int64(len(line)), line
			if means(line) {
				important++
			}
		}
	}
	if recorded+skipped != lines || important != 10 || size > 300<<10 || strings.TrimSpace(last) != "999999" {
		t.Errorf("%d lines recorded and %d skipped, of %d; %d important; %d bytes; the last one is %q", recorded,
			skipped, lines, important, size, last)
	}
	kept := 0
	for _, r := range o.recording() {
		kept += len(strings.Join(r.Output.Lines, "\n"))
	}
	if kept > keptOutput+notedOutput || kept < keptOutput-1000 {
		t.Errorf("%d bytes are kept", kept)
	}
}

// TestMarks sends marks as a client does, and datagrams that are none.
func TestMarks(t *testing.T) {
	r, file, said := begin(t, 1<<20)
	path := filepath.Join(t.TempDir(), "job", "marks")
	c, err := ListenToMarks(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if info, err := os.Stat(filepath.Dir(path)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory: %v, %v", info.Mode(), err)
	}
	go r.ReceiveMarks(c)
	client, err := net.Dial("unixgram", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.(*net.UnixConn).SetWriteBuffer(1 << 20); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		`{"rank": 3, "pid": 1, "phase": "forward", "iteration": "first", "step": 1, "source": "log"}`,
		"", "{", "[]", `{"phase": "forward"}`, `{"rank": 0, "phase": "fly"}`, `{"rank": 0, "iteration": "third"}`,
		`{"rank": 0, "step": -1}`, `{"rank": -1}`, `{"rank": "zero"}`,
		`{"rank": 0, "name": "` + strings.Repeat("x", longestMark) + `"}`,
		`{"rank": 0, "name": "` + strings.Repeat("x", 3*longestMark) + `"}`,
		`{"rank": 3, "phase": "", "step": 1, "name": "own", "ended": {"phase": "forward", "peak_resident_bytes": 5}}`,
	} {
		if _, err := io.WriteString(client, text); err != nil && !errors.Is(err, syscall.EMSGSIZE) {
			t.Fatalf("%.60s: %v", text, err)
		}
	}
	marks := func() (marks []samples.Record) {
		return slices.DeleteFunc(r.Recording(), func(r samples.Record) bool { return r.Mark == nil })
	}
	for begun := time.Now(); len(marks()) < 2 && time.Since(begun) < time.Minute; time.Sleep(time.Millisecond) {
	}
	r.End(samples.End{})
	written, _ := readBack(t, file.Bytes())
	written = slices.DeleteFunc(written, func(r samples.Record) bool { return r.Mark == nil })
	for _, got := range [][]samples.Record{marks(), written} {
		if len(got) != 2 {
			t.Fatalf("%d marks", len(got))
		}
		check(t, "first", describe(got[0]), fmt.Sprintf("mark 3 %d forward first 1 client", os.Getpid()))
		if m := got[1].Mark; m.Name != "own" || m.Ended == nil || m.Ended.Peak != 5 {
			t.Errorf("the second mark is %+v", m)
		}
	}
	// The kernel refuses the largest datagram itself where its buffer is small.
	if len(*said) != 2 || !strings.Contains((*said)[0], "a mark that is none") ||
		!strings.HasSuffix((*said)[1], " messages to PLIMSOLL_MARKS were no marks") || r.refused.Load() < 10 {
		t.Errorf("said %q", *said)
	}
}

// TestPhases: every process has the phase of its rank, from who knows best.
func TestPhases(t *testing.T) {
	p, sampler := newPhases(), &fakeSampler{}
	roots := []probe.Root{rankRoot(0, 10), rankRoot(1, 11), {Identity: probe.Identity{PID: 5}, Rank: samples.NoRank,
		Role: samples.Service}}
	for _, root := range roots[:2] {
		p.started(root)
	}
	phase := func() string {
		s := sampler.Sample(roots)
		p.assign(&s)
		var all []string
		for _, process := range s.Processes {
			all = append(all, fmt.Sprintf("%d %s %s %d", process.Rank, process.Phase, process.Iteration, process.Step))
		}
		return strings.Join(slices.Compact(all), ", ")
	}
	check(t, "at the start", phase(), "0   0, 1   0, -1   0")
	sampler.name, sampler.grows = "/usr/lib/libtorch_cuda.so", 2*loadingSize
	check(t, "libraries", phase(), "0   0, 1   0, -1   0")
	sampler.name = "/models/model-00001-of-00002.safetensors"
	check(t, "a model that loads", phase(), "0 load  0, 1 load  0, -1 load  0")
	sampler.name = ""
	check(t, "a sample without mappings", phase(), "0 load  0, 1 load  0, -1 load  0")
	sampler.name = "/models/model-00001-of-00002.safetensors"
	p.printed(1, evidence.Progress{Step: 1, Phase: ledger.Backward})
	check(t, "a log", phase(), "0 load  0, 1 backward first 1, -1   0")
	sampler.grows = 0
	check(t, "no growth", phase(), "0   0, 1 backward first 1, -1   0")
	p.printed(1, evidence.Progress{Step: 2})
	check(t, "a step", phase(), "0   0, 1  steady 2, -1   0")
	p.marked(&samples.Mark{Rank: 1, PID: 11, Phase: ledger.Forward, Iteration: ledger.Steady, Step: 7,
		Source: samples.FromClient})
	if m := p.printed(1, evidence.Progress{Step: 9}); m != nil {
		t.Errorf("the log counts more than the client: %+v", m)
	}
	check(t, "a client", phase(), "0   0, 1 forward steady 7, -1   0")
	p.started(rankRoot(1, 21))
	roots[1].PID, sampler.name = 21, ""
	check(t, "a restart", phase(), "0   0, 1   0, -1   0")
}

// TestMarkBeforeStart: a mark may overtake the message that its rank has started.
func TestMarkBeforeStart(t *testing.T) {
	p, sampler := newPhases(), &fakeSampler{}
	p.marked(&samples.Mark{PID: 10, Phase: ledger.Load, Source: samples.FromClient})
	p.started(rankRoot(0, 10))
	s := sampler.Sample([]probe.Root{rankRoot(0, 10)})
	p.assign(&s)
	check(t, "the phase", s.Processes[0].Phase, ledger.Load)
}

// TestDiskThatHangs: a sample has the size that was known before.
func TestDiskThatHangs(t *testing.T) {
	d := newDisk(t.TempDir())
	known := d.size()
	if known.Size == 0 || known.Used > known.Size {
		t.Errorf("the size is %+v", known)
	}
	d.asking = true // and nothing answers
	check(t, "the size", d.size(), known)
	d = newDisk("/no/such/directory")
	check(t, "the size of nothing", d.size(), samples.FileSystem{})
}

// TestRanksBelowOneProcess: with torchrun below plimsoll, the marks tell the ranks.
func TestRanksBelowOneProcess(t *testing.T) {
	p := newPhases()
	for rank := range 3 {
		p.marked(&samples.Mark{Rank: rank, PID: 100 + rank, Phase: ledger.Forward, Source: samples.FromClient})
	}
	s := samples.Sample{Processes: []samples.Process{
		{PID: 10, Rank: 0, Role: samples.RankProcess}, // torchrun
		{PID: 100, Parent: 10, Rank: 0, Role: samples.Child},
		{PID: 101, Parent: 10, Rank: 0, Role: samples.Child},
		{PID: 200, Parent: 101, Rank: 0, Role: samples.Child}, // a data loader
		{PID: 201, Parent: 10, Rank: 0, Role: samples.Child},  // a helper of torchrun
		{PID: 12, Rank: 2, Role: samples.RankProcess},         // a shell that starts its rank
		{PID: 102, Parent: 12, Rank: 2, Role: samples.Child},
	}}
	p.assign(&s)
	var got []string
	for _, process := range s.Processes {
		got = append(got, fmt.Sprintf("%s %d", process.Role, process.Rank))
	}
	check(t, "ranks", strings.Join(got, ", "), "child -1, rank 0, rank 1, child 1, child -1, rank 2, child 2")
}

// FuzzOutput: however a text is cut into pieces, its lines are the same.
func FuzzOutput(f *testing.F) {
	f.Add([]byte("one\ntwo\r\n 50%\r100%\r\nlast"), uint8(1))
	f.Add([]byte("\r\r\n\n\xff\r"), uint8(3))
	f.Fuzz(func(t *testing.T, text []byte, size uint8) {
		var all []string
		for _, pieces := range [][][]byte{{text}, slices.Collect(slices.Chunk(text, int(size)+1))} {
			o := newOutput(0)
			var lines []string
			for _, piece := range pieces {
				o.print(0, "stderr", 0, piece, nothing)
			}
			for _, r := range o.take(0, true) {
				lines = append(lines, r.Output.Lines...)
			}
			all = append(all, strings.Join(lines, "\n"))
		}
		if all[0] != all[1] {
			t.Errorf("%q in pieces of %d is %q, want %q", text, size, all[1], all[0])
		}
	})
}

// FuzzMark: a datagram is a mark that can be written and read again, or is refused.
func FuzzMark(f *testing.F) {
	f.Add([]byte(`{"rank": 0, "phase": "forward", "iteration": "first", "step": 1, "ended": {"phase": "load"}}`))
	f.Add([]byte(`{"rank": 1, "name": "\ud800", "ended": {"holdings": [{"component": "own"}]}}`))
	var file bytes.Buffer
	f.Fuzz(func(t *testing.T, text []byte) {
		file.Reset()
		r := &Recorder{file: newFile(&Config{File: &file, Logf: t.Logf}), phases: newPhases()}
		if r.receive(1, text) != nil {
			return
		}
		start, err := json.Marshal(samples.Record{Start: &samples.Start{Schema: samples.Schema}})
		if err != nil {
			t.Fatal(err)
		}
		records, cut := readBack(t, slices.Concat(start, []byte("\n"), file.Bytes()))
		if cut || len(records) != 2 || records[1].Mark == nil || records[1].Mark.PID != 1 {
			t.Errorf("%q: %d records, cut: %t", text, len(records), cut)
		}
	})
}

// TestAwaited: a line about a kill may come late, or not at all.
func TestAwaited(t *testing.T) {
	reads := 0
	late := func() []string {
		if reads++; reads < 3 {
			return nil
		}
		return []string{"Killed process 7"}
	}
	if lines := awaited(late, time.Minute); len(lines) != 1 || reads != 3 {
		t.Errorf("%q after %d reads, want the line of the third", lines, reads)
	}
	reads = 0
	if lines := awaited(late, 0); lines != nil || reads != 1 {
		t.Errorf("%q after %d reads, want one read if nothing is awaited", lines, reads)
	}
	if lines := awaited(func() []string { return nil }, 50*time.Millisecond); lines != nil {
		t.Errorf("%q without any line", lines)
	}
}

// TestKillsBetween compares the counters of kills of two readings.
func TestKillsBetween(t *testing.T) {
	group := func(kills int64) []samples.Counter {
		return []samples.Counter{{Name: "oom_kill", Group: "cgroup /job", Kills: kills}}
	}
	for _, c := range []struct {
		before, after []samples.Counter
		want          bool
	}{{group(2), group(2), false}, {group(2), group(3), true}, {nil, group(1), true}, {group(1), nil, false}} {
		if got := slices.Equal(killsBetween(c.before, c.after), []string{"cgroup /job"}); got != c.want {
			t.Errorf("%v to %v: %v, want %v", c.before, c.after, got, c.want)
		}
	}
}
