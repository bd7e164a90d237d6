//go:build linux

// Package view shows a recording while it grows: what every rank and every GPU holds against its plan and against every
// limit, and what the ranks print.
package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
	"plimsoll/internal/base/samples"
)

// State is what a view shows. It takes the records of a recording, one after another.
type State struct {
	start  samples.Start
	time   time.Duration // of the last record
	sample *samples.Sample
	at     time.Duration // of sample
	first  *samples.Sample
	end    *samples.End

	rows     []*row // in the order in which they are shown
	whole    history
	held     ledger.Bytes // by all processes
	peak     ledger.Bytes // of held
	gpus     map[int]*history
	limits   []*limit
	swap     *limit
	waiting  float64 // the share of time in which some task waits for memory
	messages []string
	lines    []line
	added    int64 // lines, in all
	told     int64 // of them, that unprinted has returned
}

// line is a line that a rank has printed.
type line struct {
	rank   int
	stream string
	text   string
}

// keptLines is how many lines of ranks, and of messages, are kept.
const keptLines = 1000

// row is the processes of a rank, the optimizer service, plimsoll itself, or other processes of the job.
type row struct {
	rank      int
	role      samples.Role // of rows that are no rank's
	leader    process
	processes map[process]time.Duration // with their CPU time
	phase     ledger.PhaseName
	step      int64
	stepAt    time.Duration // when the rank began it
	stepTime  time.Duration // 0 if unknown
	held      ledger.Bytes
	peak      ledger.Bytes
	cores     float64
	memory    history
	torch     ledger.Bytes // that torch.cuda has reserved; 0 if unknown
}

// process is the identity of a process.
type process struct {
	pid   int
	start uint64
}

// Add takes the next record. It keeps pointers into the record.
func (s *State) Add(r *samples.Record) {
	s.time = max(s.time, r.Time)
	switch {
	case r.Start != nil:
		s.start = *r.Start
	case r.Sample != nil:
		s.addSample(r.Time, r.Sample)
	case r.Mark != nil:
		s.addMark(r.Time, r.Mark)
	case r.Output != nil:
		s.addOutput(r.Output)
	case r.End != nil:
		s.end = r.End
	}
}

func (s *State) addOutput(o *samples.Output) {
	if o.Skipped > 0 {
		s.lines = append(s.lines, line{o.Rank, o.Stream, fmt.Sprintf("(%d lines are left out here)", o.Skipped)})
		s.added++
	}
	for _, text := range o.Lines {
		s.lines = append(s.lines, line{o.Rank, o.Stream, clean(text)})
		s.added++
	}
	s.lines = s.lines[max(0, len(s.lines)-keptLines):]
}

// firstPrinted is how many of the last lines are printed at first.
const firstPrinted = 20

// unprinted returns the lines that it has not returned before. At first these are the last ones.
func (s *State) unprinted() []line {
	after := int(s.added - s.told)
	if s.told == 0 {
		after = min(after, firstPrinted)
	}
	s.told = s.added
	return s.lines[max(0, len(s.lines)-after):]
}

// say takes a message of plimsoll.
func (s *State) say(text string) {
	s.messages = append(s.messages, clean(text))
	s.messages = s.messages[max(0, len(s.messages)-keptLines):]
}

// clean returns a line without styles and without anything that would move the cursor, safe to show.
func clean(text string) string {
	text = strings.ReplaceAll(ansi.Strip(text), "\t", "    ")
	return safe.Text(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, text))
}

// heldBy returns the memory of a process, such that the memory of several may be added up: pages that they share are
// divided among them. The division may be some time ago. Only the anonymous memory of ranks is as new as the sample,
// since children share theirs with the rank that has forked them.
func heldBy(p *samples.Process) ledger.Bytes {
	if p.ProportionalAge < 0 {
		return p.Resident.Sum()
	}
	kinds := p.Proportional
	if p.Role != samples.Child {
		kinds.Anonymous = p.Resident.Anonymous
	}
	return kinds.Sum()
}

