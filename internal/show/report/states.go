//go:build linux

package report

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/cycle"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/plan"
)

// StatesRehearsal is the document of a rehearsal with states that go to the device and back. The update by the CPU is
// rehearsed beside it.
type StatesRehearsal struct {
	Schema  string           `json:"schema"` // plimsoll.states/1
	Version string           `json:"version"`
	Verdict rehearse.Verdict `json:"verdict"`
	Model   RehearsedModel   `json:"model"`
	Job     StatesJob        `json:"job"`
	Host    RehearsedHost    `json:"host"`

	// BytesPerParameter are those of the host, without the stand-in for the device.
	BytesPerParameter BytesPerParameter `json:"bytes_per_parameter"`

	// CopyIn and CopyOut are the copies to the device and back; null where nothing was measured.
	CopyIn  *RehearsedLink `json:"copy_in"`
	CopyOut *RehearsedLink `json:"copy_out"`

	Steps []cycle.Step `json:"steps"`
	// Median are the medians over the steps after the first; null where nothing was measured.
	Median *cycle.Step `json:"median"`

	Roads []RehearsedRoad `json:"roads"`
	// Road is the road that makes a trainer wait least, and Reason says why. Road is empty where the links are unknown.
	Road   string `json:"road"`
	Reason string `json:"reason"`

	Ledger ledger.Comparison `json:"ledger"`
	CPU    *Rehearsal        `json:"cpu"` // null for an optimizer without an update by the CPU
	Notes  []string          `json:"notes"`

	timeline *rehearse.Timeline
}

// StatesJob describes the training.
type StatesJob struct {
	Optimizer        string       `json:"optimizer"`
	Mode             string       `json:"mode"`
	Recovery         bool         `json:"recovery"`
	State            string       `json:"state"`
	Moments          string       `json:"moments"`
	ParameterType    string       `json:"parameter_dtype"`
	GradientType     string       `json:"gradient_dtype"`
	ChunkBytes       ledger.Bytes `json:"chunk_bytes"`
	Chunks           int          `json:"chunks"`          // of the rank with most
	WindowBytes      ledger.Bytes `json:"window_bytes"`    // slots of a device
	TemporaryBytes   ledger.Bytes `json:"temporary_bytes"` // what an update holds beside them
	Ranks            int          `json:"ranks"`
	WorldSize        int          `json:"world_size"`
	ParametersOnHost int64        `json:"parameters_on_host"`
	ForwardSeconds   float64      `json:"forward_seconds"`
	BackwardSeconds  float64      `json:"backward_seconds"`
	// UpdateSeconds are those of the device. They were stated, or are those of an H100 by the law.
	UpdateSeconds float64 `json:"update_seconds"`
	UpdateStated  bool    `json:"update_stated"`
}

// RehearsedLink is the copies of a rank in one direction, those of a median step.
type RehearsedLink struct {
	Bytes  ledger.Bytes `json:"bytes"`
	Stated *float64     `json:"stated_bytes_per_second"` // null if no link was stated
	Speed  float64      `json:"bytes_per_second"`
	// LimitedBy is "link", or "host" if this host copies slower than that.
	LimitedBy string `json:"limited_by"`
}

// RehearsedRoad is one road. Seconds are null where they are not known.
type RehearsedRoad struct {
	Road             string       `json:"road"`
	HostBytes        ledger.Bytes `json:"host_bytes"`
	DeviceStepBytes  ledger.Bytes `json:"device_step_bytes"`
	DeviceRestBytes  ledger.Bytes `json:"device_rest_bytes"`
	CopyInSeconds    *float64     `json:"copy_in_seconds"`
	UpdateSeconds    *float64     `json:"update_seconds"`
	CopyOutSeconds   *float64     `json:"copy_out_seconds"`
	ExposedSeconds   *float64     `json:"exposed_seconds"`
	RehearsedSeconds *float64     `json:"rehearsed_exposed_seconds"`
}

// StatesSchema is the schema of the JSON document.
const StatesSchema = "plimsoll.states/1"

// roadOf are the names of the roads through the device, by mode.
var roadOf = map[string]string{cycle.Chunked: plan.ChunkedRoad, cycle.Whole: plan.WholeRoad}

// CPURoad is the rehearsal of the update by the CPU. The placement is nil where there is no such update, and the
// measurement where nothing was measured.
type CPURoad struct {
	Placement   *rehearse.Placement
	Verdict     rehearse.Verdict
	Measurement *rehearse.Measurement
}

