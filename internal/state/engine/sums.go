package engine

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/optim/kernel/abi"
	"plimsoll/internal/state/shard"
)

// A shard may have a sum of every stream of every chunk ([kernel.Sums]). An update sums what it reads and what it
// writes, in the same pass over memory. If what it has read has another sum than the update before has written, a bit
// has flipped in between: the step is never finished. [Shard.Scrub] finds that earlier.
//
// The trainer maps the parameters, and a program may write them in place at any time. So the stream that it maps has no
// sums. Neither have gradients.
//
// A sum is void while its chunk is changed by other means than an update. An update needs no void: until its chunk is
// marked as done, another process finishes it from the undo log, compares nothing, and sums the chunk anew. If it finds
// no undo log, the chunk is as it was, and so are its sums. A sum that is itself damaged is found as a wrong one.
type sums struct {
	streams []int           // their numbers in [kernel.Sums]
	list    []atomic.Uint64 // by chunk and stream: offset by written
}

// written is added to sums, so that 0 is a void one, and not that of a stream of zeros.
const written = 0x9e3779b97f4a7c15

// summed returns the numbers of the streams that have sums.
func (c ShardConfig) summed() (numbers []int) {
	if !c.Sums {
		return nil
	}
	hasParameter := slices.ContainsFunc(c.Streams, func(s shard.Stream) bool { return s.Role == kernel.ParameterRole })
	for _, stream := range c.Streams {
		number, ok := kernel.SumOf(stream.Role)
		if ok && (hasParameter || stream.Role != kernel.MasterRole) && !slices.Contains(numbers, number) {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// any reports whether the shard has sums.
func (s *sums) any() bool { return len(s.streams) > 0 }

// of returns the sums of a chunk.
func (s *sums) of(unit int) []atomic.Uint64 { return s.list[unit*len(s.streams):][:len(s.streams)] }

// put writes the sums of a chunk after an update.
func (s *sums) put(unit int, after *[abi.UndoStreams]uint64) {
	for i, number := range s.streams {
		s.of(unit)[i].Store(after[number] + written)
	}
}

// ofZeros makes all sums those of a shard that holds zeros.
func (s *sums) ofZeros() {
	for i := range s.list {
		s.list[i].Store(written)
	}
}

// renew sums a chunk.
func (s *sums) renew(unit int, state *kernel.Chunk) {
	for i, number := range s.streams {
		s.of(unit)[i].Store(state.Sum(number) + written)
	}
}

// void makes the sums of a chunk say nothing.
func (s *sums) void(unit int) {
	for i := range s.streams {
		s.of(unit)[i].Store(0)
	}
}

// wrong returns the place of the first sum that is not what a stream of a chunk has, or -1.
func (s *sums) wrong(unit int, state *kernel.Chunk) int {
	for i, number := range s.streams {
		if sum := s.of(unit)[i].Load(); sum != 0 && sum != state.Sum(number)+written {
			return i
		}
	}
	return -1
}

// isSound compares the sums of a chunk with the chunk, and records damage.
func (s *Shard) isSound(unit int, state *kernel.Chunk) bool {
	return !s.condemn(unit, s.chunkSums.wrong(unit, state))
}

// condemn records that a sum is wrong, in the journal, too.
func (s *Shard) condemn(unit, place int) bool {
	if place < 0 {
		return false
	}
	damaged := uint64(unit*len(s.chunkSums.streams)+place) + 1
	s.damaged.CompareAndSwap(0, damaged)
	s.fail(s.damagedAt(damaged))
	return true
}

// updateSummed updates a chunk and its sums, and notes what changes if anybody wants to know. It reports whether the
// chunk had the sums that it should have had.
func (s *Shard) updateSummed(worker, unit int, c chunk, state *kernel.Chunk) bool {
	var undo kernel.Undo
	if s.slots != nil {
		s.slots[worker].begin(unit)
		undo = s.slots[worker].undo
	}
	var sums kernel.Sums
	into := &sums
	if !s.chunkSums.any() {
		into = nil
	}
	if s.noted.on() {
		s.noted.update(worker, unit, func(changes *kernel.Changes) {
			s.config.Kernel.UpdateNoted(c.section.format, s.constantsOf(c), *state, undo, into, changes)
		})
	} else {
		s.config.Kernel.UpdateSummed(c.section.format, s.constantsOf(c), *state, undo, into)
	}
	if s.condemn(unit, s.chunkSums.wrongBefore(unit, &sums)) {
		return false
	}
	s.chunkSums.put(unit, &sums.After)
	return true
}

// wrongBefore is wrong for the sums that an update has found.
func (s *sums) wrongBefore(unit int, sums *kernel.Sums) int {
	for i, number := range s.streams {
		if sum := s.of(unit)[i].Load(); sum != 0 && sum != sums.Before[number]+written {
			return i
		}
	}
	return -1
}

// damagedAt returns the error about a stream of a chunk, by the number in the journal.
func (s *Shard) damagedAt(damaged uint64) error {
	unit, number := int(damaged-1)/max(1, len(s.chunkSums.streams)), int(damaged-1)%max(1, len(s.chunkSums.streams))
	if unit >= len(s.chunks) || len(s.chunkSums.streams) == 0 {
		return fmt.Errorf("rank %d: some state: %w; %s", s.config.Rank, ErrDamaged, remedy)
	}
	c := s.chunk(unit)
	state := c.state()
	if s.tier != nil {
		return fmt.Errorf("rank %d: chunk %d (elements %d to %d), which was read from the tier, has another sum than "+
			"step %d has written: %w; %s", s.config.Rank, unit, c.First, c.End(), s.Steps(), ErrDamaged, remedy)
	}
	memory := state.Summed(s.chunkSums.streams[number])
	if len(memory) == 0 { // the chunk has no such stream: its sum alone can have changed
		name, offset := s.placeOf(unsafe.Pointer(&s.chunkSums.of(unit)[number]))
		return fmt.Errorf("arena %s: the sum %d bytes from its begin, of a stream that chunk %d does not have, has "+
			"changed after step %d: %w; %s", name, offset, unit, s.Steps(), ErrDamaged, remedy)
	}
	name, offset := s.placeOf(unsafe.Pointer(unsafe.SliceData(memory)))
	return fmt.Errorf("arena %s: chunk %d (elements %d to %d), %d bytes from %d on, has another sum after step "+
		"%d: %w; %s", name, unit, c.First, c.End(), len(memory), offset, s.Steps(), ErrDamaged, remedy)
}

// placeOf returns the arena that an address is in, and how far from its begin.
func (s *Shard) placeOf(address unsafe.Pointer) (name string, offset uintptr) {
	for _, a := range s.arenas {
		at := uintptr(address) - uintptr(unsafe.Pointer(unsafe.SliceData(a.Bytes())))
		if at < uintptr(len(a.Bytes())) {
			return a.Name(), at
		}
	}
	return "", 0
}

// scrubbing keeps the scrubber and those who change the shard apart. Who changes it waits for one chunk at most.
type scrubbing struct {
	mutex    sync.Mutex
	changing bool // other than by an update
	next     int  // chunk
}

// keepOut has the scrubber stay away until the function that it returns is called.
func (s *scrubbing) keepOut() (letIn func()) {
	s.set(true)
	return s.letIn
}

func (s *scrubbing) letIn() { s.set(false) }

func (s *scrubbing) set(changing bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.changing = changing
}

// Scrub verifies the sums of the next chunk, or what files of a tier hold of it, unless the shard is being changed. It
// returns how many bytes it has read. Any goroutine may call it.
func (s *Shard) Scrub() (bytes int64) {
	defer s.catch()
	s.scrubbing.mutex.Lock()
	defer s.scrubbing.mutex.Unlock()
	if s.Err() != nil || s.scrubbing.changing || s.isUnderway() {
		return 0
	}
	unit := s.scrubbing.next % s.config.Chunks
	s.scrubbing.next = unit + 1
	if s.tier != nil {
		return s.scrubFiles(unit)
	}
	state := s.chunk(unit).state()
	s.isSound(unit, &state)
	for _, number := range s.chunkSums.streams {
		bytes += int64(len(state.Summed(number)))
	}
	return bytes
}

// ViewOf has the workers call body for the chunks with elements of a range, as [Shard.EachOf] does. body only reads,
// and only chunks whose sums are right. ViewOf returns the damage that it finds.
func (s *Shard) ViewOf(r shard.Range, body func(at shard.Chunk, state kernel.Chunk)) error {
	s.eachState(s.config.ChunksOf(r), apart, reads, func(_, unit int, state kernel.Chunk) {
		if s.isSound(unit, &state) {
			body(s.chunks[unit], state)
		}
	})
	return s.Err()
}
