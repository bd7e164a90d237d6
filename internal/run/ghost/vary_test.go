//go:build linux

package ghost

import (
	"slices"
	"strconv"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

func TestParseVariation(t *testing.T) {
	for text, want := range map[string]Variation{
		"batch=1,2,4": {Name: "batch", Values: []string{"1", "2", "4"}},
		"optim=sgd":   {Name: "optim", Values: []string{"sgd"}},
		"n=1..64":     {Name: "n", Values: []string{"1", "64"}, Range: true},
	} {
		if got, err := ParseVariation(text); err != nil || got.Name != want.Name || got.Range != want.Range ||
			!slices.Equal(got.Values, want.Values) {
			t.Errorf("%s is %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "batch", "=1,2", "batch=", "batch=1,,2", "n=2..1", "n=0..4", "n=a..b", "{n}=1"} {
		if got, err := ParseVariation(text); err == nil {
			t.Errorf("%q is %+v", text, got)
		}
	}
}

// TestBetween looks for the largest value that fits, where memory is a parabola of the value, in steps.
func TestBetween(t *testing.T) {
	testBetween(t, func(n int) ledger.Bytes { return ledger.Bytes(10+3*n+n*n/10) / 64 * 64 }, 0,
		[][2]int{{1, 200}, {1, 87}, {80, 512}})
}

// TestBetweenAtCliff looks for it where a line through two values always meets the limit beside the smaller one.
func TestBetweenAtCliff(t *testing.T) {
	cliff := func(n int) ledger.Bytes {
		if n > 20_000 {
			return 1 << 40
		}
		return 999
	}
	testBetween(t, cliff, near, [][2]int{{1, 30_000}, {15_000, 60_000}})
}

// testBetween plays ranges of values that need so much of 1,000 bytes. What is found lies by a part of it below what
// fits at most.
func testBetween(t *testing.T, need func(int) ledger.Bytes, below float64, ranges [][2]int) {
	const capacity = 1000
	played := func(n int) Varied {
		o := Varied{Value: strconv.Itoa(n), Verdict: plan.Fits, Devices: []ledger.Device{{Capacity: capacity,
			Interval: ledger.Interval{Upper: need(n)}}}}
		if need(n) > capacity {
			o.Verdict = plan.DoesNotFit
		}
		return o
	}
	for _, ends := range ranges {
		all := []Varied{played(ends[0]), played((ends[0] + ends[1]) / 2), played(ends[1])}
		for {
			value, found := between(all)
			if !found {
				break
			}
			if slices.ContainsFunc(all, func(o Varied) bool { return o.number() == value }) || len(all) > 20 {
				t.Fatalf("%v: plays %d again, or too many: %d", ends, value, len(all))
			}
			all = append(all, played(value))
		}
		largest := 0
		for _, o := range all {
			if o.Verdict == plan.Fits {
				largest = max(largest, o.number())
			}
		}
		want := 0
		for n := ends[0]; n <= ends[1] && need(n) <= capacity; n++ {
			want = n
		}
		if largest > want || float64(want-largest) > below*float64(want) {
			t.Errorf("%v: %d fits, want %d", ends, largest, want)
		}
	}
}

// TestNothingFits: where the smallest value does not fit, no other is played.
func TestNothingFits(t *testing.T) {
	over := Varied{Value: "500", Verdict: plan.DoesNotFit, Devices: []ledger.Device{{Capacity: 1}}}
	if value, found := between([]Varied{over, over}); found {
		t.Errorf("nothing fits, and %d is played", value)
	}
}