// NewStatesRehearsal makes the document of a rehearsal. The measurement is nil when there is only a plan.
func NewStatesRehearsal(version string, p *cycle.Placement, v rehearse.Verdict, m *cycle.Measurement,
	cpu CPURoad) (*StatesRehearsal, error) {
	slots, temporary := p.Window()
	r := &StatesRehearsal{
		Schema: StatesSchema, Version: version, Verdict: v,
		Model: RehearsedModel{p.Model.Name, p.Model.Architecture, p.Model.Source, p.Model.Elements()},
		Job: StatesJob{Optimizer: p.OptimizerName(), Mode: p.Mode(), Recovery: p.Settings.Recovery,
			State: p.Format.State.String(), Moments: p.Format.Moments.String(),
			ParameterType: p.Format.Parameter.String(), GradientType: p.Format.Gradient.String(),
			ChunkBytes: p.Settings.ChunkBytes, WindowBytes: slots, TemporaryBytes: temporary, Ranks: p.Job.Ranks,
			WorldSize: p.WorldSize, ParametersOnHost: p.Parameters, ForwardSeconds: p.Forward.Seconds(),
			BackwardSeconds: p.Backward.Seconds(), UpdateSeconds: p.UpdateTime().Seconds(), UpdateStated: p.Update > 0},
		Host:              newHost(p.Host),
		BytesPerParameter: BytesPerParameter{Planned: float64(p.HostBytes()) / float64(p.Parameters)},
		Steps:             []cycle.Step{},
		Ledger:            ledger.Compare(p.Planned, nil),
		Notes:             append([]string{}, p.Notes...),
	}
	for _, rank := range p.Ranks {
		r.Job.Chunks = max(r.Job.Chunks, len(rank.Layout.Chunks))
	}
	if m != nil {
		r.measured(p, m)
	}
	if cpu.Placement != nil {
		r.CPU = NewRehearsal(version, cpu.Placement, cpu.Verdict, cpu.Measurement)
	}
	return r, r.compare(p, cpu)
}

func (r *StatesRehearsal) measured(p *cycle.Placement, m *cycle.Measurement) {
	r.Ledger, r.Steps, r.timeline = ledger.Compare(p.Planned, m.Measured), m.Steps, m.Timeline
	bytes := r.Ledger.Measured(func(e ledger.Line) bool {
		return slices.Contains([]ledger.Component{ledger.HeldStates, ledger.HeldControl, ledger.Gradients}, e.Component)
	})
	perParameter := float64(bytes) / float64(p.Parameters)
	r.BytesPerParameter.Measured = &perParameter
	step := cycle.Median(m.Steps)
	r.Median = &step
	in, out := p.Moved()
	r.CopyIn, r.CopyOut = newLink(in, step.InSeconds, p.Link.In), newLink(out, step.OutSeconds, p.Link.Out)
}

// newLink describes the copies in a direction.
func newLink(bytes ledger.Bytes, seconds, stated float64) *RehearsedLink {
	l := &RehearsedLink{Bytes: bytes, Speed: float64(bytes) / max(seconds, 1e-9), LimitedBy: "host"}
	if stated > 0 {
		l.Stated = &stated
		if l.Speed > 0.9*stated {
			l.LimitedBy = "link"
		}
	}
	return l
}

// speed returns the speed for the law: the stated one, or that of this host's memory.
func (l *RehearsedLink) speed() float64 {
	switch {
	case l == nil:
		return 0
	case l.Stated != nil:
		return *l.Stated
	}
	return l.Speed
}

// WithinTolerance reports whether the arenas hold the planned bytes, page rounding included.
func (r *StatesRehearsal) WithinTolerance() bool {
	return r.Median == nil || arenasAsPlanned(r.Ledger) && (r.CPU == nil || r.CPU.WithinTolerance())
}

// Page shows what was planned beside what was measured, and the roads beside each other.
func (r *StatesRehearsal) Page() *Page {
	var job Facts
	job.add("model", "%s, %s parameters (%s)", r.Model.Name, ledger.Count(r.Model.Parameters), r.Model.Architecture)
	job.add("training", "%s, %s parameters, %s gradients", r.Job.Optimizer, r.Job.ParameterType, r.Job.GradientType)
	job.add("host", "%s", r.Host)
	p := &Page{
		Title: "Rehearsal of the states of " + r.Model.Name,
		Sections: []Section{{job}, {hostTable(r.Ledger, r.Median != nil, r.Job.ParametersOnHost)}, {r.facts()},
			{r.roadsTable()}},
		Verdict:  r.VerdictLine(),
		Tone:     toneOf(r.Verdict.Fits && r.WithinTolerance()),
		Document: r,
	}
	if r.timeline != nil {
		p.Sections = append(p.Sections, Section{Gantt{r.timeline}})
	}
	for _, change := range r.Verdict.WouldFit {
		p.Hints = append(p.Hints, "would fit: "+change)
	}
	return p
}

