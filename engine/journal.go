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

// The journal is in pages that outlive the process. It has what it takes to make
// the update under way: its number, the constants of all groups, and which chunks
// are done; and a slot for each worker, with an undo log of the chunk that it is
// changing. Who finishes a step restores what was being changed, goes on from
// there in the same slots, and then runs what is not done. An addition to the
// gradients (accumulations.go) has marks of the same chunks and the same slots, and so
// has a write of moments (write.go) the slots: only one of the three is under way.
//
// It is made for a process that ends at any instant, not for a host that does:
// a thread that is killed has made all stores before some instruction, and none
// after. So all that counts is the order of each thread's own stores.

const (
	// journalSlots is the number of slots of a large shard, and the most
	// workers that it can have. It does not follow the number of workers, so
	// that a step can be finished with another.
	journalSlots = 256

	journalMagic   = 0x6c616e72756f6a50 // "Pjournal"
	journalVersion = 3

	cacheLine = 64
)

// journalHead is what a journal begins with.
type journalHead struct {
	magic, version uint64
	layout         [sha256.Size]byte // fingerprint of the configuration
	counters
	accumulations accumulations
	// writing is true while slots are the logs of moments that are being written.
	writing atomic.Bool
}

// journalLayout says where what lies in a journal.
type journalLayout struct {
	slots, slotSize             int64
	constants, done, slotsBegin int64 // offsets
	size                        int64
}

func (c ShardConfig) journalLayout() journalLayout {
	l := journalLayout{slots: min(c.chunks(), journalSlots)}
	for _, s := range c.sections() {
		l.slotSize = max(l.slotSize, cacheLine+int64(c.formatOf(s).UndoBytes()))
	}
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
		Component: ledger.StepJournal,
		role:      journalRole,
		Size:      ledger.Bytes(l.size),
		Why: fmt.Sprintf("%d B x %d slots: what the parameters or gradients were that a worker is changing; 4 B x %s chunks: whether they are done; %d B: step and hyperparameters; in whole lines of %d B",
			l.slotSize, l.slots, ledger.Count(c.chunks()), l.done, cacheLine),
	}
}

// fingerprint is that of all that the layout of the journal depends on, and of
// what its numbers mean.
func (c ShardConfig) fingerprint() [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%d %d %v %v %v", c.chunkOf(Section{}), c.Elements, c.Format, c.sections(), c.journalLayout()))
}

// openJournal lays the journal out over its arena.
func (p *progress) openJournal(c ShardConfig, a *arena.Arena) *journalHead {
	l, bytes := c.journalLayout(), a.Bytes()
	head := at[journalHead](bytes, 0)
	p.counters, p.accumulations, p.writing = &head.counters, &head.accumulations, &head.writing
	p.constants = unsafe.Slice(at[kernel.Constants](bytes, l.constants), c.groups())
	p.done = unsafe.Slice(at[atomic.Uint32](bytes, l.done), c.chunks())
	for i := range l.slots {
		begin := l.slotsBegin + i*l.slotSize
		p.slots = append(p.slots, slot{at[atomic.Int64](bytes, begin), kernel.UndoIn(bytes[begin+cacheLine : begin+l.slotSize])})
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
	case h.accumulations.begun.Load()-h.accumulations.finished.Load() > 1 && !h.accumulations.clearing.Load():
		return fmt.Errorf("%d additions to the gradients were begun and %d finished", h.accumulations.begun.Load(), h.accumulations.finished.Load())
	}
	return nil
}
