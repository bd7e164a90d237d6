package engine

import (
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// noted is what the last step has changed of the parameters, if anybody wants to know. It costs nothing else.
//
// It is on the heap: two bits for each parameter, and 32 bytes for each 16 of which some moved by more than one. A
// process that finishes a step of another one has none of it.
type noted struct {
	chunks []kernel.Changes // none unless somebody wants to know
	rooms  []room           // of workers: for the old words of their chunks
	before int64            // the step of the parameters before
	after  int64            // and after
	read   bool             // whether somebody was told
	lost   bool             // parameters have changed otherwise, or in several steps
}

// room is where a worker keeps the old words of its chunks, one after the other, until the next step.
type room struct {
	segments [][]uint16
	current  int // segment
	used     int // words of it
}

// roomSegment is the number of words of a segment, unless a chunk needs more.
const roomSegment = 1 << 20

// next returns room for so many words. It allocates only while a step keeps more than all before it.
func (r *room) next(words int) []uint16 {
	for r.current < len(r.segments) && r.used+words > len(r.segments[r.current]) {
		r.current, r.used = r.current+1, 0
	}
	if r.current == len(r.segments) {
		r.segments = append(r.segments, make([]uint16, max(words, roomSegment)))
	}
	return r.segments[r.current][r.used : r.used : r.used+words]
}

// on reports whether steps note what they change.
func (n *noted) on() bool { return n.chunks != nil && !n.lost }

// update updates a chunk, and keeps what has changed.
func (n *noted) update(worker, unit int, update func(*kernel.Changes)) {
	of, room := &n.chunks[unit], &n.rooms[worker]
	of.Old = room.next(of.RoomWords())
	update(of)
	room.used += len(of.Old)
}

// lose says that parameters have changed, and that nobody notes how.
func (n *noted) lose() { n.lost = true }

// begin begins a step.
func (n *noted) begin(step int64) {
	if n.before != n.after && !n.read {
		n.lost = true // nobody was told what the step before has changed
	}
	n.before, n.after, n.read = n.after, step, false
	for i := range n.rooms {
		n.rooms[i].current, n.rooms[i].used = 0, 0
	}
}

// none notes that a step leaves a chunk alone.
func (n *noted) none(unit int) {
	if n.on() {
		n.chunks[unit].None()
	}
}

// NoteChanges has every step from the next one on note which parameters it changes. No step may be under way.
func (s *Shard) NoteChanges() {
	n := &s.noted
	n.before, n.after, n.lost = s.Steps(), s.Steps(), false
	if n.chunks != nil {
		return
	}
	n.chunks = make([]kernel.Changes, s.config.Chunks)
	for unit := range n.chunks {
		n.chunks[unit] = kernel.NewChanges(int(s.chunks[unit].Count))
	}
	n.rooms = make([]room, s.workers.Count())
}

// NotesChanges reports whether the changes are known of the steps after from, up to the last one. They are those of one
// step, or of none. They are not known where parameters were written, where steps were made after which nobody called
// [Shard.ChangesAreRead], and where another process has made a part of the step.
func (s *Shard) NotesChanges() (from int64, known bool) {
	n := &s.noted
	return n.before, n.on() && n.after == s.Steps()
}

// ChangesAreRead says that the changes of the last step were read. They stay known until the next step.
func (s *Shard) ChangesAreRead() { s.noted.read = true }

// EachChange calls body for every chunk of a range of the shard with what the last step has changed in it. No step may
// be under way, and [Shard.NotesChanges] has said that the changes are known.
func (s *Shard) EachChange(r shard.Range, body func(at shard.Chunk, state kernel.Chunk, changes *kernel.Changes)) {
	chunks := s.config.ChunksOf(r)
	for unit := int(chunks.First); unit < int(chunks.End()); unit++ {
		c := s.chunk(unit)
		body(c.Chunk, c.state(), &s.noted.chunks[unit])
	}
}
