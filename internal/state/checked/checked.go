// Package checked has numbers in shared memory that carry their own checksums. A bit that flips in one of them is found
// when the number is read next, before anything is decided by it.
//
// A number and its checksum are the upper 48 and the lower 16 bits of one word of 64 bits. One store writes both. So a
// process that is killed at any instant leaves the old number or the new one, each with its own checksum, and a flip
// is never mistaken for a kill. Two copies of a number would not have this: a kill between the two stores leaves them
// different, as a flip does.
//
// The checksum is CRC-16/IBM-3740 ("CCITT-FALSE": 0x1021, from 0xffff on) of the six bytes of the number, the lowest
// first. It finds every flip of one to three bits of a word. A word of zeros has a wrong checksum: memory that nobody
// has written is not taken for the number 0.
//
// What is longer than a word has a checksum in a word of its own ([Sum]). Such a sum is written behind what it is of,
// and before the word that says that it counts.
package checked

import (
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"unsafe"
)

// Most is the largest number that a word can have.
const Most = 1<<numberBits - 1

const (
	numberBits = 48
	sumBits    = 64 - numberBits
	polynomial = 0x1021
)

// Word is a number from 0 to [Most].
type Word struct{ bits atomic.Uint64 }

// Int is a number whose magnitude is less than 2^47.
type Int struct{ Word }

// Flag is true or false.
type Flag struct{ Word }

// Damage is what a read of a damaged number panics with: the number must decide nothing.
type Damage struct {
	At    unsafe.Pointer // the word
	Found uint64
}

func (d *Damage) Error() string {
	return fmt.Sprintf("a word holds %#016x, and its checksum is another: memory has changed since it was written",
		d.Found)
}

// Seal returns the word of a number.
func Seal(number uint64) uint64 {
	if number > Most {
		panic(fmt.Sprintf("checked: the number %d: expected at most %d", number, uint64(Most)))
	}
	return number<<sumBits | uint64(sumOf(number))
}

// Open returns the number of a word; ok is false if the word is damaged.
func Open(word uint64) (number uint64, ok bool) {
	number = word >> sumBits
	return number, uint16(word) == sumOf(number)
}

// BeforeStore, if it is not nil, is called before a number is written. A simulation ends its process there: between any
// two stores. It is set before the first number is used.
var BeforeStore func(w *Word)

// Store writes a number.
func (w *Word) Store(number uint64) {
	if BeforeStore != nil {
		BeforeStore(w)
	}
	w.bits.Store(Seal(number))
}

// Load reads the number. It panics with a [*Damage] if the word is damaged.
func (w *Word) Load() uint64 {
	word := w.bits.Load()
	number, ok := Open(word)
	if !ok {
		panic(&Damage{unsafe.Pointer(w), word})
	}
	return number
}

// Check returns the damage of the word, or nil.
func (w *Word) Check() *Damage {
	if word := w.bits.Load(); Seal(word>>sumBits) != word {
		return &Damage{unsafe.Pointer(w), word}
	}
	return nil
}

// Add adds to the number. Only one goroutine may write it.
func (w *Word) Add(n uint64) { w.Store(w.Load() + n) }

// CompareAndSwap writes a number if the word has another one, and reports whether it did.
func (w *Word) CompareAndSwap(was, number uint64) bool {
	if BeforeStore != nil {
		BeforeStore(w)
	}
	return w.bits.CompareAndSwap(Seal(was), Seal(number)) || w.Load() == was && w.CompareAndSwap(was, number)
}

// Store writes a number.
func (i *Int) Store(number int64) {
	if number > Most/2 || number < -Most/2 {
		panic(fmt.Sprintf("checked: the number %d: expected a magnitude of at most %d", number, int64(Most/2)))
	}
	i.Word.Store(uint64(number) & Most)
}

// Load reads the number. It panics with a [*Damage] if the word is damaged.
func (i *Int) Load() int64 { return int64(i.Word.Load()<<sumBits) >> sumBits }

// Store writes true or false.
func (f *Flag) Store(value bool) {
	number := uint64(0)
	if value {
		number = 1
	}
	f.Word.Store(number)
}

// Load reads the flag. It panics with a [*Damage] if the word is damaged.
func (f *Flag) Load() bool { return f.Word.Load() == 1 }

// Sum is the checksum of what is longer than a word: CRC-32C, for which processors have an instruction.
type Sum struct{ Word }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Of returns the checksum of some bytes.
func Of(parts ...[]byte) uint32 {
	sum := uint32(0)
	for _, part := range parts {
		sum = crc32.Update(sum, castagnoli, part)
	}
	return sum
}

// Write writes the checksum of some bytes.
func (s *Sum) Write(parts ...[]byte) { s.Store(uint64(Of(parts...))) }

// Holds reports whether the bytes have the checksum. It panics with a [*Damage] if the checksum itself is damaged.
func (s *Sum) Holds(parts ...[]byte) bool { return s.Load() == uint64(Of(parts...)) }

// Verify panics with a [*Damage] unless the bytes have the checksum.
func (s *Sum) Verify(parts ...[]byte) {
	if !s.Holds(parts...) {
		panic(&Damage{unsafe.Pointer(s), s.bits.Load()})
	}
}

// Catch sets an error if the caller panics with a [*Damage]. It is deferred. Other panics go on.
func Catch(err *error) {
	switch cause := recover().(type) {
	case nil:
	case *Damage:
		*err = cause
	default:
		panic(cause)
	}
}

// table has the checksum of each byte.
var table = func() (t [256]uint16) {
	for i := range t {
		sum := uint16(i) << 8
		for range 8 {
			carry := sum>>15 != 0
			if sum <<= 1; carry {
				sum ^= polynomial
			}
		}
		t[i] = sum
	}
	return t
}()

// sumOf returns the checksum of a number.
func sumOf(number uint64) uint16 {
	sum := uint16(0xffff)
	for range numberBits / 8 {
		sum = sum<<8 ^ table[byte(sum>>8)^byte(number)]
		number >>= 8
	}
	return sum
}
