package report

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"plimsoll/fault"
	"plimsoll/ledger"
	"plimsoll/plan"
)

// PlanSchema is the schema of the JSON document.
const PlanSchema = "plimsoll.plan/1"

// Plan is the document of a plan.
type Plan struct {
	Schema      string        `json:"schema"`
	Version     string        `json:"version"`
	Verdict     plan.Result   `json:"verdict"`
	Limit       *PlanLimit    `json:"limit"` // null when no capacity is known
	Model       PlannedModel  `json:"model"`
	Job         PlannedJob    `json:"job"`
	Assumptions []string      `json:"assumptions"`
	Devices     []plan.Device `json:"devices"`
	Hosted      []plan.Hosted `json:"plimsoll_host_state"`
	Inputs      []Input       `json:"inputs"`
	Request     plan.Request  `json:"request"`

	reasons map[string]string
}

// PlanLimit is where the job comes nearest to what a device has.
type PlanLimit struct {
	Device    ledger.Device  `json:"device"`
	Phase     plan.PhaseName `json:"phase"`
	Iteration plan.Iteration `json:"iteration"`
	Needed    ledger.Bytes   `json:"needed_bytes"`
	Capacity  ledger.Bytes   `json:"capacity_bytes"`
}

// PlannedModel says what is trained.
type PlannedModel struct {
	Name         string `json:"name"`
	Architecture string `json:"architecture"`
	Source       string `json:"source"`
	Parameters   int64  `json:"parameters"`
	Trained      int64  `json:"trained_parameters"`
}

// PlannedJob says how.
type PlannedJob struct {
	Engine       string `json:"engine"`
	Ranks        int    `json:"ranks"`
	Nodes        int    `json:"nodes"`
	MicroBatch   int64  `json:"micro_batch"`
	Sequence     int64  `json:"sequence_length"`
	Accumulation int    `json:"gradient_accumulation"`
	Weights      string `json:"weight_dtype"`
	Autocast     string `json:"autocast_dtype"` // empty: off
	Attention    string `json:"attention"`
	Optimizer    string `json:"optimizer"`
	Recompute    string `json:"recompute"`
}

// Input is a file that the plan was made from.
type Input struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// NewPlan draws up the document.
func NewPlan(version string, request plan.Request, p *plan.Plan) (*Plan, error) {
	j := p.Job
	d := &Plan{
		Schema: PlanSchema, Version: version, Verdict: p.Verdict.Result, Devices: p.Devices, Request: request,
		Model:       PlannedModel{j.Model.Name, j.Model.Architecture, j.Model.Source, j.Model.Elements(), p.Trained},
		Hosted:      append([]plan.Hosted{}, p.Hosted...),
		Assumptions: append([]string{}, j.Assumptions...),
		Job: PlannedJob{Engine: j.EngineName(), Ranks: j.World, Nodes: j.Nodes, MicroBatch: j.MicroBatch, Sequence: j.Sequence, Accumulation: j.Accumulation,
			Weights: j.Weights.String(), Attention: string(j.Attention), Optimizer: j.OptimizerName(), Recompute: j.RecomputeName()},
	}
	if v := p.Verdict; v.Result != plan.Unknown {
		d.Limit = &PlanLimit{v.Device, v.Phase, v.Iteration, v.Needed, v.Capacity}
	}
	if j.AutocastName() != "" {
		d.Job.Autocast = j.AutocastName()
	}
	for _, file := range request.Files() {
		sum, err := hashOf(file)
		if err != nil {
			return nil, err
		}
		d.Inputs = append(d.Inputs, Input{file, sum})
	}
	return d, nil
}

func hashOf(file string) (string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", &fault.Input{Where: fault.Position{File: file}, Err: err}
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:]), nil
}

// WriteJSON writes the document.
func (d *Plan) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}

