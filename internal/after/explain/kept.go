package explain

import (
	"slices"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/samples"
)

// Recording is what an explanation needs of a run that plimsoll has recorded. It takes the records one by one, and
// keeps the last ones and those at which a rank ended: a recording of days is larger than memory.
type Recording struct {
	Name       string // its file; "the recording" for one in memory
	lines      int
	start, end *numbered // nil if there is none
	samples    queue     // those with ranks
	marks      queue     // those that a program has made
	measured   queue     // those with what the phase before them held
	outputs    queue
}

// What is kept of a recording. The samples are as many as plimsoll run keeps for its own explanation.
const (
	keptSamples = 240
	keptMarks   = 4096
	keptOutput  = 16 << 20 // bytes
)

// numbered is a record and its line.
type numbered struct {
	samples.Record
	number int
}

// NewRecording returns a recording with records.
func NewRecording(name string, records ...samples.Record) *Recording {
	r := &Recording{Name: name}
	for i := range records {
		r.Add(&records[i])
	}
	return r
}

// Add adds the next record.
func (r *Recording) Add(record *samples.Record) {
	r.lines++
	n := numbered{*record, r.lines}
	switch {
	case record.Start != nil:
		r.start = &n
	case record.End != nil:
		r.end = &n
	case record.Sample != nil && hasRanks(record.Sample):
		r.samples.add(n, 1, keptSamples, followedByEnd)
	case record.Output != nil:
		r.outputs.add(n, sizeOf(record.Output), keptOutput, nil)
	case record.Mark != nil:
		if record.Mark.Phase != "" && record.Mark.Source != samples.FromBehavior {
			r.marks.add(n, 1, keptMarks, nil)
		}
		if record.Mark.Ended != nil {
			r.measured.add(n, 1, keptMarks, nil)
		}
	}
}

// queue are the last records of a kind.
type queue struct {
	kept  []numbered // older ones that stay
	last  []numbered
	sizes []int
	size  int
}

// add adds a record, and drops the oldest ones while the sizes add up to more than most. One stays if the function says
// so of it and the next one.
func (q *queue) add(n numbered, size, most int, stays func(n, next *numbered) bool) {
	q.last, q.sizes, q.size = append(q.last, n), append(q.sizes, size), q.size+size
	for len(q.last) > 1 && q.size > most {
		if stays != nil && stays(&q.last[0], &q.last[1]) {
			q.kept = append(q.kept, q.last[0])
		}
		q.size -= q.sizes[0]
		q.last[0] = numbered{} // for the garbage collector
		q.last, q.sizes = q.last[1:], q.sizes[1:]
	}
}

// all returns the records in their order.
func (q *queue) all() []numbered { return slices.Concat(q.kept, q.last) }

// followedByEnd reports whether a rank of a sample is not in the next one.
func followedByEnd(n, next *numbered) bool {
	return slices.ContainsFunc(n.Sample.Processes, func(p samples.Process) bool {
		same := func(q samples.Process) bool { return q.PID == p.PID && q.StartTime == p.StartTime }
		return p.Role == samples.RankProcess && !slices.ContainsFunc(next.Sample.Processes, same)
	})
}

func sizeOf(output *samples.Output) int {
	size := 0
	for _, line := range output.Lines {
		size += len(line) + 64
	}
	return size
}

// Began returns when the recording began, or zero.
func (r *Recording) Began() time.Time {
	if r.start == nil {
		return time.Time{}
	}
	return r.start.Start.Began
}

// at returns a finding without a fact at a record.
func (r *Recording) at(n *numbered) evidence.Finding {
	return evidence.Finding{Line: evidence.Line{File: r.Name, Number: n.number}, Rank: evidence.NoRank,
		Time: r.Began().Add(n.Time)}
}
