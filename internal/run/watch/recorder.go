//go:build linux

// Package watch samples a running job: its processes, the phases that they are in, its cgroups and its GPUs. It makes a
// recording of package samples, in memory and in a file.
package watch

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/probe"
)

// Sampler takes a sample of processes and of what they run on. It leaves the phases of processes empty.
type Sampler interface {
	Sample(roots []probe.Root) samples.Sample
	Close()
}

// Config is what a recorder needs.
type Config struct {
	// Start is the first record. The recorder fills in its schema, its time, its host and its counters.
	Start samples.Start
	// Interval is the time between two samples.
	Interval time.Duration
	// Brief makes the first samples come sooner. A job that fails at once has samples, too.
	Brief   bool
	Sampler Sampler
	// Snapshots is the recording beside which ranks write memory snapshots of PyTorch; empty for none.
	Snapshots string
	// File takes the records, one write each. It is nil for none. A *Ring is written anew when it is full.
	File io.Writer
	// Observe gets each record, and must not wait. It is nil for none.
	Observe func(*samples.Record)
	// Logf tells the user something.
	Logf func(format string, values ...any)
}

// What a recorder keeps in memory.
const (
	keptSamples = 240
	keptMarks   = 4096
)

// Recorder records a job. Its methods may be called by any goroutine.
type Recorder struct {
	config Config
	began  time.Time
	logEnd time.Duration      // of the kernel's log, at began
	wanted chan struct{}      // a sample is wanted now
	stop   context.CancelFunc // ends sampling
	done   chan struct{}      // closed when the last sample is taken
	disk   disk
	// refused is the number of datagrams that were no marks.
	refused atomic.Int64

	lock    sync.Mutex
	file    *file
	start   samples.Record
	samples []samples.Record // the last ones
	marks   []samples.Record // the last ones
	ends    []samples.RankEnd
	kernel  []samples.Record // what the kernel's log says
	end     *samples.Record
	roots   []probe.Root
	outputs map[int]*output
	phases  phases
}

// Begin writes the first record and begins to sample.
func Begin(c Config) *Recorder {
	began := time.Now()
	c.Start.Schema, c.Start.Began, c.Start.Host = samples.Schema, began, localHost()
	c.Start.Counters = counters()
	sampling, stop := context.WithCancel(context.Background())
	r := &Recorder{config: c, began: began, logEnd: host.KernelLogEnd(), wanted: make(chan struct{}, 1), stop: stop,
		done: make(chan struct{}), file: newFile(&c), outputs: map[int]*output{}, phases: newPhases(),
		start: samples.Record{Start: &c.Start}, disk: newDisk(c.Start.WorkingDirectory)}
	r.file.write(&r.start)
	go r.sampleUntil(sampling.Done())
	return r
}

// now returns the time of a record that is made now.
func (r *Recorder) now() time.Duration { return time.Since(r.began) }

// Started adds a process of the job. A rank that was started again takes the place of its first process.
func (r *Recorder) Started(root probe.Root) {
	r.lock.Lock()
	defer r.lock.Unlock()
	same := func(other probe.Root) bool {
		return other.PID == root.PID ||
			root.Role != samples.Keeper && root.Role == other.Role && root.Rank == other.Rank
	}
	r.roots = append(slices.DeleteFunc(r.roots, same), root)
	if root.Role == samples.RankProcess {
		r.phases.started(root)
		r.want()
	}
}

// Printed takes text that a rank has printed to stdout or stderr. Text that was left out before it is skipped bytes.
func (r *Recorder) Printed(rank int, stream string, skipped int64, text []byte) {
	r.lock.Lock()
	defer r.lock.Unlock()
	out := r.outputs[rank]
	if out == nil {
		out = newOutput(rank)
		r.outputs[rank] = out
	}
	now := r.now()
	out.print(now, stream, skipped, text, func(lines []string) []bool { return r.read(now, rank, lines) })
	r.writeAll(out.take(now, false))
}

