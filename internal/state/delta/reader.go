package delta

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/flate"
)

// Message is a message that was read. Everything in it was checked: [Message.Apply] cannot fail because of it.
type Message struct {
	Header
	Pieces  []Piece
	streams [streams][]byte
}

const (
	fixedSize   = 8 + 2 + 2 + 4 + 4*8
	headSize    = fixedSize + streams*16
	leastPiece  = 2 + 1 + 1 + 16
	mostDeflate = 1032 // bytes that a byte of deflate can stand for
)

var errEnds = errors.New("it ends in the middle of a value")

// Read reads a message.
func Read(data []byte) (*Message, error) {
	m := &Message{}
	if len(data) < headSize+sha256.Size || string(data[:8]) != magic {
		return nil, fmt.Errorf("it is no delta: expected %d bytes or more that begin with %q", headSize+sha256.Size,
			magic)
	}
	if v := binary.LittleEndian.Uint16(data[8:]); v != version {
		return nil, fmt.Errorf("it is a delta of version %d: this release reads version %d", v, version)
	}
	end := len(data) - sha256.Size
	if sum := sha256.Sum256(data[:end]); !bytes.Equal(sum[:], data[end:]) {
		return nil, errors.New("its checksum is another: it was damaged or cut off on its way; fetch it again")
	}
	flags := binary.LittleEndian.Uint16(data[10:])
	if flags&^flagWhole != 0 {
		return nil, fmt.Errorf("its flags are %#x: this release knows %#x", flags, flagWhole)
	}
	m.Whole = flags == flagWhole
	for i, n := range []*uint64{&m.From, &m.To, &m.Before, &m.After} {
		*n = binary.LittleEndian.Uint64(data[16+8*i:])
	}
	if err := m.unpack(data[:end]); err != nil {
		return nil, err
	}
	if err := m.readTable(binary.LittleEndian.Uint32(data[12:])); err != nil {
		return nil, fmt.Errorf("its table of parameters: %w", err)
	}
	return m, m.check()
}

// unpack unpacks the streams.
func (m *Message) unpack(data []byte) error {
	rest := data[headSize:]
	for i := range m.streams {
		raw := binary.LittleEndian.Uint64(data[fixedSize+16*i:])
		coded := binary.LittleEndian.Uint64(data[fixedSize+16*i+8:])
		if coded > uint64(len(rest)) || raw > coded*mostDeflate || raw < coded {
			return fmt.Errorf("stream %d has %d bytes of %d: expected fewer, within the %d that are left", i, coded,
				raw, len(rest))
		}
		var err error
		if m.streams[i], err = unpacked(rest[:coded], raw); err != nil {
			return fmt.Errorf("stream %d: %w", i, err)
		}
		rest = rest[coded:]
	}
	if len(rest) > 0 {
		return fmt.Errorf("%d bytes follow the last stream", len(rest))
	}
	return nil
}

// unpacked returns a stream.
func unpacked(coded []byte, raw uint64) ([]byte, error) {
	if raw == uint64(len(coded)) {
		return coded, nil
	}
	r := flate.NewReader(bytes.NewReader(coded))
	text, err := io.ReadAll(io.LimitReader(r, int64(raw)+1))
	if err == nil && uint64(len(text)) != raw {
		err = fmt.Errorf("it has other than its %d bytes", raw)
	}
	return text, err
}

// readTable reads the table of pieces.
func (m *Message) readTable(pieces uint32) error {
	rest := m.streams[table]
	if uint64(pieces)*leastPiece > uint64(len(rest)) {
		return fmt.Errorf("%d parameters in %d bytes", pieces, len(rest))
	}
	names := map[string]bool{}
	for range pieces {
		var p Piece
		var err error
		if p, rest, err = readPiece(rest); err != nil {
			return err
		}
		if names[p.Name] {
			return fmt.Errorf("parameter %q is listed twice", p.Name)
		}
		if len(m.Pieces) > 0 && p.Type != m.Pieces[0].Type {
			return fmt.Errorf("parameter %q is %v, and others are %v: expected one type", p.Name, p.Type,
				m.Pieces[0].Type)
		}
		names[p.Name] = true
		m.Pieces = append(m.Pieces, p)
	}
	if len(rest) > 0 {
		return fmt.Errorf("%d bytes follow the last parameter", len(rest))
	}
	return nil
}

