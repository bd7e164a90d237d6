package delta

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"iter"
	"slices"

	"github.com/klauspost/compress/flate"
)

// Writer writes a message, piece after piece. All pieces have one type.
type Writer struct {
	streams [streams][]byte
	pieces  uint32
	block   changes
}

// changes are those of a block, in order.
type changes struct {
	places   []uint16
	old, now []uint32
}

// Changed adds a piece of which some elements have changed. changed yields their places in the piece, in order, and
// what they were. Of elements of 32 bits what they were is not used. now are the words of the piece.
func (w *Writer) Changed(p Piece, now []byte, changed iter.Seq2[int, uint32]) {
	w.begin(&p)
	number := 0
	for place, old := range changed {
		for ; number < place/block; number++ {
			w.endBlock(&p, number, now)
		}
		w.block.places = append(w.block.places, uint16(place%block))
		w.block.old = append(w.block.old, old)
		w.block.now = append(w.block.now, word(now[place*p.size():], p.size()))
	}
	for ; number < p.blocks(); number++ {
		w.endBlock(&p, number, now)
	}
}

// Whole adds a piece with all of its words.
func (w *Writer) Whole(p Piece, now []byte) {
	w.begin(&p)
	for range p.blocks() {
		w.add(forms, byte(dense))
	}
	w.add(all, now...)
}

// begin adds a piece to the table.
func (w *Writer) begin(p *Piece) {
	t := w.streams[table]
	t = binary.LittleEndian.AppendUint16(t, uint16(len(p.Name)))
	t = append(t, p.Name...)
	t = append(t, byte(slices.Index(types[:], p.Type)), byte(len(p.Shape)))
	for _, n := range slices.Concat(p.Shape, []uint64{p.First, p.Count}) {
		t = binary.LittleEndian.AppendUint64(t, n)
	}
	w.streams[table] = t
	w.pieces++
}

// endBlock writes the changes of a block in the form that takes the fewest bytes.
func (w *Writer) endBlock(p *Piece, number int, now []byte) {
	c, n, size := &w.block, p.inBlock(number), p.size()
	defer func() { c.places, c.old, c.now = c.places[:0], c.old[:0], c.now[:0] }()
	if len(c.places) == 0 {
		w.add(forms, byte(same))
		return
	}
	counted, distances, mask := c.placed(n)
	valued, worded := c.valued(size)
	rest := len(valued) + len(worded)
	byGaps := len(counted) + len(distances)
	switch {
	case min(byGaps, len(mask))+rest >= n*size:
		begin := number * block * size
		w.add(forms, byte(dense))
		w.add(all, now[begin:begin+n*size]...)
		return
	case byGaps <= len(mask):
		w.add(forms, byte(apart))
		w.add(counts, counted...)
		w.add(gaps, distances...)
	default:
		w.add(forms, byte(bits))
		w.add(masks, mask...)
	}
	w.add(values, valued...)
	w.add(words, worded...)
}

// add adds bytes to a stream.
func (w *Writer) add(stream int, data ...byte) {
	w.streams[stream] = append(w.streams[stream], data...)
}

// placed returns the places of changes among n elements: their number and gaps, and as bits.
func (c *changes) placed(n int) (counted, distances, mask []byte) {
	counted, mask = appendNumber(nil, len(c.places)), make([]byte, (n+7)/8)
	last := -1
	for _, place := range c.places {
		distances = appendNumber(distances, int(place)-last-1)
		last = int(place)
		mask[place/8] |= 1 << (place % 8)
	}
	return counted, distances, mask
}

// appendNumber appends a number: a byte of 255 for each 255 in it, and a byte for the rest. Most gaps take one byte,
// and codes of bytes then come near the entropy.
func appendNumber(to []byte, n int) []byte {
	for ; n >= 255; n -= 255 {
		to = append(to, 255)
	}
	return append(to, byte(n))
}

// valued returns what the elements became. At small learning rates most words of 16 bits become the next number or the
// one before: a byte has the difference, and the entropy of that is about one bit.
func (c *changes) valued(size int) (valued, worded []byte) {
	for i, now := range c.now {
		if size == 4 {
			worded = appendWord(worded, now, size)
			continue
		}
		by := int16(now - c.old[i])
		if zigzag := uint16(by<<1) ^ uint16(by>>15); zigzag < far {
			valued = append(valued, byte(zigzag))
			continue
		}
		valued = append(valued, far)
		worded = appendWord(worded, now^c.old[i], size)
	}
	return valued, worded
}

// Message returns the message.
func (w *Writer) Message(h Header) []byte {
	m := append([]byte(magic), 0, 0, 0, 0)
	binary.LittleEndian.PutUint16(m[8:], version)
	if h.Whole {
		m[10] = flagWhole
	}
	m = binary.LittleEndian.AppendUint32(m, w.pieces)
	for _, n := range []uint64{h.From, h.To, h.Before, h.After} {
		m = binary.LittleEndian.AppendUint64(m, n)
	}
	var coded [streams][]byte
	for i, raw := range w.streams {
		coded[i] = compressed(raw)
		m = binary.LittleEndian.AppendUint64(m, uint64(len(raw)))
		m = binary.LittleEndian.AppendUint64(m, uint64(len(coded[i])))
	}
	m = append(m, bytes.Join(coded[:], nil)...)
	sum := sha256.Sum256(m)
	return append(m, sum[:]...)
}

// leastDeflate is the number of bytes from which on a stream may be shorter than they are. A writer has a mebibyte to
// clear, and most streams of most messages are empty.
const leastDeflate = 8

// compressed returns the shortest of some bytes and their raw deflate streams. Gaps and values have no repetitions that
// are worth a reference: with codes alone they are shorter than with references. Python has deflate without a package.
func compressed(raw []byte) []byte {
	shortest := raw
	if len(raw) < leastDeflate {
		return raw
	}
	for _, level := range []int{flate.HuffmanOnly, flate.DefaultCompression} {
		var to bytes.Buffer
		w, err := flate.NewWriter(&to, level)
		if err == nil {
			_, err = w.Write(raw)
		}
		if err == nil && w.Close() == nil && to.Len() < len(shortest) {
			shortest = to.Bytes()
		}
	}
	return shortest
}
