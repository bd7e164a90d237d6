package export

import (
	"io"
	"slices"

	"github.com/google/pprof/profile"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

// The values of a sample. A component counts at its device's highest peak only in the first two, so that sums are of
// one instant.
const (
	plannedAtPeak = iota
	measuredAtPeak
	plannedByPhase
	measuredByPhase
)

// writeProfile writes a profile for go tool pprof. Its stacks are device, phase and component, of the host and of the
// GPUs.
func writeProfile(w io.Writer, s *Source) error {
	p := &profile.Profile{SampleType: []*profile.ValueType{
		{Type: "planned", Unit: "bytes"}, {Type: "measured", Unit: "bytes"},
		{Type: "planned_by_phase", Unit: "bytes"}, {Type: "measured_by_phase", Unit: "bytes"},
	}, DefaultSampleType: "planned"}
	if s.Recorded {
		p.DefaultSampleType = "measured"
	}
	frames := map[string]*profile.Location{}
	frame := func(name string) *profile.Location {
		name = safe.Line(name)
		if frames[name] == nil {
			id := uint64(len(frames) + 1)
			f := &profile.Function{ID: id, Name: name}
			frames[name] = &profile.Location{ID: id, Line: []profile.Line{{Function: f}}}
			p.Function, p.Location = append(p.Function, f), append(p.Location, frames[name])
		}
		return frames[name]
	}
	atPlanned := s.highest(func(p *reconcile.Peak) *ledger.Bytes { return p.Planned })
	atMeasured := s.highest(func(p *reconcile.Peak) *ledger.Bytes { return p.Measured })
	isAt := func(peaks []*reconcile.Peak, l ledger.Line) bool {
		return slices.ContainsFunc(peaks, func(p *reconcile.Peak) bool {
			return p.Device == l.Device && p.Rank == l.Rank && p.Phase == l.Phase && p.Iteration == l.Iteration
		})
	}
	for _, l := range s.Lines {
		if l.Device == ledger.Host && l.Rank != ledger.WholeNode {
			continue // the node has the sum
		}
		values := make([]int64, len(p.SampleType))
		values[plannedByPhase] = int64(l.Planned)
		if l.Measured != nil {
			values[measuredByPhase] = int64(*l.Measured)
		}
		if isAt(atPlanned, l) {
			values[plannedAtPeak] = values[plannedByPhase]
		}
		if isAt(atMeasured, l) {
			values[measuredAtPeak] = values[measuredByPhase]
		}
		p.Sample = append(p.Sample, &profile.Sample{Value: values,
			Location: []*profile.Location{frame(l.Component.Title()), frame(phaseOf(l.Phase, l.Iteration)),
				frame(device(l.Device, l.Rank))},
			Label: map[string][]string{"component": {safe.Line(string(l.Component))},
				"device": {device(l.Device, l.Rank)}, "phase": {safe.Line(phaseOf(l.Phase, l.Iteration))}},
		})
	}
	return p.Write(w)
}
