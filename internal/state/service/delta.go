//go:build linux

package service

import (
	"cmp"
	"iter"
	"os"
	"sync/atomic"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/delta"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
)

// lastDelta is what the last delta was about: the step that it led to, and the checksums before and after.
type lastDelta struct{ step, before, after uint64 }

// delta writes what the last step has changed of the parameters into the client's memfd.
func (c *connection) delta(r request) (reply, error) {
	body, err := protocol.Decode[protocol.DeltaBody](r.Kind, r.Body)
	if err != nil {
		return reply{}, err
	}
	if err := r.checkFile(0, 0); err != nil {
		return reply{}, protocol.Refused.Errorf("delta: %v", err)
	}
	s := c.session.contents.(*heldShard)
	message, err := s.delta(body.Flags)
	if err != nil {
		return reply{}, err
	}
	if err := writeAll(r.files[0], message); err != nil {
		return reply{}, protocol.Refused.Errorf("delta of %d bytes: %v", len(message), err)
	}
	s.shard.ChangesAreRead()
	return reply{result: protocol.Encode(uint64(len(message)))}, nil
}

// writeAll makes some bytes the contents of a file.
func writeAll(file *os.File, data []byte) error {
	err := file.Truncate(int64(len(data)))
	if err == nil {
		_, err = file.WriteAt(data, 0)
	}
	return err
}

// delta returns the message. Until the next step, the same request has the same result.
func (s *heldShard) delta(flags uint64) ([]byte, error) {
	h := delta.Header{To: uint64(s.shard.Steps()), Whole: flags == protocol.WholeDelta}
	from, known := s.shard.NotesChanges()
	switch {
	case flags > protocol.WholeDelta:
		return nil, protocol.Refused.Errorf("delta with flags %#x: expected 0, %#x or %#x", flags, protocol.BeginDelta,
			protocol.WholeDelta)
	case !s.initialized():
		return nil, protocol.OutOfOrder.Errorf("delta: the session has no state yet; write it and send set_step")
	case flags == 0 && !known:
		return nil, protocol.OutOfOrder.Errorf("delta: what was changed since the last delta is not known: ask for "+
			"one after every step, and for all parameters (flags %#x) after a load, a write, or a restart of the "+
			"service", protocol.WholeDelta)
	case flags != 0:
		s.shard.NoteChanges()
		sum, err := s.checksum()
		if err != nil {
			return nil, err
		}
		from, s.lastDelta = s.shard.Steps(), lastDelta{h.To, sum, sum}
	}
	h.From, h.Before = uint64(from), s.lastDelta.after
	if h.From != s.lastDelta.step { // the same is asked for again
		h.Before = s.lastDelta.before
	}
	return s.message(h)
}

// message writes a message.
func (s *heldShard) message(h delta.Header) ([]byte, error) {
	var w delta.Writer
	memory, first := s.shared()[0], int64(0)
	of, after := s.shard.Config().Format.Parameter, h.Before
	for _, p := range s.document.Parameters {
		piece := pieceOf(p, of)
		now := memory.Bytes()[first*of.Size():][:p.Count*of.Size()]
		switch {
		case h.Whole:
			w.Whole(piece, now)
		case h.From == h.To:
			w.Changed(piece, now, func(func(int, uint32) bool) {})
		default:
			changes := s.changes(shard.Range{First: first, Count: p.Count}, of)
			after += moved(piece, now, changes)
			w.Changed(piece, now, changes)
		}
		first += p.Count
	}
	if of == dtype.F32 && h.From != h.To { // what its words were is not known
		var err error
		if after, err = s.checksum(); err != nil {
			return nil, err
		}
	}
	s.lastDelta, h.After = lastDelta{h.To, h.Before, after}, after
	return w.Message(h), nil
}

// pieceOf returns the piece of a parameter of the document.
func pieceOf(p protocol.Piece, of dtype.Type) delta.Piece {
	piece := delta.Piece{Name: p.Name, Type: of, First: uint64(p.First), Count: uint64(p.Count)}
	for _, n := range p.Shape {
		piece.Shape = append(piece.Shape, uint64(n))
	}
	return piece
}

// changes returns the elements of a range that the last step has changed, from its begin on, with what they were.
func (s *heldShard) changes(r shard.Range, of dtype.Type) iter.Seq2[int, uint32] {
	return func(yield func(int, uint32) bool) {
		s.shard.EachChange(r, func(at shard.Chunk, state kernel.Chunk, changes *kernel.Changes) {
			begin := int(at.First - r.First)
			if of == dtype.F32 {
				for element := range changes.Changed() {
					yield(begin+element, 0)
				}
				return
			}
			for element, old := range changes.All(state.Parameter) {
				yield(begin+element, uint32(old))
			}
		})
	}
}

// moved returns by how much changes move the checksum.
func moved(p delta.Piece, now []byte, changes iter.Seq2[int, uint32]) (by uint64) {
	if p.Type == dtype.F32 {
		return 0
	}
	seed := delta.Seed(p.Name)
	for place, old := range changes {
		word := uint32(now[2*place]) | uint32(now[2*place+1])<<8
		by += delta.Term(seed, p.First+uint64(place), word) - delta.Term(seed, p.First+uint64(place), old)
	}
	return by
}

// checksum returns the checksum of all parameters. The workers read them.
func (s *heldShard) checksum() (uint64, error) {
	var sum atomic.Uint64
	role := kernel.ParameterRole
	of := s.shard.Config().Format.Parameter
	if of == dtype.F32 {
		role = kernel.MasterRole
	}
	firsts := []int64{0}
	for _, p := range s.document.Parameters {
		firsts = append(firsts, firsts[len(firsts)-1]+p.Count)
	}
	err := s.shard.ViewOf(s.shard.Config().Range(), func(at shard.Chunk, state kernel.Chunk) {
		p := s.document.Parameters[at.Section]
		first := uint64(p.First + at.First - firsts[at.Section])
		sum.Add(delta.Checksum(p.Name, of, first, state.Bytes(role)))
	})
	return sum.Load(), cmp.Or(err, s.shard.Err())
}
