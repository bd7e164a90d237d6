package hosttest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// usualWork is the CPU time of [work] on a core of 2.5 GHz (Cascade Lake).
const usualWork = 80 * time.Millisecond

// Slowness returns how many times as much CPU time this host takes for plain work in Go as that core, at least 1. A
// limit of CPU time that is multiplied by it holds on slow hosts, too. Call it close to what is limited: hosts that
// others use have slow minutes.
func Slowness(t testing.TB) float64 {
	t.Helper()
	best := time.Hour
	for range 3 {
		begin := CPUTime(t)
		work()
		best = min(best, CPUTime(t)-begin)
	}
	return max(1, float64(best)/float64(usualWork))
}

// work allocates, hashes, formats and sorts.
func work() {
	r := rand.New(rand.NewPCG(1, 2))
	counts := map[string]int{}
	var names []string
	for range 1 << 16 {
		name := fmt.Sprintf("name %d", r.IntN(1<<15))
		counts[name]++
		names = append(names, name)
	}
	slices.Sort(names)
}
