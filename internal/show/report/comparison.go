package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/plan/job"
)

// ComparisonSchema is the schema of the JSON document.
const ComparisonSchema = "plimsoll.comparison/1"

// Comparison is the document of a recorded run, beside its plan if there is one.
type Comparison struct {
	Schema    string             `json:"schema"`
	Version   string             `json:"version"`
	Plan      *ComparedPlan      `json:"plan"` // null where the job was not planned
	Recording ComparedRecording  `json:"recording"`
	Tolerance float64            `json:"tolerance"` // a share of the plan
	Within    bool               `json:"within_tolerance"`
	Farthest  *reconcile.Peak    `json:"farthest"` // null where nothing was compared
	Peaks     []reconcile.Peak   `json:"peaks"`
	Lines     ledger.Comparison  `json:"components"`
	Growth    []reconcile.Growth `json:"growth"`
	Notes     []string           `json:"notes"`
}

// ComparedPlan is the plan of a recorded run.
type ComparedPlan struct {
	File       string `json:"file"`
	Model      string `json:"model,omitempty"` // empty where the plan is the one in the recording
	Parameters int64  `json:"parameters,omitempty"`
}

// ComparedRecording is the recorded run.
type ComparedRecording struct {
	File     string               `json:"file"`
	Job      string               `json:"job"`
	Command  []string             `json:"command"`
	Host     samples.Host         `json:"host"`
	Began    time.Time            `json:"began"`
	Duration time.Duration        `json:"duration_ns"`
	Samples  int                  `json:"samples"`
	Marks    int                  `json:"marks"`
	Sources  []samples.MarkSource `json:"mark_sources"`
	Ranks    []int                `json:"ranks"`
	ExitCode *int                 `json:"exit_code"` // null if the recorder was killed
}

// Compared returns what a comparison needs of the plan.
func (d *PlanDocument) Compared() *reconcile.Plan {
	return &reconcile.Plan{Devices: d.Devices, RanksPerNode: d.Job.Ranks / max(d.Job.Nodes, 1),
		Parameters: d.Model.Parameters}
}

// NewComparison compares a recording with a plan. Without one it takes the plan that the recording has, if any.
func NewComparison(version string, r *reconcile.Recording, file string, plan *PlanDocument,
	tolerance float64) *Comparison {
	d := &Comparison{Schema: ComparisonSchema, Version: version, Tolerance: tolerance, Within: true,
		Recording: newComparedRecording(r)}
	var planned *reconcile.Plan
	switch own := r.Start.Plan; {
	case plan != nil:
		planned = plan.Compared()
		d.Plan = &ComparedPlan{file, plan.Model.Name, plan.Model.Parameters}
	case own != nil:
		planned = &reconcile.Plan{Devices: own.Devices}
		d.Plan = &ComparedPlan{File: own.File}
	}
	c := reconcile.Compare(r, planned)
	d.Peaks, d.Lines, d.Growth, d.Notes = c.Peaks, c.Lines, c.Growth, c.Notes
	if d.Farthest = c.Farthest(); d.Farthest != nil {
		share, _ := d.Farthest.Share()
		d.Within = math.Abs(share) <= tolerance
	}
	return d
}

// Learn returns what the run has taught about memory that does not depend on the model. A line is missing where it was
// not told apart.
func (d *Comparison) Learn(plan *PlanDocument) *job.Factors {
	f := &job.Factors{Schema: job.FactorsSchema, Recording: d.Recording.File, Plan: d.Plan.File, Torch: plan.Job.Torch,
		Ranks: plan.Job.Ranks, Constants: []job.Constant{}, Ratios: []job.Ratio{}}
	for i := range plan.Devices {
		if plan.Devices[i].Kind == ledger.GPU {
			f.GPU = plan.Devices[i].Name
		}
	}
	most := map[ledger.Component]job.Constant{}
	for _, l := range d.Lines {
		if l.Measured == nil || l.Rank < 0 {
			continue
		}
		isProcess := l.Device == ledger.Host && l.Component == ledger.PythonProcess && d.hasClient()
		isOutside := l.Device == ledger.GPU && l.Component == ledger.OutsideAllocator
		if (isProcess || isOutside) && *l.Measured > most[l.Component].Bytes {
			most[l.Component] = job.Constant{Component: l.Component, Bytes: *l.Measured,
				Why: fmt.Sprintf("measured on rank %d (%s)", l.Rank, d.stage(l.Phase, l.Iteration))}
		}
	}
	for _, component := range slices.Sorted(maps.Keys(most)) {
		f.Constants = append(f.Constants, most[component])
	}
	for _, of := range d.devices() {
		peak := d.highest(of)
		for _, l := range d.Lines {
			if l.Device == of.kind && l.Rank == of.rank && l.Phase == peak.Phase && l.Iteration == peak.Iteration &&
				l.Measured != nil && l.Planned > 0 {
				f.Ratios = append(f.Ratios, job.Ratio{Device: l.Device, Phase: l.Phase, Iteration: l.Iteration,
					Component: l.Component, Planned: l.Planned, Measured: *l.Measured,
					Ratio: float64(*l.Measured) / float64(l.Planned)})
			}
		}
	}
	return f
}

