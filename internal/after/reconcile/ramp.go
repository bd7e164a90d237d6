package reconcile

import (
	"cmp"
	"math"
	"slices"

	"plimsoll/internal/measure/summary"
)

// point is a size at a step, or at a time in seconds.
type point struct{ x, y float64 }

// ramp is a line that is flat, rises from one point to another, and is flat again.
type ramp struct {
	from, to float64 // where it rises
	slope    float64
	// every is the distance of the stairs, and jump their height, where it rises in stairs; else 0.
	every, jump float64
	toEnd       bool // it rises until the end
}

// rise returns how much the line rises.
func (r *ramp) rise() float64 { return r.slope * (r.to - r.from) }

const (
	leastRise   = 1 << 20 // bytes that count as growth
	leastPoints = 6
	// givenBack is the largest part of a rise that may be given back at one time. Garbage that is collected now and
	// then gives all of it back.
	givenBack  = 0.6
	candidates = 40
	mostPoints = 240
)

// floors returns the least size of every step, or of every few steps. A step holds more in its middle than at its ends,
// so the samples of one step have one floor. Where samples are rare, few of them are near a floor.
func floors(points []point) []point {
	var list []point
	for i, p := range points {
		switch {
		case i == 0 || p.x != points[i-1].x:
			list = append(list, p)
		case p.y < list[len(list)-1].y:
			list[len(list)-1] = p
		}
	}
	size := (len(list) + mostPoints - 1) / mostPoints
	if len(points) < 3*len(list) && len(list) >= 10*leastPoints {
		size = max(size, 5)
	}
	if size <= 1 {
		return list
	}
	var binned []point
	for i := 0; i+size <= len(list); i += size {
		binned = append(binned, slices.MinFunc(list[i:i+size], func(a, b point) int { return cmp.Compare(a.y, b.y) }))
	}
	return binned
}

// findRamp returns where points rise, or nil if they do not rise for good.
func findRamp(points []point) *ramp {
	if len(points) < leastPoints || points[0].x == points[len(points)-1].x {
		return nil
	}
	if highest(points)-lowest(points) < leastRise {
		return nil
	}
	r, last := fit(points)
	within := between(points, r)
	if len(within) < leastPoints-1 {
		return nil
	}
	if !r.stairs(within) {
		r.slope = theilSen(within)
	}
	if r.rise() < leastRise || drawdown(points) > givenBack*r.rise() || kendall(within) < 3 {
		return nil
	}
	r.toEnd = r.to >= last-max(0.1*(last-points[0].x), 2*r.every)
	return r
}

// fit returns the ramp with the least squares of differences, and the last place. A ramp with an end, or with a start,
// has to be better than a straight line by far.
func fit(points []point) (*ramp, float64) {
	var places []float64
	for i := range candidates + 1 {
		x := points[i*(len(points)-1)/candidates].x
		if len(places) == 0 || x > places[len(places)-1] {
			places = append(places, x)
		}
	}
	first, last := places[0], places[len(places)-1]
	const step = 64 << 10 // differences below are no noise of a process
	score := func(from, to float64) float64 {
		squares := leastSquares(points, from, to)/float64(len(points)) + step*step
		penalty := 0.0
		if from > first {
			penalty++
		}
		if to < last {
			penalty++
		}
		return float64(len(points))*math.Log(squares) + 3*penalty*math.Log(float64(len(points)))
	}
	best, found := math.Inf(1), &ramp{from: first, to: last}
	for i, from := range places {
		for _, to := range places[i+1:] {
			if s := score(from, to); s < best {
				best, found = s, &ramp{from: from, to: to}
			}
		}
	}
	return found, last
}

// leastSquares returns the sum of squares that the best ramp between two places leaves.
func leastSquares(points []point, from, to float64) float64 {
	var n, u, v, uu, uv, vv float64
	for _, p := range points {
		x, y := min(max(p.x, from), to)-from, p.y-points[0].y
		n, u, v, uu, uv, vv = n+1, u+x, v+y, uu+x*x, uv+x*y, vv+y*y
	}
	spread := uu - u*u/n
	if spread <= 0 {
		return vv - v*v/n
	}
	covariance := uv - u*v/n
	return max(vv-v*v/n-covariance*covariance/spread, 0)
}

func between(points []point, r *ramp) []point {
	var list []point
	for _, p := range points {
		if p.x >= r.from && p.x <= r.to {
			list = append(list, p)
		}
	}
	return list
}

// stairs finds jumps that are alike and come at equal distances.
func (r *ramp) stairs(points []point) bool {
	largest := 0.0
	for i := 1; i < len(points); i++ {
		largest = max(largest, points[i].y-points[i-1].y)
	}
	var at, heights []float64
	sum := 0.0
	for i := 1; i < len(points); i++ {
		if jump := points[i].y - points[i-1].y; jump > largest/2 {
			at, heights, sum = append(at, points[i].x), append(heights, jump), sum+jump
		}
	}
	if len(at) < 3 || len(at) > len(points)/3 || sum < 0.8*(points[len(points)-1].y-points[0].y) ||
		summary.Median(heights) < max(leastRise, 2*drawdown(points)) {
		return false
	}
	distance := (at[len(at)-1] - at[0]) / float64(len(at)-1)
	bin := (points[len(points)-1].x - points[0].x) / float64(len(points)-1)
	for i := 1; i < len(at); i++ {
		if math.Abs(at[i]-at[i-1]-distance) > 0.25*distance+bin {
			return false
		}
	}
	r.every, r.jump = distance, summary.Median(heights)
	r.slope = r.jump / distance
	return true
}

// theilSen returns the median of the slopes of all pairs. A quarter of the points may be anything.
func theilSen(points []point) float64 {
	var slopes []float64
	for i := range points {
		for _, q := range points[i+1:] {
			if q.x > points[i].x {
				slopes = append(slopes, (q.y-points[i].y)/(q.x-points[i].x))
			}
		}
	}
	return summary.Median(slopes)
}

// kendall returns how many standard deviations the order of the points is from chance (Mann and Kendall's test).
func kendall(points []point) float64 {
	sum := 0.0
	for i := range points {
		for _, q := range points[i+1:] {
			switch {
			case q.y > points[i].y:
				sum++
			case q.y < points[i].y:
				sum--
			}
		}
	}
	n := float64(len(points))
	return sum / math.Sqrt(n*(n-1)*(2*n+5)/18)
}

// drawdown returns the largest fall from a point to a later one.
func drawdown(points []point) float64 {
	high, most := math.Inf(-1), 0.0
	for _, p := range points {
		high = max(high, p.y)
		most = max(most, high-p.y)
	}
	return most
}

func highest(points []point) float64 {
	return slices.MaxFunc(points, func(a, b point) int { return cmp.Compare(a.y, b.y) }).y
}

func lowest(points []point) float64 {
	return slices.MinFunc(points, func(a, b point) int { return cmp.Compare(a.y, b.y) }).y
}
