package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
)

// RoadsSchema is the schema of the JSON document.
const RoadsSchema = "plimsoll.roads/1"

// Roads is the document of the roads of a job.
type Roads struct {
	Schema  string       `json:"schema"`
	Version string       `json:"version"`
	Model   PlannedModel `json:"model"`
	Job     PlannedJob   `json:"job"`
	States  string       `json:"states"` // how they would rest on the host
	Rates   RoadRates    `json:"rates"`
	Roads   []Road       `json:"roads"`
	// Best is the name of the road on which the trainer waits least; empty where that is not known.
	Best    string   `json:"best"`
	Verdict string   `json:"verdict"`
	Missing []string `json:"missing_rates"`
	// Designs are those of Megatron-LM beside the chunks of Plimsoll, per GPU.
	Designs     []roads.Design `json:"designs"`
	Assumptions []string       `json:"assumptions"`
}

// RoadRates are the speeds that times were computed from, 0 for those that are not known.
type RoadRates struct {
	In              float64  `json:"link_in_bytes_per_second"`
	Out             float64  `json:"link_out_bytes_per_second"`
	Together        float64  `json:"link_both_bytes_per_second"` // 0: neither direction slows the other down
	Host            float64  `json:"host_bytes_per_second"`
	Device          float64  `json:"gpu_bytes_per_second"`
	FLOPS           float64  `json:"gpu_flops"`
	ForwardSeconds  float64  `json:"forward_seconds"`
	BackwardSeconds float64  `json:"backward_seconds"`
	Sources         []string `json:"sources"`
}

// Road is one road. Host memory is that of a node, everything else is of one GPU.
type Road struct {
	Name    string       `json:"name"`
	Host    ledger.Bytes `json:"host_bytes"`
	Pinned  ledger.Bytes `json:"pinned_bytes"`
	Freed   ledger.Bytes `json:"gpu_freed_bytes"`
	Window  ledger.Bytes `json:"gpu_window_bytes"`
	GPU     ledger.Bytes `json:"gpu_peak_bytes"`
	Verdict plan.Result  `json:"verdict"`
	Times   *RoadTimes   `json:"times"` // null where rates are missing
}

// RoadTimes are the times of a step: of the copies and of the update alone, and what the trainer waits for.
type RoadTimes struct {
	InSeconds      float64 `json:"copy_in_seconds"`
	OutSeconds     float64 `json:"copy_out_seconds"`
	UpdateSeconds  float64 `json:"update_seconds"`
	ExposedSeconds float64 `json:"exposed_seconds"`
}

// NewRoads makes the document. The sources are those of the rates.
func NewRoads(of *PlanDocument, states string, r *plan.Roads, sources []string) *Roads {
	d := &Roads{Schema: RoadsSchema, Version: of.Version, Model: of.Model, Job: of.Job, States: states,
		Missing: append([]string{}, r.Missing...), Assumptions: of.Assumptions,
		Designs: append([]roads.Design{}, r.Megatron...),
		Rates: RoadRates{In: r.Rates.Link.In, Out: r.Rates.Link.Out, Together: r.Rates.Link.Together,
			Host: r.Rates.Host, Device: r.Rates.Device, FLOPS: r.Rates.FLOPS,
			ForwardSeconds: r.Passes.Forward.Seconds(), BackwardSeconds: r.Passes.Backward.Seconds(),
			Sources: append([]string{}, sources...)}}
	for i := range r.Roads {
		from := &r.Roads[i]
		road := Road{Name: from.Name, Host: from.Host, Pinned: from.Pinned, Freed: from.Freed, Window: from.Window,
			GPU: from.GPU, Verdict: from.Verdict}
		if s := from.Step; s != nil {
			road.Times = &RoadTimes{s.In.Seconds(), s.Out.Seconds(), s.Update.Seconds(), s.Exposed.Seconds()}
		}
		if from.Name == plan.ChunkedRoad {
			window := from.Window
			own := roads.Design{Name: "Plimsoll, chunks", Between: window, Step: window, First: window,
				Pinned: from.Pinned / ledger.Bytes(max(1, of.Job.Ranks/of.Job.Nodes))}
			d.Designs = append([]roads.Design{own}, d.Designs...)
		}
		d.Roads = append(d.Roads, road)
	}
	if r.Job.Megatron == nil && r.Job.FSDP == nil && r.Job.World > 1 {
		d.Assumptions = append(slices.Clone(d.Assumptions), "every rank holds and updates all states on each road: "+
			`sharding="zero1" of plimsoll.torch.AdamW divides the CPU step among ranks, and --fsdp 2 every road`)
	}
	isBackward := func(road plan.Road) bool { return road.Name == plan.BackwardRoad }
	if r.Job.Clip > 0 && slices.ContainsFunc(r.Roads, isBackward) {
		d.Assumptions = append(slices.Clone(d.Assumptions), fmt.Sprintf("%s: the step is not clipped, as a clipped "+
			"one is retracted and made again behind the next forward pass; %d cores compute", plan.BackwardRoad,
			roads.AssumedCores))
	}
	if r.Best != nil {
		d.Best = r.Best.Name
	}
	d.Verdict = d.verdict(r)
	return d
}

