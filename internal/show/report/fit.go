package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/plan/fit"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
)

// FitSchema is the schema of the JSON document.
const FitSchema = "plimsoll.fit/1"

// Fit is the document of a search for recipes.
type Fit struct {
	Schema   string       `json:"schema"`
	Version  string       `json:"version"`
	Model    string       `json:"model"`
	GPU      string       `json:"gpu"`
	Capacity ledger.Bytes `json:"gpu_capacity_bytes"`
	// Untimed means that times are not predicted: recipes are in the order of what costs time.
	Untimed    bool `json:"untimed,omitempty"`
	Candidates int  `json:"candidates"`
	Planned    int  `json:"planned"`
	// Fastest is null if no recipe fits. Closest is then the one that lacks least.
	Fastest *FitRecipe `json:"fastest"`
	Closest *FitRecipe `json:"closest,omitempty"`
	// Ladder is what makes the job fit as it was asked, if no recipe does. Asked is its verdict without that.
	Ladder *lever.Ladder `json:"ladder,omitempty"`
	Asked  plan.Result   `json:"asked,omitempty"`
	// Front begins with the fastest. Each further one takes less memory.
	Front        []*FitRecipe `json:"front"`
	LargestBatch *FitRecipe   `json:"largest_micro_batch"`
	Longest      *FitRecipe   `json:"longest_sequence"`
	Edits        []amend.Edit `json:"edits"` // of the user's files, for the fastest
	// Unsaid are settings of the fastest recipe that none of the user's files can say.
	Unsaid      []UnsaidSetting `json:"unsaid,omitempty"`
	Written     []string        `json:"written,omitempty"`
	LeftOut     map[string]int  `json:"left_out"` // reasons, with the number of variants
	Sources     []string        `json:"sources,omitempty"`
	Assumptions []string        `json:"assumptions"`
}

// UnsaidSetting is a setting that is left to the user.
type UnsaidSetting struct {
	Name string `json:"name"`
	To   any    `json:"to"`
}

// FitRecipe is one recipe. Memory is that of a GPU and of a node.
type FitRecipe struct {
	Name         string       `json:"name"`
	Verdict      plan.Result  `json:"verdict"`
	GPUs         int          `json:"gpus"`
	MicroBatch   int64        `json:"micro_batch"`
	Accumulation int          `json:"gradient_accumulation"`
	Sequence     int64        `json:"sequence_length"`
	GPU          ledger.Bytes `json:"gpu_bytes"`
	Host         ledger.Bytes `json:"host_bytes"`
	Step         *Seconds     `json:"step_seconds"`
	TokensSecond float64      `json:"tokens_per_second"`
	Request      job.Request  `json:"request"` // of plimsoll plan
}

func newFitRecipe(r *fit.Recipe, q job.Request) *FitRecipe {
	if r == nil {
		return nil
	}
	size := r.Size
	d := &FitRecipe{Name: r.Name, Verdict: r.Plan.Verdict.Result, GPUs: size.Ranks, MicroBatch: size.MicroBatch,
		Accumulation: size.Accumulation, Sequence: size.Sequence, GPU: r.Peak(), Request: r.Request(q)}
	if r.IsTimed() {
		d.TokensSecond, d.Step = r.Speed(), secondsOf(r.Step.Total)
	}
	d.Host, _ = r.Plan.Held(ledger.Host, nil)
	return d
}

// NewFit makes the document.
func NewFit(version string, q job.Request, a *fit.Answer, made *amend.Result, sources []string) *Fit {
	d := &Fit{Schema: FitSchema, Version: version, Model: a.Base.Model.Name, GPU: a.Base.GPU.Name,
		Capacity: a.Base.GPU.Memory, Untimed: a.Untimed, Candidates: a.Candidates, Planned: a.Planned,
		Fastest: newFitRecipe(a.Fastest, q), Closest: newFitRecipe(a.Closest, q),
		LargestBatch: newFitRecipe(a.LargestBatch, q), Longest: newFitRecipe(a.Longest, q),
		Edits: append([]amend.Edit{}, made.Edits...), LeftOut: a.Left, Sources: slices.Concat(sources, a.Assumed),
		Ladder:      a.Ladder,
		Assumptions: append([]string{}, a.Base.Assumptions...), Front: []*FitRecipe{}}
	if a.Asked != nil {
		d.Asked = a.Asked.Verdict.Result
	}
	for _, rest := range made.Rest {
		if a.Says && rest.To != false {
			d.Unsaid = append(d.Unsaid, UnsaidSetting{string(rest.Name), rest.To})
		}
	}
	for _, r := range a.Front {
		d.Front = append(d.Front, newFitRecipe(r, q))
	}
	return d
}