// hasClient reports whether the trainer has counted its memory itself. Without it, memory of the process and tensors
// are one.
func (d *Comparison) hasClient() bool {
	return slices.Contains(d.Recording.Sources, samples.FromClient)
}

func newComparedRecording(r *reconcile.Recording) ComparedRecording {
	c := ComparedRecording{File: r.File, Job: r.Start.Job, Command: append([]string{}, r.Start.Command...),
		Host: r.Start.Host, Began: r.Start.Began, Samples: len(r.Samples), Marks: len(r.Marks),
		Sources: append([]samples.MarkSource{}, r.Sources()...), Ranks: append([]int{}, r.Ranks()...)}
	if n := len(r.Samples); n > 0 {
		c.Duration = max(c.Duration, r.Samples[n-1].Time)
	}
	if n := len(r.Marks); n > 0 {
		c.Duration = max(c.Duration, r.Marks[n-1].Time)
	}
	if r.End != nil {
		c.ExitCode, c.Duration = &r.End.End.ExitCode, max(c.Duration, r.End.Time)
	}
	return c
}

// Page shows the peaks of every device, its components at the highest one, and what grows.
func (d *Comparison) Page() *Page {
	p := &Page{Title: "Comparison of " + d.Recording.Job, Sections: []Section{{d.facts()}}, Document: d,
		Verdict: d.VerdictLine(), Tone: toneOf(d.Within), Brief: d.brief, Piped: true}
	for _, of := range d.devices() {
		p.Sections = append(p.Sections, Section{d.differences(of), d.phases(of), d.peakPicture(of), d.components(of)})
	}
	p.Sections = append(p.Sections, Section{d.growth()})
	return p
}

// brief shows the device that is farthest from its plan: its fullest phases, its largest components, and what grows.
func (d *Comparison) brief(detail int) *Page {
	p := &Page{Sections: []Section{{d.facts().chosen("recording", "end")}}, Verdict: d.VerdictLine(),
		Tone: toneOf(d.Within)}
	if list := d.devices(); len(list) > 0 {
		of := list[0]
		if f := d.Farthest; f != nil && slices.Contains(list, compared{f.Device, f.Rank}) {
			of = compared{f.Device, f.Rank}
		}
		phases, components := d.phases(of), d.components(of)
		phases.Style = Plain
		p.Sections = append(p.Sections, Section{phases.heaviestRows(max(1, detail/2), largestCell)},
			Section{components.heaviestRows(max(1, detail/2), largestCell)})
	}
	growth := d.growth()
	shown := growth[:min(len(growth), 1+detail/4)]
	if hidden := len(growth) - len(shown); hidden > 0 {
		shown.add("", "and %d more", hidden)
	}
	p.Sections = append(p.Sections, Section{shown, next("--long shows all devices and phases, --html FILE draws them")})
	return p
}

func (d *Comparison) facts() Facts {
	var f Facts
	if d.Plan != nil {
		model := ""
		if d.Plan.Model != "" {
			model = fmt.Sprintf(": %s, %s parameters", d.Plan.Model, ledger.Count(d.Plan.Parameters))
		}
		f.add("plan", "%s%s", d.Plan.File, model)
	}
	r := d.Recording
	f.add("recording", "%s: %s", r.File, fault.Printable(strings.Join(r.Command, " ")))
	from := "no marks"
	if r.Marks > 0 {
		var sources []string
		for _, source := range r.Sources {
			sources = append(sources, string(source))
		}
		from = fmt.Sprintf("%s marks (%s)", ledger.Count(int64(r.Marks)), strings.Join(sources, ", "))
	}
	f.add("measured", "%s samples and %s in %v, ranks %s", ledger.Count(int64(r.Samples)), from,
		r.Duration.Round(time.Second), strings.Trim(fmt.Sprint(r.Ranks), "[]"))
	if r.ExitCode == nil {
		f.add("end", "the recording has no end: the recorder was killed")
	} else {
		f.add("end", "exit code %d", *r.ExitCode)
	}
	f.addEach("note", d.Notes)
	return f
}

// compared is a device of a comparison.
type compared struct {
	kind ledger.Kind
	rank int
}

func (c compared) title() string {
	switch {
	case c.kind == ledger.GPU:
		return fmt.Sprintf("GPU of rank %d", c.rank)
	case c.rank == ledger.WholeNode:
		return "host"
	}
	return fmt.Sprintf("host, rank %d", c.rank)
}

