package main

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/plan"
)

// result is the comparison of one row.
type result struct {
	row
	compared []comparison // the main one first
	left     []figure     // figures that cannot be compared
	reason   string       // why nothing could be compared
}

// comparison is a measured figure beside the planned one.
type comparison struct {
	figure
	Case              *expression
	measured, planned float64
	what              string // name of the planned figure
	deepSpeed, accel  float64
}

// error returns the error relative to the measured figure.
func (c comparison) error() float64 { return c.planned/c.measured - 1 }

func compareAll(rows []row, folder string) []result {
	results := make([]result, len(rows))
	for i, r := range rows {
		results[i] = compare(r, filepath.Join(folder, r.ID))
	}
	slices.SortStableFunc(results, func(a, b result) int {
		switch {
		case a.worst() > b.worst():
			return -1
		case a.worst() < b.worst():
			return 1
		}
		return 0
	})
	return results
}

// worst returns the absolute error of the row's main figure, or -1 without one.
func (r result) worst() float64 {
	if len(r.compared) == 0 {
		return -1
	}
	return math.Abs(r.compared[0].error())
}

func compare(r row, folder string) result {
	out := result{row: r}
	planned := map[string]*outcome{} // by point, as a point may name a recipe of its own
	for i, f := range r.Measured {
		o, known := planned[f.Point]
		if !known {
			o = planPoint(r, f.Point, filepath.Join(folder, fmt.Sprint(i)))
			planned[f.Point] = o
		}
		if o.err != nil {
			out.reason = strings.ReplaceAll(o.err.Error(), folder+string(filepath.Separator), "")
			out.left = append(out.left, f)
			continue
		}
		bytes, ok := f.bytes()
		if f.perParameter() {
			bytes, ok = f.Value*float64(o.model.Elements()), true
		}
		if value, what := o.figure(r, f); ok && what != "" && bytes > 0 {
			out.compared = append(out.compared, comparison{figure: f, Case: o.expression, measured: bytes,
				planned: value, what: what,
				deepSpeed: deepSpeedEstimate(o.expression), accel: accelerateEstimate(o.expression)})
		} else {
			out.left = append(out.left, f)
		}
	}
	if len(out.compared) == 0 && out.reason == "" {
		out.reason = "no figure of a plan corresponds to what was measured"
	}
	slices.SortStableFunc(out.compared, func(a, b comparison) int {
		if d := r.rank(a.figure) - r.rank(b.figure); d != 0 {
			return d
		}
		return int(math.Copysign(1, b.measured-a.measured))
	})
	return out
}

// rank orders a row's figures. The main figure is the peak of the GPU, or of the host in rows about the host.
func (r row) rank(f figure) int {
	if strings.Contains(f.Point, "overall") {
		return 0
	}
	order := []string{"max_reserved", "max_allocated", "total", "nvidia_smi", "gpu_used", "reserved", "allocated",
		"cpu_used", "cpu_rss"}
	if slices.Contains(r.Tags, "host") {
		order = append([]string{"cpu_used", "cpu_rss"}, order...)
	}
	if at := slices.Index(order, f.Quantity); at >= 0 {
		return at
	}
	return len(order)
}

// outcome is the plan of an expression.
type outcome struct {
	*expression
	plan *plan.Plan
	peak float64 // of a kernel, which has no plan
	err  error
}

func planPoint(r row, point, folder string) *outcome {
	e, err := express(r, point, folder)
	if err != nil {
		return &outcome{err: err}
	}
	out := &outcome{expression: e}
	if k := e.kernel(); k != nil {
		out.peak, out.err = e.peakOf(k)
		return out
	}
	var j *job.Job
	if j, out.err = e.request.Resolve(); out.err == nil {
		out.plan, out.err = plan.New(j)
	}
	return out
}

// moment is the part of the job that a point describes.
type moment struct {
	phases    []ledger.PhaseName // empty for all
	iteration ledger.Iteration   // empty for any
}

// moments derive the moment from the words of a point; the first match counts.
var moments = []struct {
	pattern string
	phase   ledger.PhaseName
}{
	{`after (model )?(load|init\b)|model loaded|initialize beginning|args sanity|before configure`, ledger.Load},
	{`after initializing zero|throughout optimizer init|after initializing optimizer states`, ledger.Initialize},
	{`optimizer[. ]step|after step|step boundary|end of run`, ledger.Step},
	{`forward`, ledger.Forward},
	{`backward|^before$`, ledger.Backward},
}

