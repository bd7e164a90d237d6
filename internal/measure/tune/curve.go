//go:build linux

package tune

import (
	"math"
	"slices"
)

// Measure takes samples, in seconds, with so many cores, until enough of them were taken.
type Measure func(cores int, enough func(samples []float64) bool) ([]float64, error)

// Point is what was measured with a number of cores.
type Point struct {
	Cores   int
	Seconds float64 // the median of the samples
	Samples int
	// Uncertainty is the standard error of the median, as a fraction of it.
	Uncertainty float64

	all []float64 // the samples
}

// A point is measured until its uncertainty is small enough, within these numbers of samples.
const (
	precision    = 0.008
	leastSamples = 5
	mostSamples  = 21
)

// Curve is the time of some work as a function of the cores that it has. It is measured only where somebody asks for
// it. In between the time is taken for a straight line over one divided by the cores. It is one where all work is
// divided among the cores, where none is, and where a part is (Amdahl's law).
type Curve struct {
	measure Measure
	most    int // measurements that may be made
	made    int
	late    func() bool
	points  []Point // by cores
}

// NewCurve returns a curve for which at most so many measurements are made. When it is late, a point has as few samples
// as possible.
func NewCurve(measure Measure, most int, late func() bool) *Curve {
	return &Curve{measure: measure, most: most, late: late}
}

// Points returns what was measured.
func (c *Curve) Points() []Point { return c.points }

// leastPoints are measured even when it is late.
const leastPoints = 2

// at measures a point, and reports whether it did. It does not where the point was measured before, or where no further
// measurement may be made.
func (c *Curve) at(cores int) (bool, error) {
	_, measured := c.find(cores)
	if measured || c.made >= c.most || c.late() && len(c.points) >= leastPoints {
		return false, nil
	}
	return true, c.again(cores)
}

// again measures a point once more, and counts the samples of all times.
func (c *Curve) again(cores int) error {
	if c.made >= c.most || c.late() && len(c.points) >= leastPoints {
		return nil
	}
	c.made++
	samples, err := c.measure(cores, c.enough)
	if err != nil {
		return err
	}
	if i, measured := c.find(cores); measured {
		c.points[i] = newPoint(cores, append(c.points[i].all, samples...))
	} else {
		c.points = slices.Insert(c.points, i, newPoint(cores, samples))
	}
	return nil
}

func (c *Curve) find(cores int) (at int, measured bool) {
	return slices.BinarySearchFunc(c.points, cores, func(p Point, cores int) int { return p.Cores - cores })
}

// enough reports whether the median of the samples is known well enough.
func (c *Curve) enough(samples []float64) bool {
	switch n := len(samples); {
	case n < leastSamples:
		return false
	case n >= mostSamples || c.late():
		return true
	}
	return newPoint(0, samples).Uncertainty <= precision
}

// newPoint sums samples up. The quartiles of few samples are less sensitive to outliers than their standard deviation
// is. The constants are those of a normal distribution.
func newPoint(cores int, samples []float64) Point {
	const quartiles, ofMedian = 1.349, 1.2533
	sorted := slices.Sorted(slices.Values(samples))
	n := len(sorted)
	median := (sorted[(n-1)/2] + sorted[n/2]) / 2
	spread := (sorted[3*(n-1)/4] - sorted[(n-1)/4]) / quartiles
	return Point{cores, median, n, ofMedian * spread / math.Sqrt(float64(n)) / median, samples}
}

// Seconds returns the time with so many cores, measured or estimated. At least one point must have been measured.
func (c *Curve) Seconds(cores int) float64 {
	i, _ := c.find(cores)
	switch {
	case i == len(c.points):
		return c.points[i-1].Seconds
	case i == 0 || c.points[i].Cores == cores:
		return c.points[i].Seconds
	}
	before, after := c.points[i-1], c.points[i]
	of := func(cores int) float64 { return 1 / float64(cores) }
	share := (of(before.Cores) - of(cores)) / (of(before.Cores) - of(after.Cores))
	return (1-share)*before.Seconds + share*after.Seconds
}

// between returns the middle of the wider gap beside a number of cores, among measured points up to some number; 0 if
// both are too narrow, or no further point may be measured.
func (c *Curve) between(cores, upTo int) (middle int) {
	if c.made >= c.most {
		return 0
	}
	widest := resolution(cores)
	for i := 1; i < len(c.points) && c.points[i].Cores <= upTo; i++ {
		low, high := c.points[i-1].Cores, c.points[i].Cores
		if low <= cores && cores <= high && high-low > widest {
			widest, middle = high-low, (low+high)/2
		}
	}
	return middle
}

// Least returns the shortest time that was measured.
func (c *Curve) Least() float64 {
	return slices.MinFunc(c.points, func(a, b Point) int {
		if a.Seconds < b.Seconds {
			return -1
		}
		return 1
	}).Seconds
}

// resolution is the largest distance of measured points that is not worth another one.
func resolution(cores int) int { return max(1, cores/16) }

// Knee returns the fewest cores whose rate is at least a share of the best, to within the curve's resolution. The curve
// must have been measured with one core and with many.
func (c *Curve) Knee(share float64) (int, error) {
	for {
		bound := c.Least() / share
		high := slices.IndexFunc(c.points, func(p Point) bool { return p.Seconds <= bound })
		low := 0
		if high > 0 {
			low = c.points[high-1].Cores
		}
		cores := c.points[high].Cores
		if high == 0 || cores-low <= resolution(cores) || c.made >= c.most || c.late() {
			return cores, nil
		}
		if _, err := c.at((low + cores) / 2); err != nil {
			return 0, err
		}
	}
}

// mostPoints is more than a search ever needs.
const mostPoints = 40

// mostRuns is the most runs of a user's program.
const mostRuns = 6
