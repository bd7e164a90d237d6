//go:build linux

package bench

import (
	"context"
	"math"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
)

// TestTurnsWalkTheState: the turns of all passes together walk through the chunks of each worker, one after the other
// and around, and no turn begins where the last one began.
func TestTurnsWalkTheState(t *testing.T) {
	r := usual()
	r.Journal, r.Parameters, r.Ranks = true, []string{"2000001"}, 2
	c := planOf(t, r, ledger.GiB).Cases[0]
	state, err := MakeState(context.Background(), c.Shards)
	defer func() { _ = closeAll(state) }()
	if err != nil {
		t.Fatal(err)
	}
	turns := newTurns(c, state)
	if want := []int{trafficPass, updatePass, normPass, loggedPass}; !slices.Equal(turns.measured, want) {
		t.Errorf("passes %v, want %v", turns.measured, want)
	}
	elements := 0.0
	for _, rank := range turns.walkers {
		for _, w := range rank {
			elements += w.own
			w.next = 0
		}
	}
	if int64(elements) != c.Held {
		t.Errorf("the workers have %g of %d elements", elements, c.Held)
	}
	w := turns.walkers[1][0]
	turns.chunks = 3
	walked := 0
	for turn := range 20 {
		walked += turns.chunksOf(turn % passes)
		if seconds := turns.turn(turn % passes); seconds <= 0 || w.next != walked%len(w.chunks) {
			t.Errorf("turn %d: %g s, then at chunk %d of %d", turn, seconds, w.next, len(w.chunks))
		}
	}
}

// TestEveryTurnHasItsSpeed: a turn says how long all parameters take at its speed, however few it walks. The clock of
// the test goes by the chunks that the worker has walked. By a real clock, other processes make long turns slower than
// short ones.
func TestEveryTurnHasItsSpeed(t *testing.T) {
	r := usual()
	r.Parameters, r.Workers = []string{"4Mi"}, []int{1}
	c := planOf(t, r, ledger.GiB).Cases[0]
	state, err := MakeState(context.Background(), c.Shards)
	defer func() { _ = closeAll(state) }()
	if err != nil {
		t.Fatal(err)
	}
	turns := newTurns(c, state)
	w := turns.walkers[0][0]
	const pace = 3 * time.Millisecond // of a chunk
	var clock time.Time
	at := w.next
	turns.now = func() time.Time {
		clock = clock.Add(time.Duration((w.next-at+len(w.chunks))%len(w.chunks)) * pace)
		at = w.next
		return clock
	}
	want := (time.Duration(len(w.chunks)) * pace).Seconds()
	for _, turns.chunks = range []int{1, 2, 5, len(w.chunks) - 1} {
		if seconds := turns.turn(updatePass); math.Abs(seconds/want-1) > 1e-9 {
			t.Errorf("a turn of %d chunks says %g s for all, expected %g s", turns.chunks, seconds, want)
		}
	}
}

// TestWorkersThatShareACPU: they take as long as they take together, waits for the CPU included.
func TestWorkersThatShareACPU(t *testing.T) {
	r := usual()
	r.Parameters, r.Ranks, r.Workers = []string{"4Mi"}, 2, []int{1}
	c := planOf(t, r, ledger.GiB).Cases[0]
	c.Shards[1].CPUs, c.SharedCores = c.Shards[0].CPUs, true
	state, err := MakeState(context.Background(), c.Shards)
	defer func() { _ = closeAll(state) }()
	if err != nil {
		t.Fatal(err)
	}
	turns := newTurns(c, state)
	for try := 0; ; try++ { // others use the CPUs between turns, too
		sum, begin := 0.0, time.Now()
		for range 50 {
			sum += turns.turn(updatePass) * turns.part()
		}
		wall := time.Since(begin).Seconds()
		if sum <= wall && sum >= 0.9*wall {
			return
		}
		if sum > wall || try == 9 {
			t.Fatalf("the turns took %g s, and say %g s", wall, sum)
		}
	}
}
