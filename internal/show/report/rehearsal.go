//go:build linux

package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/measure/summary"
)

// Rehearsal is the document of a rehearsal; its table shows the same data.
type Rehearsal struct {
	Schema  string              `json:"schema"` // plimsoll.rehearsal/1
	Version string              `json:"version"`
	Verdict rehearse.Verdict    `json:"verdict"`
	Model   RehearsedModel      `json:"model"`
	Job     RehearsedJob        `json:"job"`
	Host    RehearsedHost       `json:"host"`
	Binding *binding.Assignment `json:"binding"`

	BytesPerParameter BytesPerParameter `json:"bytes_per_parameter"`

	LossScaling *LossScaling   `json:"loss_scaling"` // null where no gradient is in fp16
	Overlap     *Overlap       `json:"overlap"`      // null without a paced trainer
	Tier        *RehearsedTier `json:"tier"`         // null where all state is in memory

	Steps             []rehearse.Step `json:"steps"`
	OptimizerSteps    int64           `json:"optimizer_steps"`     // without skipped steps
	StepSecondsMedian float64         `json:"step_seconds_median"` // without the first optimizer step, which warms up
	StepSecondsMin    float64         `json:"step_seconds_min"`
	StepSecondsMax    float64         `json:"step_seconds_max"`

	// TrafficBytesPerParameter is the bytes that an update moves, reads plus writes. The norm reads the gradients
	// once more.
	TrafficBytesPerParameter     float64 `json:"traffic_bytes_per_parameter"`
	NormTrafficBytesPerParameter int64   `json:"norm_traffic_bytes_per_parameter"`
	// MemoryBandwidth compares updates with what the memory does by itself or, with a tier, with what the disks do. The
	// bytes are then those that a step reads from the disks and writes there.
	MemoryBandwidth MemoryBandwidth `json:"memory_bandwidth"`

	GrowthAfterFirstStep ledger.Bytes `json:"growth_after_first_step_bytes"`
	ProcessSteady        ledger.Bytes `json:"process_steady_bytes"`
	ProcessPeak          ledger.Bytes `json:"process_peak_bytes"`
	HugePageBytes        ledger.Bytes `json:"huge_page_bytes"`
	InitializeSeconds    float64      `json:"initialize_seconds"`
	// AllocationRate is how fast the host gave the memory.
	AllocationRate float64 `json:"allocation_bytes_per_second"`

	Ledger ledger.Comparison `json:"ledger"`
	Notes  []string          `json:"notes"`
}

// RehearsedModel describes the model.
type RehearsedModel struct {
	Name         string `json:"name"`
	Architecture string `json:"architecture"`
	Source       string `json:"source"`
	Parameters   int64  `json:"parameters"`
}

// RehearsedJob describes the training.
type RehearsedJob struct {
	Recipe           string `json:"recipe"` // a file; empty for none
	State            string `json:"state"`
	Moments          string `json:"moments"`
	EmbeddingMoments string `json:"embedding_moments"`
	// ParametersByMoments is the number of parameters, padding included, for each type of moments.
	ParametersByMoments map[string]int64 `json:"parameters_by_moments"`
	ParameterType       string           `json:"parameter_dtype"`
	GradientType        string           `json:"gradient_dtype"`
	Optimizer           string           `json:"optimizer"`
	GradientClipping    float64          `json:"gradient_clipping"`
	Ranks               int              `json:"ranks"`
	WorldSize           int              `json:"world_size"`
	ParametersOnHost    int64            `json:"parameters_on_host"`
	PaddingElements     int64            `json:"padding_elements"`
	Kernel              string           `json:"kernel"`
	ChunkElements       int              `json:"chunk_elements"`
	StateBytesPlanned   int64            `json:"state_bytes_planned"`
	ArenaPages          string           `json:"arena_pages"`
	WorkersOnHost       int              `json:"workers_on_host"`
	RehearsedStepsCount int              `json:"rehearsed_steps"`
}

// RehearsedTier is the tier of a rehearsal, with all its ranks.
type RehearsedTier struct {
	Folders []string `json:"folders"`
	TierBytes
}

func newRehearsedTier(p *rehearse.Placement) *RehearsedTier {
	if p.Tier == nil {
		return nil
	}
	return &RehearsedTier{p.Tier.Folders, newTierBytes(p.TierBytes())}
}

