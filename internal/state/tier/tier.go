// Package tier holds the state of a shard in files, on one disk or striped over several. It is crash-safe at any
// write: after a loss of power the files hold the state of the last commit, whole, or that of the one before.
//
// # Two slots
//
// Every chunk of the shard has two parts: its state, which a step reads and writes, and its parameters, which a step
// only writes, because the trainer has them in memory. Each part has two slots in a file. A write goes to the slot that
// the last commit does not use. So nothing of the last commit is ever overwritten, and the files take twice the room of
// the state.
//
// # A commit
//
// The index has an entry for each part of each chunk: which slot counts, and the checksum of what is there (CRC-32C).
// [Store.Commit] brings the data files to the disks, then writes the index with its own checksum (SHA-256), and brings
// that to the disk. Two areas of the index file take turns. Until the new index is there as a whole, the old one
// counts. An area has two copies: a bit that flips in one of them does not make an older index the last one.
//
// # Caveats
//
// Any goroutine may read and write parts, at most one the same part at a time. A commit excludes everything else.
// Buffers are read and written by direct I/O: they begin at a multiple of [Block] in memory, and their lengths are
// multiples of it.
package tier

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"sync/atomic"

	"plimsoll/internal/base/ledger"
)

// Block is what offsets, lengths and addresses of direct I/O are multiples of.
const Block = 4096

// DefaultMemory is that of the windows of a service that is not told another: enough to keep several disks busy.
const DefaultMemory = 1 * ledger.GiB

// Round rounds a size up to full blocks.
func Round(size int64) int64 { return (size + Block - 1) / Block * Block }

// Part is a part of a chunk that is read and written as one.
type Part int

// The parts.
const (
	State      Part = iota // what the trainer does not map
	Parameters             // what the trainer maps
	Parts      = 2
)

func (p Part) String() string { return [...]string{"state", "parameters"}[p] }

// Plan describes the files of a shard.
type Plan struct {
	Folders []string // one on each disk
	Name    string   // that the files' names begin with
	Label   []byte   // says what shard it is
	Chunks  int
	// Sizes are the bytes of the parts of each chunk. All are multiples of [Block].
	Sizes func(chunk int) [Parts]int64
	// Sections and Sums are how many numbers of either kind a commit keeps.
	Sections, Sums int
	// Kept says which chunks have their state in memory from one step to the next; nil: none. Any process may keep
	// others: the files are the same.
	Kept func(chunk int) bool
}

// ErrDamaged says that a file holds something else than what was written there.
var ErrDamaged = errors.New("the file has changed since it was written")

// Memory is the memory of a store. The caller may let it outlive this process.
type Memory struct {
	// Entries has an entry for each part of each chunk: what is in the files now, committed or not.
	Entries []atomic.Uint64
	// Area is aligned memory of [Plan.AreaBytes] bytes, for the index.
	Area []byte
}

// Store is the open files of a shard.
type Store struct {
	plan      Plan
	layout    layout
	memory    Memory
	index     File
	data      []File
	identity  [identitySize]byte
	committed []uint64 // entries of the last commit
	last      commit
	before    commit      // the one before, as it was found; none if it was not whole
	touched   atomic.Bool // something was written since the files were opened
	torn      bool        // an area of the index was written, and no copy of it is whole

	read, written atomic.Int64 // bytes
}

// EntryCount returns the number of entries that the memory of a store has.
func (p *Plan) EntryCount() int { return Parts * p.Chunks }

// Entries are words: the checksum, a mark and the slot. No flip of one bit makes an entry of another slot, or one that
// says that nothing was written.
const (
	nothing   = uint64(0) // zeros that nobody has written
	entryMark = uint64(0x7e1234) << 8
	slotMask  = uint64(0xff)
	markMask  = uint64(0xffffff) << 8
)

var slotCodes = [2]uint64{0x0f, 0xf0}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func entryOf(slot int, data []byte) uint64 {
	return uint64(crc32.Checksum(data, castagnoli))<<32 | entryMark | slotCodes[slot]
}

// slotOf returns the slot of an entry; ok is false for an entry that nobody has written.
func slotOf(entry uint64) (slot int, ok bool) {
	for slot, code := range slotCodes {
		if entry&markMask == entryMark && entry&slotMask == code {
			return slot, true
		}
	}
	return 0, false
}

