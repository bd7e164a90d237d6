package ledger

import "math"

// Confidence is the share of runs whose peak is in the interval of a plan.
const Confidence = 0.9

// Interval is where the peak of a device is expected.
type Interval struct {
	Lower      Bytes   `json:"lower_bytes"`
	Upper      Bytes   `json:"upper_bytes"`
	Confidence float64 `json:"confidence"`
	// Sources make the interval wide, the largest first.
	Sources []Source `json:"sources"`
}

// Source is a mechanism whose bytes a plan cannot know exactly: a run may hold so many less or more than planned.
type Source struct {
	Name   string `json:"name"`
	Below  Bytes  `json:"below_bytes"`
	Above  Bytes  `json:"above_bytes"`
	Reason string `json:"reason"`
}

// Spread returns how far a figure may be below and above the plan. Sources are independent mechanisms, so they add up
// as standard deviations do: the root of the sum of their squares.
func Spread(sources []Source) (below, above Bytes) {
	var squaresBelow, squaresAbove float64
	for _, s := range sources {
		squaresBelow += float64(s.Below) * float64(s.Below)
		squaresAbove += float64(s.Above) * float64(s.Above)
	}
	return Bytes(math.Sqrt(squaresBelow)), Bytes(math.Sqrt(squaresAbove))
}

// Largest returns the source that makes the upper end highest, nil without one.
func (i *Interval) Largest() *Source {
	if len(i.Sources) == 0 {
		return nil
	}
	return &i.Sources[0]
}