// verdict says in one sentence which road, and why.
func (d *Roads) verdict(r *plan.Roads) string {
	switch {
	case r.Job.Megatron != nil:
		return "no verdict on time: that of optimizer states on the host is not predicted for Megatron-LM"
	case len(r.Missing) > 0:
		return "no verdict on time without " + strings.Join(r.Missing, ", ") + ": --machine has published rates"
	case r.Best == nil:
		return "no road fits: the GPU or the host lacks memory on each"
	}
	step := r.Passes.Forward + r.Passes.Backward + r.Best.Step.Exposed
	text := fmt.Sprintf("%s: the trainer waits %s, %.1f %% of a step", r.Best.Name, duration(r.Best.Step.Exposed),
		100*r.Best.Step.Exposed.Seconds()/step.Seconds())
	var next *plan.Road
	for i := range r.Roads {
		road := &r.Roads[i]
		same := road.Name == r.Best.Name || isCPU(road.Name) && isCPU(r.Best.Name) // with another overlap
		if !same && road.Verdict != plan.DoesNotFit && (next == nil || road.Step.Exposed < next.Step.Exposed) {
			next = road
		}
	}
	if next != nil {
		text += fmt.Sprintf("; %s: %s", next.Name, duration(next.Step.Exposed))
	}
	return text
}

func isCPU(road string) bool { return strings.HasPrefix(road, plan.CPURoad) }

func duration(d time.Duration) string { return seconds(d.Seconds()) }

// Page shows the roads side by side.
func (d *Roads) Page() *Page {
	var facts Facts
	facts.add("model", "%s, %s parameters", d.Model.Name, ledger.Count(d.Model.Parameters))
	facts.add("job", "%s, %d x %s tokens, %s", strings.Join(append([]string{d.Job.Engine}, d.Job.Parallel...), ", "),
		d.Job.MicroBatch, ledger.Count(d.Job.Sequence), d.Job.Optimizer)
	facts.add("states", "%s", d.States)
	if d.Rates.ForwardSeconds > 0 {
		facts.add("passes", "forward %s, backward %s", seconds(d.Rates.ForwardSeconds),
			seconds(d.Rates.BackwardSeconds))
	}
	facts.addEach("rates", d.Rates.Sources)
	sections := []Section{{facts}, {d.table()}}
	if len(d.Designs) > 0 {
		sections = append(sections, Section{d.designs()})
	}
	if len(d.Assumptions) > 0 {
		sections = append(sections, Section{Facts{{"assumed", []string{strings.Join(d.Assumptions, "; ")}}}})
	}
	return &Page{Title: "Roads of " + d.Model.Name, Sections: sections, Verdict: d.Verdict, Document: d, Dense: true,
		Brief: d.brief, Piped: true}
}

// brief shows what each road takes and how long the trainer waits on it.
func (d *Roads) brief(detail int) *Page {
	var facts Facts
	facts.add("model", "%s on %s: %s, %s", d.Model.Name,
		strings.Join(append([]string{d.Job.Engine}, d.Job.Parallel...), ", "), (&PlanDocument{Job: d.Job}).batch(),
		d.Job.optimizer())
	if d.Rates.ForwardSeconds > 0 {
		facts.add("passes", "forward %s, backward %s", seconds(d.Rates.ForwardSeconds),
			seconds(d.Rates.BackwardSeconds))
	}
	facts.addEach("rates", d.Rates.Sources[:min(len(d.Rates.Sources), detail/3)])
	t := (&Table{Style: Plain}).with(Words, "road").with(Bytes, "host", "GPU peak").with(Label, "fits", "update",
		"trainer waits")
	for _, r := range d.Roads {
		row := []any{r.Name, r.Host, r.GPU, fits[r.Verdict], "?", "?"}
		if s := r.Times; s != nil {
			row[4], row[5] = seconds(s.UpdateSeconds), seconds(s.ExposedSeconds)
		}
		t.add(row...)
	}
	said := next("--long shows rates, copies, windows, and what was assumed")
	if lacks := func(r Road) bool { return r.Verdict == plan.DoesNotFit }; len(d.Roads) > 0 &&
		!slices.ContainsFunc(d.Roads, func(r Road) bool { return !lacks(r) }) {
		said = next("plimsoll plan with the same flags shows what makes the job fit; --long shows the rates")
	}
	return &Page{Sections: []Section{{facts}, {t}, {said}}, Verdict: d.Verdict}
}

func (d *Roads) table() *Table {
	t := (&Table{Style: Plain}).with(Words, "road").with(Bytes, "host", "pinned", "GPU freed", "window", "GPU peak").
		with(Label, "fits", "copy in", "copy out", "update", "exposed")
	for _, r := range d.Roads {
		row := []any{r.Name, r.Host, r.Pinned, r.Freed, r.Window, r.GPU, fits[r.Verdict]}
		if s := r.Times; s != nil {
			row = append(row, brief(s.InSeconds), brief(s.OutSeconds), seconds(s.UpdateSeconds),
				seconds(s.ExposedSeconds))
		} else {
			row = append(row, "?", "?", "?", "?")
		}
		t.add(row...)
	}
	return t
}

var fits = map[plan.Result]string{plan.Fits: "yes", plan.Tight: "tight", plan.DoesNotFit: "no", plan.Unknown: "?"}

// brief leaves out copies that there are none of.
func brief(s float64) string {
	if s == 0 {
		return "-"
	}
	return seconds(s)
}

func (d *Roads) designs() *Table {
	t := (&Table{Style: Plain}).with(Words, "states of one GPU").with(Bytes, "in passes", "in a step", "first step",
		"at save", "at load", "pinned on the host")
	for _, m := range d.Designs {
		t.add(m.Name, m.Between, m.Step, m.First, m.Save, m.Load, m.Pinned)
	}
	return t
}
