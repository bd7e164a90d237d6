package export

import (
	"io"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

// writePrometheus writes gauges for the textfile collector of node_exporter.
func writePrometheus(w io.Writer, s *Source) error {
	registry := prometheus.NewRegistry()
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "plimsoll", Name: name, Help: help}, labels)
		registry.MustRegister(g)
		return g
	}
	peak := gauge("peak_bytes", "Memory of a device at its peak in a phase, planned or measured.",
		"source", "device", "rank", "phase", "iteration")
	component := gauge("component_bytes", "Memory of a component at the peak of a phase, planned or measured.",
		"source", "device", "rank", "phase", "iteration", "component")
	growth := gauge("growth_bytes_per_step", "Memory that rises from step to step.", "rank", "role", "kind", "shape")
	for _, p := range s.Peaks {
		set := func(source string, bytes *ledger.Bytes) {
			if bytes != nil {
				peak.WithLabelValues(labels(source, string(p.Device), rankLabel(p.Rank), string(p.Phase),
					string(p.Iteration))...).Set(float64(*bytes))
			}
		}
		set("planned", p.Planned)
		set("measured", p.Measured)
	}
	for _, l := range s.Lines {
		set := func(source string, bytes ledger.Bytes) {
			component.WithLabelValues(labels(source, string(l.Device), rankLabel(l.Rank), string(l.Phase),
				string(l.Iteration), string(l.Component))...).Set(float64(bytes))
		}
		if l.Planned != 0 {
			set("planned", l.Planned)
		}
		if l.Measured != nil {
			set("measured", *l.Measured)
		}
	}
	for _, g := range s.Growth {
		if g.Shape != reconcile.FirstStep && g.BytesPerStep != 0 {
			growth.WithLabelValues(labels(rankLabel(g.Rank), string(g.Role), string(g.Kind), string(g.Shape))...).
				Set(float64(g.BytesPerStep))
		}
	}
	families, err := registry.Gather()
	if err != nil {
		return err
	}
	for _, family := range families {
		if _, err := expfmt.MetricFamilyToText(w, family); err != nil {
			return err
		}
	}
	return nil
}

// labels returns values of labels that are safe to show. The format itself escapes quotes and line breaks alone.
func labels(values ...string) []string {
	for i, v := range values {
		values[i] = safe.Text(v)
	}
	return values
}

// rankLabel is empty for the whole node.
func rankLabel(rank int) string {
	if rank == ledger.WholeNode {
		return ""
	}
	return strconv.Itoa(rank)
}