func momentOf(point text) (m moment, named bool) {
	for _, known := range moments {
		if point.has(known.pattern) {
			m.phases, named = []ledger.PhaseName{known.phase}, true
			break
		}
	}
	switch {
	case point.has(`\bstep [01]\b|first`) && !point.has("before first|micro"):
		m.iteration = ledger.First
	case point.has("steady|step"):
		m.iteration = ledger.Steady
	}
	return m, named
}

// of lists the phases of a device at this moment.
func (m moment) of(d *ledger.Device) []ledger.Phase {
	var phases []ledger.Phase
	for _, p := range d.Phases {
		if len(m.phases) > 0 && !slices.Contains(m.phases, p.Name) {
			continue
		}
		if m.iteration != ledger.Once && p.Iteration != ledger.Once && p.Iteration != m.iteration ||
			m.iteration == ledger.First && p.Name == ledger.Checkpoint {
			continue
		}
		phases = append(phases, p)
	}
	return phases
}

func (o *outcome) device(kind ledger.Kind) *ledger.Device { return deviceOf(o.plan, kind) }

// deviceOf returns the device of a kind with the highest peak, of which a source gives the figure.
func deviceOf(p *plan.Plan, kind ledger.Kind) *ledger.Device {
	var fullest *ledger.Device
	for i := range p.Devices {
		d := &p.Devices[i]
		if d.Kind == kind && (fullest == nil || d.Peak().PeakUsed > fullest.Peak().PeakUsed) {
			fullest = d
		}
	}
	return fullest
}

// figure returns the planned figure that corresponds to a measured one, and its name. The name is empty where no
// planned figure corresponds.
func (o *outcome) figure(r row, f figure) (float64, string) {
	if o.plan == nil {
		return o.peak, "peak allocated, the module by itself"
	}
	point := text(f.Point)
	m, named := momentOf(point)
	if strings.HasPrefix(f.Quantity, "cpu_") {
		return o.hostFigure(r, f, m, named)
	}
	d := o.device(ledger.GPU)
	if d == nil {
		return 0, ""
	}
	if point.has("context") {
		for _, c := range d.Outside {
			if c.Component == ledger.CUDAContext {
				return float64(c.Bytes), "CUDA context"
			}
		}
		return 0, ""
	}
	if f.inHiddenSizes() {
		return o.layer(d)
	}
	ranks := 1.0
	if point.has(`\b(sum|total) (of|over)( all)?( the)?( \d+)? GPUs`) {
		ranks = float64(o.plan.Job.World)
	}
	var name string
	var of func(ledger.Phase) ledger.Bytes
	last := false // the end of a phase, not its peak
	switch f.Quantity {
	case "max_allocated", "peak_active", "peak_allocated":
		name, of = "peak allocated", func(p ledger.Phase) ledger.Bytes { return p.PeakAllocated }
		// DeepSpeed's log begins a new peak at every point. The initialization has many points, but only one phase in
		// the plan.
		if named && m.phases[0] == ledger.Initialize {
			return 0, ""
		}
		if !named || m.phases[0] == ledger.Step {
			m.phases = nil
		}
		if point.has("^before|afters? ") && !named {
			return 0, ""
		}
	case "max_reserved":
		name, of = "peak reserved", func(p ledger.Phase) ledger.Bytes { return p.PeakReserved }
		if named && m.phases[0] != ledger.Load && m.phases[0] != ledger.Initialize {
			m.phases = nil
		}
	case "nvidia_smi", "gpu_used", "gpu_memory":
		name, of = "peak in use", func(p ledger.Phase) ledger.Bytes { return p.PeakUsed }
	case "total":
		return o.total(r, d)
	case "allocated":
		name, of, last = "allocated at the end", func(p ledger.Phase) ledger.Bytes { return p.EndAllocated }, true
	case "reserved":
		name, of, last = "reserved at the end", func(p ledger.Phase) ledger.Bytes { return p.EndReserved }, true
	case "component":
		return o.component(d, f.Point)
	default:
		return 0, ""
	}
	if last && !named {
		return 0, ""
	}
	phases := m.of(d)
	if len(phases) == 0 {
		return 0, ""
	}
	chosen := phases[len(phases)-1]
	if !last {
		for _, p := range phases {
			if of(p) > of(chosen) {
				chosen = p
			}
		}
	}
	return ranks * float64(of(chosen)), fmt.Sprintf("%s, %s %s", name, chosen.Iteration, chosen.Name)
}

