package main

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// result is the comparison of one row.
type result struct {
	row
	compared []comparison // the main one first
	left     []figure     // figures that cannot be compared
	reason   string       // why nothing could be compared
	verdict  plan.Result  // of the main figure's plan; empty without a plan
	// falseFits counts figures whose plan fits, and whose run did not: it ran out of memory, or held more than the
	// device has.
	falseFits int
}

// comparison is a measured figure beside the planned one.
type comparison struct {
	figure
	Case              *expression
	measured, planned float64
	what              string // name of the planned figure
	verdict           plan.Result
	lower, upper      float64 // of the planned interval, if there is one
	deepSpeed, accel  float64
	plan              *plan.Plan // nil for a kernel
}

// hasInterval reports whether the planned figure has an interval: modules by themselves have none.
func (c comparison) hasInterval() bool { return c.upper > 0 }

// isInside reports whether the measured figure, before it was rounded for print, may be in the planned interval.
func (c comparison) isInside() bool { return !c.isAbove() && c.measured+c.rounding() >= c.lower }

func (c comparison) isAbove() bool { return c.measured-c.rounding() > c.upper }

// rounding returns half of the last digit that the source prints.
func (c comparison) rounding() float64 {
	digits := strconv.FormatFloat(c.Value, 'f', -1, 64)
	_, behind, _ := strings.Cut(digits, ".")
	return c.measured / c.Value / 2 * math.Pow10(-len(behind))
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
	if r.unread != nil {
		out.reason, out.left = r.unread.Error(), r.Measured
		return out
	}
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
		if o.plan != nil && o.plan.Verdict.Result == plan.Fits && f.exceeds(bytes, o.plan) {
			out.falseFits++
		}
		if p := o.figure(r, f); ok && p.what != "" && bytes > 0 {
			out.compared = append(out.compared, comparison{figure: f, Case: o.expression, measured: bytes,
				verdict: o.verdict(), planned: p.value, what: p.what, lower: p.lower, upper: p.upper,
				plan: o.plan, deepSpeed: deepSpeedEstimate(o.expression), accel: accelerateEstimate(o.expression)})
		} else {
			out.left = append(out.left, f)
		}
	}
	for _, f := range r.Measured {
		if out.reason == "" && f.Value <= 0 {
			out.reason = fmt.Sprintf("%s, %s, has no number", f.Quantity, f.Point)
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
	if len(out.compared) > 0 {
		out.verdict = out.compared[0].verdict
	}
	return out
}

// exceeds reports whether a figure says that its run did not fit: it ran out of memory, or the figure is of a GPU and
// larger than the GPU is.
func (f figure) exceeds(bytes float64, p *plan.Plan) bool {
	if text(f.Quantity + " " + f.Point).has(`\b(OOM|OutOfMemory\w*|out of memory)\b`) {
		return true
	}
	d := deviceOf(p, ledger.GPU)
	ofGPU := []string{"max_reserved", "max_allocated", "nvidia_smi", "gpu_used", "gpu_memory", "reserved", "allocated"}
	return d != nil && d.Capacity > 0 && slices.Contains(ofGPU, f.Quantity) &&
		!f.ofAllGPUs() && bytes > float64(d.Capacity)
}

// ofAllGPUs reports whether the figure is the sum over all GPUs of a job.
func (f figure) ofAllGPUs() bool {
	const gpus = `( all)?( of)?( the)?( \d+)? (GPUs|ranks|devices|cards)`
	return text(f.Point + " " + f.Unit).has(`\b(sum(med)?|total(led)?|added up|together)( of| over| across| on)` + gpus +
		`|\ball( of)?( the)?( \d+)? (GPUs|ranks|devices|cards)( together|,? summed|,? (in )?(sum|total))`)
}

// verdict returns the result of the plan, empty without one.
func (o *outcome) verdict() plan.Result {
	if o.plan == nil {
		return ""
	}
	return o.plan.Verdict.Result
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

// of lists the phases of a device at this moment. Runs that are measured save nothing, and begin anew, unless their
// source says so.
func (m moment) of(d *ledger.Device) []ledger.Phase {
	var phases []ledger.Phase
	for _, p := range d.Phases {
		if len(m.phases) > 0 && !slices.Contains(m.phases, p.Name) {
			continue
		}
		if m.iteration != ledger.Once && p.Iteration != ledger.Once && p.Iteration != m.iteration ||
			len(m.phases) == 0 && (p.Name == ledger.Checkpoint || p.Name == ledger.Resume) {
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

// planned is a planned figure, with its name and its interval. The name is empty if there is no such figure.
type planned struct {
	value        float64
	what         string
	lower, upper float64
}

// figure returns the planned figure that corresponds to a measured one, and its name. The name is empty where no
// planned figure corresponds.
func (o *outcome) figure(r row, f figure) planned {
	if o.plan == nil {
		return planned{value: o.peak, what: "peak allocated, the module by itself"}
	}
	point := text(f.Point)
	m, named := momentOf(point)
	if strings.HasPrefix(f.Quantity, "cpu_") {
		return o.hostFigure(r, f, m, named)
	}
	d := o.device(ledger.GPU)
	if d == nil {
		return planned{}
	}
	if point.has(`\bCUDA context|\bcontext only|^context$`) {
		return contextOf(d)
	}
	if f.inHiddenSizes() {
		return o.layer(d)
	}
	ranks := 1.0
	if f.ofAllGPUs() {
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
			return planned{}
		}
		if !named || m.phases[0] == ledger.Step {
			m.phases = nil
		}
		if point.has("^before|afters? ") && !named {
			return planned{}
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
		return planned{}
	}
	if last && !named {
		return planned{}
	}
	phases := m.of(d)
	if len(phases) == 0 {
		return planned{}
	}
	chosen := phases[len(phases)-1]
	if !last {
		for _, p := range phases {
			if of(p) > of(chosen) {
				chosen = p
			}
		}
	}
	value := of(chosen)
	i := o.interval(d, f.Quantity, value, phases, chosen)
	return planned{ranks * float64(value), fmt.Sprintf("%s, %s %s", name, chosen.Iteration, chosen.Name),
		ranks * float64(i.Lower), ranks * float64(i.Upper)}
}

func contextOf(d *ledger.Device) planned {
	for _, c := range d.Outside {
		if c.Component == ledger.CUDAContext {
			return planned{value: float64(c.Bytes), what: "CUDA context"}
		}
	}
	return planned{}
}

// interval returns the interval of a planned figure of a GPU, at its own level: allocated, reserved or in use. The
// phases are those of the figure's moment.
func (o *outcome) interval(d *ledger.Device, quantity string, value ledger.Bytes, phases []ledger.Phase,
	chosen ledger.Phase) ledger.Interval {
	behind := d.Phases
	for i, p := range d.Phases {
		if p.Name == chosen.Name && p.Iteration == chosen.Iteration {
			behind = d.Phases[:i+1]
		}
	}
	spread := o.plan.Spread
	switch quantity {
	case "allocated":
		return spread.AllocatedAtEnd(&chosen)
	case "max_reserved", "reserved":
		return spread.Reserved(d.Kind, value, behind)
	case "nvidia_smi", "gpu_used", "gpu_memory":
		return spread.Used(d, value, behind)
	}
	return spread.Allocated(phases)
}

// layer returns what a layer keeps between the passes of the first step, in widths of the residual stream.
func (o *outcome) layer(d *ledger.Device) planned {
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
		return planned{value: float64(kept) / width / float64(len(j.Model.Network.Blocks())), what: "kept by a layer"}
	}
	return planned{}
}

// total returns the sum of the components that the row lists, each at its own peak.
func (o *outcome) total(r row, d *ledger.Device) planned {
	var sum float64
	for _, f := range r.Measured {
		if f.Quantity == "component" {
			sum += o.component(d, f.Point).value
		}
	}
	if sum == 0 {
		return planned{}
	}
	var passes []ledger.Phase // what spreads are activations
	var peak ledger.Bytes
	for _, p := range d.Phases {
		if p.Name == ledger.Forward || p.Name == ledger.Backward {
			passes, peak = append(passes, p), max(peak, p.PeakAllocated)
		}
	}
	i := o.plan.Spread.Allocated(passes)
	return planned{sum, "the row's components together, each at its peak", sum - float64(peak-i.Lower),
		sum + float64(i.Upper-peak)}
}

// component returns the largest sum, in any phase, of the components with such a name.
func (o *outcome) component(d *ledger.Device, point string) planned {
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
		return planned{}
	}
	return planned{value: most, what: point}
}

// hostFigure returns a figure of the host. The used memory of a machine includes other programs, so it is compared as
// the difference from the row's first figure. The resident memory of the process is compared directly.
func (o *outcome) hostFigure(r row, f figure, m moment, named bool) planned {
	d := o.device(ledger.Host)
	end := func(m moment) (last ledger.Phase) {
		if phases := m.of(d); len(phases) > 0 {
			last = phases[len(phases)-1]
		}
		return last
	}
	switch f.Quantity {
	case "cpu_rss":
		i := d.Interval
		return planned{float64(d.Peak().PeakUsed), "peak of the host", float64(i.Lower), float64(i.Upper)}
	case "cpu_delta_per_param":
		return o.hostDelta(text(f.Point))
	case "cpu_used":
		first, ok := r.firstHostFigure()
		at, atNamed := momentOf(text(first.Point))
		if !ok || !named || !atNamed || first.Point == f.Point {
			return planned{}
		}
		base, _ := first.bytes()
		return o.between(end(at), end(m), base, fmt.Sprintf("%.2f GiB as measured first, and the planned difference",
			base/(1<<30)))
	}
	return planned{}
}

// between returns what the host holds more at the end of a phase than at the end of an earlier one, on top of a base.
func (o *outcome) between(from, to ledger.Phase, base float64, what string) planned {
	i := o.plan.Spread.Reserved(ledger.Host, to.EndReserved,
		[]ledger.Phase{{PeakAllocated: to.EndAllocated, Components: to.End}})
	base -= float64(from.EndReserved)
	return planned{base + float64(to.EndReserved), what, base + float64(i.Lower), base + float64(i.Upper)}
}

// hostDelta returns what the host holds more at a point than after the load: the engine's initialization, the first
// step, or both.
func (o *outcome) hostDelta(point text) planned {
	d := o.device(ledger.Host)
	at := map[ledger.PhaseName]ledger.Phase{}
	for _, p := range d.Phases {
		at[p.Name] = p // of the last iteration
	}
	load, initialized, stepped := at[ledger.Load], at[ledger.Initialize], at[ledger.Step]
	switch {
	case point.has(`(grand total|overall)`):
		return o.between(load, stepped, 0, "the host, from load to step")
	case point.has(`initialize total`):
		return o.between(load, initialized, 0, "the host, from load to initialize")
	case point.has(`step total`):
		return o.between(initialized, stepped, 0, "the host, from initialize to step")
	}
	return planned{}
}

func (r row) firstHostFigure() (figure, bool) {
	for _, f := range r.Measured {
		if f.Quantity == "cpu_used" {
			return f, true
		}
	}
	return figure{}, false
}
