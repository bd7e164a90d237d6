package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
)

// The size of a chart in pixels. The viewer scales it.
const (
	chartWidth, chartHeight = 920, 260
	chartLeft, chartTop     = 72, 12
	bandTop, bandHeight     = chartTop + chartHeight + 6, 12
	columns                 = 460 // each has the lowest and the highest of its samples
)

// chart is a stacked area chart of a track as SVG.
type chart struct {
	Title  string
	Areas  []area
	Bands  []band
	Lines  []chartLine
	Ticks  []tick // of both axes
	Above  []string
	Width  int
	Height int
}

// area is one component of a chart.
type area struct {
	Title, Points, Peak string
	Class               string
}

// band is a phase below a chart.
type band struct {
	X, Width float64
	Phase    ledger.PhaseName
	Title    string
}

type chartLine struct {
	Y     float64
	Title string
}

type tick struct {
	X, Y  float64
	Text  string
	OfX   bool
	Right float64
}

// newChart draws a track. The planned peak is nil if there is none.
func newChart(track *reconcile.Track, t *reconcile.Timeline, planned *ledger.Bytes) *chart {
	c := &chart{Title: compared{track.Kind, track.Rank}.title(), Width: chartLeft + chartWidth + 28,
		Height: bandTop + bandHeight + 24}
	if track.Rank == ledger.WholeNode {
		c.Title = "optimizer service and plimsoll"
	}
	track = tidied(track)
	points := track.Curves[0].Points
	from, to := points[0].Time, points[len(points)-1].Time
	if to <= from {
		to = from + 1
	}
	kept, most := thinned(track)
	if planned != nil {
		most = max(most, *planned)
	}
	limits := t.Limits // of the host
	if track.Kind == ledger.GPU {
		limits = nil
	}
	for _, l := range limits {
		if l.Bytes <= 2*most {
			most = max(most, l.Bytes)
		} else {
			c.Above = append(c.Above, fmt.Sprintf("%s: %v", l.Name, l.Bytes))
		}
	}
	x := func(at time.Duration) float64 {
		return chartLeft + chartWidth*min(max(float64(at-from)/float64(to-from), 0), 1)
	}
	top := float64(most) * 1.05
	y := func(bytes ledger.Bytes) float64 { return chartTop + chartHeight*(1-float64(bytes)/max(top, 1)) }
	c.stack(track, kept, x, y)
	if planned != nil {
		c.Lines = append(c.Lines, chartLine{y(*planned), "planned peak: " + planned.String()})
	}
	for _, l := range limits {
		if float64(l.Bytes) <= top {
			c.Lines = append(c.Lines, chartLine{y(l.Bytes), fmt.Sprintf("%s: %v", l.Name, l.Bytes)})
		}
	}
	c.axes(from, to, ledger.Bytes(top), x, y)
	c.bands(t, track.Rank, from, to)
	return c
}

// tidied returns a track in which curves that are hardly seen are one, and memory that nobody has counted is on top.
func tidied(track *reconcile.Track) *reconcile.Track {
	_, most := thinned(track)
	full := &reconcile.Track{Kind: track.Kind, Rank: track.Rank}
	var small *reconcile.Curve
	for _, c := range track.Curves {
		switch {
		case len(track.Curves) <= 3 || highestOf(&c) >= most/100:
			full.Curves = append(full.Curves, c)
		case small == nil:
			small = &reconcile.Curve{Title: "other", Points: slices.Clone(c.Points)}
		default:
			for i := range small.Points {
				small.Points[i].Bytes += c.Points[i].Bytes
			}
		}
	}
	slices.SortStableFunc(full.Curves, func(a, b reconcile.Curve) int {
		return onTop(a.Component) - onTop(b.Component)
	})
	if small != nil {
		full.Curves = append(full.Curves, *small)
	}
	return full
}

// onTop is 1 for memory that no component is known of.
func onTop(c ledger.Component) int {
	if c.PartOf() == ledger.Unexplained {
		return 1
	}
	return 0
}

