package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/published"
	"plimsoll/internal/state/optim/kernel"
)

// PlanSchema is the schema of the JSON document.
const PlanSchema = "plimsoll.plan/2"

// PlanDocument is the document of a plan.
type PlanDocument struct {
	Schema  string      `json:"schema"`
	Version string      `json:"version"`
	Verdict plan.Result `json:"verdict"`
	// Estimate is the GPU's peak with an estimate of activations, for a model without known operations.
	Estimate    ledger.Bytes `json:"estimate_with_activations_bytes,omitempty"`
	Limit       *PlanLimit   `json:"limit"` // null where no capacity is known
	Model       PlannedModel `json:"model"`
	Job         PlannedJob   `json:"job"`
	Assumptions []string     `json:"assumptions"`
	// NotCounted names what the job has beside what is planned.
	NotCounted   []string           `json:"not_counted,omitempty"`
	Devices      []ledger.Device    `json:"devices"`
	StateFormats []plan.StateFormat `json:"plimsoll_host_state"`
	// Tier is what the disks of a node hold, if the states are in files.
	Tier *PlannedTier `json:"tier,omitempty"`
	// HostStep is the time of an update on this host; nil where the profile of the host does not tell.
	HostStep *HostStep `json:"plimsoll_host_step,omitempty"`
	// Advice is what would mend the job, the best first.
	Advice []lever.Change `json:"advice,omitempty"`
	// Ladder is a way from a job that lacks memory to one that fits, the cheapest changes first.
	Ladder *lever.Ladder `json:"ladder,omitempty"`
	// Applied is the advice whose files were written.
	Applied *PlanApplied `json:"applied,omitempty"`
	// Nearest are the public measurements nearest to the plan, one for each kind of device.
	Nearest []published.Measurement `json:"nearest_measurements,omitempty"`
	// StepTime is nil where nobody asked for it.
	StepTime *StepTime   `json:"step_time,omitempty"`
	Inputs   []Input     `json:"inputs"`
	Request  job.Request `json:"request"`
	// Megatron are the arguments of Megatron-LM or their file, of a plan that was made from them.
	Megatron string `json:"megatron,omitempty"`
	// unsearched says that plimsoll fit does not search jobs of the program.
	unsearched bool
	// unread is the quantization that no file says, whose name also stands for weights that take more.
	unread string
	// Program is the program that has planned itself, and nil for a plan on paper.
	Program *PlannedProgram `json:"program,omitempty"`
}

// PlanLimit is the point where the job comes nearest to a device's capacity.
type PlanLimit struct {
	Device    ledger.Kind      `json:"device"`
	Rank      int              `json:"rank"` // the first with such a device
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration"`
	Needed    ledger.Bytes     `json:"needed_bytes"`
	Least     ledger.Bytes     `json:"least_bytes"` // if the allocator lost nothing to fragmentation
	Capacity  ledger.Bytes     `json:"capacity_bytes"`
	// Lacks is what the device lacks after PyTorch has freed its cache; 0 if the plan itself fits.
	Lacks ledger.Bytes `json:"lacks_bytes"`
	// Stops is the first phase that lacks memory: a run ends there.
	Stops *PlanStop `json:"stops_in,omitempty"`
	// Lower and Upper are the ends of the interval that 90 % of runs are in. Source makes it widest.
	Lower  ledger.Bytes `json:"lower_bytes,omitempty"`
	Upper  ledger.Bytes `json:"upper_bytes,omitempty"`
	Source string       `json:"largest_source,omitempty"`
}

// PlanStop is the phase in which a run ends.
type PlanStop struct {
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration"`
}

// newPlanLimit returns the limit of a verdict, nil where no capacity is known.
func newPlanLimit(v plan.Verdict) *PlanLimit {
	if v.Result == plan.Unknown {
		return nil
	}
	l := &PlanLimit{Device: v.Device, Rank: v.Rank, Phase: v.Phase, Iteration: v.Iteration, Needed: v.Needed,
		Least: v.Least, Capacity: v.Capacity, Lacks: v.Lacks(), Lower: v.Lower, Upper: v.Upper, Source: v.Source}
	if v.Stops != nil {
		l.Stops = &PlanStop{v.Stops.Name, v.Stops.Iteration}
	}
	return l
}