// devices returns the devices to show. One rank alone is the node, which is shown.
func (d *Comparison) devices() []compared {
	var list []compared
	for _, p := range d.Peaks {
		of := compared{p.Device, p.Rank}
		alone := p.Device == ledger.Host && p.Rank >= 0 && len(d.Recording.Ranks) == 1
		if !alone && !slices.Contains(list, of) {
			list = append(list, of)
		}
	}
	return list
}

// phases returns a table of a device's peaks.
func (d *Comparison) phases(of compared) *Table {
	t := &Table{Columns: []Column{{Title: of.title()}}}
	t.with(Bytes, "planned", "measured")
	t.Columns = append(t.Columns, Column{Title: "difference", Kind: Share, Decimals: 1})
	t.with(Bytes, "unexplained").with(Label, "from")
	for _, p := range d.Peaks {
		if (compared{p.Device, p.Rank}) != of {
			continue
		}
		var difference, unexplained any
		if share, known := p.Share(); known {
			difference = fmt.Sprintf("%+.1f %%", 100*share)
		}
		if p.Measured != nil {
			unexplained = p.Unexplained
		}
		t.add(d.stage(p.Phase, p.Iteration), sizeOf(p.Planned), sizeOf(p.Measured), difference, unexplained,
			string(p.Source))
	}
	return t
}

func sizeOf(b *ledger.Bytes) any {
	if b == nil {
		return nil
	}
	return *b
}

// stage names a phase. A recording without phases is one, and one with phases has times between them.
func (d *Comparison) stage(name ledger.PhaseName, iteration ledger.Iteration) string {
	switch {
	case name != "":
		return stageText(name, iteration)
	case slices.ContainsFunc(d.Peaks, func(p reconcile.Peak) bool { return p.Phase != "" }):
		return "between phases"
	}
	return "the run"
}

func stageText(name ledger.PhaseName, iteration ledger.Iteration) string {
	return rowText(&ledger.Phase{Name: name, Iteration: iteration})
}

// highest returns the peak of a device that is highest in the measurement, of those that have a plan if any has.
func (d *Comparison) highest(of compared) *reconcile.Peak {
	var most *reconcile.Peak
	size := func(p *reconcile.Peak) ledger.Bytes {
		switch {
		case p.Measured == nil:
			return -1
		case p.Planned == nil:
			return *p.Measured
		}
		return *p.Measured + 1<<62
	}
	for i := range d.Peaks {
		p := &d.Peaks[i]
		if (compared{p.Device, p.Rank}) == of && (most == nil || size(p) > size(most)) {
			most = p
		}
	}
	return most
}

// components lists what a device holds at its highest peak.
func (d *Comparison) components(of compared) *Table {
	peak := d.highest(of)
	t := &Table{Style: Plain, Columns: []Column{{Title: "at the peak, " + d.stage(peak.Phase, peak.Iteration)}}}
	t.with(Bytes, "planned", "measured", "difference")
	var cache bool
	for _, l := range d.Lines {
		if l.Device != of.kind || l.Rank != of.rank || l.Phase != peak.Phase || l.Iteration != peak.Iteration ||
			l.Planned == 0 && l.Measured == nil {
			continue
		}
		name := l.Component.Title()
		if l.Part != "" {
			name += ", " + l.Part
		}
		var planned, measured, difference any
		if l.Planned != 0 {
			planned = l.Planned
		}
		if l.Measured != nil {
			measured = *l.Measured
		}
		if l.Planned != 0 && l.Measured != nil {
			difference = (*l.Measured - l.Planned).Signed()
		}
		t.add(name, planned, measured, difference)
		cache = true
	}
	if cache && peak.PageCache > 0 {
		t.add("beside that: page cache of mapped files", nil, peak.PageCache, nil)
	}
	return t
}

// differences draws how far each phase of a device is from its plan.
func (d *Comparison) differences(of compared) Block {
	var rows []barRow
	for _, p := range d.Peaks {
		if difference, known := p.Difference(); known && (compared{p.Device, p.Rank}) == of {
			rows = append(rows, barRow{d.stage(p.Phase, p.Iteration), []barPart{{size: float64(difference)}}})
		}
	}
	return differing(of.title()+": measured less planned, by phase", rows)
}