// Page shows the fastest recipe first, and what takes less memory below it.
func (d *Fit) Page() *Page {
	var facts, limits, assumed Facts
	facts.add("model", "%s on %s, %v each", d.Model, d.GPU, d.Capacity)
	facts.add("search", "%s recipes, %d of them planned", ledger.Count(int64(d.Candidates)), d.Planned)
	sections := []Section{{facts}, allRungs(d.Ladder)}
	if len(d.Front) > 0 {
		sections = append(sections, Section{d.table()})
		most := ""
		if d.LargestBatch.MicroBatch == fit.LargestTried {
			most = ", the most that is tried"
		}
		limits.add("largest", "micro batch %d%s: %s", d.LargestBatch.MicroBatch, most, d.LargestBatch.Name)
		if d.Longest != nil {
			limits.add("longest", "%s tokens in a micro batch of 1: %s", ledger.Count(d.Longest.Sequence),
				d.Longest.Name)
		}
	}
	for _, e := range d.Edits {
		limits.add("edit", "%v", e)
	}
	for _, s := range d.Unsaid {
		limits.add("to set", "%s: %v, which no file of yours says", s.Name, s.To)
	}
	limits.addEach("written", d.Written)
	for _, why := range slices.Sorted(maps.Keys(d.LeftOut)) {
		assumed.add("left out", "%d variants: %s", d.LeftOut[why], why)
	}
	assumed.addEach("rates", d.Sources)
	if len(d.Assumptions) > 0 {
		assumed.add("assumed", "%s", strings.Join(d.Assumptions, "; "))
	}
	sections = append(sections, Section{limits}, Section{assumed})
	return &Page{Title: "Recipes of " + d.Model, Sections: sections, Verdict: d.verdict(), Document: d, Dense: true,
		Brief: d.brief}
}

// brief is the answer on one screen.
func (d *Fit) brief(detail int) *Page {
	var facts, limits, next Facts
	facts.add("model", "%s on %s, %v each", d.Model, d.GPU, d.Capacity)
	sections := []Section{append(Section{facts}, rungs(d.Ladder, max(2, detail), false)...)}
	if len(d.Front) > 0 {
		short := *d
		short.Front = d.Front[:min(len(d.Front), max(1, detail/2))]
		sections = append(sections, Section{short.table()})
		limits.add("largest", "micro batch %d: %s", d.LargestBatch.MicroBatch, d.LargestBatch.Name)
		if d.Longest != nil {
			limits.add("longest", "%s tokens: %s", ledger.Count(d.Longest.Sequence), d.Longest.Name)
		}
	}
	for _, e := range d.Edits[:min(len(d.Edits), max(1, detail/2))] {
		limits.add("edit", "%v", e)
	}
	for _, s := range d.Unsaid[:min(len(d.Unsaid), max(1, detail/3))] {
		limits.add("to set", "%s: %v, which no file of yours says", s.Name, s.To)
	}
	limits.addEach("written", d.Written)
	next.add("next", "%s", d.next())
	return &Page{Sections: append(sections, append(Section{limits}, next)), Verdict: d.verdict(), Document: d}
}

// next says what to do after the search.
func (d *Fit) next() string {
	switch l := d.Ladder; {
	case d.Fastest != nil && len(d.Edits) > 0 && len(d.Written) == 0:
		return "add --write FOLDER to write your files with these edits"
	case d.Fastest != nil:
		return "plimsoll plan shows what each phase holds; --long shows the search"
	case l != nil && l.All != nil && l.All.Verdict != plan.DoesNotFit && len(l.All.Edits) > 0:
		return "plimsoll plan --apply FOLDER writes your files with these edits"
	case l != nil && l.All != nil && l.All.Verdict != plan.DoesNotFit:
		return "plimsoll plan with " + strings.Join(l.All.Flags, " ")
	case l != nil && l.Machine != nil:
		return "plan the larger machine, or a smaller model"
	}
	return "plimsoll plan --long shows what fills the memory"
}

func (d *Fit) table() *Table {
	if d.Untimed {
		t := (&Table{Style: Plain}).with(Words, "recipe").with(Number, "micro", "accum").with(Bytes, "GPU", "host").
			with(Label, "fits")
		for _, r := range d.Front {
			t.add(r.Name, r.MicroBatch, r.Accumulation, r.GPU, r.Host, fits[r.Verdict])
		}
		return t
	}
	t := (&Table{Style: Plain}).with(Words, "recipe").with(Number, "micro", "accum").with(Bytes, "GPU", "host").
		with(Label, "step", "tokens/s", "fits")
	for _, r := range d.Front {
		t.add(r.Name, r.MicroBatch, r.Accumulation, r.GPU, r.Host, seconds(r.Step.Expected),
			ledger.Count(int64(r.TokensSecond)), fits[r.Verdict])
	}
	return t
}

func (d *Fit) verdict() string {
	if r := d.Fastest; r != nil && d.Untimed {
		return fmt.Sprintf("first: %s, micro batch %d, accumulation %d, %v on a GPU; this search has no times, so "+
			"the order is that of what costs time: recomputation, ranks that share the model, smaller micro batches",
			r.Name, r.MicroBatch, r.Accumulation, r.GPU)
	}
	if r := d.Fastest; r != nil {
		return fmt.Sprintf("fastest: %s, micro batch %d, accumulation %d: %s tokens/s by the model of time, "+
			"%v on a GPU", r.Name, r.MicroBatch, r.Accumulation, ledger.Count(int64(r.TokensSecond)), r.GPU)
	}
	if l := d.Ladder; l.Fits() {
		how := "with the changes below"
		if l.Trains() {
			how = "with the changes below, and the last of them change the training"
		}
		return "no recipe of this training fits as it is; it fits " + how
	}
	if r := d.Closest; r != nil {
		return fmt.Sprintf("nothing fits this machine: %s, micro batch %d, comes closest, %v on a GPU and %v on the "+
			"host", r.Name, r.MicroBatch, r.GPU, r.Host)
	}
	if d.Asked == plan.Fits || d.Asked == plan.Tight {
		return string(d.Asked) + ": the job as it was asked; times are not predicted, and no recipe is compared"
	}
	if d.Asked != "" {
		return string(d.Asked) + ": the job as it was asked"
	}
	return ""
}