// interval returns the interval in short, with what makes it widest. It is empty for a document without one.
func (l *PlanLimit) interval() string {
	if l.Upper == 0 {
		return ""
	}
	text := fmt.Sprintf("; %.0f %%: %v to %v", 100*ledger.Confidence, l.Lower, l.Upper)
	if l.Source != "" {
		text += " (" + l.Source + ")"
	}
	return text
}

// PlannedModel describes the model.
type PlannedModel struct {
	Name         string `json:"name"`
	Architecture string `json:"architecture"`
	Source       string `json:"source"`
	Parameters   int64  `json:"parameters"`
	Trained      int64  `json:"trained_parameters"`
}

// PlannedJob describes how the model is trained.
type PlannedJob struct {
	Engine       string `json:"engine"`
	Ranks        int    `json:"ranks"`
	Nodes        int    `json:"nodes"`
	MicroBatch   int64  `json:"micro_batch"`
	Sequence     int64  `json:"sequence_length"`
	Usual        int64  `json:"usual_sequence_length,omitempty"`    // where the first micro batch has longer ones
	Shortest     int64  `json:"shortest_sequence_length,omitempty"` // where lengths vary
	Accumulation int    `json:"gradient_accumulation"`
	Weights      string `json:"weight_dtype"`
	Autocast     string `json:"autocast_dtype"` // empty for off
	Compute      string `json:"compute_dtype"`  // FSDP casts parameters to it; empty where they keep their own type
	Attention    string `json:"attention"`
	Optimizer    string `json:"optimizer"`
	Adapter      string `json:"adapter"`      // empty where the model itself is trained
	Quantization string `json:"quantization"` // of frozen weights; empty for none
	Recompute    string `json:"recompute"`
	Torch        string `json:"torch"` // its version

	// The degrees of parallelism beside the engine's own, 1 for none. Each of the Replicas groups of ranks holds one
	// full model.
	TensorParallel  int64    `json:"tensor_parallel"`
	ContextParallel int64    `json:"context_parallel"`
	ExpertParallel  int64    `json:"expert_parallel"`
	Pipeline        int64    `json:"pipeline_parallel,omitempty"` // stages of torch.distributed.pipelining
	Replicas        int      `json:"replicas"`
	Parallel        []string `json:"-"` // the same in words
}

// Input is a file that the plan was made from.
type Input struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// NewPlanDocument makes the document of a plan.
func NewPlanDocument(version string, request job.Request, p *plan.Plan) (*PlanDocument, error) {
	j := p.Job
	d := &PlanDocument{
		Schema: PlanSchema, Version: version, Verdict: p.Verdict.Result, Devices: p.Devices, Request: request,
		Estimate:     p.Estimate,
		Limit:        newPlanLimit(p.Verdict),
		Nearest:      nearestOf(p.Devices, published.EngineOf(p.Job.EngineName()), p.Elements),
		Model:        PlannedModel{j.Model.Name, j.Model.Architecture, j.Model.Source, p.Elements, p.Trained},
		StateFormats: append([]plan.StateFormat{}, p.StateFormats...),
		Tier:         newPlannedTier(p.Tier),
		Assumptions:  append([]string{}, j.Assumptions...),
		NotCounted:   j.LeftOut,
		unread:       j.UnreadPacking(),
		Job: PlannedJob{
			Engine:          j.EngineName(),
			Ranks:           j.World,
			Nodes:           j.Nodes,
			MicroBatch:      j.MicroBatch,
			Sequence:        j.Sequence,
			Usual:           j.UsualSequence,
			Shortest:        j.ShortestSequence,
			Accumulation:    j.Accumulation,
			Weights:         j.ParameterType.String(),
			Attention:       string(j.Attention),
			Optimizer:       j.OptimizerName(),
			Adapter:         j.AdapterName(),
			Quantization:    j.QuantizationName(),
			Recompute:       j.RecomputeName(),
			Torch:           j.Versions.Torch.String(),
			Compute:         j.ComputeName(),
			TensorParallel:  j.Parallel.Tensor,
			ContextParallel: j.Parallel.Context,
			ExpertParallel:  j.Parallel.Expert,
			Pipeline:        pipelineOf(j),
			Replicas:        j.Replicas(),
			Parallel:        j.ParallelNames(),
		},
	}
	if j.AutocastName() != "" {
		d.Job.Autocast = j.AutocastName()
	}
	if j.Megatron != nil {
		d.Megatron, d.unsearched = j.Megatron.Given, j.Megatron.Policy != nil
	}
	var err error
	d.Inputs, err = inputsOf(j.Files)
	return d, err
}

