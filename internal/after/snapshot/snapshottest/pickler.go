// Package snapshottest writes memory snapshots as PyTorch does, from a training that never ran. Only tests import it.
package snapshottest

import (
	"bufio"
	"encoding/binary"
	"io"
	"math"
)

// Style is the pickler whose output is imitated.
type Style int

// The picklers: Python's of a protocol, and PyTorch's in C++, which writes protocol 2.
const (
	TorchScript Style = 1
	Python2     Style = 2
	Python4     Style = 4
	Python5     Style = 5
)

// pickler writes the instructions. Python's picklers put a list or dictionary into the memo before its content, and
// the one in C++ after it.
type pickler struct {
	w     *bufio.Writer
	style Style
	memo  uint32
	texts map[string]uint32
}

func newPickler(w io.Writer, style Style) *pickler {
	p := &pickler{w: bufio.NewWriterSize(w, 1<<20), style: style, texts: map[string]uint32{}}
	protocol := byte(style)
	if style == TorchScript {
		protocol = 2
	}
	p.w.Write([]byte{0x80, protocol})
	return p
}

func (p *pickler) finish() error {
	p.op('.')
	return p.w.Flush()
}

func (p *pickler) op(op byte) { p.w.WriteByte(op) }

// put gives the last object the next number.
func (p *pickler) put() uint32 {
	switch {
	case p.style >= Python4:
		p.op(0x94)
	case p.memo < 256:
		p.w.Write([]byte{'q', byte(p.memo)})
	default:
		p.op('r')
		p.w.Write(binary.LittleEndian.AppendUint32(nil, p.memo))
	}
	p.memo++
	return p.memo - 1
}

func (p *pickler) get(n uint32) {
	if n < 256 {
		p.w.Write([]byte{'h', byte(n)})
		return
	}
	var b [5]byte
	b[0] = 'j'
	binary.LittleEndian.PutUint32(b[1:], n)
	p.w.Write(b[:])
}

func (p *pickler) text(s string) {
	if n, known := p.texts[s]; known {
		p.get(n)
		return
	}
	if p.style >= Python4 && len(s) < 256 {
		p.w.Write([]byte{0x8c, byte(len(s))})
	} else {
		p.op('X')
		p.w.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
	}
	p.w.WriteString(s)
	p.texts[s] = p.put()
}

func (p *pickler) integer(n int64) {
	var b [9]byte
	switch {
	case n >= 0 && n < 256:
		p.w.Write([]byte{'K', byte(n)})
	case n >= 0 && n < 1<<16:
		p.w.Write([]byte{'M', byte(n), byte(n >> 8)})
	case n >= math.MinInt32 && n <= math.MaxInt32:
		b[0] = 'J'
		binary.LittleEndian.PutUint32(b[1:], uint32(n))
		p.w.Write(b[:5])
	default:
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		length := 8
		for p.style != TorchScript && length > 1 && b[length-1] == 0 && b[length-2] < 0x80 {
			length--
		}
		p.w.Write([]byte{0x8a, byte(length)})
		p.w.Write(b[:length])
	}
}

func (p *pickler) boolean(b bool) {
	if b {
		p.op(0x88)
	} else {
		p.op(0x89)
	}
}

// batch is how many elements Python's picklers add at a time.
const batch = 1000

// sequence writes a list and returns its number in the memo.
func (p *pickler) sequence(length int, element func(i int)) uint32 {
	p.op(']')
	n := uint32(0)
	if p.style != TorchScript {
		n = p.put()
	}
	for i := range length {
		if i == 0 || p.style != TorchScript && i%batch == 0 {
			p.op('(')
		}
		element(i)
		if i == length-1 || p.style != TorchScript && i%batch == batch-1 {
			p.op('e')
		}
	}
	if p.style == TorchScript {
		if length == 0 {
			p.w.WriteString("(e")
		}
		n = p.put()
	}
	return n
}

// mapping writes a dictionary and returns its number in the memo.
func (p *pickler) mapping(pairs ...any) uint32 {
	p.op('}')
	n := uint32(0)
	if p.style != TorchScript {
		n = p.put()
	}
	p.op('(')
	for i := 0; i < len(pairs); i += 2 {
		p.text(pairs[i].(string))
		p.value(pairs[i+1])
	}
	p.op('u')
	if p.style == TorchScript {
		n = p.put()
	}
	return n
}

func (p *pickler) value(v any) {
	switch v := v.(type) {
	case string:
		p.text(v)
	case int64:
		p.integer(v)
	case bool:
		p.boolean(v)
	case float64:
		p.op('G')
		p.w.Write(binary.BigEndian.AppendUint64(nil, math.Float64bits(v)))
	case func():
		v()
	}
}

// pool writes the id of the default pool.
func (p *pickler) pool() {
	p.integer(0)
	p.integer(0)
	p.op(0x86)
	p.put()
}
