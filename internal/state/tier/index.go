package tier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
)

const (
	indexMagic   = "plimsoll tier\x00\x00\x00"
	dataMagic    = "plimsoll data\x00\x00\x00"
	areaMagic    = "plimsoll step\x00\x00\x00"
	version      = 1
	identitySize = 16
	areaHeadSize = 96
	maximumLabel = 1 << 30
)

var order = binary.LittleEndian

// commit says which state an area of the index is of.
type commit struct {
	generation uint64 // counts commits, from 1 on; 0 is none
	steps      int64
}

// head is the first block of a file: magic, version, identity of the files, three numbers, and a checksum.
type head struct {
	magic    string
	identity [identitySize]byte
	numbers  [3]uint64 // of an index: bytes of the label, bytes of an area, data files; of data: number, files, bytes
	sum      [sha256.Size]byte
}

const headSize = 16 + 8 + identitySize + 3*8 + sha256.Size

// encode writes a head into a block. The checksum is of everything before it, and of what follows the block.
func (h *head) encode(block, rest []byte) {
	clear(block)
	at := copy(block, h.magic)
	order.PutUint64(block[at:], version)
	at += 8 + copy(block[at+8:], h.identity[:])
	for _, number := range h.numbers {
		order.PutUint64(block[at:], number)
		at += 8
	}
	sum := sumOf(block[:at], rest)
	copy(block[at:], sum[:])
}

// decodeHead reads the head in a block. The caller verifies its checksum with what follows.
func decodeHead(block []byte, magic string) (h head, err error) {
	if len(block) < headSize || string(block[:16]) != magic {
		return h, errors.New("it is no file of a tier: its first 16 bytes are others")
	}
	if found := order.Uint64(block[16:]); found != version {
		return h, fmt.Errorf("it has version %d, and this release reads version %d", found, version)
	}
	h.magic = magic
	at := 24 + copy(h.identity[:], block[24:])
	for i := range h.numbers {
		h.numbers[i] = order.Uint64(block[at:])
		at += 8
	}
	copy(h.sum[:], block[at:])
	return h, nil
}

// verify compares the checksum of a head.
func (h *head) verify(block, rest []byte) error {
	if sumOf(block[:headSize-sha256.Size], rest) != h.sum {
		return fmt.Errorf("its head has another checksum: %w", ErrDamaged)
	}
	return nil
}

func sumOf(parts ...[]byte) (sum [sha256.Size]byte) {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write(part)
	}
	hash.Sum(sum[:0])
	return sum
}

// An area is a head of areaHeadSize bytes (magic, identity, generation, steps, three counts, checksum), and then the
// numbers of sections, the entries and the sums.

// seal writes a commit into the memory of the area.
func (s *Store) seal(c commit, own func(section int) int64, sums []atomic.Uint64) {
	area := s.memory.Area
	at := areaHeadSize
	put := func(word uint64) {
		order.PutUint64(area[at:], word)
		at += 8
	}
	for section := range s.plan.Sections {
		put(uint64(own(section)))
	}
	for i := range s.memory.Entries {
		put(s.memory.Entries[i].Load())
	}
	for i := range sums {
		put(sums[i].Load())
	}
	clear(area[at:])
	clear(area[:areaHeadSize])
	s.sealHead(area, c)
}

// sealHead writes the head of an area, whose numbers are there.
func (s *Store) sealHead(area []byte, c commit) {
	copy(area, areaMagic)
	copy(area[16:], s.identity[:])
	order.PutUint64(area[32:], c.generation)
	order.PutUint64(area[40:], uint64(c.steps))
	order.PutUint32(area[48:], uint32(s.plan.Sections))
	order.PutUint32(area[52:], uint32(s.plan.EntryCount()))
	order.PutUint32(area[56:], uint32(s.plan.Sums))
	sum := sumOf(area[:64], area[areaHeadSize:])
	copy(area[64:], sum[:])
}

// openArea reads the head of an area. It reports whether the area is a commit of these files, and whether it is blank.
func (s *Store) openArea(area []byte) (c commit, ok, blank bool) {
	c = commit{order.Uint64(area[32:]), int64(order.Uint64(area[40:]))}
	sum := sumOf(area[:64], area[areaHeadSize:])
	ok = string(area[:16]) == areaMagic && bytes.Equal(area[16:32], s.identity[:]) && c.generation > 0 &&
		order.Uint32(area[48:]) == uint32(s.plan.Sections) && order.Uint32(area[52:]) == uint32(s.plan.EntryCount()) &&
		order.Uint32(area[56:]) == uint32(s.plan.Sums) && bytes.Equal(area[64:96], sum[:])
	return c, ok, len(bytes.Trim(area[:areaHeadSize], "\x00")) == 0
}

// word returns a number of the area in memory.
func (s *Store) word(number int) uint64 { return order.Uint64(s.memory.Area[areaHeadSize+8*number:]) }

// EachOwn calls body with the numbers of sections that the last commit has kept. It is to be called before the next
// commit.
func (s *Store) EachOwn(body func(section int, number int64)) {
	for section := range s.plan.Sections {
		body(section, int64(s.word(section)))
	}
}

// EachSum calls body with the sums that the last commit has kept. It is to be called before the next commit.
func (s *Store) EachSum(body func(number int, sum uint64)) {
	for i := range s.plan.Sums {
		body(i, s.word(s.plan.Sections+s.plan.EntryCount()+i))
	}
}