func (t *RehearsedTier) addTo(f *Facts) {
	t.TierBytes.addTo(f, "in "+strings.Join(t.Folders, ", "), "")
}

// LossScaling is the settings of the loss scaler, by DeepSpeed's names, and its results.
type LossScaling struct {
	Static                float64 `json:"loss_scale"` // 0 for a dynamic scale, with the settings below
	InitialScalePower     int     `json:"initial_scale_power"`
	Window                int64   `json:"loss_scale_window"`
	Hysteresis            int     `json:"hysteresis"`
	ConsecutiveHysteresis bool    `json:"consecutive_hysteresis"`
	Minimum               float64 `json:"min_loss_scale"`

	FirstScale   float64 `json:"first_scale"`
	NextScale    float64 `json:"next_scale"` // after the last step
	SkippedSteps int64   `json:"skipped_steps"`
}

func newLossScaling(j *rehearse.Job) *LossScaling {
	if !j.ScalesLoss() {
		return nil
	}
	l := &LossScaling{Static: j.LossScaler.Static, FirstScale: j.LossScaler.Scale(), NextScale: j.LossScaler.Scale()}
	if l.Static == 0 {
		l.InitialScalePower, l.Window, l.Minimum = j.LossScaler.InitialScalePower, j.LossScaler.Window,
			j.LossScaler.Minimum
		l.Hysteresis, l.ConsecutiveHysteresis = j.LossScaler.Hysteresis, j.LossScaler.ConsecutiveHysteresis
	}
	return l
}

// BytesPerParameter compares the state arenas with their plan. The measured bytes include the full last pages.
type BytesPerParameter struct {
	Planned  float64  `json:"planned"`
	Measured *float64 `json:"measured"` // null when nothing was measured
}

// MemoryBandwidth compares the update with the speed limit of the host's memory. Both are measured in the same run
// over the same streams. The bytes are the update's.
type MemoryBandwidth struct {
	Limit    float64 `json:"limit_bytes_per_second"`
	Update   float64 `json:"update_bytes_per_second"`
	Fraction float64 `json:"fraction"` // median over the steps of traffic time / update time
	least    float64
	most     float64
	// WholeStepFraction includes the norm: the time of all bytes of a step at the limit, over the step's time, also
	// the median.
	WholeStepFraction float64 `json:"whole_step_fraction"`
}

// RehearsalSchema is the schema of the JSON document.
const RehearsalSchema = "plimsoll.rehearsal/1"

// NewRehearsal makes the document of a rehearsal. The measurement is nil when there is only a plan.
func NewRehearsal(version string, p *rehearse.Placement, v rehearse.Verdict, m *rehearse.Measurement) *Rehearsal {
	r := &Rehearsal{
		Schema: RehearsalSchema, Version: version, Verdict: v, Binding: p.Binding,
		Model: RehearsedModel{p.Model.Name, p.Model.Architecture, p.Model.Source, p.Model.Elements()},
		Job: RehearsedJob{
			State:               p.Format.State.String(),
			Moments:             p.Format.Moments.String(),
			EmbeddingMoments:    p.EmbeddingMoments.String(),
			ParametersByMoments: map[string]int64{},
			ParameterType:       p.Format.Parameter.String(),
			GradientType:        p.Format.Gradient.String(),
			Optimizer:           p.Optimizer.String(),
			GradientClipping:    p.Clip,
			Ranks:               p.Ranks,
			WorldSize:           p.WorldSize,
			ParametersOnHost:    p.Parameters,
			PaddingElements:     p.Held - p.Parameters,
			Kernel:              p.Kernel.String(),
			ChunkElements:       p.Chunk(),
			StateBytesPlanned:   int64(p.StateBytes()),
			ArenaPages:          p.Pages.String(),
			WorkersOnHost:       p.WorkerCount(),
			RehearsedStepsCount: p.Steps,
		},
		Host:                         newHost(p.Host),
		BytesPerParameter:            BytesPerParameter{Planned: float64(p.StateBytes()) / float64(p.Parameters)},
		TrafficBytesPerParameter:     float64(p.TrafficBytes()) / float64(p.Held),
		NormTrafficBytesPerParameter: p.Format.Gradient.Size(),
		LossScaling:                  newLossScaling(p.Job),
		Overlap:                      newOverlap(p, m),
		Tier:                         newRehearsedTier(p),
		Steps:                        []rehearse.Step{},
		Ledger:                       ledger.Compare(p.Planned, nil),
		Notes:                        append([]string{}, p.Notes...),
	}
	for moments, parameters := range p.ParametersByMoments() {
		r.Job.ParametersByMoments[moments.String()] = parameters
	}
	if p.Recipe != nil {
		r.Job.Recipe = p.Recipe.File
	}
	if m != nil {
		r.measured(p, m)
	}
	return r
}

