package main

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/published"
)

var address = regexp.MustCompile(`https?://[^\s,;()]+`)

// tableOf returns the main figure of every run as the table of package published, in the order of the runs' names.
// Runs without a public address and modules by themselves are left out.
func tableOf(results []result) []byte {
	var list []published.Measurement
	for _, r := range compared(results) {
		c, source := r.compared[0], address.FindString(r.Source)
		if source == "" || c.plan == nil || c.Unit == perParameter || c.Of == "layer" {
			continue
		}
		device := ledger.GPU
		if strings.HasPrefix(c.Quantity, "cpu_") {
			device = ledger.Host
		}
		list = append(list, published.Measurement{Run: r.ID, Source: source, Engine: published.EngineOf(
			c.plan.Job.EngineName()), Device: device, Parameters: c.plan.Elements,
			Quantity: strings.Join(strings.Fields(c.Quantity+", "+c.Point), " "),
			Measured: ledger.Bytes(c.measured), Planned: ledger.Bytes(c.planned)})
	}
	slices.SortFunc(list, func(a, b published.Measurement) int { return cmp.Compare(a.Run, b.Run) })
	var lines strings.Builder
	for _, m := range list {
		lines.WriteString(m.Line())
	}
	return []byte(lines.String())
}