// WriteText writes what a person reads: the verdict first.
func (d *Plan) WriteText(w io.Writer) error {
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-11s %s\n", name, value) }
	line("model", fmt.Sprintf("%s, %s parameters (%s)", d.Model.Name, ledger.Count(d.Model.Parameters), d.Model.Architecture)+d.trained())
	line("job", fmt.Sprintf("%s, %s, %d x %s tokens x %d, %s attention, %s", d.Job.Engine, d.types(), d.Job.MicroBatch, ledger.Count(d.Job.Sequence), d.Job.Accumulation, d.Job.Attention, d.Job.Optimizer))
	for i := range d.Devices {
		device := &d.Devices[i]
		if device.Peak().PeakRequested == 0 {
			continue
		}
		b.WriteString("\n" + d.timeline(device) + "\n")
		d.consumers(&b, device)
	}
	b.WriteString("\n")
	for _, a := range d.Assumptions {
		line("assumed", a)
	}
	b.WriteString("\n" + d.verdictLine() + "\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (d *Plan) trained() string {
	if d.Model.Trained == d.Model.Parameters {
		return ""
	}
	return fmt.Sprintf(", %s trained", ledger.Count(d.Model.Trained))
}

func (d *Plan) types() string {
	if d.Job.Autocast != "" {
		return d.Job.Weights + " weights under " + d.Job.Autocast + " autocast"
	}
	return d.Job.Weights
}

// timeline is a table of a device's phases.
func (d *Plan) timeline(device *plan.Device) string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format = table.FormatOptions{}
	var columns []table.ColumnConfig
	for i := 2; i <= 6; i++ {
		columns = append(columns, table.ColumnConfig{Number: i, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	t.SetColumnConfigs(columns)
	title := fmt.Sprintf("GPU of rank %d", device.Rank)
	if device.Kind == ledger.Host {
		title = "host"
	}
	if device.Count > 1 {
		title += fmt.Sprintf(", one of %d", device.Count)
	}
	t.AppendHeader(table.Row{title, "requested", "allocated", "reserved", "in use", "end"})
	for i := range device.Phases {
		p := &device.Phases[i]
		name := string(p.Name)
		if p.Iteration != plan.Once {
			name = fmt.Sprintf("%s, %s", p.Name, p.Iteration)
		}
		t.AppendRow(table.Row{name, p.PeakRequested, p.PeakAllocated, p.PeakReserved, p.PeakUsed, p.EndAllocated})
	}
	return t.Render()
}

// consumers are the largest components at a device's peak.
func (d *Plan) consumers(b *strings.Builder, device *plan.Device) {
	peak := device.Peak()
	fmt.Fprintf(b, "peak in %s: %v of", phaseText(peak.Name, peak.Iteration), peak.PeakUsed)
	if device.Capacity > 0 {
		fmt.Fprintf(b, " %v\n", device.Capacity)
	} else {
		b.WriteString(" an unknown capacity\n")
	}
	rest := peak.PeakUsed
	for i, c := range slices.Concat(peak.Components, device.Outside) {
		if i < 7 || c.Bytes*20 > peak.PeakUsed {
			fmt.Fprintf(b, "  %10v  %s\n", c.Bytes, text.WrapSoft(c.Name+": "+c.Why, 200))
		}
		rest -= c.Bytes
	}
	if device.Kind == ledger.GPU && rest > 0 {
		fmt.Fprintf(b, "  %10v  reserved by the allocator and not in use at that moment: rounding, fragments, what earlier phases needed\n", rest)
	}
}

func phaseText(name plan.PhaseName, iteration plan.Iteration) string {
	if iteration == plan.Once {
		return string(name)
	}
	return fmt.Sprintf("the %s %s", iteration, name)
}

func (d *Plan) verdictLine() string {
	if d.Limit == nil {
		return "no verdict: give --gpu or --gpu-memory, and --host-memory"
	}
	where := "GPU"
	if d.Limit.Device == ledger.Host {
		where = "host"
	}
	what := fmt.Sprintf("%v of %v on the %s in %s", d.Limit.Needed, d.Limit.Capacity, where, phaseText(d.Limit.Phase, d.Limit.Iteration))
	switch d.Verdict {
	case plan.DoesNotFit:
		return fmt.Sprintf("does not fit: %s, %v too much", what, d.Limit.Needed-d.Limit.Capacity)
	case plan.Tight:
		return "tight: " + what
	}
	return "fits: " + what
}

// Explain writes everything about one component.
func (d *Plan) Explain(w io.Writer, name string) error {
	var names []string
	var b strings.Builder
	found := false
	for i := range d.Devices {
		device := &d.Devices[i]
		why, printed := "", false
		for k := range device.Phases {
			p := &device.Phases[k]
			for _, c := range p.Components {
				names = append(names, c.Name)
				if !strings.EqualFold(c.Name, name) {
					continue
				}
				if !printed {
					fmt.Fprintf(&b, "%s on the %s\n", c.Name, device.Kind)
					printed = true
				}
				why, found = c.Why, true
				fmt.Fprintf(&b, "  %-20s %s\n", phaseText(p.Name, p.Iteration), c.Bytes.Exact())
			}
		}
		if printed {
			fmt.Fprintf(&b, "  why: %s\n", why)
		}
	}
	if !found {
		slices.Sort(names)
		mend := "components of this plan: " + strings.Join(slices.Compact(names), ", ")
		return &fault.Input{What: fmt.Sprintf("no component is called %q at any peak of this plan", name), Mend: mend}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
