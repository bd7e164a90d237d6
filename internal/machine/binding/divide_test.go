//go:build linux

package binding

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestCutIsCheapest compares with all possible cuts.
func TestCutIsCheapest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.IntRange(1, 6).Draw(t, "parts")
		sizes := rapid.SliceOfN(rapid.IntRange(0, 3), parts, parts).Draw(t, "sizes")
		grow := rapid.SliceOfN(rapid.Bool(), parts, parts).Draw(t, "grow")
		length, most := 0, 0
		for i, size := range sizes {
			length += size
			if grow[i] {
				most++
			}
		}
		extra := rapid.IntRange(0, most).Draw(t, "extra")
		length += extra
		d, positions := divider{}, []int{}
		for i := range length {
			d.cores = append(d.cores, &core{groups: [levels]int{
				i / rapid.IntRange(1, 8).Draw(t, "package"), i / rapid.IntRange(1, 6).Draw(t, "die"),
				i / rapid.IntRange(1, 4).Draw(t, "node"), i / 3,
			}})
			positions = append(positions, i)
		}
		price := func(sizes []int) int {
			cost, end := 0, 0
			for _, size := range sizes {
				if end += size; end > 0 && end < length {
					cost += d.cost(end-1, end)
				}
			}
			return cost
		}
		best := -1
		for choice := range 1 << parts {
			trial, grown := slices.Clone(sizes), 0
			for i := range trial {
				if choice>>i&1 == 1 && grow[i] {
					trial[i]++
					grown++
				}
			}
			if cost := price(trial); grown == extra && (best < 0 || cost < best) {
				best = cost
			}
		}
		got := d.cut(positions, sizes, grow)
		sum := 0
		for i, size := range got {
			sum += size
			if size != sizes[i] && !(grow[i] && size == sizes[i]+1) {
				t.Fatalf("part %d grew from %d to %d", i, sizes[i], size)
			}
		}
		if sum != length {
			t.Fatalf("%v are not %d", got, length)
		}
		if cost := price(got); cost != best {
			t.Fatalf("%v costs %d, the cheapest %d", got, cost, best)
		}
	})
}
