package main

import (
	"fmt"
	"slices"

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
		if main := r.compared[0]; main.hasInterval() {
			c.add(main)
		}
	}
	return c
}

// add counts a figure as exactly as its source printed it.
func (c *coverage) add(figure comparison) {
	switch {
	case figure.isAbove():
		c.above++
	case figure.isInside():
		c.inside++
	default:
		c.below++
	}
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

// levels are the levels of memory that figures are of, in the order of the table, with the quantities of each.
var levels = []struct {
	name       string
	quantities []string
}{
	{"allocated by PyTorch", []string{"max_allocated", "allocated", "total"}},
	{"reserved by PyTorch", []string{"max_reserved", "reserved"}},
	{"in use on the GPU", []string{"nvidia_smi", "gpu_used"}},
	{"on the host", []string{"cpu_used", "cpu_rss", "cpu_delta_per_param"}},
}

// levelTable returns what share of all figures with an interval is inside of it, level by level.
func levelTable(results []result) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"figures", "with an interval", "inside of it", "above", "below",
		"median of the absolute error"})
	for _, level := range levels {
		var c coverage
		var errors []float64
		for _, r := range compared(results) {
			for _, figure := range r.compared {
				if slices.Contains(level.quantities, figure.Quantity) && figure.hasInterval() {
					c.add(figure)
					errors = append(errors, figure.error())
				}
			}
		}
		if c.rows() > 0 {
			t.AppendRow(table.Row{level.name, c.rows(), fmt.Sprintf("%d (%.1f %%)", c.inside, 100*c.share()), c.above,
				c.below, share(statisticsOf(errors).median)})
		}
	}
	return t
}

// coverageTable returns what share of runs is inside of their intervals, and what the verdicts on them are.
func coverageTable(results []result) table.Writer {
	c, falseFits := coverageOf(results), 0
	verdicts, ends := map[plan.Result]int{}, map[plan.Result]int{}
	for _, r := range results {
		falseFits += r.falseFits
		verdicts[r.verdict]++
		for _, end := range r.ends {
			ends[end]++
		}
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
		{"planned as \"does not fit\" or \"tight\", and ran out of memory", ends[plan.DoesNotFit] + ends[plan.Tight]},
		{"false \"fits\": out of memory, or more than the GPU has", falseFits},
	} {
		t.AppendRow(line)
	}
	return t
}