// facts returns the lines below the table.
func (r *StatesRehearsal) facts() Facts {
	var f Facts
	j, recovery := r.Job, "with recovery"
	if !j.Recovery {
		recovery = "without recovery"
	}
	f.add("bytes a parameter", "%s, state %s, moments %s, %s", r.BytesPerParameter, j.State, j.Moments, recovery)
	if j.WorldSize > 1 {
		f.add("ranks", "%d here of %d, %s of %s parameters on this host", j.Ranks, j.WorldSize,
			ledger.Count(j.ParametersOnHost), ledger.Count(r.Model.Parameters))
	}
	chunks := fmt.Sprintf("%s of up to %v, or one parameter", counted(j.Chunks, "chunk"), j.ChunkBytes)
	if j.Mode == cycle.Whole {
		chunks = "all at once"
	}
	f.add("window", "%v of the device's memory, and %v while it updates; mode %s: %s", j.WindowBytes, j.TemporaryBytes,
		j.Mode, chunks)
	if r.Median != nil {
		f.add("copy in", "%s", r.CopyIn.describe(r.Median.InSeconds, "--link-in"))
		f.add("copy out", "%s", r.CopyOut.describe(r.Median.OutSeconds, "--link-out"))
		source := "by the law for an H100: --update-ms states another time"
		if j.UpdateStated {
			source = "as stated"
		}
		f.add("update", "%s, %s; it took %s here", seconds(j.UpdateSeconds), source, seconds(r.Median.UpdateSeconds))
		f.add("cycle", "%s until a trainer goes on, %s until all is back; the law says %s and %s of these copies",
			seconds(r.Median.ReadySeconds), seconds(r.Median.Seconds), seconds(r.Median.PredictedReadySeconds),
			seconds(r.Median.PredictedSeconds))
	}
	if j.ForwardSeconds > 0 {
		f.add("trainer", "forward %s, backward %s", seconds(j.ForwardSeconds), seconds(j.BackwardSeconds))
	}
	if r.Median != nil {
		update := ""
		if r.CPU != nil && r.CPU.OptimizerSteps > 0 {
			update = "; the CPU's update was measured"
		}
		f.add("roads", "by the law, with copies at %s and %s%s", r.CopyIn.source(), r.CopyOut.source(), update)
	}
	f.addEach("note", r.Notes)
	return f
}

// source says which speed the law takes.
func (l *RehearsedLink) source() string {
	if l.Stated != nil {
		return fmt.Sprintf("%.1f GB/s (stated)", l.speed()/1e9)
	}
	return fmt.Sprintf("%.1f GB/s (of this host)", l.speed()/1e9)
}

// describe says how fast the copies were, and whether that was measured or stated.
func (l *RehearsedLink) describe(took float64, flag string) string {
	text := fmt.Sprintf("%v in %s, %.1f GB/s", l.Bytes, seconds(took), l.Speed/1e9)
	switch {
	case l.Stated == nil:
		return text + ", measured: as fast as this host copies, as no link was stated"
	case l.LimitedBy == "link":
		return text + fmt.Sprintf(", paced: %s states it", flag)
	}
	return text + fmt.Sprintf(", measured: this host copies slower than the %.1f GB/s of %s", *l.Stated/1e9, flag)
}

// VerdictLine returns the first line of the text.
func (r *StatesRehearsal) VerdictLine() string {
	switch {
	case r.Median == nil:
		return plannedLine(r.Verdict)
	case !r.WithinTolerance():
		return fmt.Sprintf("DIFFERS FROM THE PLAN by more than %.1f %%: %s bytes a parameter", 100*rehearse.Tolerance,
			r.BytesPerParameter)
	}
	fits := fmt.Sprintf("FITS: %.2f bytes a parameter as planned; ", *r.BytesPerParameter.Measured)
	if r.Road == "" {
		return fits + "no road was chosen: " + r.Reason
	}
	return fits + "take " + r.Road + ": " + r.Reason
}
