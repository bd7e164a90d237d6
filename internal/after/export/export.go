// Package export writes plans and recordings in the formats of other programs: Perfetto traces, pprof profiles,
// Prometheus text and CSV.
package export

import (
	"fmt"
	"io"
	"slices"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
)

// Source is what is exported. Each part may be missing.
type Source struct {
	// Lines are components by device and phase, planned and measured.
	Lines ledger.Comparison
	// Peaks are the sums by device and phase.
	Peaks    []reconcile.Peak
	Growth   []reconcile.Growth
	Timeline *reconcile.Timeline // nil for a plan
	// Recorded is set if there are measurements.
	Recorded bool
	// Planned is set if there is a plan.
	Planned bool
}

// Format is how a plan or a recording is written for another program.
type Format struct {
	Name  string
	Write func(io.Writer, *Source) error
	// NeedsRecording is set for formats that show time.
	NeedsRecording bool
}

// Formats are all formats of this package.
var Formats = []Format{
	{"perfetto", writePerfetto, true},
	{"pprof", writeProfile, false},
	{"prometheus", writePrometheus, false},
	{"csv", writeCSV, false},
}

// device names a device.
func device(kind ledger.Kind, rank int) string {
	switch {
	case kind == ledger.GPU:
		return fmt.Sprintf("GPU of rank %d", rank)
	case rank == ledger.WholeNode:
		return "host"
	}
	return fmt.Sprintf("host, rank %d", rank)
}

func phaseOf(name ledger.PhaseName, iteration ledger.Iteration) string {
	switch {
	case name == "":
		return "run"
	case iteration == ledger.Once:
		return string(name)
	}
	return fmt.Sprintf("%s, %s", name, iteration)
}

// highest returns the peaks of each device that are highest in the plan, or in the measurement.
func (s *Source) highest(size func(*reconcile.Peak) *ledger.Bytes) []*reconcile.Peak {
	var list []*reconcile.Peak
	for i := range s.Peaks {
		p := &s.Peaks[i]
		if size(p) == nil {
			continue
		}
		at := slices.IndexFunc(list, func(o *reconcile.Peak) bool { return o.Device == p.Device && o.Rank == p.Rank })
		switch {
		case at < 0:
			list = append(list, p)
		case *size(p) > *size(list[at]):
			list[at] = p
		}
	}
	return list
}
