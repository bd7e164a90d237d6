package engine

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"plimsoll/arena"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// The journal is an undo log, in pages that outlive the process. An update
// changes state in place, a block at a time; before a worker changes a block it
// copies what the block was to its slot of the journal, which stays in its
// cache. Who finishes a step puts back what the slots hold of blocks that were
// being changed, and runs what is not done.
//
// It is made for a process that ends at any instant, not for a host that does:
// a thread that is killed has made all stores before some instruction, and none
// after. So all that counts is the order of each thread's own stores.

// ComponentJournal is the ledger's name of the journal.
const ComponentJournal = "step_journal"

const (
	// journalBlock is the number of elements of which a slot has room for what
	// they were. Blocks of int8 moments must be whole.
	journalBlock = 1024
	// journalSlots is the number of slots of a large shard, and the most
	// workers that it can have. It does not follow the number of workers, so
	// that a step can be finished with another.
	journalSlots = 256

	journalMagic   = 0x6c616e72756f6a50 // "Pjournal"
	journalVersion = 1

	cacheLine = 64
)

// journalHead is what a journal begins with.
type journalHead struct {
	magic, version uint64
	layout         [sha256.Size]byte // fingerprint of the configuration
	counters
}

// counters count updates.
type counters struct {
	begun, finished atomic.Uint64 // one apart while an update is under way
	// before is the step that the state was at before the first update.
	before atomic.Int64
}

// journalLayout says where what lies in a journal.
type journalLayout struct {
	slots, slotSize             int64
	constants, done, slotsBegin int64 // offsets
	size                        int64
}

func (c ShardConfig) journalLayout() journalLayout {
	var image int64
	for _, s := range c.sections() {
		image = max(image, c.formatOf(s).ChangedBytes(journalBlock))
	}
	l := journalLayout{slots: min(c.chunks(), journalSlots), slotSize: cacheLine + wholeLines(image)}
	l.constants = wholeLines(int64(unsafe.Sizeof(journalHead{})))
	l.done = l.constants + wholeLines(int64(c.groups())*int64(unsafe.Sizeof(kernel.Constants{})))
	l.slotsBegin = l.done + wholeLines(4*c.chunks())
	l.size = l.slotsBegin + l.slots*l.slotSize
	return l
}

// wholeLines is a size rounded up to whole cache lines.
func wholeLines(size int64) int64 { return (size + cacheLine - 1) / cacheLine * cacheLine }

func (c ShardConfig) journalArena() ArenaPlan {
	l := c.journalLayout()
	return ArenaPlan{
		Component: ComponentJournal,
		role:      journalRole,
		Size:      ledger.Bytes(l.size),
		Why: fmt.Sprintf("%d slots x %d B: what the %d parameters were that a worker is changing; 4 B x %s chunks: whether they are done; %d B: step and hyperparameters of %d groups",
			l.slots, l.slotSize, journalBlock, ledger.Count(c.chunks()), l.done, c.groups()),
	}
}

// fingerprint is that of all that the layout of the journal depends on, and of
// what its numbers mean.
func (c ShardConfig) fingerprint() [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%d %d %v %v %d", c.chunkOf(Section{}), c.Elements, c.Format, c.sections(), unsafe.Sizeof(kernel.Constants{})))
}

// slot is a worker's part of the journal.
type slot struct {
	// position is twice the element of the shard up to which the slot's chunk
	// has been updated, and 1 more where the block that begins there is being
	// changed: then image is what the block was. It is 0 where there is none.
	position *uint64
	image    []byte
}

// openJournal lays the journal out over its arena.
func (s *Shard) openJournal(a *arena.Arena) *journalHead {
	l, bytes := s.config.journalLayout(), a.Bytes()
	head := at[journalHead](bytes, 0)
	s.counters = &head.counters
	s.constants = unsafe.Slice(at[kernel.Constants](bytes, l.constants), s.config.groups())
	s.done = unsafe.Slice(at[atomic.Uint32](bytes, l.done), s.config.chunks())
	for i := range l.slots {
		begin := l.slotsBegin + i*l.slotSize
		s.slots = append(s.slots, slot{at[uint64](bytes, begin), bytes[begin+cacheLine : begin+l.slotSize]})
	}
	return head
}

// at is what lies at an offset.
func at[T any](bytes []byte, offset int64) *T { return (*T)(unsafe.Pointer(&bytes[offset])) }

// init makes it the journal of a shard without steps.
func (h *journalHead) init(c ShardConfig) {
	h.magic, h.version, h.layout = journalMagic, journalVersion, c.fingerprint()
}

// check says whether the journal is that of such a shard.
func (h *journalHead) check(c ShardConfig) error {
	switch {
	case h.magic != journalMagic:
		return errors.New("it is no journal")
	case h.version != journalVersion:
		return fmt.Errorf("its version is %d, expected %d", h.version, journalVersion)
	case h.layout != c.fingerprint():
		return errors.New("it was written for a shard of other sections, format or chunks")
	case h.begun.Load()-h.finished.Load() > 1:
		return fmt.Errorf("%d updates were begun and %d finished", h.begun.Load(), h.finished.Load())
	}
	return nil
}

// change updates elements from to the end of a chunk, and keeps in the slot what
// is needed to go on.
func (s *Shard) change(slot slot, c chunk, from int) {
	section := c.section
	constants := &s.constants[section.group]
	for first := from; first < c.end; first += journalBlock {
		block := section.state.Slice(first, min(first+journalBlock, c.end))
		position := 2 * uint64(section.first+first)
		*slot.position = position // of what was changed before
		slot.save(section.format, &block)
		*slot.position = position + 1
		s.config.Kernel.Update(section.format, constants, block)
	}
}

// save keeps what a block is.
func (s slot) save(f kernel.Format, block *kernel.Chunk) {
	image := s.image
	for _, stream := range block.Changed(f) {
		image = image[copy(image, stream):]
	}
}

// restore makes a block what it was.
func (s slot) restore(f kernel.Format, block *kernel.Chunk) {
	image := s.image
	for _, stream := range block.Changed(f) {
		image = image[copy(stream, image):]
	}
}

// resume brings the chunk that a slot names to its end. Should this process be
// killed, too, the slot says the same as before, or goes on from there.
func (s *Shard) resume(slot slot) {
	element, changing := int(*slot.position/2), *slot.position%2 == 1
	if *slot.position == 0 {
		return
	}
	unit := s.chunkAt(element)
	if s.isDone(unit) {
		return
	}
	c := s.chunks[unit]
	first := element - c.section.first
	if changing {
		block := c.section.state.Slice(first, min(first+journalBlock, c.end))
		slot.restore(c.section.format, &block)
	}
	s.change(slot, c, first)
	s.setDone(unit)
}
