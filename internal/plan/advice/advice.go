// Package advice finds edits of a user's own files that mend a job which does not fit, is tight, or leaves memory
// unused. Every edit is planned, from the edited text.
package advice

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// Advice is a change of a job, with what its plan says.
type Advice struct {
	Why   string
	Edits []amend.Edit
	Flags []string // of plimsoll plan, for settings that no file says
	// Before and After are what the device holds at its peak that is nearest to its limit.
	Device        ledger.Kind
	Before, After ledger.Bytes
	Verdict       plan.Result // with the change
	// Slower is the time of a step with the change over that without it, less 1; nil where times are not known.
	Slower *float64

	Texts   files.Texts // of edited files
	Request job.Request // for the edited files

	idea idea
}

// Frees returns the bytes that the change frees. It is negative for one that uses memory that was free.
func (a *Advice) Frees() ledger.Bytes { return a.Before - a.After }

// idea is a change before it is planned.
type idea struct {
	why      string
	settings []amend.Setting
}

// For returns advice on a planned job, the best first. It has none for a job that fits and fills its GPU well.
func For(q job.Request, p *plan.Plan, m steptime.Machine) ([]Advice, error) {
	var ideas []idea
	device := p.Verdict.Device
	switch {
	case p.Verdict.Result == plan.Unknown || p.Job.OnCPU:
		return nil, nil
	case p.Verdict.Result == plan.Fits:
		ideas, device = wasted(p), ledger.GPU
	case device == ledger.Host:
		ideas = forHost(p.Job)
	default:
		ideas = forGPU(p.Job)
	}
	step, _ := p.Time(m)
	w := weigher{q: q, plan: p, machine: m, device: device, step: step, before: peakOf(p, device)}
	var list []Advice
	for _, i := range ideas {
		a, err := w.weigh(i)
		if err != nil {
			return nil, err
		}
		if a != nil && w.helps(a) {
			list = append(list, *a)
		}
	}
	rank(list)
	if p.Verdict.Result == plan.DoesNotFit && len(list) > 1 && list[0].Verdict == plan.DoesNotFit {
		a, err := w.combined(list)
		if err != nil || a == nil {
			return list, err
		}
		list = append([]Advice{*a}, list...)
	}
	return list, nil
}

// weigher plans ideas for a job.
type weigher struct {
	q       job.Request
	plan    *plan.Plan
	machine steptime.Machine
	device  ledger.Kind
	step    *steptime.Step // nil where times are not known
	before  ledger.Bytes
}

// helps reports whether a change is worth a line: it frees something, or makes a job faster that fits.
func (w *weigher) helps(a *Advice) bool {
	if w.plan.Verdict.Result == plan.Fits {
		return a.Slower != nil && *a.Slower <= -0.01 && a.Verdict == plan.Fits
	}
	return a.Frees() >= w.before/200
}

// combined joins changes that free something, from the one that frees most on, until the job fits. It returns nil if
// no other change frees more beside the first.
func (w *weigher) combined(list []Advice) (best *Advice, err error) {
	joined := list[0].idea
	for _, a := range list[1:] {
		with := joined.and(a.idea)
		if len(with.settings) == len(joined.settings) {
			continue
		}
		next, err := w.weigh(with)
		if err != nil {
			return nil, err
		}
		if next == nil || best == nil && next.After >= list[0].After || best != nil && next.After >= best.After {
			continue
		}
		if best, joined = next, with; best.Verdict != plan.DoesNotFit {
			break
		}
	}
	return best, nil
}

// and returns both ideas. Where both say a setting, the first counts.
func (i idea) and(other idea) idea {
	both := idea{why: i.why, settings: slices.Clone(i.settings)}
	for _, s := range other.settings {
		if !slices.ContainsFunc(i.settings, func(t amend.Setting) bool { return t.Name == s.Name }) {
			both.settings = append(both.settings, s)
		}
	}
	if len(both.settings) > len(i.settings) {
		both.why += "; " + other.why
	}
	return both
}

// rank puts first what makes a job fit, then what costs least time, then what frees most.
func rank(list []Advice) {
	order := map[plan.Result]int{plan.Fits: 0, plan.Tight: 1, plan.DoesNotFit: 2, plan.Unknown: 3}
	slower := func(a *Advice) float64 {
		if a.Slower == nil {
			return 0
		}
		return *a.Slower
	}
	slices.SortStableFunc(list, func(a, b Advice) int {
		if a.Verdict != b.Verdict {
			return cmp.Compare(order[a.Verdict], order[b.Verdict])
		}
		if a.Verdict == plan.DoesNotFit {
			return cmp.Compare(b.Frees(), a.Frees())
		}
		return cmp.Or(cmp.Compare(slower(&a), slower(&b)), cmp.Compare(b.Frees(), a.Frees()))
	})
}

// peakOf returns what the fullest device of a kind holds.
func peakOf(p *plan.Plan, kind ledger.Kind) (most ledger.Bytes) {
	for i := range p.Devices {
		if p.Devices[i].Kind == kind {
			most = max(most, p.Devices[i].Peak().PeakUsed)
		}
	}
	return most
}

// weigh plans an idea from the edited files. It returns nil for one that changes nothing, for a job that the engine
// refuses, and for texts that cannot be edited.
func (w *weigher) weigh(i idea) (*Advice, error) {
	a, err := w.planned(i)
	if errors.As(err, new(*fault.Input)) {
		return nil, nil
	}
	return a, err
}

