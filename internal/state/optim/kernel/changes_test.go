//go:build linux

package kernel

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// newChanges returns room for the changes of some elements, with others in it that an update has to remove.
func newChanges(elements int) *Changes {
	c := NewChanges(elements)
	c.Old = make([]uint16, 0, c.RoomWords())
	for i := range c.Moves {
		c.Moves[i] = 1<<31 | 1
	}
	c.Old = append(c.Old, make([]uint16, ChangeGroup)...)
	return &c
}

// wordsOf returns the parameters of a chunk: 16 bits each, or those of fp32 masters.
func wordsOf(f Format, c Chunk) []uint32 {
	var words []uint32
	if !f.hasParameter() {
		return slices.Clone(view[uint32](bytesOf(c.Master)))
	}
	for _, word := range c.Parameter {
		words = append(words, uint32(word))
	}
	return words
}

// TestNotedUpdates makes updates that note what they change, with every set, format and length. The state has the bits
// of an update that notes nothing, and the changes are those that a comparison of all parameters finds. All sets note
// the same.
func TestNotedUpdates(t *testing.T) {
	sets := testedSets(t)
	for _, f := range formats() {
		t.Run(f.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(5, 1))
			lengths := []int{1, 17, 63, 64, 65, 300, 1000, comparedBlock + 300}
			for _, n := range lengths {
				start := newChunk(t, f, n, r.IntN(16))
				fill(r, f, start, n%2 == 0)
				settle(f, start)
				for step, constants := range steps(f.Algorithm) {
					for _, set := range sets {
						checkNoted(t, set, f, &constants, start, fmt.Sprintf("%v, n=%d, step %d", set, n, step))
					}
				}
			}
		})
	}
}

// settle makes parameters the copies of their masters that an update leaves.
func settle(f Format, c Chunk) {
	for i := range c.Len() {
		c.PutMasterWeight(f, i, c.MasterWeight(f, i))
	}
}

// checkNoted updates copies of a chunk.
func checkNoted(t *testing.T, set Set, f Format, constants *Constants, start Chunk, name string) {
	n := start.Len()
	want, got := newChunk(t, f, n, 0), newChunk(t, f, n, 1)
	copyChunk(want, start)
	copyChunk(got, start)
	want.First, got.First = start.First, start.First
	log := UndoIn(make([]byte, f.UndoBytes()))
	log.Begin()
	var wantSums, sums Sums
	set.UpdateSummed(f, constants, want, log, &wantSums)
	log.Begin()
	changes := newChanges(n)
	set.UpdateNoted(f, constants, got, log, &sums, changes)
	if d := differ(f, got, want); d != "" {
		t.Fatalf("%s: %s", name, d)
	}
	if sums != wantSums {
		t.Fatalf("%s: the sums are %v, expected %v", name, sums, wantSums)
	}
	checkChanges(t, f, changes, start, got, name)
}

// checkChanges compares changes with what two chunks have.
func checkChanges(t *testing.T, f Format, changes *Changes, was, is Chunk, name string) {
	old, now := wordsOf(f, was), wordsOf(f, is)
	before := map[int]uint16{}
	if f.hasParameter() {
		for element, word := range changes.All(is.Parameter) {
			before[element] = word
		}
	}
	changed := slices.Collect(changes.Changed())
	for i := range ChangeGroup * len(changes.Moves) {
		_, noted := slices.BinarySearch(changed, i)
		if noted != (i < len(old) && old[i] != now[i]) {
			t.Fatalf("%s: element %d of %d is noted as changed: %v", name, i, len(old), noted)
		}
		if noted && f.hasParameter() && uint32(before[i]) != old[i] {
			t.Fatalf("%s: element %d was %#x and became %#x, and is noted as %#x", name, i, old[i], now[i], before[i])
		}
	}
}