// read looks for the meaning of lines. It returns which of them say more than where the training loop is.
func (r *Recorder) read(now time.Duration, rank int, lines []string) []bool {
	says := make([]bool, len(lines))
	if len(lines) == 0 {
		return says
	}
	source, err := evidence.Read("", strings.NewReader(strings.Join(lines, "\n")+"\n"))
	if err != nil {
		return says // it is no text
	}
	for _, finding := range source.Findings {
		if progress, ok := finding.Fact.(evidence.Progress); ok {
			r.mark(now, r.phases.printed(rank, progress))
		} else if i := finding.Number - 1; i >= 0 && i < len(says) {
			says[i] = true
		}
	}
	return says
}

// mark records a mark, unless it is nil.
func (r *Recorder) mark(at time.Duration, m *samples.Mark) {
	if m == nil {
		return
	}
	record := samples.Record{Time: at, Mark: m}
	r.marks = append(r.marks[max(0, len(r.marks)-keptMarks+1):], record)
	r.file.write(&record)
}

func (r *Recorder) writeAll(records []samples.Record) {
	for i := range records {
		r.file.write(&records[i])
	}
}

// Ended takes the end of a rank's first process. Its Time may be left out.
func (r *Recorder) Ended(e samples.RankEnd, at time.Time) {
	r.lock.Lock()
	defer r.lock.Unlock()
	e.Time = at.Sub(r.began)
	r.ends = append(r.ends, e)
	r.roots = slices.DeleteFunc(r.roots, func(root probe.Root) bool { return root.PID == e.PID })
	if out := r.outputs[e.Rank]; out != nil {
		r.writeAll(out.take(r.now(), true))
	}
	if e.ExitCode != 0 || e.Signal != 0 {
		r.want()
	}
}

// Running returns the ranks that have not ended.
func (r *Recorder) Running() []probe.Root {
	r.lock.Lock()
	defer r.lock.Unlock()
	other := func(root probe.Root) bool { return root.Role != samples.RankProcess }
	return slices.DeleteFunc(slices.Clone(r.roots), other)
}

// Stop takes a last sample. It returns when that is done.
func (r *Recorder) Stop() {
	r.stop()
	<-r.done
}

// End takes a last sample, unless Stop has, and writes the last record. The recorder fills in the ends of the ranks and
// the counters.
func (r *Recorder) End(e samples.End) {
	r.Stop()
	r.lock.Lock()
	defer r.lock.Unlock()
	for _, out := range r.outputs {
		r.writeAll(out.take(r.now(), true))
	}
	e.Ranks, e.Counters = slices.Clone(r.ends), counters()
	r.addKernelKills(killsBetween(r.start.Start.Counters, e.Counters))
	slices.SortStableFunc(e.Ranks, func(a, b samples.RankEnd) int { return int(a.Time - b.Time) })
	r.end = &samples.Record{Time: r.now(), End: &e}
	r.file.write(r.end)
	if refused := r.refused.Load(); refused > 1 {
		r.config.Logf("%d messages to %s were no marks", refused, MarksVariable)
	}
}

// lateLine is how long the kernel's line about a kill may come after the end of the process: the kernel sends the
// signal, and writes the line then.
const lateLine = time.Second

// addKernelKills records what the kernel's log says of processes of the job that it has killed for memory. Where the
// counters say that it has killed, the log may still get its line. A process that lived for less than the time between
// two samples is found by its cgroup, whose counter has risen.
func (r *Recorder) addKernelKills(counters []string) {
	var groups []string
	for _, name := range counters {
		if group, ok := strings.CutPrefix(name, "cgroup "); ok && group != "/" {
			groups = append(groups, group)
		}
	}
	var pids []int
	for _, e := range r.ends {
		pids = append(pids, e.PID)
	}
	for _, s := range r.samples {
		for _, p := range s.Sample.Processes {
			pids = append(pids, p.PID)
		}
	}
	var wait time.Duration
	if len(counters) > 0 && r.logEnd > 0 {
		wait = lateLine
	}
	kills := func() []string { return host.KernelKills(pids, groups, r.logEnd) }
	if lines := awaited(kills, wait); len(lines) > 0 {
		record := samples.Record{Time: r.now(), Output: &samples.Output{Rank: samples.NoRank,
			Stream: samples.KernelStream, Lines: lines}}
		r.kernel = append(r.kernel, record)
		r.file.write(&record)
	}
}

