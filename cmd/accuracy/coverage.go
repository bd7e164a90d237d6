package main

import (
	"fmt"

	"github.com/jedib0t/go-pretty/v6/table"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// coverage counts measured figures by where they are: inside of their planned intervals, above or below.
type coverage struct{ inside, above, below int }

func (c coverage) rows() int      { return c.inside + c.above + c.below }
func (c coverage) share() float64 { return float64(c.inside) / float64(c.rows()) }

func (c coverage) String() string {
	return fmt.Sprintf("%d of %d (%.1f %%), %d above and %d below", c.inside, c.rows(), 100*c.share(), c.above, c.below)
}

// count counts a figure that was measured exactly.
func (c *coverage) count(measured ledger.Bytes, i ledger.Interval) {
	switch {
	case measured > i.Upper:
		c.above++
	case measured < i.Lower:
		c.below++
	default:
		c.inside++
	}
}

// coverageOf counts the main figures of runs.
func coverageOf(results []result) (c coverage) {
	for _, r := range compared(results) {
		switch main := r.compared[0]; {
		case !main.hasInterval():
		case main.isAbove():
			c.above++
		case main.isInside():
			c.inside++
		default:
			c.below++
		}
	}
	return c
}

// sourceCoverage counts the main figures of each source's runs.
type sourceCoverage map[string]coverage

func coverageBySource(results []result) sourceCoverage {
	groups, c := map[string][]result{}, sourceCoverage{}
	for _, r := range compared(results) {
		groups[r.family()] = append(groups[r.family()], r)
	}
	for name, group := range groups {
		if of := coverageOf(group); of.rows() > 0 {
			c[name] = of
		}
	}
	return c
}

// share returns the mean of the sources' shares, without one of them, which may be "".
func (c sourceCoverage) share(without string) float64 {
	var sum, sources float64
	for name, of := range c {
		if name != without {
			sum, sources = sum+of.share(), sources+1
		}
	}
	return sum / sources
}

// widthOf returns the median of the intervals' half widths, relative to the planned figure.
func widthOf(results []result) float64 {
	var widths []float64
	for _, r := range compared(results) {
		if main := r.compared[0]; main.hasInterval() {
			widths = append(widths, (main.upper-main.lower)/2/main.planned)
		}
	}
	return quantile(widths, 0.5)
}

// coverageTable returns what share of runs is inside of their intervals, and what the verdicts on them are.
func coverageTable(results []result) table.Writer {
	c, falseFits := coverageOf(results), 0
	verdicts := map[plan.Result]int{}
	for _, r := range results {
		falseFits += r.falseFits
		verdicts[r.verdict]++
	}
	t := table.NewWriter()
	t.AppendHeader(table.Row{"runs", "number"})
	for _, line := range []table.Row{
		{"with an interval", c.rows()}, {"inside of it", fmt.Sprintf("%d (%.1f %%)", c.inside, 100*c.share())},
		{"inside, each source with one value", fmt.Sprintf("%.1f %%", 100*coverageBySource(results).share(""))},
		{"above the upper end", c.above}, {"below the lower end", c.below},
		{"planned as \"fits\" on their GPU", verdicts[plan.Fits]},
		{"planned as \"tight\"", verdicts[plan.Tight]},
		{"planned as \"does not fit\", though they ran", verdicts[plan.DoesNotFit]},
		{"false \"fits\": out of memory, or more than the GPU has", falseFits},
	} {
		t.AppendRow(line)
	}
	return t
}