// inputsOf returns the files that a plan was made from with their hashes.
func inputsOf(list []string) ([]Input, error) {
	inputs := []Input{}
	for _, file := range list {
		sum, err := hashOf(file)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, Input{file, sum})
	}
	return inputs, nil
}

// pipelineOf returns the number of pipeline stages, 0 without a pipeline.
func pipelineOf(j *job.Job) int64 {
	if j.Pipeline == nil {
		return 0
	}
	return j.Pipeline.Degree
}

// Page shows every device, phase by phase, and what is largest at its peak.
func (d *PlanDocument) Page() *Page {
	if d.Program != nil {
		return d.programPage()
	}
	var job, assumed Facts
	job.add("model", "%s, %s parameters (%s)%s", d.Model.Name, ledger.Count(d.Model.Parameters), d.Model.Architecture,
		d.trained())
	job.add("job", "%s, %s, %s, %s attention, %s",
		strings.Join(append([]string{d.Job.Engine}, d.Job.Parallel...), ", "), d.types(), d.batch(), d.Job.Attention,
		d.Job.optimizer())
	d.StepTime.addTo(&job)
	d.Tier.addTo(&job, d.StepTime)
	sections := []Section{d.advised(), {job}}
	palette := paletteOf(d.Devices)
	for i := range d.Devices {
		sections = append(sections, d.device(&d.Devices[i], palette))
	}
	d.notCounted(&job)
	if len(d.Assumptions) > 0 {
		assumed.add("assumed", "%s", strings.Join(d.Assumptions, "; "))
	}
	return &Page{
		Title:    "Plan of " + d.Model.Name,
		Sections: append(sections, Section{assumed}),
		Verdict:  d.verdictLine(),
		Tone:     map[plan.Result]Tone{plan.Fits: Good, plan.Tight: Warning, plan.DoesNotFit: Bad}[d.Verdict],
		Hints:    append(d.stops(), d.unjudged()...),
		Document: d,
		Dense:    true,
		Brief:    d.brief,
	}
}

// notCounted says what the verdict does not count.
func (d *PlanDocument) notCounted(to *Facts) {
	if len(d.NotCounted) > 0 {
		to.add("not counted", "%s", strings.Join(d.NotCounted, "; "))
	}
}

// batch says what a rank computes in an optimizer step.
func (d *PlanDocument) batch() string {
	text := fmt.Sprintf("%s of %s tokens", counted(int(d.Job.MicroBatch), "sequence"), ledger.Count(d.Job.Sequence))
	if d.Job.Usual > 0 {
		text += fmt.Sprintf(" (%s after the first)", ledger.Count(d.Job.Usual))
	}
	if d.Job.Shortest > 0 {
		text += fmt.Sprintf(" (the shortest has %s)", ledger.Count(d.Job.Shortest))
	}
	if d.Job.Accumulation > 1 {
		text += fmt.Sprintf(" in each of %d micro batches", d.Job.Accumulation)
	}
	return text
}

// optimizer names the optimizer in the words of its users.
func (j *PlannedJob) optimizer() string {
	name, implementation, _ := strings.Cut(j.Optimizer, "/")
	implementation, rest, _ := strings.Cut(implementation, ",")
	first, more, _ := strings.Cut(name, " ")
	if proper, ok := optimizerTitles[first]; ok {
		name = strings.TrimSpace(proper + " " + more)
	}
	if implementation != "" {
		name += " (" + implementation + ")"
	}
	if rest != "" {
		name += "," + rest
	}
	return name
}

