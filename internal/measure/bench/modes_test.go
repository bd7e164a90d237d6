//go:build linux

package bench

import (
	"math/rand/v2"
	"testing"
)

// TestModes draws the speeds of turns from one or two normal distributions.
func TestModes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, test := range []struct {
		slow, fast, share float64 // share of the fast ones
		want              int
	}{
		{63, 98, 0.5, 2}, {63, 98, 0.8, 2}, {63, 98, 0.15, 2},
		{63, 98, 0.05, 1}, // some turns that others disturbed are no mode
		{63, 98, 1, 1}, {63, 70, 0.5, 1}, {63, 63, 0, 1},
	} {
		var rates []float64
		for i := range 1000 {
			rate := test.slow
			if i < int(1000*test.share) {
				rate = test.fast
			}
			rates = append(rates, rate*(1+0.03*random.NormFloat64()))
		}
		random.Shuffle(len(rates), func(i, j int) { rates[i], rates[j] = rates[j], rates[i] })
		got := Modes(rates)
		if len(got) != test.want {
			t.Errorf("%+v: %v", test, got)
			continue
		}
		if test.want == 2 && (got[0].Rate/test.slow-1 > 0.02 || got[1].Rate/test.fast-1 > 0.02 ||
			got[1].Share-test.share > 0.01 || got[0].Share+got[1].Share < 0.999) {
			t.Errorf("%+v: %v", test, got)
		}
	}
	// Even spreading is no pair of modes, nor are few turns.
	var even []float64
	for i := range 1000 {
		even = append(even, 50+float64(i)/20)
	}
	for _, rates := range [][]float64{even, {63}, {63, 63}} {
		if got := Modes(rates); len(got) != 1 || got[0].Share != 1 {
			t.Errorf("%d rates: %v", len(rates), got)
		}
	}
	if got := Modes(nil); got != nil {
		t.Errorf("no turns: %v", got)
	}
}