func entryNumber(chunk int, part Part) int { return Parts*chunk + int(part) }

// Holds reports whether a part was ever written.
func (s *Store) Holds(chunk int, part Part) bool {
	return s.memory.Entries[entryNumber(chunk, part)].Load() != nothing
}

// Read reads a part, and verifies it. A part that was never written is zeros.
func (s *Store) Read(chunk int, part Part, p []byte) error {
	err := s.Verify(chunk, part, p)
	if err == nil && s.Holds(chunk, part) {
		s.read.Add(int64(len(p)))
	}
	return err
}

// Verify reads a part as Read does, and does not count it: no step has read it.
func (s *Store) Verify(chunk int, part Part, p []byte) error {
	entry := s.memory.Entries[entryNumber(chunk, part)].Load()
	if entry == nothing {
		clear(p)
		return nil
	}
	slot, ok := slotOf(entry)
	file, offset := s.place(chunk, part, slot)
	if !ok {
		return fmt.Errorf("the index says %#016x of the %v of chunk %d, in %s: %w", entry, part, chunk, file.Name(),
			ErrDamaged)
	}
	if err := readAll(file, p, offset); err != nil {
		return failed("reading", chunk, part, file, offset, p, err)
	}
	if entryOf(slot, p) != entry {
		return fmt.Errorf("%s: the %v of chunk %d, %d bytes from %d on, have another checksum than those that were "+
			"written: %w", file.Name(), part, chunk, len(p), offset, ErrDamaged)
	}
	return nil
}

// Recall verifies memory that should hold what the files have of a part. If it holds something else, the part is read
// into it, and recalled is false.
func (s *Store) Recall(chunk int, part Part, p []byte) (recalled bool, err error) {
	entry := s.memory.Entries[entryNumber(chunk, part)].Load()
	slot, ok := slotOf(entry)
	switch {
	case entry == nothing:
		clear(p)
		return true, nil
	case ok && entryOf(slot, p) == entry:
		return true, nil
	}
	return false, s.Read(chunk, part, p)
}

// Write writes a part into the slot that the last commit does not use.
func (s *Store) Write(chunk int, part Part, p []byte) error {
	s.touched.Store(true)
	number := entryNumber(chunk, part)
	slot, ok := slotOf(s.committed[number])
	if ok {
		slot = 1 - slot
	}
	file, offset := s.place(chunk, part, slot)
	entry := entryOf(slot, p)
	if err := writeAll(file, p, offset); err != nil {
		return failed("writing", chunk, part, file, offset, p, err)
	}
	s.written.Add(int64(len(p)))
	s.memory.Entries[number].Store(entry)
	return nil
}

// Move reads the parts of a chunk and writes them into the other slots, without their checksums: what a step moves, and
// nothing else. It does not read the state of a chunk that memory keeps. Everything that was written must be committed:
// the state stays as it is.
func (s *Store) Move(chunk int, parts [Parts][]byte, reads bool) error {
	for part, p := range parts {
		number := entryNumber(chunk, Part(part))
		slot, _ := slotOf(s.committed[number])
		if s.memory.Entries[number].Load() != s.committed[number] {
			return fmt.Errorf("the %v of chunk %d were written, and not committed: traffic would overwrite them",
				Part(part), chunk)
		}
		file, from := s.place(chunk, Part(part), slot)
		if Part(part) == State && reads {
			if err := readAll(file, p, from); err != nil {
				return failed("reading", chunk, Part(part), file, from, p, err)
			}
		}
		_, to := s.place(chunk, Part(part), 1-slot)
		if err := writeAll(file, p, to); err != nil {
			return failed("writing", chunk, Part(part), file, to, p, err)
		}
	}
	return nil
}

// failed returns the error of a read or write.
func failed(what string, chunk int, part Part, file File, offset int64, p []byte, err error) error {
	return fmt.Errorf("%s: %s the %v of chunk %d, %d bytes from %d on: %w", file.Name(), what, part, chunk, len(p),
		offset, err)
}

// readAll and writeAll read and write a buffer as a whole. A file may read or write less without an error.
func readAll(file File, p []byte, offset int64) error {
	n, err := file.ReadAt(p, offset)
	if err == nil && n < len(p) {
		err = fmt.Errorf("%d of %d bytes: %w", n, len(p), io.ErrUnexpectedEOF)
	}
	return err
}

