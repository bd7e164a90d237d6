package engine

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
)

// The journal lies in pages that outlive the process. It holds what another process needs to finish an update: its
// number, its constants, which sections take which of them and how many steps these have had, and which chunks are
// done. It also holds a slot for each worker: the undo log of the chunk that the worker is changing.
//
// To finish a step, a process restores the chunks that were being changed, goes on in
// the same slots, and then updates the chunks that are not done. Accumulations
// (accumulate.go) use the same marks and slots, and writes of moments (write.go) the
// same slots. Only one of the three is under way at any time.
//
// The journal protects against the end of a process, not of a host. A thread that is
// killed has made all stores before some instruction and none after it, so only the
// order of each thread's own stores counts.

const (
	// journalSlots is the number of slots of a large shard, and so the most
	// workers that it can have. It does not depend on the number of workers:
	// another process may finish a step with another number.
	journalSlots = 256

	journalMagic   = 0x6c616e72756f6a50 // "Pjournal"
	journalVersion = 8

	cacheLine = 64
)

// journalHead is the beginning of a journal.
type journalHead struct {
	magic, version uint64
	layout         [sha256.Size]byte // fingerprint of the configuration
	counters
	accumulations accumulations
	// writing is true while slots are the undo logs of a write of moments.
	writing checked.Flag
	// restoring is true while the state is being replaced by the last commit of a tier.
	restoring checked.Flag
	decided   verdict
}

// journalLayout holds the offsets of the parts of a journal.
type journalLayout struct {
	slots, slotSize int64
	// Offsets.
	constants, rows, done, sums, slotsBegin int64
	own                                     [2]int64
	size                                    int64
}

func (c ShardConfig) journalLayout() journalLayout {
	l := journalLayout{slots: min(int64(c.Chunks), journalSlots)}
	for section := range c.Sections() {
		l.slotSize = max(l.slotSize, cacheLine+int64(c.FormatOf(section).UndoBytes()))
	}
	sections := int64(len(c.Sections()))
	l.constants = wholeLines(int64(unsafe.Sizeof(journalHead{})))
	l.rows = l.constants + wholeLines(sections*int64(unsafe.Sizeof(constants{})))
	l.own[0] = l.rows + wholeLines(8*sections)
	l.own[1] = l.own[0] + wholeLines(8*sections)
	l.done = l.own[1] + wholeLines(8*sections)
	l.sums = l.done + wholeLines(8*int64(c.Chunks))
	_, _, l.slotsBegin = c.tierLayout(l.sums)
	l.size = l.slotsBegin + l.slots*l.slotSize
	return l
}

// tierLayout returns where the numbers of a tier begin, which follow the sums, and where they end. Without a tier they
// take nothing.
func (c ShardConfig) tierLayout(sums int64) (entries, lanes, end int64) {
	entries = sums + wholeLines(8*int64(c.Chunks)*int64(len(c.summed())))
	lanes = entries + wholeLines(8*int64(c.entries()))
	return entries, lanes, lanes + wholeLines(8*int64(c.lanes()))
}

// wholeLines rounds a size up to full cache lines.
func wholeLines(size int64) int64 { return (size + cacheLine - 1) / cacheLine * cacheLine }

func (c ShardConfig) journalArena() arena.Plan {
	l := c.journalLayout()
	return arena.Plan{
		Component: ledger.StepJournal,
		Size:      ledger.Bytes(l.size),
		Why: fmt.Sprintf("%d B x %d slots: undo logs of what each worker is changing; 8 B x %s chunks: which of them "+
			"are done; %d B: step, and the constants and steps of %s parameters%s; rounded up to lines of %d B",
			l.slotSize, l.slots, ledger.Count(int64(c.Chunks)), l.done, ledger.Count(int64(len(c.Sections()))),
			c.whySums()+c.whyEntries(), cacheLine),
	}
}

// whySums says what sums take.
func (c ShardConfig) whySums() string {
	if !c.Sums {
		return ""
	}
	return fmt.Sprintf("; 8 B x %d streams x %s chunks: sums of the state", len(c.summed()),
		ledger.Count(int64(c.Chunks)))
}

// fingerprint identifies everything that the layout and the meaning of the journal
// depend on.
func (c ShardConfig) fingerprint() [sha256.Size]byte {
	text := fmt.Appendf(nil, "%d %d %v %v %v", c.ChunkElements, c.Elements, c.Format, c.Sections(), c.journalLayout())
	if c.Tier != nil {
		text = fmt.Appendf(text, " %d lanes, %d kept", c.Tier.Lanes, c.Tier.Kept)
	}
	if c.Retracts {
		text = fmt.Appendf(text, " retracts %d", kernel.RetractionVersion)
	}
	return sha256.Sum256(text)
}