// optimizerTitles are names of optimizers as their users write them.
var optimizerTitles = map[string]string{"adamw": "AdamW", "adam": "Adam", "adamw-8bit": "8-bit AdamW", "sgd": "SGD",
	"lion": "Lion", "adafactor": "Adafactor", "adagrad": "Adagrad", "muon": "Muon"}

func (d *PlanDocument) trained() string {
	if d.Model.Trained == d.Model.Parameters {
		return ""
	}
	return fmt.Sprintf(", %s trained", ledger.Count(d.Model.Trained))
}

func (d *PlanDocument) types() string {
	types := d.weights()
	if d.Job.Quantization != "" {
		types += ", frozen weights in " + d.Job.Quantization
	}
	if d.Job.Adapter != "" {
		types += ", " + d.Job.Adapter
	}
	return types
}

func (d *PlanDocument) weights() string {
	if d.Job.Autocast != "" {
		return d.Job.Weights + " weights under " + d.Job.Autocast + " autocast"
	}
	if d.Job.Compute != "" && d.Job.Compute != d.Job.Weights {
		return d.Job.Weights + " weights, computing in " + d.Job.Compute
	}
	return d.Job.Weights
}

// device returns a device's phases, and what it holds at its peak.
func (d *PlanDocument) device(device *ledger.Device, palette []pigment) Section {
	peak := device.Peak()
	when := "peak in " + phaseText(peak.Name, peak.Iteration)
	if peak.PeakRequested == 0 {
		when = titleOf(device) + ", all the time"
	}
	capacity := "an unknown capacity"
	if device.Capacity > 0 {
		capacity = device.Capacity.String()
	}
	s := Section{Paragraph(fmt.Sprintf("%s: %v of %s", when, peak.PeakUsed, capacity)), consumers(device)}
	if peak.PeakRequested > 0 {
		s = append(Section{Bars{Device: device, palette: palette}}, s...)
	}
	s = append(s, mappedFiles(device)...)
	if nodes := device.NUMANodes; len(nodes) > 0 {
		capacity := ""
		if nodes[0].Capacity > 0 {
			capacity = " of " + nodes[0].Capacity.String()
		}
		s = append(s, Paragraph(fmt.Sprintf("on the fullest of %d NUMA nodes, with %d ranks: %v%s", len(nodes),
			nodes[0].Ranks, nodes[0].PeakUsed, capacity)))
	}
	if device.Kind == ledger.Host && len(d.StateFormats) > 0 && peak.PeakRequested > 0 {
		s = append(s, d.stateFormats())
		if d.HostStep != nil {
			s = append(s, d.HostStep.paragraph())
		}
	}
	return s
}

// mappedFiles names the page cache of a device, which no figure has.
func mappedFiles(device *ledger.Device) (s Section) {
	for _, p := range device.Phases {
		if h := p.PageCache; h != nil {
			s = append(s, Paragraph(fmt.Sprintf("beside that in %s: %v of page cache, which the kernel takes back "+
				"when memory is short: %s", phaseText(p.Name, p.Iteration), h.Bytes, h.Why)))
		}
	}
	return s
}

// timeline returns a table of a device's phases. Consecutive phases with the same figures share a row.
func timeline(device *ledger.Device) *Table {
	t := &Table{Columns: []Column{{Title: titleOf(device)}}}
	for _, title := range []string{"requested", "allocated", "reserved", "in use", "end"} {
		t.Columns = append(t.Columns, Column{Title: title, Kind: Bytes})
	}
	for _, r := range phaseRows(device) {
		p := r.phase
		t.add(r.name, p.PeakRequested, p.PeakAllocated, p.PeakReserved, p.PeakUsed, p.EndAllocated)
	}
	return t
}

func titleOf(device *ledger.Device) string {
	title := fmt.Sprintf("GPU of rank %d", device.Rank)
	if device.Kind == ledger.Host {
		title = "host"
	}
	if device.Count > 1 {
		title += ", one of " + ledger.Count(int64(device.Count))
	}
	return title
}

