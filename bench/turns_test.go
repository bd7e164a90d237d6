//go:build linux

package bench

import (
	"context"
	"slices"
	"testing"
	"time"

	"plimsoll/ledger"
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

// TestEveryTurnHasItsSpeed: a turn says how long all parameters take at its speed, however few it walks.
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
	times := map[int]float64{}
	for _, turns.chunks = range []int{2, 64} {
		var took []float64
		for range 21 {
			took = append(took, turns.turn(updatePass))
		}
		times[turns.chunks] = median(took)
	}
	if ratio := times[64] / times[2]; ratio < 0.4 || ratio > 2.5 {
		t.Errorf("turns of 64 chunks say %g s for all, turns of 2 chunks %g s", times[64], times[2])
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
	turns, sum := newTurns(c, state), 0.0
	begin := time.Now()
	for range 50 {
		sum += turns.turn(updatePass) * turns.part()
	}
	if wall := time.Since(begin).Seconds(); sum > wall || sum < 0.9*wall {
		t.Errorf("the turns took %g s, and say %g s", wall, sum)
	}
}