func (s *State) addSample(at time.Duration, sample *samples.Sample) {
	before, elapsed := s.sample, at-s.at
	if before == nil {
		s.first = sample
	}
	s.sample, s.at, s.held = sample, at, 0
	was := map[*row]map[process]time.Duration{}
	for _, r := range s.rows {
		was[r] = r.processes
		r.processes, r.held, r.cores = map[process]time.Duration{}, 0, 0
	}
	for i := range sample.Processes {
		p := &sample.Processes[i]
		r := s.row(p)
		id := process{p.PID, p.StartTime}
		r.add(p, id)
		if cpu, known := was[r][id]; known && elapsed > 0 {
			r.cores += float64(p.CPUTime-cpu) / float64(elapsed)
		}
		s.held += heldBy(p)
	}
	for _, r := range s.rows {
		r.peak = max(r.peak, r.held)
		r.memory.add(at, r.held)
	}
	s.peak = max(s.peak, s.held)
	s.whole.add(at, s.held)
	for _, gpu := range sample.GPUs {
		if s.gpus == nil {
			s.gpus = map[int]*history{}
		}
		if s.gpus[gpu.Index] == nil {
			s.gpus[gpu.Index] = &history{}
		}
		s.gpus[gpu.Index].add(at, gpu.Used)
	}
	if before != nil && elapsed > 0 {
		s.waiting = float64(sample.Node.Pressure.Some-before.Node.Pressure.Some) / float64(elapsed)
	}
	s.addLimits(at, sample)
}

// row returns the row of a process.
func (s *State) row(p *samples.Process) *row {
	role := p.Role
	if p.Rank != samples.NoRank {
		role = samples.RankProcess
	}
	return s.rowOf(p.Rank, role)
}

func (s *State) rowOf(rank int, role samples.Role) *row {
	wanted := &row{rank: rank, role: role, processes: map[process]time.Duration{}}
	at, found := slices.BinarySearchFunc(s.rows, wanted, compareRows)
	if !found {
		s.rows = slices.Insert(s.rows, at, wanted)
	}
	return s.rows[at]
}

// compareRows puts ranks before other rows.
func compareRows(a, b *row) int {
	other := func(r *row) int {
		return slices.Index([]samples.Role{samples.RankProcess, samples.Service, samples.Child, samples.Keeper}, r.role)
	}
	return cmp.Or(other(a)-other(b), cmp.Compare(a.rank, b.rank))
}

func (r *row) add(p *samples.Process, id process) {
	r.processes[id] = p.CPUTime
	r.held += heldBy(p)
	if p.Role == samples.Child && r.role == samples.RankProcess {
		if p.Phase != "" && r.phase == "" {
			r.phase = p.Phase
		}
		return
	}
	if r.leader != id { // the rank was started again
		r.leader, r.peak, r.step, r.stepAt, r.stepTime, r.torch = id, 0, 0, 0, 0, 0
	}
	r.phase, r.step = p.Phase, max(r.step, p.Step)
	r.peak = max(r.peak, p.Peak)
}

func (s *State) addMark(at time.Duration, m *samples.Mark) {
	r := s.rowOf(m.Rank, samples.RankProcess)
	if ended := m.Ended; ended != nil {
		r.peak = max(r.peak, ended.Peak)
		r.torch = 0
		for _, gpu := range ended.GPUs {
			r.torch += gpu.Reserved
		}
	}
	r.phase = m.Phase
	if m.Step <= r.step && r.stepAt > 0 || m.Step <= 0 {
		return
	}
	if began := m.Step - r.step; r.stepAt > 0 && began > 0 {
		r.stepTime = (at - r.stepAt) / time.Duration(began)
	}
	r.step, r.stepAt = m.Step, at
}

// planned returns what the plan says of the largest device of a kind, or nil.
func (s *State) planned(kind ledger.Kind) *ledger.Device {
	var most *ledger.Device
	if s.start.Plan == nil {
		return nil
	}
	for i := range s.start.Plan.Devices {
		d := &s.start.Plan.Devices[i]
		if d.Kind == kind && d.Peak() != nil && (most == nil || d.Peak().PeakUsed > most.Peak().PeakUsed) {
			most = d
		}
	}
	return most
}