func (r *Rehearsal) measured(p *rehearse.Placement, m *rehearse.Measurement) {
	perParameter := float64(m.StateBytes) / float64(p.Parameters)
	r.BytesPerParameter.Measured = &perParameter
	r.Ledger, r.Steps, r.OptimizerSteps = ledger.Compare(p.Planned, m.Measured), m.Steps, m.Updates
	if r.LossScaling != nil {
		r.LossScaling.NextScale, r.LossScaling.SkippedSteps = m.LossScale, int64(len(m.Steps))-m.Updates
	}
	r.GrowthAfterFirstStep, r.ProcessSteady, r.ProcessPeak = m.Growth, m.Steady, m.Peak
	r.HugePageBytes, r.InitializeSeconds = m.Huge, m.InitializeSeconds
	if m.AllocateSeconds > 0 {
		r.AllocationRate = float64(m.StateBytes) / m.AllocateSeconds
	}

	warm := slices.DeleteFunc(slices.Clone(m.Steps), func(s rehearse.Step) bool { return s.Skipped })
	if len(warm) == 0 {
		return
	}
	if len(warm) > 1 {
		warm = warm[1:]
	}
	of := func(value func(rehearse.Step) float64) summary.Spread { return summary.Over(warm, value) }
	seconds := of(func(s rehearse.Step) float64 { return s.Seconds })
	r.StepSecondsMedian, r.StepSecondsMin, r.StepSecondsMax = seconds.Median, seconds.Min, seconds.Max
	updateBytes := float64(p.TrafficBytes())
	if t := r.Tier; t != nil {
		updateBytes = float64(t.StepReads + t.StepWrites)
	}
	fractions := of(func(s rehearse.Step) float64 { return s.TrafficSeconds / s.UpdateSeconds })
	withNorm := 1 + float64(p.Format.Gradient.Size())/r.TrafficBytesPerParameter
	limit := of(func(s rehearse.Step) float64 { return s.TrafficSeconds }).Median
	r.MemoryBandwidth = MemoryBandwidth{
		Limit:    updateBytes / limit,
		Update:   updateBytes / of(func(s rehearse.Step) float64 { return s.UpdateSeconds }).Median,
		Fraction: fractions.Median, least: fractions.Min, most: fractions.Max,

		WholeStepFraction: of(func(s rehearse.Step) float64 { return withNorm * s.TrafficSeconds / s.Seconds }).Median,
	}
}

// WithinTolerance reports whether the arenas hold the planned bytes, page rounding included.
func (r *Rehearsal) WithinTolerance() bool {
	return r.BytesPerParameter.Measured == nil || arenasAsPlanned(r.Ledger)
}

// arenasAsPlanned reports whether the measured bytes of all arenas are the planned ones.
func arenasAsPlanned(c ledger.Comparison) bool {
	isArena := func(e ledger.Line) bool {
		return e.Component != ledger.PageTables && e.Component != ledger.Process
	}
	planned := c.Planned(isArena)
	return math.Abs(float64(c.Measured(isArena)-planned)) <= rehearse.Tolerance*float64(planned)
}

// Page shows what was planned beside what was measured.
func (r *Rehearsal) Page() *Page {
	var job Facts
	job.add("model", "%s, %s parameters (%s)", r.Model.Name, ledger.Count(r.Model.Parameters), r.Model.Architecture)
	job.add("training", "%s, %s parameters, %s gradients%s", r.Job.Optimizer, r.Job.ParameterType, r.Job.GradientType,
		r.clipping())
	job.add("host", "%s", r.Host)
	found := r.facts()
	found.addEach("note", r.Notes)
	p := &Page{
		Title:    "Rehearsal of " + r.Model.Name,
		Sections: r.sections(job, found),
		Verdict:  r.VerdictLine(),
		Tone:     toneOf(r.Verdict.Fits && r.WithinTolerance()),
		Document: r,
		Brief:    r.brief,
		Piped:    true,
	}
	for _, change := range r.Verdict.WouldFit {
		p.Hints = append(p.Hints, "would fit: "+change)
	}
	return p
}

