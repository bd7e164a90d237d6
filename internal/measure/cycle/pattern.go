//go:build linux

package cycle

import (
	"encoding/binary"
	"fmt"
)

// pattern is made-up bytes that tell where they belong. Every so many bytes a word is a stamp, which also tells how
// many steps have updated it.
type pattern struct{ words, stamps uint64 }

const (
	stampEvery = 64 << 10
	word       = 8
)

// mix is the output function of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// statesOf returns the pattern of the states of a chunk.
func statesOf(chunk int) pattern {
	seed := mix(uint64(chunk)<<2 + 1)
	return pattern{seed, seed}
}

// parametersOf and gradientsOf return the patterns of what a chunk has on the device beside its states. One buffer
// stands in for all chunks, so only the stamps tell them apart.
func parametersOf(chunk int) pattern { return pattern{0, mix(uint64(chunk)<<2 + 2)} }
func gradientsOf(chunk int) pattern  { return pattern{0, mix(uint64(chunk)<<2 + 3)} }

func (p pattern) word(at int) uint64 { return mix(p.words + uint64(at)) }

func (p pattern) stamp(at int, step int64) uint64 {
	return mix(p.stamps + uint64(at) + uint64(step)<<40)
}

// fill writes words from a place on, a multiple of stampEvery, and the stamps of a step.
func (p pattern) fill(memory []byte, from int, step int64) {
	for i := 0; i+word <= len(memory); i += word {
		binary.LittleEndian.PutUint64(memory[i:], p.word(from+i))
	}
	p.put(memory, from, step)
}

// put writes the stamps of a step.
func (p pattern) put(memory []byte, from int, step int64) {
	for i := 0; i+word <= len(memory); i += stampEvery {
		binary.LittleEndian.PutUint64(memory[i:], p.stamp(from+i, step))
	}
}

// erase writes stamps that are of no step.
func erase(memory []byte) {
	for i := 0; i+word <= len(memory); i += stampEvery {
		clear(memory[i : i+word])
	}
}

// check compares the stamps with those of a step.
func (p pattern) check(memory []byte, step int64) error {
	for i := 0; i+word <= len(memory); i += stampEvery {
		if binary.LittleEndian.Uint64(memory[i:]) != p.stamp(i, step) {
			return misplaced(i)
		}
	}
	return nil
}

// checkAll also compares all words between the stamps.
func (p pattern) checkAll(memory []byte, step int64) error {
	if err := p.check(memory, step); err != nil {
		return err
	}
	for i := 0; i+word <= len(memory); i += word {
		if i%stampEvery != 0 && binary.LittleEndian.Uint64(memory[i:]) != p.word(i) {
			return misplaced(i)
		}
	}
	return nil
}

func misplaced(at int) error {
	return fmt.Errorf("byte %d is another one than was sent: a piece was left out, or copied to another place", at)
}