func alike(p, q *ledger.Phase) bool {
	return p.PeakRequested == q.PeakRequested && p.PeakAllocated == q.PeakAllocated &&
		p.PeakReserved == q.PeakReserved && p.PeakUsed == q.PeakUsed && p.EndAllocated == q.EndAllocated
}

func rowText(p *ledger.Phase) string {
	if p.Iteration == ledger.Once {
		return string(p.Name)
	}
	return fmt.Sprintf("%s, %s", p.Name, p.Iteration)
}

// shown is the number of components to list at a device's peak.
const shown = 5

// consumers lists the largest components at a device's peak.
func consumers(device *ledger.Device) *Table {
	t := &Table{Style: Listed, Columns: []Column{{Title: "bytes", Kind: Bytes, Width: len("1002.3 GiB")},
		{Title: "held by"}}}
	peak := device.Peak()
	components := slices.Concat(peak.Components, device.Outside)
	slices.SortStableFunc(components, func(a, b ledger.Holding) int { return cmp.Compare(b.Bytes, a.Bytes) })
	for _, c := range components[:min(shown, len(components))] {
		t.add(c.Bytes, c.Component.Title()+": "+c.Why)
	}
	if len(components) > shown {
		var sum ledger.Bytes
		var names []string
		for _, c := range components[shown:] {
			sum += c.Bytes
			names = append(names, c.Component.Title())
		}
		t.add(sum, fmt.Sprintf("%d more: %s", len(names), strings.Join(names, ", ")))
	}
	if rest := peak.PeakReserved - peak.PeakRequested; device.Kind == ledger.GPU && rest > 0 {
		t.add(rest, "reserved by the allocator beyond that: rounding, fragments, memory of earlier phases")
	}
	return t
}

// stateFormats lists the bytes of the optimizer's state in Plimsoll's formats. Those of overlapped steps are in the
// JSON document alone.
func (d *PlanDocument) stateFormats() Paragraph {
	var formats []string
	for _, h := range d.StateFormats {
		if h.Overlap != "" {
			continue
		}
		name := h.State
		switch {
		case h.State == kernel.Split24.String():
			name += " with " + h.Moments + " moments"
		case h.Moments != "fp32":
			name = h.Moments + " moments"
		}
		formats = append(formats, fmt.Sprintf("%s %v", name, h.Bytes))
	}
	return Paragraph("the optimizer's state in Plimsoll's formats: " + strings.Join(formats, ", "))
}

func phaseText(name ledger.PhaseName, iteration ledger.Iteration) string {
	if iteration == ledger.Once {
		return string(name)
	}
	return fmt.Sprintf("the %s %s", iteration, name)
}

func (d *PlanDocument) verdictLine() string {
	if d.Estimate > 0 && d.Verdict != plan.DoesNotFit {
		least := d.Devices[0].Peak().PeakUsed
		return fmt.Sprintf("no verdict: the operations of this model are unknown. It needs at least %v on the GPU, "+
			"which is without activations, and about %v if every matrix keeps its input and result in fp32.",
			least, d.Estimate)
	}
	if d.Limit == nil {
		return "no verdict: give --gpu or --gpu-memory, and --host-memory"
	}
	where := "GPU"
	if d.Limit.Device == ledger.Host {
		where = "host"
	}
	what := fmt.Sprintf("%v of %v on the %s in %s", d.Limit.Needed, d.Limit.Capacity, where,
		phaseText(d.Limit.Phase, d.Limit.Iteration))
	switch d.Verdict {
	case plan.DoesNotFit:
		return fmt.Sprintf("does not fit: %s, %v too much", what, d.Limit.Lacks)
	case plan.Tight:
		side := ", more likely enough"
		if d.Limit.Lacks > 0 {
			side = fmt.Sprintf(", %v too much, more likely than not", d.Limit.Lacks)
		}
		return "tight: " + what + side + d.Limit.interval()
	}
	return "fits: " + what + d.Limit.interval()
}

// stops says where a run would end for want of memory, if that is not where it needs most.
func (d *PlanDocument) stops() (lines []string) {
	if l := d.Limit; l != nil && l.Stops != nil && *l.Stops != (PlanStop{l.Phase, l.Iteration}) {
		lines = append(lines, "a run would stop earlier, in "+phaseText(l.Stops.Phase, l.Stops.Iteration))
	}
	return lines
}