// brief shows the largest components, and what a step takes. With a paced trainer the picture of its step has their
// place.
func (r *Rehearsal) brief(detail int) *Page {
	var job Facts
	job.add("model", "%s, %s parameters", r.Model.Name, ledger.Count(r.Model.Parameters))
	job.add("host", "%s", r.Host)
	p := &Page{Verdict: r.VerdictLine(), Tone: toneOf(r.Verdict.Fits && r.WithinTolerance())}
	for _, change := range r.Verdict.WouldFit[:min(len(r.Verdict.WouldFit), 1+detail/4)] {
		p.Hints = append(p.Hints, "would fit: "+change)
	}
	table := hostTable(r.Ledger, r.BytesPerParameter.Measured != nil, r.Job.ParametersOnHost)
	last := next("--long shows every component, and where the workers run")
	if r.Overlap != nil && r.Overlap.timeline != nil {
		p.Sections = []Section{{job, r.Overlap.facts().chosen("trainer", "exposed", "T*")},
			{Gantt{r.Overlap.timeline}}, {last}}
		return p
	}
	facts := r.facts().chosen("optimizer step", "update", "overflow", "start")
	for i := range facts {
		if facts[i].Name == "optimizer step" { // the names of a screenful are short
			facts[i].Name = "step"
		}
	}
	facts.addEach("note", r.Notes[:min(len(r.Notes), detail/4)])
	p.Sections = []Section{{job}, {table.heaviestRows(max(1, detail), largestCell)}, {facts}, {last}}
	return p
}

func (r *Rehearsal) sections(job, found Facts) []Section {
	table := hostTable(r.Ledger, r.BytesPerParameter.Measured != nil, r.Job.ParametersOnHost)
	sections := []Section{{job}, {rehearsedPicture(r.Ledger), table}, {found, stepsPicture(r.Steps)}}
	if r.Overlap != nil {
		sections = append(sections, r.Overlap.sections()...)
	}
	return sections
}

func (r *Rehearsal) clipping() string {
	if r.Job.GradientClipping == 0 {
		return ", no clipping"
	}
	return fmt.Sprintf(", clipped to norm %g", r.Job.GradientClipping)
}

// hostTable returns a table with one line per component, summed over all ranks.
func hostTable(c ledger.Comparison, isMeasured bool, parameters int64) *Table {
	t := &Table{Columns: []Column{{Title: "host memory"}, {Title: "planned", Kind: Bytes},
		{Title: "measured", Kind: Bytes}, {Title: "difference", Kind: Bytes},
		{Title: "B/parameter", Kind: Number, Decimals: 3}}}
	row := func(name string, keep func(ledger.Line) bool) []any {
		planned := c.Planned(keep)
		var measured, difference any // nil where nothing was measured
		if isMeasured {
			bytes := c.Measured(keep)
			measured, difference = bytes, (bytes - planned).Signed()
		}
		return []any{name, planned, measured, difference, float64(planned) / float64(parameters)}
	}
	var components []ledger.Component
	for _, e := range c {
		if !slices.Contains(components, e.Component) {
			components = append(components, e.Component)
		}
	}
	for _, component := range components {
		t.add(row(component.Title(), func(e ledger.Line) bool { return e.Component == component })...)
	}
	t.Footer = row("total", nil)
	return t
}