func writeAll(file File, p []byte, offset int64) error {
	n, err := file.WriteAt(p, offset)
	if err == nil && n < len(p) {
		err = fmt.Errorf("%d of %d bytes: %w", n, len(p), io.ErrShortWrite)
	}
	return err
}

// place returns the file and the offset of a slot.
func (s *Store) place(chunk int, part Part, slot int) (File, int64) {
	return s.data[s.layout.file(chunk)], s.layout.offset(chunk, part, slot)
}

// Commit makes what was written the state that the files hold, with the number of steps that the state has seen. own
// and sums are numbers of the caller's. If Commit fails, the files hold the state of the commit before, or this one.
func (s *Store) Commit(steps int64, own func(section int) int64, sums []atomic.Uint64) error {
	s.touched.Store(true)
	if err := s.Sync(); err != nil {
		return err
	}
	next := commit{generation: s.last.generation + 1, steps: steps}
	s.seal(next, own, sums)
	for number := range areaCopies {
		if err := writeAll(s.index, s.memory.Area, s.layout.area(next.generation, number)); err != nil {
			return fmt.Errorf("%s: writing the index of step %d: %w", s.index.Name(), steps, err)
		}
		s.written.Add(int64(len(s.memory.Area)))
	}
	if err := s.index.Sync(); err != nil {
		return fmt.Errorf("%s: bringing the index of step %d to the disk: %w", s.index.Name(), steps, err)
	}
	s.last = next
	for i := range s.committed {
		s.committed[i] = s.memory.Entries[i].Load()
	}
	return nil
}

// Sync brings the data files to their disks, all at once.
func (s *Store) Sync() error {
	failed := make([]error, len(s.data))
	var syncing sync.WaitGroup
	for i, file := range s.data {
		syncing.Go(func() {
			if err := file.Sync(); err != nil {
				failed[i] = fmt.Errorf("%s: bringing the chunks to the disk: %w", file.Name(), err)
			}
		})
	}
	syncing.Wait()
	return errors.Join(failed...)
}

// Committed returns the number of steps of the state that the files hold; ok is false if nothing was committed.
func (s *Store) Committed() (steps int64, ok bool) { return s.last.steps, s.last.generation > 0 }

// Has reports whether the last commit is of a number of steps, and nothing was written since.
func (s *Store) Has(steps int64) bool {
	for i, entry := range s.committed {
		if s.memory.Entries[i].Load() != entry {
			return false
		}
	}
	return s.last.generation > 0 && s.last.steps == steps
}

// IsTorn reports whether a commit after the last one was broken off, or has changed since: the two cannot be told
// apart.
func (s *Store) IsTorn() bool { return s.torn }

// Adopt makes the state of the last commit the one that is read: what was written later is forgotten.
func (s *Store) Adopt() {
	for i, entry := range s.committed {
		s.memory.Entries[i].Store(entry)
	}
}

// Traffic returns how many bytes were read and written since the store was opened.
func (s *Store) Traffic() (read, written int64) { return s.read.Load(), s.written.Load() }

// Plan returns what the store was opened with.
func (s *Store) Plan() *Plan { return &s.plan }

// Close closes the files. They keep what was committed.
func (s *Store) Close() error {
	var err error
	if s.index != nil {
		err = s.index.Close()
	}
	for _, file := range s.data {
		err = errors.Join(err, file.Close())
	}
	s.index, s.data = nil, nil
	return err
}

// Bytes returns what the files take in each folder.
func (p *Plan) Bytes() []ledger.Bytes {
	l := newLayout(p)
	var sizes []ledger.Bytes
	for _, size := range l.sizes {
		sizes = append(sizes, ledger.Bytes(size))
	}
	sizes[0] += ledger.Bytes(l.indexBytes())
	return sizes
}

// StepBytes returns what a step reads and writes that changes every chunk.
func (p *Plan) StepBytes() (reads, writes ledger.Bytes) {
	writes = ledger.Bytes(areaCopies * p.AreaBytes())
	for chunk := range p.Chunks {
		sizes := p.Sizes(chunk)
		if p.Kept == nil || !p.Kept(chunk) {
			reads += ledger.Bytes(sizes[State])
		}
		writes += ledger.Bytes(sizes[State] + sizes[Parameters])
	}
	return reads, writes
}
