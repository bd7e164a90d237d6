package states

// Layout is where the regions of chunks lie in the arena.
type Layout struct {
	begins []int64 // of the regions of a low state; one more for the end
	gap    int64   // the size of the largest region
}

// NewLayout returns the layout of a valid description.
func NewLayout(chunks []Chunk) *Layout {
	l := &Layout{begins: make([]int64, 1, len(chunks)+1)}
	for i, c := range chunks {
		l.begins = append(l.begins, l.begins[i]+c.Bytes)
		l.gap = max(l.gap, c.Bytes)
	}
	return l
}

// Chunks returns how many there are.
func (l *Layout) Chunks() int { return len(l.begins) - 1 }

// Bytes returns the size of the arena: all regions, and the gap.
func (l *Layout) Bytes() int64 { return l.begins[l.Chunks()] + l.gap }

// Gap returns by how much a step moves each region.
func (l *Layout) Gap() int64 { return l.gap }

// Offset returns where the region of a chunk lies in the state after so many steps: high after an even number.
func (l *Layout) Offset(chunk int, steps int64) int64 {
	if steps%2 == 0 {
		return l.begins[chunk] + l.gap
	}
	return l.begins[chunk]
}

// Moment is how far an optimizer is. It has made Steps steps, and Committed chunks have had the next one.
type Moment struct {
	Steps     int64
	Committed int
}

// MaximumSteps keeps every position within a word of the control arena ([checked.Most]).
const MaximumSteps = 1 << 27

// Position returns a moment in the form that is in the control arena.
func (l *Layout) Position(m Moment) uint64 {
	return uint64(m.Steps)*uint64(l.Chunks()) + uint64(m.Committed)
}

// At returns the moment of a position.
func (l *Layout) At(position uint64) Moment {
	n := uint64(l.Chunks())
	position = min(position, MaximumSteps*n) // the trainer may write anything
	return Moment{int64(position / n), int(position % n)}
}

// Next returns the chunk that is copied and committed at a moment. It is the same chunk that a save at rest reads
// next: the next step first overwrites the regions that were read first.
func (l *Layout) Next(m Moment) int {
	if m.Steps%2 == 0 {
		return m.Committed
	}
	return l.Chunks() - 1 - m.Committed
}

// StepsOf returns how many steps a chunk has had at a moment.
func (l *Layout) StepsOf(chunk int, m Moment) int64 {
	order := chunk
	if m.Steps%2 != 0 {
		order = l.Chunks() - 1 - chunk
	}
	if order < m.Committed {
		return m.Steps + 1
	}
	return m.Steps
}

// Condition says what can be done with states that a process has left.
type Condition string

// The conditions of states.
const (
	New   Condition = "new"   // no step was finished
	Whole Condition = "whole" // all regions are of one step
	Redo  Condition = "redo"  // the next step is half made, and can be finished from the gradients
	Torn  Condition = "torn"  // the next step is half made, and cannot be finished
)

// Condition returns the condition of states at a position, if the gradients that are held are those of a step.
func (l *Layout) Condition(position, gradientsOf uint64, recovery bool) Condition {
	m := l.At(position)
	switch {
	case m.Steps == 0:
		return New
	case m.Committed == 0:
		return Whole
	case recovery && gradientsOf == uint64(m.Steps)+1:
		return Redo
	}
	return Torn
}