// facts returns the lines below the table.
func (r *Rehearsal) facts() Facts {
	var f Facts
	f.add("bytes a parameter", "%s, state %s, moments %s", r.BytesPerParameter, r.Job.State, r.moments())
	if r.Job.WorldSize > r.Job.Ranks || r.Job.Ranks > 1 {
		f.add("ranks", "%d here of %d, %s of %s parameters on this host", r.Job.Ranks, r.Job.WorldSize,
			ledger.Count(r.Job.ParametersOnHost), ledger.Count(r.Model.Parameters))
	}
	if r.Tier != nil {
		r.Tier.addTo(&f)
	}
	if l := r.LossScaling; l != nil {
		f.add("loss scale", "%s", l.rule())
		if len(r.Steps) > 0 {
			f.add("overflow", "%s", l.outcome(r.OptimizerSteps))
		}
	}
	if b := r.MemoryBandwidth; r.OptimizerSteps > 0 {
		f.add("optimizer step", "%s median, %s to %s over %d steps", seconds(r.StepSecondsMedian),
			seconds(r.StepSecondsMin), seconds(r.StepSecondsMax), r.OptimizerSteps)
		what, moves := r.limited()
		f.add("update", "%.1f GB/s, %s: it moves %.1f GB/s in the same %s", b.Update/1e9, b.bound(what), b.Limit/1e9,
			moves)
	}
	if len(r.Steps) > 0 {
		f.add("process", "%v steady, %v peak, %v since the first step", r.ProcessSteady, r.ProcessPeak,
			signedOrNone(r.GrowthAfterFirstStep))
	}
	for _, rank := range r.Binding.Ranks {
		where := "workers on CPUs " + rank.OptimizerCPUs.String()
		if rank.OptimizerCPUs.Size() == 1 {
			where = "one worker, on CPU " + rank.OptimizerCPUs.String()
		}
		if rank.Shared {
			where += ", shared with other ranks"
		}
		f.add(fmt.Sprintf("rank %d", rank.Rank), "%s", where)
	}
	pages := r.Job.ArenaPages
	if r.HugePageBytes > 0 {
		pages += fmt.Sprintf(", %v of them huge", r.HugePageBytes)
	}
	f.add("kernels, pages", "%s, %s", r.Job.Kernel, pages)
	if slow := slowAllocation(r.AllocationRate); slow != "" {
		f.add("start", "%s", slow)
	}
	return f
}

// leastAllocationRate is what a host reaches with memory that it has: 2.5 GB/s in pages of 4 KiB and more in huge ones,
// with two workers. A virtual machine whose host gives the memory only when it is touched reaches 0.3 to 0.7.
const leastAllocationRate = 1.5e9

// slowAllocation says why the start took long, if the host was slow to give memory.
func slowAllocation(bytesPerSecond float64) string {
	if bytesPerSecond == 0 || bytesPerSecond >= leastAllocationRate { // 0: not measured
		return ""
	}
	return fmt.Sprintf("the host gave memory at %.1f GB/s, as virtual machines do on first use", bytesPerSecond/1e9)
}

// rule describes how the scale is chosen.
func (l *LossScaling) rule() string {
	if l.Static != 0 {
		return fmt.Sprintf("fixed at %g", l.Static)
	}
	halves := "halves at every overflow"
	switch {
	case l.Hysteresis > 1 && l.ConsecutiveHysteresis:
		halves = fmt.Sprintf("halves from overflow %d in a row on", l.Hysteresis)
	case l.Hysteresis > 1:
		halves = fmt.Sprintf("halves from overflow %d on", l.Hysteresis)
	}
	return fmt.Sprintf("dynamic from %g: %s, doubles after %s without one, and is at least %g", l.FirstScale, halves,
		counted(l.Window, "step"), l.Minimum)
}

// outcome describes the last scale and the skipped steps; made is the number of steps that were not skipped.
func (l *LossScaling) outcome(made int64) string {
	skipped := "no step overflowed"
	if l.SkippedSteps > 0 {
		skipped = fmt.Sprintf("%d of %s overflowed and changed no state: the optimizer counts %d", l.SkippedSteps,
			counted(made+l.SkippedSteps, "step"), made)
	}
	if l.Static != 0 {
		return skipped
	}
	if l.NextScale == l.FirstScale {
		return fmt.Sprintf("%s; the scale is still %g", skipped, l.NextScale)
	}
	return fmt.Sprintf("%s; the scale went from %g to %g", skipped, l.FirstScale, l.NextScale)
}

// shortBytes rounds to hundredths and omits trailing zeros.
func shortBytes(b float64) string { return strconv.FormatFloat(math.Round(100*b)/100, 'f', -1, 64) }

func signedOrNone(b ledger.Bytes) string {
	if b == 0 {
		return "no growth"
	}
	return b.Signed()
}

// moments describes the types of the moments, with the share of each exception.
func (r *Rehearsal) moments() string {
	text, which := r.Job.Moments, "small tensors"
	if r.Job.EmbeddingMoments != r.Job.Moments {
		which += " and embeddings"
	}
	for _, other := range slices.Sorted(maps.Keys(r.Job.ParametersByMoments)) {
		if n := r.Job.ParametersByMoments[other]; other != r.Job.Moments {
			text += fmt.Sprintf(" (%s for %.2g %%: %s)", other,
				100*float64(n)/float64(r.Job.ParametersOnHost+r.Job.PaddingElements), which)
		}
	}
	return text
}