// layer returns what a layer keeps between the passes of the first step, in widths of the residual stream.
func (o *outcome) layer(d *ledger.Device) (float64, string) {
	j := o.plan.Job
	width := float64(j.MicroBatch * j.Sequence * j.Model.Network.Hidden * j.ComputeType().Size())
	for _, p := range d.Phases {
		if p.Name != ledger.Forward || p.Iteration != ledger.First {
			continue
		}
		var kept ledger.Bytes
		for _, c := range p.End {
			if strings.HasPrefix(string(c.Component), "activations") || c.Component == ledger.AttentionScores {
				kept += c.Bytes
			}
		}
		return float64(kept) / width / float64(len(j.Model.Network.Blocks())), "kept by a layer"
	}
	return 0, ""
}

// total returns the sum of the components that the row lists, each at its own peak.
func (o *outcome) total(r row, d *ledger.Device) (float64, string) {
	var sum float64
	for _, f := range r.Measured {
		if f.Quantity == "component" {
			planned, _ := o.component(d, f.Point)
			sum += planned
		}
	}
	if sum == 0 {
		return 0, ""
	}
	return sum, "the row's components together, each at its peak"
}

// component returns the largest sum, in any phase, of the components with such a name.
func (o *outcome) component(d *ledger.Device, point string) (float64, string) {
	names := map[string][]ledger.Component{
		"parameters":       {ledger.Parameters},
		"gradients":        {ledger.Gradients},
		"optimizer states": {ledger.OptimizerStates, ledger.MasterWeights},
		"activations":      {ledger.LogitsAndLoss, ledger.Batch},
	}[point]
	var most float64
	for _, p := range d.Phases {
		var sum ledger.Bytes
		for _, c := range p.Components {
			if slices.ContainsFunc(names, func(name ledger.Component) bool {
				return c.Component == name || name != ledger.Gradients &&
					strings.HasPrefix(string(c.Component), string(name))
			}) || point == "activations" && strings.HasPrefix(string(c.Component), point) {
				sum += c.Bytes
			}
		}
		most = max(most, float64(sum))
	}
	if names == nil || most == 0 {
		return 0, ""
	}
	return most, point
}

// hostFigure returns a figure of the host. The used memory of a machine includes other programs, so it is compared as
// the difference from the row's first figure. The resident memory of the process is compared directly.
func (o *outcome) hostFigure(r row, f figure, m moment, named bool) (float64, string) {
	d := o.device(ledger.Host)
	end := func(m moment) float64 {
		phases := m.of(d)
		if len(phases) == 0 {
			return 0
		}
		return float64(phases[len(phases)-1].EndReserved)
	}
	switch f.Quantity {
	case "cpu_rss":
		var most ledger.Bytes
		for _, p := range d.Phases {
			most = max(most, p.PeakUsed)
		}
		return float64(most), "peak of the host"
	case "cpu_delta_per_param":
		return o.hostDelta(text(f.Point))
	case "cpu_used":
		first, ok := r.firstHostFigure()
		at, atNamed := momentOf(text(first.Point))
		if !ok || !named || !atNamed || first.Point == f.Point {
			return 0, ""
		}
		base, _ := first.bytes()
		return base + end(m) - end(at), fmt.Sprintf("%.2f GiB as measured first, and the planned difference",
			base/(1<<30))
	}
	return 0, ""
}

// hostDelta returns what the host holds more at a point than after the load: the engine's initialization, the first
// step, or both.
func (o *outcome) hostDelta(point text) (float64, string) {
	d := o.device(ledger.Host)
	at := map[ledger.PhaseName]float64{}
	for _, p := range d.Phases {
		at[p.Name] = float64(p.EndReserved) // of the last iteration
	}
	load, initialized, stepped := at[ledger.Load], at[ledger.Initialize], at[ledger.Step]
	switch {
	case point.has(`(grand total|overall)`):
		return stepped - load, "the host, from load to step"
	case point.has(`initialize total`):
		return initialized - load, "the host, from load to initialize"
	case point.has(`step total`):
		return stepped - initialized, "the host, from initialize to step"
	}
	return 0, ""
}

func (r row) firstHostFigure() (figure, bool) {
	for _, f := range r.Measured {
		if f.Quantity == "cpu_used" {
			return f, true
		}
	}
	return figure{}, false
}
