package main

import (
	"bufio"
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// column is a column of results.csv.
type column struct {
	name  string
	value func(r result) float64
}

var columns = []column{
	{"v_mean", func(r result) float64 { return r.vMean }},
	{"v_spread", func(r result) float64 { return r.vSpread }},
	{"v_1_percent", func(r result) float64 { return r.v1 }},
	{"v_median", func(r result) float64 { return r.vMedian }},
	{"v_99_percent", func(r result) float64 { return r.v99 }},
	{"v_largest", func(r result) float64 { return r.vLargest }},
	{"v_drift", func(r result) float64 { return r.vDrift }},
	{"m_slope", func(r result) float64 { return r.mSlope }},
	{"m_error", func(r result) float64 { return r.mError }},
	{"update_slope", func(r result) float64 { return r.uSlope }},
	{"update_error", func(r result) float64 { return r.uError }},
	{"update_worst", func(r result) float64 { return r.uWorst }},
	{"idle_update", func(r result) float64 { return r.idle }},
}

func writeTable(w io.Writer, results []result) error {
	table := csv.NewWriter(w)
	header := []string{"beta2", "scenario", "code"}
	for _, c := range columns {
		header = append(header, c.name)
	}
	lines := [][]string{header}
	for _, r := range results {
		line := []string{strconv.FormatFloat(float64(r.beta2), 'g', -1, 32), r.scenario, r.code}
		for _, c := range columns {
			line = append(line, strconv.FormatFloat(c.value(r), 'g', 4, 64))
		}
		lines = append(lines, line)
	}
	return table.WriteAll(lines)
}

// writeSummary prints one line per code as Markdown, with v and the error of the update in each scenario.
func writeSummary(w io.Writer, results []result) error {
	var scenarios, codes []string
	cells := map[string][]string{}
	for _, r := range results {
		if len(scenarios) == 0 || scenarios[len(scenarios)-1] != r.scenario {
			scenarios = append(scenarios, r.scenario)
		}
		if cells[r.code] == nil {
			codes = append(codes, r.code)
		}
		cells[r.code] = append(cells[r.code], fmt.Sprintf("%.3g ± %.2g; %.2g", r.vMean, r.vSpread, r.uError))
	}
	var text strings.Builder
	fmt.Fprintf(&text, "beta2 = %g: v / true v, mean ± spread; relative error of the "+
		"update\n\n| code | %s |\n|---|%s\n", results[0].beta2, strings.Join(scenarios, " | "),
		strings.Repeat("---|", len(scenarios)))
	for _, c := range codes {
		fmt.Fprintf(&text, "| %s | %s |\n", c, strings.Join(cells[c], " | "))
	}
	text.WriteString("\n")
	_, err := io.WriteString(w, text.String())
	return err
}

// The plot has a panel for each of these scenarios and a line for each of these codes.
var (
	plottedScenarios = []string{"one scale", "4 decades", "sparse", "jumps"}
	plottedCodes     = []struct{ name, color string }{
		{"dynamic map, nearest (bitsandbytes)", "#c44e52"},
		{"3 digits, power of two, nearest", "#937860"},
		{"3 digits, largest as scale, random", "#dd8452"},
		{"chosen", "#4c72b0"},
	}
)

const (
	panelWidth, panelHeight = 400.0, 200.0
	left, above, between    = 50.0, 70.0, 60.0
	decades                 = 2 // of v, up and down
)

// writePlot draws v over the true v for the first beta2. The line is the median; the area is the range from the 1st
// to the 99th percentile.
func writePlot(w io.Writer, results []result) error {
	out := bufio.NewWriter(w)
	fmt.Fprintf(out,
		`<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" font-family="sans-serif" font-size="12">`+"\n",
		2*(left+panelWidth)+30, above+2*(panelHeight+between))
	fmt.Fprintln(out, `<rect width="100%" height="100%" fill="white"/>`)
	for k, c := range plottedCodes {
		x, y := left+float64(k%2)*(left+panelWidth), 15+18*float64(k/2)
		fmt.Fprintf(out,
			`<rect x="%.0f" y="%.0f" width="24" height="10" fill="%s"/><text x="%.0f" y="%.0f">%s</text>`+"\n",
			x, y, c.color, x+30, y+10, c.name)
	}
	for k, scenario := range plottedScenarios {
		fmt.Fprintf(out, `<g transform="translate(%.0f %.0f)">`+"\n", left+float64(k%2)*(left+panelWidth),
			above+float64(k/2)*(panelHeight+between))
		drawPanel(out, scenario, results)
		fmt.Fprintln(out, `</g>`)
	}
	fmt.Fprintln(out, `</svg>`)
	return out.Flush()
}

func drawPanel(out io.Writer, scenario string, results []result) {
	height := func(ratio float64) float64 {
		power := math.Log10(max(ratio, 1e-9))
		return panelHeight / 2 * (1 - min(max(power/decades, -1), 1))
	}
	curve := results[0].curve
	last := curve[len(curve)-1].step
	fmt.Fprintf(out,
		`<text x="0" y="-6">%s: v / true v</text><text x="%.0f" y="%.0f" text-anchor="end">step %.0f</text>`+"\n",
		scenario, panelWidth, panelHeight+16, last)
	for power := -decades; power <= decades; power++ {
		y := height(math.Pow(10, float64(power)))
		fmt.Fprintf(out, `<path d="M0 %.1fH%.0f" stroke="#ddd"/><text x="-6" y="%.1f" text-anchor="end">%g</text>`+
			"\n", y, panelWidth, y+4, math.Pow(10, float64(power)))
	}
	for _, c := range plottedCodes {
		for _, r := range results {
			if r.beta2 != results[0].beta2 || r.scenario != scenario || r.code != c.name {
				continue
			}
			var line, upper, lower string
			for _, p := range r.curve {
				x := panelWidth * p.step / last
				line += fmt.Sprintf(" %.1f,%.1f", x, height(p.median))
				upper += fmt.Sprintf(" %.1f,%.1f", x, height(p.high))
				lower = fmt.Sprintf(" %.1f,%.1f", x, height(p.low)) + lower
			}
			fmt.Fprintf(out,
				`<polygon points="%s" fill="%s" fill-opacity="0.15"/><polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n",
				(upper + lower)[1:], c.color, line[1:], c.color)
		}
	}
}