func (b BytesPerParameter) String() string {
	if b.Measured == nil {
		return fmt.Sprintf("%.3f planned", b.Planned)
	}
	return fmt.Sprintf("%.3f planned, %.3f measured", b.Planned, *b.Measured)
}

// VerdictLine returns the first line of the text.
func (r *Rehearsal) VerdictLine() string {
	switch {
	case r.BytesPerParameter.Measured == nil:
		return plannedLine(r.Verdict)
	case !r.WithinTolerance():
		return fmt.Sprintf("DIFFERS FROM THE PLAN by more than %.1f %%: %s bytes a parameter", 100*rehearse.Tolerance,
			r.BytesPerParameter)
	}
	fits := fmt.Sprintf("FITS: %.2f bytes a parameter as planned", *r.BytesPerParameter.Measured)
	if r.OptimizerSteps == 0 {
		return fits + "; every step overflowed, and none was measured: use more --steps or a smaller loss scale"
	}
	return fits + fmt.Sprintf(", a step takes %s at %s", seconds(r.StepSecondsMedian), r.boundOfStep())
}

// bound says how near an update comes to the speed of memory. Other programs use the memory, too: the limit is then
// measured at another speed than the update, and the fraction may exceed 1.
func (b *MemoryBandwidth) bound(what string) string {
	if b.Fraction > 1 {
		return fmt.Sprintf("full %s bandwidth (noisy host: %.0f to %.0f %% of what was measured)", what, 100*b.least,
			100*b.most)
	}
	return fmt.Sprintf("%.0f %% of %s bandwidth", 100*b.Fraction, what)
}

// boundOfStep is bound for what limits a step.
func (r *Rehearsal) boundOfStep() string {
	what, _ := r.limited()
	return r.MemoryBandwidth.bound(what)
}

// limited says what limits a step, and what it moves there.
func (r *Rehearsal) limited() (what, moves string) {
	if t := r.Tier; t != nil {
		return "disk", (t.StepReads + t.StepWrites).String()
	}
	return "memory", shortBytes(r.TrafficBytesPerParameter) + " B/parameter"
}

// plannedLine returns the first line where nothing was measured.
func plannedLine(v rehearse.Verdict) string {
	switch {
	case v.Missing == 0 && v.Shortage != "":
		return "DOES NOT FIT: " + v.Shortage
	case !v.Fits:
		return fmt.Sprintf("DOES NOT FIT: needs %v, %v is left (%s), %v is missing", v.Needed, v.Available,
			v.LimitedBy, v.Missing)
	}
	return fmt.Sprintf("FITS: needs %v of the %v that are left (%s)", v.Needed, v.Available, v.LimitedBy)
}

// rehearsedPicture draws what the components of host memory were planned to hold, and what they held.
func rehearsedPicture(c ledger.Comparison) Block {
	rows := []barRow{{name: "planned"}, {name: "measured"}}
	for _, l := range c {
		part := barPart{component: wholeOf(l.Component), title: wholeOf(l.Component).Title(), size: float64(l.Planned)}
		rows[0].put(part)
		if l.Measured != nil {
			part.size = float64(*l.Measured)
			rows[1].put(part)
		}
	}
	rows = slices.DeleteFunc(rows, func(r barRow) bool { return len(r.parts) == 0 })
	return stacked("Host memory by component", rows, sizeWords)
}

// mostSteps is how many steps a picture shows: the last ones.
const mostSteps = 24

// stepsPicture draws how long each step took, and what for.
func stepsPicture(steps []rehearse.Step) Block {
	var rows []barRow
	for i, s := range steps {
		if i < len(steps)-mostSteps {
			continue
		}
		rest := max(0, s.Seconds-s.NormSeconds-s.UpdateSeconds)
		rows = append(rows, barRow{fmt.Sprintf("step %d", i+1), []barPart{
			{activity: "summing", title: "norm of the gradients", size: s.NormSeconds},
			{activity: "updating", title: "update", size: s.UpdateSeconds},
			{activity: otherColor, title: "other", size: rest}}})
	}
	return stacked("Time of a step", rows, seconds)
}