func highestOf(c *reconcile.Curve) ledger.Bytes {
	most := ledger.Bytes(0)
	for _, p := range c.Points {
		most = max(most, p.Bytes)
	}
	return most
}

// thinned returns the samples to draw: of every column the lowest and the highest, in order. It returns the highest
// sum, too.
func thinned(track *reconcile.Track) (kept []int, most ledger.Bytes) {
	points := track.Curves[0].Points
	sums := make([]ledger.Bytes, len(points))
	for _, c := range track.Curves {
		for i, p := range c.Points {
			sums[i] += p.Bytes
		}
	}
	per := max((len(points)+columns-1)/columns, 1)
	for i := 0; i < len(points); i += per {
		low, high := i, i
		for k := i; k < min(i+per, len(points)); k++ {
			if sums[k] < sums[low] {
				low = k
			}
			if sums[k] > sums[high] {
				high = k
			}
		}
		kept = append(kept, min(low, high))
		if low != high {
			kept = append(kept, max(low, high))
		}
		most = max(most, sums[high])
	}
	if last := len(points) - 1; kept[len(kept)-1] != last {
		kept = append(kept, last)
	}
	return kept, most
}

// stack makes an area of every curve, each on top of those before it.
func (c *chart) stack(track *reconcile.Track, kept []int, x func(time.Duration) float64, y func(ledger.Bytes) float64) {
	below := make([]ledger.Bytes, len(kept))
	var components []ledger.Component
	for _, curve := range track.Curves {
		components = append(components, curve.Component)
	}
	classes := colorClasses(components)
	for _, curve := range track.Curves {
		var upper, lower []string
		for k, i := range kept {
			p := curve.Points[i]
			lower = append(lower, fmt.Sprintf("%.1f,%.1f", x(p.Time), y(below[k])))
			below[k] += p.Bytes
			upper = append(upper, fmt.Sprintf("%.1f,%.1f", x(p.Time), y(below[k])))
		}
		slices.Reverse(lower)
		c.Areas = append(c.Areas, area{curve.Title, strings.Join(append(upper, lower...), " "),
			highestOf(&curve).String(), classes[curve.Component]})
	}
}

// axes adds four or five round sizes and five times.
func (c *chart) axes(from, to time.Duration, top ledger.Bytes, x func(time.Duration) float64,
	y func(ledger.Bytes) float64) {
	step := ledger.Bytes(math.Exp2(math.Floor(math.Log2(float64(max(top, 4)) / 3))))
	for at := ledger.Bytes(0); at <= top && step > 0; at += step {
		c.Ticks = append(c.Ticks, tick{X: chartLeft, Y: y(at), Text: at.String(), Right: chartLeft + chartWidth})
	}
	for i := range 6 {
		at := from + (to-from)*time.Duration(i)/5
		round := time.Second
		if to-from < 10*time.Second {
			round = 100 * time.Millisecond
		}
		c.Ticks = append(c.Ticks, tick{X: x(at), Y: bandTop + bandHeight + 16, Text: at.Round(round).String(),
			OfX: true})
	}
}

// bands adds the phases of the rank, or of the lowest rank where the track is of none: one for every pixel at most.
func (c *chart) bands(t *reconcile.Timeline, rank int, from, to time.Duration) {
	var spans []reconcile.Span
	for _, s := range t.Spans {
		if s.Rank == rank || rank == ledger.WholeNode && s.Rank == t.Spans[0].Rank {
			spans = append(spans, s)
		}
	}
	next := 0
	for px := range chartWidth {
		at := from + time.Duration((float64(px)+0.5)/chartWidth*float64(to-from))
		for next < len(spans) && spans[next].To <= at {
			next++
		}
		if next == len(spans) {
			return
		}
		s := &spans[next]
		if s.From > at {
			continue
		}
		x := chartLeft + float64(px)
		if n := len(c.Bands) - 1; n >= 0 && c.Bands[n].Phase == s.Phase && c.Bands[n].X+c.Bands[n].Width == x {
			c.Bands[n].Width++
			continue
		}
		c.Bands = append(c.Bands, band{x, 1, s.Phase, stageText(s.Phase, s.Iteration)})
	}
}
