//go:build linux

package kernel

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"plimsoll/internal/state/optim/kernel/abi"
)

// TestSummedUpdatesAgree compares summed updates with the reference, with and without an undo log. The sums are those
// of the streams before and after.
func TestSummedUpdatesAgree(t *testing.T) {
	for _, set := range testedSets(t) {
		for _, f := range formats() {
			t.Run(fmt.Sprintf("%v/%v", set, f), func(t *testing.T) {
				r := rand.New(rand.NewPCG(5, uint64(set)))
				for round := range 12 {
					n := 1 + r.IntN(9*f.granule())
					got, want := newChunk(t, f, n, 3), newChunk(t, f, n, 0)
					want.First = got.First
					fill(r, f, want, false)
					copyChunk(got, want)
					var log Undo
					if round%2 == 0 {
						log = UndoIn(guarded(t, f.UndoBytes(), 64, 0))
						log.Begin()
					}
					constants := steps(f.Algorithm)[1]
					var before, after [abi.UndoStreams]uint64
					got.sum(&before)
					var sums Sums
					set.UpdateSummed(f, &constants, got, log, &sums)
					got.sum(&after)
					updateReference(f, &constants, want)
					if d := differ(f, got, want); d != "" {
						t.Fatalf("n=%d: %s", n, d)
					}
					if sums.Before != before || sums.After != after {
						t.Fatalf("n=%d: the sums are %x, want %x before and %x after", n, sums, before, after)
					}
				}
			})
		}
	}
}

// TestSumFindsEveryFlip flips every bit of a stream whose size is no multiple of 8.
func TestSumFindsEveryFlip(t *testing.T) {
	stream := make([]byte, 77)
	for i := range stream {
		stream[i] = byte(i * 7)
	}
	want := wordSum(stream)
	for bit := range 8 * len(stream) {
		stream[bit/8] ^= 1 << (bit % 8)
		if wordSum(stream) == want {
			t.Errorf("a flip of bit %d is not found", bit)
		}
		stream[bit/8] ^= 1 << (bit % 8)
	}
}
