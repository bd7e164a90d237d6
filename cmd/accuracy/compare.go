package main

import (
	"cmp"
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
	ends      []plan.Result // verdicts on jobs that ran out of memory
}

// comparison is a measured figure beside the planned one.
type comparison struct {
	figure
	variant           *variant
	measured, planned float64
	rounding          float64 // how far the source has rounded the measured figure
	what              string  // name of the planned figure
	verdict           plan.Result
	lower, upper      float64 // of the planned interval, if there is one
	deepSpeed, accel  float64
	plan              *plan.Plan // nil for a kernel
}

// hasInterval reports whether the planned figure has an interval: modules by themselves have none.
func (c comparison) hasInterval() bool { return c.upper > 0 }

// isInside reports whether the measured figure, before it was rounded for print, may be in the planned interval.
func (c comparison) isInside() bool { return !c.isAbove() && c.measured+c.rounding >= c.lower }

func (c comparison) isAbove() bool { return c.measured-c.rounding > c.upper }

// error returns the error relative to the measured figure.
func (c comparison) error() float64 { return c.planned/c.measured - 1 }

// rounded returns how far the source has rounded a figure: half of the last digit that it prints, if no more.
func (f figure) rounded() float64 {
	if f.Rounding > 0 {
		return f.Rounding
	}
	_, behind, _ := strings.Cut(strconv.FormatFloat(f.Value, 'f', -1, 64), ".")
	return math.Pow10(-len(behind)) / 2
}

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
	out := result{row: r, reason: r.Reason}
	for i := range r.variants {
		out.compareVariant(&r.variants[i], filepath.Join(folder, fmt.Sprint(i)))
	}
	out.reason = strings.ReplaceAll(out.reason, folder+string(filepath.Separator), "")
	if !out.isExpressed() && out.reason == "" {
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

// isExpressed reports whether the run is planned.
func (r *result) isExpressed() bool { return len(r.compared)+len(r.ends) > 0 }

// compareVariant plans a variant, and compares its figures.
func (r *result) compareVariant(of *variant, folder string) {
	o := planVariant(of, folder)
	if o.err != nil {
		r.reason, r.left = o.err.Error(), append(r.left, of.Figures...)
		return
	}
	if o.plan != nil && o.isOpaque() {
		r.reason = fmt.Sprintf("no verdict: the operations of %s are unknown", o.plan.Job.Model.Architecture)
	}
	for _, f := range of.Figures {
		if o.plan != nil && f.OutOfMemory {
			r.ends = append(r.ends, o.plan.Verdict.Result)
		}
		elements := o.elements()
		measured := f.bytes(f.Value, elements)
		if o.plan != nil && o.plan.Verdict.Result == plan.Fits && f.exceeds(measured, o.plan) {
			r.falseFits++
		}
		p := o.figure(f)
		if p.what == "" || measured <= 0 {
			r.left = append(r.left, f)
			continue
		}
		r.compared = append(r.compared, comparison{figure: f, variant: of, measured: measured,
			rounding: f.bytes(f.rounded(), elements), verdict: o.verdict(), planned: p.value, what: p.what,
			lower: p.lower, upper: p.upper, plan: o.plan, deepSpeed: o.deepSpeedEstimate(),
			accel: o.accelerateEstimate()})
	}
}

// exceeds reports whether a figure says that its run did not fit: it ran out of memory, or the figure is of a GPU and
// larger than the GPU is.
func (f figure) exceeds(bytes float64, p *plan.Plan) bool {
	d := deviceOf(p, ledger.GPU)
	return f.OutOfMemory || d != nil && d.Capacity > 0 && slices.Contains(ofGPU, f.Quantity) && !f.AllGPUs &&
		bytes > float64(d.Capacity)
}

// ofGPU are the quantities that no GPU can hold more of than it has.
var ofGPU = []string{"max_reserved", "max_allocated", "nvidia_smi", "gpu_used", "reserved", "allocated"}

// verdict returns the result of the plan, empty without one.
func (o *outcome) verdict() plan.Result {
	if o.plan == nil {
		return ""
	}
	return o.plan.Verdict.Result
}

// rank orders a row's figures. The main figure is the peak of the GPU, or of the host in rows about the host.
func (r row) rank(f figure) int {
	if f.Main {
		return 0
	}
	order := []string{"max_reserved", "max_allocated", "total", "nvidia_smi", "gpu_used", "reserved", "allocated",
		"cpu_used", "cpu_rss"}
	if r.Host {
		order = append([]string{"cpu_used", "cpu_rss"}, order...)
	}
	if at := slices.Index(order, f.Quantity); at >= 0 {
		return at
	}
	return len(order)
}

// outcome is the plan of a variant.
type outcome struct {
	*variant
	asked job.Request
	plan  *plan.Plan
	peak  float64 // of a kernel, which has no plan
	err   error
}

func planVariant(r *variant, folder string) *outcome {
	out := &outcome{variant: r}
	if r.Kernel != nil {
		out.peak, out.err = r.Kernel.peakOf(folder)
		return out
	}
	if out.asked, _, out.err = r.request(folder); out.err != nil {
		return out
	}
	var j *job.Job
	if j, out.err = out.asked.Resolve(); out.err == nil {
		out.plan, out.err = plan.New(j)
	}
	return out
}

// isOpaque reports whether the operations of the model are unknown. Its plan has states and no activations, and gives
// no verdict.
func (o *outcome) isOpaque() bool { return o.plan.Job.Model.Network.Opaque != nil }

// elements returns the number of parameters of the model, 0 of a kernel.
func (o *outcome) elements() int64 {
	if o.plan == nil {
		return 0
	}
	return o.plan.Job.Model.Elements()
}

// of lists the phases of a device that a figure is of. Runs that are measured save nothing, and begin anew, unless
// their source says so.
func (f figure) of(d *ledger.Device) []ledger.Phase {
	var phases []ledger.Phase
	for _, p := range d.Phases {
		if f.Phase != "" && p.Name != f.Phase {
			continue
		}
		if f.Iteration != ledger.Once && p.Iteration != ledger.Once && p.Iteration != f.Iteration ||
			f.Phase == "" && (p.Name == ledger.Checkpoint || p.Name == ledger.Resume) {
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

// quantities say which figure of a phase corresponds to a quantity, and whether it is that of the phase's end.
var quantities = map[string]struct {
	name string
	of   func(ledger.Phase) ledger.Bytes
	end  bool
}{
	"max_allocated": {"peak allocated", func(p ledger.Phase) ledger.Bytes { return p.PeakAllocated }, false},
	"max_reserved":  {"peak reserved", func(p ledger.Phase) ledger.Bytes { return p.PeakReserved }, false},
	"nvidia_smi":    {"peak in use", func(p ledger.Phase) ledger.Bytes { return p.PeakUsed }, false},
	"gpu_used":      {"peak in use", func(p ledger.Phase) ledger.Bytes { return p.PeakUsed }, false},
	"allocated":     {"allocated at the end", func(p ledger.Phase) ledger.Bytes { return p.EndAllocated }, true},
	"reserved":      {"reserved at the end", func(p ledger.Phase) ledger.Bytes { return p.EndReserved }, true},
}

// figure returns the planned figure that corresponds to a measured one, and its name. The name is empty where no
// planned figure corresponds.
func (o *outcome) figure(f figure) planned {
	if o.plan == nil {
		return planned{value: o.peak, what: "peak allocated, the module by itself"}
	}
	if isOfHost(f.Quantity) {
		return o.hostFigure(f)
	}
	d := o.device(ledger.GPU)
	switch {
	case d == nil:
		return planned{}
	case f.Of == "context":
		return contextOf(d)
	case f.Of == "layer":
		return o.layer(d)
	case f.Quantity == "total":
		return o.total(d)
	case f.Quantity == "component":
		return o.component(d, f.Point)
	}
	q, known := quantities[f.Quantity]
	phases := f.of(d)
	if !known || len(phases) == 0 || o.isOpaque() && !q.end {
		return planned{}
	}
	chosen := phases[len(phases)-1]
	for _, p := range phases {
		if !q.end && q.of(p) > q.of(chosen) {
			chosen = p
		}
	}
	value, ranks := q.of(chosen), 1.0
	if f.AllGPUs {
		ranks = float64(o.plan.Job.World)
	}
	i := o.interval(d, f.Quantity, value, phases, chosen)
	return planned{ranks * float64(value), fmt.Sprintf("%s, %s %s", q.name, chosen.Iteration, chosen.Name),
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
	case "nvidia_smi", "gpu_used":
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

// total returns the sum of the components that the variant lists, each at its own peak.
func (o *outcome) total(d *ledger.Device) planned {
	var sum float64
	for _, f := range o.Figures {
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
// the difference from what the source found at the end of an earlier phase. The resident memory of the process is
// compared directly.
func (o *outcome) hostFigure(f figure) planned {
	d := o.device(ledger.Host)
	if f.From == "" && f.Phase == "" {
		i := d.Interval
		return planned{float64(d.Peak().PeakUsed), "peak of the host", float64(i.Lower), float64(i.Upper)}
	}
	if phases := f.of(d); f.From == "" && len(phases) > 0 {
		most := slices.MaxFunc(phases, func(a, b ledger.Phase) int { return cmp.Compare(a.PeakUsed, b.PeakUsed) })
		i := o.plan.Spread.Used(d, most.PeakUsed, phases)
		return planned{float64(most.PeakUsed), fmt.Sprintf("peak of the host, %s %s", most.Iteration, most.Name),
			float64(i.Lower), float64(i.Upper)}
	}
	end := func(f figure) (last ledger.Phase) {
		if phases := f.of(d); len(phases) > 0 {
			last = phases[len(phases)-1]
		}
		return last
	}
	what := fmt.Sprintf("the host, from %s to %s", f.From, f.Phase)
	if f.Base > 0 {
		what = fmt.Sprintf("%.2f GiB as measured first, and the planned difference", f.Base/(1<<30))
	}
	return o.between(end(figure{Phase: f.From}), end(f), f.Base, what)
}

// between returns what the host holds more at the end of a phase than at the end of an earlier one, on top of a base.
func (o *outcome) between(from, to ledger.Phase, base float64, what string) planned {
	i := o.plan.Spread.Reserved(ledger.Host, to.EndReserved,
		[]ledger.Phase{{PeakAllocated: to.EndAllocated, Components: to.End}})
	base -= float64(from.EndReserved)
	return planned{base + float64(to.EndReserved), what, base + float64(i.Lower), base + float64(i.Upper)}
}
