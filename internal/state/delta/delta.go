// Package delta has the messages that carry what steps have changed of the parameters (docs/delta.md): to processes
// that hold a copy, and to files.
//
// A message is exact. It says of which parameters it is after which step, and has the checksum of these parameters
// before and after. So a receiver knows before it changes anything that the message is whole, that it is the next one,
// and that the result will be what the trainer has.
package delta

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"

	"plimsoll/internal/base/dtype"
)

const (
	magic   = "plimdelt"
	version = 1

	// block is the number of elements of a piece that are written in one form.
	block = 4096

	flagWhole = 1
)

// Header is what a message is about.
type Header struct {
	// Whole says that the message has all parameters, and not what has changed of them. Before and From say nothing
	// then.
	Whole         bool
	From, To      uint64 // the steps before and after
	Before, After uint64 // the checksums of the parameters of all pieces
}

// Piece is a range of a parameter: Count elements of the flattened parameter from First on.
type Piece struct {
	Name         string
	Type         dtype.Type // BF16, F16 or F32
	Shape        []uint64   // of the full parameter
	First, Count uint64
}

// size returns the bytes of an element.
func (p *Piece) size() int { return int(p.Type.Size()) }

// bytes returns the size of the piece.
func (p *Piece) bytes() int64 { return int64(p.Count) * p.Type.Size() }

// blocks returns the number of blocks.
func (p *Piece) blocks() int { return int((p.Count + block - 1) / block) }

// inBlock returns the number of elements of a block.
func (p *Piece) inBlock(number int) int { return int(min(block, p.Count-uint64(number)*block)) }

// types are the element types of parameters, in the order of their numbers in a message.
var types = [...]dtype.Type{dtype.BF16, dtype.F16, dtype.F32}

// form is how a block is written.
type form byte

const (
	same  form = iota // nothing has changed
	apart             // the number of changes, and the distance of each to the one before
	bits              // a bit for each element
	dense             // all words
)

// streams are the parts of a message. Each is compressed by itself.
const (
	table  = iota // of the pieces
	forms         // a byte for each block
	counts        // of the changes of a block, where their places are gaps
	gaps          // between changes
	masks         // of changes
	values        // of changes of 16 bits: a byte each, or far
	words         // old xor new where a value is far; new words of 32 bits
	all           // the words of dense blocks
	streams
)

// far is the value of a change that a byte cannot hold.
const far = 255

// The checksum of parameters is the sum, modulo 2^64, of a number for each element, which depends on the name of the
// parameter, the place of the element in it, and its bits. So it does not depend on how ranks share a parameter, and a
// change of an element needs no other element. A change that was not made to deceive stays undetected with a
// probability of 2^-64, as far as the numbers are random. It is easy to construct one that does.

const (
	placeFactor = 0x9e3779b97f4a7c15
	wordFactor  = 0xd6e8feb86659fd93
)

// Seed returns what the numbers of the elements of a parameter begin with.
func Seed(name string) uint64 {
	sum := sha256.Sum256([]byte(name))
	return binary.LittleEndian.Uint64(sum[:])
}

// Term returns the number of an element.
func Term(seed, place uint64, word uint32) uint64 {
	x := seed + place*placeFactor ^ uint64(word)*wordFactor
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// Checksum returns the checksum of the words of a range of a parameter, which begins at a place.
func Checksum(name string, of dtype.Type, first uint64, data []byte) (sum uint64) {
	seed, size := Seed(name), int(of.Size())
	for at := 0; at < len(data); at += size {
		sum += Term(seed, first+uint64(at/size), word(data[at:], size))
	}
	return sum
}

// word returns the first word of some bytes.
func word(data []byte, size int) uint32 {
	if size == 2 {
		return uint32(binary.LittleEndian.Uint16(data))
	}
	return binary.LittleEndian.Uint32(data)
}

// appendWord appends a word.
func appendWord(to []byte, word uint32, size int) []byte {
	if size == 2 {
		return binary.LittleEndian.AppendUint16(to, uint16(word))
	}
	return binary.LittleEndian.AppendUint32(to, word)
}

// check refuses a piece that no parameter can have.
func (p *Piece) check() error {
	elements := uint64(1)
	for _, n := range p.Shape {
		if n != 0 && elements > math.MaxInt64/8/n {
			return fmt.Errorf("parameter %q has the shape %v: expected at most 2^60 elements", p.Name, p.Shape)
		}
		elements *= n
	}
	if p.First > elements || p.Count > elements-p.First {
		return fmt.Errorf("parameter %q: %d elements from %d on: expected a range within its %d", p.Name, p.Count,
			p.First, elements)
	}
	return nil
}