// awaited reads until there are lines, or for so long.
func awaited(read func() []string, wait time.Duration) []string {
	end := time.Now().Add(wait)
	for {
		if lines := read(); len(lines) > 0 || !time.Now().Before(end) {
			return lines
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Recording returns what is in memory, in order: the start, the last samples, marks and lines, and the end.
func (r *Recorder) Recording() []samples.Record {
	r.lock.Lock()
	defer r.lock.Unlock()
	return r.recording()
}

func (r *Recorder) recording() []samples.Record {
	rest := slices.Concat(r.samples, r.marks, r.kernel)
	for _, out := range r.outputs {
		rest = append(rest, out.recording()...)
	}
	slices.SortStableFunc(rest, func(a, b samples.Record) int { return int(a.Time - b.Time) })
	all := append([]samples.Record{r.start}, rest...)
	if r.end != nil {
		all = append(all, *r.end)
	}
	return all
}

// want asks for a sample now.
func (r *Recorder) want() {
	select {
	case r.wanted <- struct{}{}:
	default: // one is wanted already
	}
}

// firstPause is the time before the second sample of a brief recording. Later pauses are as long as the recording is
// then, up to the interval.
const firstPause = 250 * time.Millisecond

// leastPause keeps samples that are wanted at once apart.
const leastPause = 50 * time.Millisecond

func (r *Recorder) sampleUntil(stopped <-chan struct{}) {
	defer close(r.done)
	for {
		pause := r.config.Interval
		if r.config.Brief {
			pause = min(pause, max(firstPause, r.now()))
		}
		next := time.NewTimer(pause)
		select {
		case <-stopped:
			next.Stop()
			r.sample()
			r.config.Sampler.Close()
			return
		case <-r.wanted:
			next.Stop()
			r.sample()
			time.Sleep(leastPause)
		case <-next.C:
			r.sample()
		}
	}
}

// sample takes one sample.
func (r *Recorder) sample() {
	r.lock.Lock()
	roots := slices.Clone(r.roots)
	r.lock.Unlock()
	s := r.config.Sampler.Sample(roots)
	s.Disk = r.disk.size()
	r.lock.Lock()
	defer r.lock.Unlock()
	record := samples.Record{Time: r.now(), Sample: &s}
	for _, m := range r.phases.assign(&s) {
		r.mark(record.Time, m)
	}
	r.samples = append(r.samples[max(0, len(r.samples)-keptSamples+1):], record)
	r.file.write(&record)
	if r.file.isFull() {
		if err := r.file.ring.renew(r.recording()); err != nil {
			r.file.giveUp(err)
		}
	}
}

// killsBetween returns the groups in which the kernel's OOM killer has killed a process between two readings, and those
// whose limit was reached then. It returns none where no process was killed.
func killsBetween(before, after []samples.Counter) (groups []string) {
	was := map[string]samples.Counter{}
	for _, c := range before {
		was[c.Name] = c
	}
	killed := false
	for _, c := range after {
		kills := c.Kills > was[c.Name].Kills
		killed = killed || kills
		if kills || c.Reached > was[c.Name].Reached {
			groups = append(groups, c.Group)
		}
	}
	if !killed {
		return nil
	}
	return groups
}

// counters returns the counters of the kernel's OOM killer.
func counters() []samples.Counter {
	read := host.LocalMemoryCounters()
	all := make([]samples.Counter, len(read))
	for i, c := range read {
		all[i] = samples.Counter(c)
	}
	return all
}