// openJournal lays the progress out over the arena of the journal.
func (p *progress) openJournal(c ShardConfig, a *arena.Arena) *journalHead {
	l, bytes := c.journalLayout(), a.Bytes()
	head := at[journalHead](bytes, 0)
	p.counters, p.accumulations = &head.counters, &head.accumulations
	p.writing, p.restoring, p.decided = &head.writing, &head.restoring, &head.decided
	sections := len(c.Sections())
	p.constants = unsafe.Slice(at[constants](bytes, l.constants), sections)
	p.rows = unsafe.Slice(at[checked.Word](bytes, l.rows), sections)
	for i := range p.own {
		p.own[i] = unsafe.Slice(at[checked.Int](bytes, l.own[i]), sections)
	}
	p.done = unsafe.Slice(at[checked.Word](bytes, l.done), c.Chunks)
	p.chunkSums.streams = c.summed()
	if n := c.Chunks * len(p.chunkSums.streams); n > 0 {
		p.chunkSums.list = unsafe.Slice(at[atomic.Uint64](bytes, l.sums), n)
	}
	if n := c.entries(); n > 0 {
		entries, lanes, _ := c.tierLayout(l.sums)
		p.entries = unsafe.Slice(at[atomic.Uint64](bytes, entries), n)
		p.lanes = unsafe.Slice(at[checked.Int](bytes, lanes), c.lanes())
	}
	for i := range l.slots {
		begin := l.slotsBegin + i*l.slotSize
		p.slots = append(p.slots, slot{
			at[checked.Int](bytes, begin),
			at[checked.Flag](bytes, begin+8),
			kernel.UndoIn(bytes[begin+cacheLine : begin+l.slotSize]),
		})
	}
	return head
}

// at returns a pointer to the value at an offset.
func at[T any](bytes []byte, offset int64) *T { return (*T)(unsafe.Pointer(&bytes[offset])) }

// init initializes the head for a shard without steps.
func (h *journalHead) init(c ShardConfig) {
	h.magic, h.version, h.layout = journalMagic, journalVersion, c.fingerprint()
}

// checkJournal refuses the journal of another shard, or a damaged one.
func (s *Shard) checkJournal(head *journalHead) error {
	if err := head.check(s.config); err != nil {
		return fmt.Errorf("arena %s: %w", s.journal().Name(), err)
	}
	if damage := s.progress.check(); damage != nil {
		return s.named(damage)
	}
	if damaged := s.damaged.Load(); damaged != 0 {
		return fmt.Errorf("arena %s: it says that a chunk has another sum (place %d of the list): %w; %s",
			s.journal().Name(), damaged-1, ErrDamaged, remedy)
	}
	err := cmp.Or(s.progress.checkCounts(), s.progress.checkUpdate(), s.checkSlots())
	if damage := (*checked.Damage)(nil); errors.As(err, &damage) {
		return s.named(damage)
	}
	if err != nil {
		return fmt.Errorf("arena %s: %w", s.journal().Name(), err)
	}
	return nil
}

// check refuses a head that is of another shard or release.
func (h *journalHead) check(c ShardConfig) error {
	switch {
	case h.magic != journalMagic:
		return errors.New("it is no journal: its first 8 bytes are others")
	case h.version != journalVersion:
		return fmt.Errorf("its version is %d, expected %d: another release has written it, or memory has changed; "+
			"end the job with that release, or begin again from the last checkpoint", h.version, journalVersion)
	case h.layout != c.fingerprint():
		return errors.New("it was written for a shard of other sections, format or chunks")
	}
	return nil
}

// checkCounts refuses counts that do not go together.
func (p *progress) checkCounts() error {
	switch {
	case p.begun.Load()-p.finished.Load() > 1:
		return fmt.Errorf("%d updates were begun and %d finished", p.begun.Load(), p.finished.Load())
	case p.accumulations.begun.Load()-p.accumulations.finished.Load() > 1 && !p.accumulations.clearing.Load():
		return fmt.Errorf("%d accumulations of gradients were begun and %d finished",
			p.accumulations.begun.Load(), p.accumulations.finished.Load())
	}
	return nil
}

// checkSlots refuses slots that name a place in a chunk that there is not.
func (s *Shard) checkSlots() error {
	for i, slot := range s.slots {
		if err := slot.undo.Check(int(s.config.Chunk(int(slot.unit.Load())).Count)); err != nil {
			return fmt.Errorf("slot %d: %w", i, err)
		}
	}
	return nil
}