func (w *weigher) planned(i idea) (*Advice, error) {
	q, step := w.q, w.step
	inFiles, flags, ok := split(i.settings, &q)
	if !ok {
		return nil, nil
	}
	made, err := amend.Apply(nil, w.plan.Job.Files, inFiles)
	if err != nil {
		return nil, err
	}
	_, more, ok := split(made.Rest, nil)
	if !ok {
		return nil, nil
	}
	for _, rest := range made.Rest {
		set(&q, rest)
	}
	flags = append(flags, more...)
	if len(made.Edits)+len(flags) == 0 {
		return nil, nil
	}
	a := &Advice{Why: i.why, Edits: made.Edits, Flags: flags, Device: w.device, Before: w.before, Texts: made.Texts,
		Request: q, idea: i}
	q.Texts = made.Texts
	j, err := q.Resolve()
	if err != nil {
		return nil, err
	}
	with, err := plan.New(j)
	if err != nil {
		return nil, err
	}
	a.After, a.Verdict = peakOf(with, w.device), with.Verdict.Result
	if now, err := with.Time(w.machine); err == nil && step != nil {
		before := step.Total.Expected.Seconds() / float64(step.Tokens)
		slower := now.Total.Expected.Seconds()/float64(now.Tokens)/before - 1
		a.Slower = &slower
	}
	return a, nil
}

// split divides settings into those for files and those for flags: a flag goes before all files. With a request, it
// sets those that the request has as a flag already. Without, all have to be flags; ok is false if one cannot.
func split(settings []amend.Setting, q *job.Request) (inFiles []amend.Setting, flags []string, ok bool) {
	for _, s := range settings {
		if q != nil && !isGiven(q, s.Name) {
			inFiles = append(inFiles, s)
			continue
		}
		flag := flagOf(s)
		if flag == "" {
			return nil, nil, false
		}
		flags = append(flags, flag)
		if q != nil {
			set(q, s)
		}
	}
	return inFiles, flags, true
}

// zeroOffloads are the values of --zero-offload.
var zeroOffloads = map[recipe.Setting]string{
	recipe.OptimizerDevice: job.OffloadedOptimizer, recipe.ParameterDevice: job.OffloadedParameters,
}

// isGiven reports whether the request has a setting as a flag.
func isGiven(q *job.Request, name recipe.Setting) bool {
	switch name {
	case recipe.MicroBatch:
		return q.MicroBatch > 0
	case recipe.Accumulation:
		return q.Accumulation > 0
	case recipe.GradientCheckpointing:
		return q.Recompute != ""
	case recipe.OptimizerName:
		return q.Optimizer != ""
	case recipe.FSDPOffload:
		return q.OffloadParameters || q.FSDP != ""
	case recipe.Stage, recipe.OptimizerDevice, recipe.ParameterDevice:
		return q.ZeRO != ""
	case recipe.PipelineSchedule:
		return q.PipelineParallel > 0
	case sharded: // of the program that starts the ranks
		return true
	}
	return false
}

// set sets a setting of the request.
func set(q *job.Request, s amend.Setting) {
	switch s.Name {
	case recipe.MicroBatch:
		q.MicroBatch = s.To.(int)
	case recipe.Accumulation:
		q.Accumulation = s.To.(int)
	case recipe.GradientCheckpointing:
		q.Recompute = "none"
		if s.To == true {
			q.Recompute = "full"
		}
	case recipe.OptimizerName:
		q.Optimizer = fused
	case recipe.FSDPOffload:
		q.OffloadParameters = s.To == true
	case recipe.Stage:
		q.ZeRO = fmt.Sprint(s.To)
	case recipe.OptimizerDevice, recipe.ParameterDevice:
		what := zeroOffloads[s.Name]
		q.ZeROOffload = slices.DeleteFunc(slices.Clone(q.ZeROOffload), func(o string) bool { return o == what })
		if s.To == "cpu" {
			q.ZeROOffload = append(q.ZeROOffload, what)
		}
	case recipe.PipelineSchedule:
		q.PipelineSchedule = s.To.(string)
	case sharded:
		q.FSDP = "2"
	}
}

// flagOf returns the flag for a setting, or "" if there is none.
func flagOf(s amend.Setting) string {
	switch s.Name {
	case recipe.MicroBatch:
		return fmt.Sprintf("--micro-batch %v", s.To)
	case recipe.Accumulation:
		return fmt.Sprintf("--grad-accum %v", s.To)
	case recipe.GradientCheckpointing:
		if s.To == true {
			return "--gradient-checkpointing"
		}
		return "--gradient-checkpointing=none"
	case recipe.OptimizerName:
		return "--optimizer " + fused
	case recipe.FSDPOffload:
		return "--fsdp-offload"
	case recipe.Stage:
		return fmt.Sprintf("--zero %v", s.To)
	case recipe.OptimizerDevice, recipe.ParameterDevice:
		if s.To == "cpu" {
			return "--zero-offload " + zeroOffloads[s.Name]
		}
		return "without --zero-offload " + zeroOffloads[s.Name]
	case recipe.PipelineSchedule:
		return fmt.Sprintf("--pipeline-schedule %v", s.To)
	case sharded:
		return "--fsdp 2"
	}
	return ""
}
