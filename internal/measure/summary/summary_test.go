package summary

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestOver(t *testing.T) {
	itself := func(x float64) float64 { return x }
	for _, test := range []struct {
		values []float64
		want   Spread
	}{
		{[]float64{3}, Spread{3, 3, 3}},
		{[]float64{4, 1}, Spread{2.5, 1, 4}},
		{[]float64{9, 1, 2}, Spread{2, 1, 9}},
		{[]float64{8, 1, 2, 4}, Spread{3, 1, 8}},
	} {
		if got := Over(test.values, itself); got != test.want {
			t.Errorf("%v: %+v, want %+v", test.values, got, test.want)
		}
	}
	// The median has as many values on one side as on the other, in any order.
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(0, 1e6), 1, 50).Draw(t, "values")
		got := Over(values, itself)
		below, above := 0, 0
		for _, x := range values {
			if x < got.Median {
				below++
			}
			if x > got.Median {
				above++
			}
		}
		if below > len(values)/2 || above > len(values)/2 || got.Min != slices.Min(values) ||
			got.Max != slices.Max(values) {
			t.Fatalf("%v: %+v", values, got)
		}
		rand.Shuffle(len(values), func(i, j int) { values[i], values[j] = values[j], values[i] })
		if again := Over(values, itself); again != got {
			t.Fatalf("%v: %+v, then %+v", values, got, again)
		}
	})
}
