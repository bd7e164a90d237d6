// Package summary sums up what was measured several times.
package summary

import "slices"

// Spread sums up a quantity over rounds.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Over returns the spread of a quantity over samples. There must be at least one sample.
func Over[T any](samples []T, quantity func(T) float64) Spread {
	var values []float64
	for _, s := range samples {
		values = append(values, quantity(s))
	}
	slices.Sort(values)
	n := len(values)
	return Spread{(values[(n-1)/2] + values[n/2]) / 2, values[0], values[n-1]}
}

// Median returns the median of values, or 0 for none.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	return Over(values, func(x float64) float64 { return x }).Median
}