// peakPicture draws what a device holds at its highest peak.
func (d *Comparison) peakPicture(of compared) Block {
	peak := d.highest(of)
	rows := []barRow{{name: "planned"}, {name: "measured"}}
	for _, l := range d.Lines {
		if l.Device != of.kind || l.Rank != of.rank || l.Phase != peak.Phase || l.Iteration != peak.Iteration {
			continue
		}
		part := barPart{component: wholeOf(l.Component), title: wholeOf(l.Component).Title()}
		if part.size = float64(l.Planned); part.size > 0 {
			rows[0].put(part)
		}
		if l.Measured != nil && *l.Measured > 0 {
			part.size = float64(*l.Measured)
			rows[1].put(part)
		}
	}
	rows = slices.DeleteFunc(rows, func(r barRow) bool { return len(r.parts) == 0 })
	return stacked(of.title()+": at the peak, "+d.stage(peak.Phase, peak.Iteration), rows, sizeWords)
}

// growth tells what grows.
func (d *Comparison) growth() Facts {
	var f Facts
	for i := range d.Growth {
		name := "growth"
		if d.Growth[i].IsLeak() {
			name = "leak"
		}
		f.add(name, "%s", d.GrowthText(&d.Growth[i]))
	}
	if len(d.Growth) == 0 && d.Recording.Samples > 0 {
		f.add("growth", "none after the first step")
	}
	return f
}

// Leaks returns a line for each leak.
func (d *Comparison) Leaks() []string {
	var lines []string
	for i := range d.Growth {
		if d.Growth[i].IsLeak() {
			lines = append(lines, "leak: "+d.GrowthText(&d.Growth[i]))
		}
	}
	return lines
}

// roles and kinds of memory in words.
var (
	roleTexts = map[samples.Role]string{samples.RankProcess: "", samples.Child: ", child processes",
		samples.Service: "the optimizer service", samples.Keeper: "plimsoll"}
	kindTexts = map[reconcile.MemoryKind]string{reconcile.Anonymous: "anonymous memory",
		reconcile.Shared: "shared memory", reconcile.File: "page cache of mapped files",
		reconcile.Hugetlb:  "huge pages",
		reconcile.Resident: "resident memory", reconcile.Allocated: "memory that torch has allocated on the GPU",
		reconcile.Driver: "GPU memory as the driver counts it"}
)

// GrowthText says in words what grows.
func (d *Comparison) GrowthText(g *reconcile.Growth) string {
	who := roleTexts[g.Role]
	if g.Rank >= 0 {
		who = fmt.Sprintf("rank %d%s", g.Rank, who)
	}
	what := kindTexts[g.Kind]
	if g.Mapping != "" {
		what += " of " + fault.Printable(g.Mapping)
	}
	perParameter := ""
	if g.BytesPerParameter > 0 {
		perParameter = fmt.Sprintf(" (%.3g bytes a parameter)", g.BytesPerParameter)
	}
	where := ""
	if g.Phase != "" {
		where = ", in " + string(g.Phase)
	}
	asMany := ""
	for i, h := range g.Appeared {
		asMany += map[bool]string{true: ": ", false: ", "}[i == 0] + fmt.Sprintf("%s %v", h.Component.Title(), h.Bytes)
	}
	if g.Component != "" {
		asMany = ", as many bytes as the " + g.Component.Title()
	}
	switch {
	case g.Shape == reconcile.FirstStep:
		return fmt.Sprintf("%s: the first step adds %v of %s%s%s", who, g.Total, what, perParameter, asMany)
	case g.BytesPerStep == 0:
		return fmt.Sprintf("%s: %s rises by %v a second from %v on%s", who, what, g.BytesPerSecond,
			g.FromTime.Round(time.Second), until(g, fmt.Sprint(g.ToTime.Round(time.Second))))
	case g.Shape == reconcile.Stairs:
		return fmt.Sprintf("%s: %s rises by %v every %d steps, %v a step%s, from step %d on%s%s", who, what, g.Jump,
			g.Every, g.BytesPerStep, perParameter, g.FromStep, where, asMany)
	}
	return fmt.Sprintf("%s: %s rises by %v a step%s, from step %d on%s%s%s", who, what, g.BytesPerStep, perParameter,
		g.FromStep, until(g, fmt.Sprintf("step %d", g.ToStep)), where, asMany)
}

func until(g *reconcile.Growth, end string) string {
	if g.Shape == reconcile.Settled {
		return " until " + end
	}
	return ""
}

// VerdictLine says how far the run is from its plan.
func (d *Comparison) VerdictLine() string {
	p := d.Farthest
	if p == nil {
		return "measured only: no phase has both a plan and a measurement"
	}
	share, _ := p.Share()
	difference, _ := p.Difference()
	where := fmt.Sprintf("%v (%+.1f %%) on the %s in %s", difference.Signed(), 100*share,
		compared{p.Device, p.Rank}.title(), d.stage(p.Phase, p.Iteration))
	if !d.Within {
		return fmt.Sprintf("differs from the plan by more than %g %%: %s", 100*d.Tolerance, where)
	}
	return fmt.Sprintf("within %g %% of the plan; largest difference: %s", 100*d.Tolerance, where)
}