// readPiece reads a piece and returns what follows it.
func readPiece(data []byte) (p Piece, rest []byte, err error) {
	if len(data) < leastPiece {
		return p, nil, errEnds
	}
	length := int(binary.LittleEndian.Uint16(data))
	if len(data) < leastPiece+length {
		return p, nil, errEnds
	}
	p.Name, rest = string(data[2:2+length]), data[2+length:]
	of, dimensions := int(rest[0]), int(rest[1])
	if rest = rest[2:]; len(rest) < 8*(dimensions+2) || of >= len(types) {
		return p, nil, fmt.Errorf("parameter %q has type %d and %d dimensions", p.Name, of, dimensions)
	}
	p.Type = types[of]
	for range dimensions {
		p.Shape = append(p.Shape, binary.LittleEndian.Uint64(rest))
		rest = rest[8:]
	}
	p.First, p.Count = binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[8:])
	return p, rest[16:], p.check()
}

// cursor is how far the streams were read.
type cursor [streams][]byte

// take returns the next bytes of a stream.
func (c *cursor) take(stream, n int) ([]byte, error) {
	if n > len(c[stream]) {
		return nil, errEnds
	}
	taken := c[stream][:n]
	c[stream] = c[stream][n:]
	return taken, nil
}

// number returns the next number of a stream.
func (c *cursor) number(stream int) (int, error) {
	n := 0
	for {
		next, err := c.take(stream, 1)
		if err != nil {
			return 0, err
		}
		if n += int(next[0]); n > block {
			return 0, fmt.Errorf("a number of changes, or a gap between them, is more than %d", block)
		}
		if next[0] < 255 {
			return n, nil
		}
	}
}

// check walks over all blocks once, so that no later walk fails.
func (m *Message) check() error {
	at := cursor(m.streams)
	blocks := 0
	for i := range m.Pieces {
		if m.Pieces[i].Count > block*uint64(len(m.streams[forms])) {
			return fmt.Errorf("parameter %q has more blocks than the message", m.Pieces[i].Name)
		}
		blocks += m.Pieces[i].blocks()
	}
	if blocks != len(m.streams[forms]) {
		return fmt.Errorf("it has %d blocks: expected %d, of its parameters", len(m.streams[forms]), blocks)
	}
	for i := range m.Pieces {
		p := &m.Pieces[i]
		for number := range p.blocks() {
			var b blockChanges
			if err := b.read(&at, p, number); err != nil {
				return fmt.Errorf("parameter %q, block %d: %w", p.Name, number, err)
			}
			if m.Whole && b.all == nil {
				return fmt.Errorf("parameter %q, block %d: a message with all parameters lacks some", p.Name, number)
			}
		}
	}
	for stream := counts; stream < streams; stream++ {
		if len(at[stream]) > 0 {
			return fmt.Errorf("%d bytes of stream %d are of no block", len(at[stream]), stream)
		}
	}
	return nil
}

// blockChanges is what a message says about a block.
type blockChanges struct {
	places         []int
	values, worded []byte
	all            []byte // if not nil, all words
}

// read reads a block.
func (b *blockChanges) read(at *cursor, p *Piece, number int) error {
	n, size := p.inBlock(number), p.size()
	kind, err := at.take(forms, 1)
	if err != nil {
		return err
	}
	b.places, b.values, b.worded, b.all = b.places[:0], nil, nil, nil
	switch form(kind[0]) {
	case same:
		return nil
	case apart:
		err = b.readGaps(at, n)
	case bits:
		err = b.readBits(at, n)
	case dense:
		b.all, err = at.take(all, n*size)
		return err
	default:
		return fmt.Errorf("its form is %d: expected 0 to %d", kind[0], dense)
	}
	if err != nil {
		return err
	}
	if size == 4 {
		b.worded, err = at.take(words, 4*len(b.places))
		return err
	}
	if b.values, err = at.take(values, len(b.places)); err != nil {
		return err
	}
	b.worded, err = at.take(words, 2*bytes.Count(b.values, []byte{far}))
	return err
}

// readGaps reads places that are written as distances.
func (b *blockChanges) readGaps(at *cursor, n int) error {
	count, err := at.number(counts)
	if err != nil {
		return err
	}
	last := -1
	for range count {
		gap, err := at.number(gaps)
		if err != nil {
			return err
		}
		if last += gap + 1; last >= n {
			return fmt.Errorf("element %d of %d has changed", last, n)
		}
		b.places = append(b.places, last)
	}
	return nil
}

