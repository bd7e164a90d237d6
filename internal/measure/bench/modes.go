//go:build linux

package bench

import (
	"math"
	"slices"

	"plimsoll/internal/measure/summary"
)

// Mode is a speed at which memory served some of the turns.
type Mode struct {
	Rate  float64 `json:"bytes_per_second"` // the median
	Share float64 `json:"share_of_turns"`
}

// A speed is one of two modes where the two are well apart, both are frequent, and little lies between them. A split of
// numbers that are evenly spread explains three quarters of their variance.
const (
	leastModeRatio = 1.2
	leastModeShare = 0.1
	leastExplained = 0.85
)

// Modes returns one or two modes of the speed of memory, the slower first. The memory of some hosts serves several
// workers at one of two speeds, minute by minute, and a mean of both is the speed of neither.
func Modes(rates []float64) []Mode {
	sorted := slices.Sorted(slices.Values(rates))
	if len(sorted) == 0 {
		return nil
	}
	at, explained := split(sorted)
	slow, fast := modeOf(sorted[:at], len(sorted)), modeOf(sorted[at:], len(sorted))
	if at == 0 || explained < leastExplained || fast.Rate < leastModeRatio*slow.Rate ||
		min(slow.Share, fast.Share) < leastModeShare {
		return []Mode{modeOf(sorted, len(sorted))}
	}
	return []Mode{slow, fast}
}

// Modes returns the modes of the memory in all turns of traffic.
func (r Result) Modes() []Mode {
	bytes := float64(r.TrafficBytes())
	var rates []float64
	for _, s := range r.Samples {
		for _, seconds := range s.TrafficTurns {
			rates = append(rates, bytes/seconds)
		}
	}
	return Modes(rates)
}

func modeOf(sorted []float64, all int) Mode {
	return Mode{summary.Median(sorted), float64(len(sorted)) / float64(all)}
}

// split returns the place that divides sorted numbers into the two groups with the least variance of logarithms within
// them, and which part of all variance the division explains (N. Otsu, "A threshold selection method from gray-level
// histograms").
func split(sorted []float64) (at int, explained float64) {
	sum, squares := 0.0, 0.0
	for _, x := range sorted {
		y := math.Log(x)
		sum, squares = sum+y, squares+y*y
	}
	n := float64(len(sorted))
	variance := squares/n - sum*sum/n/n
	if variance <= 1e-12 {
		return 0, 0
	}
	below := 0.0
	for i, x := range sorted[:len(sorted)-1] {
		below += math.Log(x)
		k := float64(i + 1)
		apart := below/k - (sum-below)/(n-k)
		if part := k / n * (1 - k/n) * apart * apart / variance; part > explained {
			at, explained = i+1, part
		}
	}
	return at, explained
}
