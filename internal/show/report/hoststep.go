package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/state/optim/kernel"
)

// HostStep is the time of an update by Plimsoll's optimizer on this host, as its profile has measured it.
type HostStep struct {
	Profile  string         `json:"profile"` // its file
	Measured time.Time      `json:"measured"`
	Ranks    int            `json:"ranks"` // of a node
	Formats  []HostStepTime `json:"formats"`
}

// HostStepTime is the time of an update in one format.
type HostStepTime struct {
	State          string  `json:"state"`
	Moments        string  `json:"moments"`
	Seconds        float64 `json:"seconds"`
	BytesPerSecond float64 `json:"bytes_per_second"`
	OptimizerCores int     `json:"optimizer_cores"` // of each rank
}

// HasHostStep reports whether the plan has optimizer states on the host, in a form that Plimsoll's formats hold.
func (d *PlanDocument) HasHostStep() bool {
	return len(d.StateFormats) > 0 && slices.ContainsFunc(d.Devices, func(device ledger.Device) bool {
		return device.Kind == ledger.Host && slices.ContainsFunc(device.Phases, func(phase ledger.Phase) bool {
			return slices.ContainsFunc(phase.Components, func(h ledger.Holding) bool {
				return h.Component == ledger.OptimizerStates && h.Bytes > 0
			})
		})
	})
}

// PredictHostStep adds the time of a step on this host. It needs a profile with a split for the ranks of a node.
// Formats whose gradients the profile has not measured are left out. Overlapped steps update as others do.
func (d *PlanDocument) PredictHostStep(p *profile.Profile, file string) {
	step := &HostStep{Profile: file, Measured: p.Measured, Ranks: d.Job.Ranks / max(1, d.Job.Nodes)}
	for _, format := range d.StateFormats {
		split := p.Split(step.Ranks, format.State, format.Moments)
		curve := p.Curve(step.Ranks, format.State, format.Moments)
		if split == nil || curve == nil || format.State != kernel.Split.String() || format.Overlap != "" {
			continue
		}
		parameters := float64(format.Bytes) / format.BytesPerParameter // of a node
		step.Formats = append(step.Formats, HostStepTime{
			State: format.State, Moments: format.Moments, BytesPerSecond: split.BytesPerSecond,
			Seconds: parameters * curve.BytesPerParameter / split.BytesPerSecond, OptimizerCores: split.Optimizer,
		})
	}
	if len(step.Formats) > 0 {
		d.HostStep = step
	}
}

// paragraph shows the times below the sizes of the state.
func (s *HostStep) paragraph() Paragraph {
	var formats []string
	for _, f := range s.Formats {
		formats = append(formats, fmt.Sprintf("%s moments %s", f.Moments, seconds(f.Seconds)))
	}
	return Paragraph(fmt.Sprintf("an update of it on this host, as Plimsoll makes it: %s (%s, measured %s)",
		strings.Join(formats, ", "), s.Profile, s.Measured.Local().Format(time.DateTime)))
}