// readBits reads places that are written as bits.
func (b *blockChanges) readBits(at *cursor, n int) error {
	mask, err := at.take(masks, (n+7)/8)
	if err != nil {
		return err
	}
	for i, of8 := range mask {
		for bit := range 8 {
			if of8>>bit&1 == 0 {
				continue
			}
			if 8*i+bit >= n {
				return fmt.Errorf("element %d of %d has changed", 8*i+bit, n)
			}
			b.places = append(b.places, 8*i+bit)
		}
	}
	return nil
}

// apply calls set for every element of the block that the message is about, with its old and its new word. data are the
// words of the block.
func (b *blockChanges) apply(data []byte, size int, set func(place int, old, now uint32)) {
	if b.all != nil {
		for i := 0; i < len(data); i += size {
			set(i/size, word(data[i:], size), word(b.all[i:], size))
		}
		return
	}
	rest := b.worded
	for i, place := range b.places {
		old := word(data[place*size:], size)
		switch {
		case size == 4:
			set(place, old, word(rest, 4))
			rest = rest[4:]
		case b.values[i] == far:
			set(place, old, old^word(rest, 2))
			rest = rest[2:]
		default:
			zigzag := uint32(b.values[i])
			set(place, old, uint32(uint16(old+(zigzag>>1^-(zigzag&1)))))
		}
	}
}

// Copy is a copy of the parameters of a message.
type Copy interface {
	// Words returns the words of a block of a piece, a number of bytes from the begin of the piece on. They are valid
	// until the next call.
	Words(piece int, offset int64, count int) ([]byte, error)
	// Put replaces the words of a block.
	Put(piece int, offset int64, data []byte) error
}

// Differs is an error: a copy has other parameters than those that the message is about.
type Differs struct {
	Header
	Has uint64 // the checksum of what it has
}

func (e *Differs) Error() string {
	return fmt.Sprintf("the delta leads from step %d to step %d, and the parameters are not those after step %d: "+
		"their checksum is %#016x, expected %#016x; apply the deltas before this one first, or begin with one that "+
		"has all parameters", e.From, e.To, e.From, e.Has, e.Before)
}

// Apply changes a copy whose parameters have the checksum has. It returns a [Differs], and changes nothing, where the
// message does not follow them. A copy is of no use after another error.
func (m *Message) Apply(c Copy, has uint64) error {
	if !m.Whole && has != m.Before {
		return &Differs{m.Header, has}
	}
	moved, err := m.apply(c)
	if err == nil && has+moved != m.After {
		err = fmt.Errorf("the delta makes parameters with the checksum %#016x, expected %#016x, as the trainer has: "+
			"the trainer has changed parameters other than by its steps; ask it for a delta with all parameters",
			has+moved, m.After)
	}
	return err
}

// apply changes a copy, and returns by how much its checksum has moved.
func (m *Message) apply(c Copy) (moved uint64, err error) {
	at := cursor(m.streams)
	var b blockChanges
	for i := range m.Pieces {
		p := &m.Pieces[i]
		seed := Seed(p.Name)
		for number := range p.blocks() {
			if err := b.read(&at, p, number); err != nil {
				return 0, err
			}
			if b.all == nil && len(b.places) == 0 {
				continue
			}
			first := uint64(number) * block
			data, err := c.Words(i, int64(first)*p.Type.Size(), p.inBlock(number)*p.size())
			if err != nil {
				return 0, err
			}
			changed, size := slices.Clone(data), p.size()
			b.apply(data, size, func(place int, old, now uint32) {
				element := p.First + first + uint64(place)
				moved += Term(seed, element, now) - Term(seed, element, old)
				appendWord(changed[:place*size], now, size)
			})
			if err := c.Put(i, int64(first)*p.Type.Size(), changed); err != nil {
				return 0, err
			}
		}
	}
	return moved, nil
}

// checksumOf returns the checksum of pieces of a copy.
func checksumOf(pieces []Piece, c Copy) (sum uint64, err error) {
	for i := range pieces {
		p := &pieces[i]
		for number := range p.blocks() {
			first := uint64(number) * block
			data, err := c.Words(i, int64(first)*p.Type.Size(), p.inBlock(number)*p.size())
			if err != nil {
				return 0, err
			}
			sum += Checksum(p.Name, p.Type, p.First+first, data)
		}
	}
	return sum, nil
}

// InMemory is a copy in memory: the bytes of each piece.
type InMemory [][]byte

// Words returns the words of a block.
func (c InMemory) Words(piece int, offset int64, count int) ([]byte, error) {
	return c[piece][offset : offset+int64(count)], nil
}

// Put replaces the words of a block.
func (c InMemory) Put(piece int, offset int64, data []byte) error {
	copy(c[piece][offset:], data)
	return nil
}