// Lacks reports whether a job lacks memory by its plan. A strict reader wants the upper end of the interval to fit.
func (d *PlanDocument) Lacks(strict bool) bool {
	return d.Verdict == plan.DoesNotFit ||
		d.Verdict == plan.Tight && (strict || d.Limit != nil && d.Limit.Lacks > 0)
}

// unjudged names the devices whose capacity is unknown, and the form of weights that no file says: the verdict says
// nothing of them.
func (d *PlanDocument) unjudged() (lines []string) {
	if d.unread != "" && d.Verdict != plan.DoesNotFit {
		lines = append(lines, "no file says that the weights are packed as "+strings.ToUpper(d.unread)+" packs "+
			"them: if the quant_method in their config.json is compressed-tensors, the first forward pass makes "+
			"ordinary weights of them; --quantization compressed-tensors plans that")
	}
	for i := range d.Devices {
		device := &d.Devices[i]
		if device.Capacity > 0 || d.Limit == nil || d.Verdict == plan.DoesNotFit {
			continue
		}
		flag := "--host-memory"
		if device.Kind == ledger.GPU {
			flag = "--gpu or --gpu-memory"
		}
		lines = append(lines, fmt.Sprintf("the %s needs %v and was not judged: give %s", device.Kind,
			device.Peak().PeakUsed, flag))
	}
	return lines
}

// Explain shows everything about one component, or about the intervals. An error is a *fault.Input.
func (d *PlanDocument) Explain(name string) (*Page, error) {
	if name == "interval" {
		return d.explainIntervals(), nil
	}
	var names []string
	var all Section
	for i := range d.Devices {
		device := &d.Devices[i]
		phases := &Table{Style: Listed, Columns: []Column{{Title: "phase", Width: len("the steady backward")},
			{Title: "bytes"}}}
		var found ledger.Holding // where it is largest
		when := ""
		for k := range device.Phases {
			p := &device.Phases[k]
			for _, c := range slices.Concat(p.Components, device.Outside) {
				names = append(names, c.Component.Title())
				if strings.EqualFold(c.Component.Title(), name) || string(c.Component) == name {
					phases.add(phaseText(p.Name, p.Iteration), c.Bytes.Exact())
					if c.Bytes > found.Bytes {
						found, when = c, phaseText(p.Name, p.Iteration)
					}
				}
			}
		}
		if len(phases.Rows) > 0 {
			all = append(all, Paragraph(fmt.Sprintf("%s on the %s", found.Component.Title(), device.Kind)), phases,
				Paragraph("  why: "+found.Why))
			all = append(all, d.addressOf(device, found, when)...)
		}
	}
	if len(all) == 0 {
		slices.Sort(names)
		return nil, fault.Inputf("no peak of this plan has a component called %q", name).
			WithHint("components of this plan: " + strings.Join(slices.Compact(names), ", ") + "; or interval")
	}
	return &Page{Title: "Plan of " + d.Model.Name + ": " + name, Sections: []Section{all}, Document: d}, nil
}

// explainIntervals shows what makes the interval of every device wide.
func (d *PlanDocument) explainIntervals() *Page {
	var all Section
	for i := range d.Devices {
		device := &d.Devices[i]
		if device.Interval.Confidence == 0 {
			continue
		}
		t := &Table{Style: Listed, Columns: []Column{{Title: "less", Kind: Bytes, Width: len("1002.3 GiB")},
			{Title: "more", Kind: Bytes, Width: len("1002.3 GiB")}, {Title: "source"}}}
		for _, s := range device.Interval.Sources {
			t.add(s.Below, s.Above, s.Name+": "+s.Reason)
		}
		all = append(all, Paragraph(fmt.Sprintf(
			"%s: %v planned, %.0f %% between %v and %v; bytes less and more by source",
			titleOf(device), device.Peak().PeakUsed, 100*device.Interval.Confidence, device.Interval.Lower,
			device.Interval.Upper)), t)
	}
	return &Page{Title: "Plan of " + d.Model.Name + ": interval", Sections: []Section{all}, Document: d}
}
