// Package reconcile puts a recorded run beside its plan: what was planned, what was measured, what no component
// explains, and what grows from step to step.
package reconcile

import (
	"bufio"
	"cmp"
	"io"
	"slices"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// Recording is a run in memory: its samples and marks, in their order. The proportional sizes are those of the time of
// the sample.
type Recording struct {
	File    string
	Start   samples.Start
	Samples []sample
	Marks   []samples.Record // each has a Mark
	End     *samples.Record  // nil if the recorder was killed
	// Cut is set if the last line has no end.
	Cut bool
}

// Open reads the recording of a file.
func Open(file string) (*Recording, error) {
	opened, _, err := files.Open(file)
	if err != nil {
		return nil, err
	}
	defer opened.Close()
	return Read(file, bufio.NewReader(opened))
}

// Read reads a recording. The file is the name for errors.
func Read(file string, from io.Reader) (*Recording, error) {
	r := &Recording{File: file}
	compact := newCompactor()
	cut, err := samples.Read(file, from, func(record *samples.Record) error {
		switch {
		case record.Start != nil:
			r.Start = *record.Start
		case record.Sample != nil:
			r.Samples = append(r.Samples, compact.sample(record))
		case record.Mark != nil:
			compact.mark(record.Mark)
			r.Marks = append(r.Marks, *record)
		case record.End != nil:
			end := *record
			r.End = &end
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.Cut = cut
	slices.SortStableFunc(r.Samples, func(a, b sample) int { return cmp.Compare(a.Time, b.Time) })
	slices.SortStableFunc(r.Marks, compareTimes)
	r.divide()
	return r, nil
}

func compareTimes(a, b samples.Record) int { return cmp.Compare(a.Time, b.Time) }

// Ranks returns the ranks that were seen, in order.
func (r *Recording) Ranks() []int {
	var ranks []int
	see := func(rank int) {
		if rank >= 0 && !slices.Contains(ranks, rank) {
			ranks = append(ranks, rank)
		}
	}
	for _, s := range r.Samples {
		for i := range s.Processes {
			see(s.Processes[i].Rank)
		}
	}
	for _, m := range r.Marks {
		see(m.Mark.Rank)
	}
	slices.Sort(ranks)
	return ranks
}

// Sources returns where the marks come from.
func (r *Recording) Sources() []samples.MarkSource {
	var sources []samples.MarkSource
	for _, m := range r.Marks {
		if !slices.Contains(sources, m.Mark.Source) {
			sources = append(sources, m.Mark.Source)
		}
	}
	return sources
}

// stage is a phase in an iteration.
type stage struct {
	phase     ledger.PhaseName
	iteration ledger.Iteration
}

// stages are in the order of a job. A stage without a name comes first.
var stages = []stage{
	{}, {ledger.Load, ledger.Once}, {ledger.Initialize, ledger.Once},
	{ledger.Forward, ledger.First}, {ledger.Backward, ledger.First}, {ledger.Step, ledger.First},
	{ledger.Forward, ledger.Steady}, {ledger.Backward, ledger.Steady}, {ledger.Step, ledger.Steady},
	{ledger.Checkpoint, ledger.Once},
}

// compareStages orders stages. Stages that no job has come last.
func compareStages(a, b stage) int {
	place := func(s stage) int {
		if i := slices.Index(stages, s); i >= 0 {
			return i
		}
		return len(stages)
	}
	return place(a) - place(b)
}
