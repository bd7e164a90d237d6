package lever

import (
	"cmp"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// Question is what a planned job needs.
type Question struct {
	Need    Need
	Request job.Request
	Plan    *plan.Plan
	Machine steptime.Machine
	Phase   *ledger.PhaseName // whose bytes count; nil for the peak
}

// Change is a change of a job, with what its plan says.
type Change struct {
	Applied
	Why string `json:"why"`
	// Before and After are what the device holds at its peak that is nearest to its limit, or in the phase that the
	// question is about.
	Device  ledger.Kind  `json:"device"`
	Before  ledger.Bytes `json:"before_bytes"`
	After   ledger.Bytes `json:"after_bytes"`
	Verdict plan.Result  `json:"verdict"` // with the change
	// Slower is a GPU's time for a token with the change over that without it, less 1; nil where times are not known.
	Slower *float64 `json:"slower"`

	idea idea
}

// Frees returns the bytes that the change frees. It is negative for one that uses memory that was free.
func (c *Change) Frees() ledger.Bytes { return c.Before - c.After }

// String says the change: edits of files, and then flags. Of several edits in one file only the first names it.
func (c *Change) String() string {
	var parts []string
	for i, e := range c.Edits {
		if i > 0 && e.File == c.Edits[i-1].File { // names may be long
			e.File = "line"
			parts = append(parts, strings.Replace(e.String(), "line:", "line ", 1))
			continue
		}
		parts = append(parts, e.String())
	}
	return strings.Join(append(parts, c.Flags...), ", ")
}

// First returns the edit that the others follow. A flag is an edit without a file.
func (c *Change) First() amend.Edit {
	says := c.Flags
	if s := c.idea.settings[0]; len(c.Edits) > 0 {
		f, ok := flags[s.Name]
		if !ok || !slices.Contains(c.Flags, f.says(s.To)) {
			return c.Edits[0]
		}
		says = []string{f.says(s.To)}
	}
	name, value, _ := strings.Cut(strings.TrimPrefix(says[0], added), " ")
	if name == "without" {
		name, value, _ = strings.Cut(value, " ")
		return amend.Edit{Key: name, From: value, To: "none"}
	}
	return amend.Edit{Key: name, To: cmp.Or(value, "true")}
}

// idea is a change before it is planned.
type idea struct {
	why      string
	settings []amend.Setting
}

// For returns the changes that serve the need of a job, the best first.
func For(q Question) ([]Change, error) {
	w := weigher{Question: q, device: q.Need.Device()}
	w.step, _ = q.Plan.Time(q.Machine)
	w.before, _ = q.Plan.Held(w.device, q.Phase)
	list, err := w.all()
	if err != nil {
		return nil, err
	}
	w.rank(list)
	if q.Plan.Verdict.Result == plan.DoesNotFit && len(list) > 0 && list[0].Verdict == plan.DoesNotFit {
		l, err := Climb(q)
		if err != nil || l == nil || l.All == nil || l.All.Verdict == plan.DoesNotFit && l.All.After >= list[0].After {
			return list, err
		}
		list = append([]Change{*l.All}, list...)
	}
	return list, nil
}

// weigher plans ideas for a job.
type weigher struct {
	Question
	device ledger.Kind
	step   *steptime.Step // nil where times are not known
	before ledger.Bytes
}

// all weighs every way of every lever for the need, and returns those that help.
func (w *weigher) all() (list []Change, err error) {
	var ideas []*idea
	for _, l := range slices.Concat(levers, pairs) {
		if l.For != w.Need || l.Cost == Training {
			continue
		}
		for _, settings := range l.Ways(w.Plan.Job) {
			ideas = append(ideas, &idea{why: l.Why, settings: settings})
		}
	}
	changes := make(map[*idea]*Change, len(ideas))
	var of sync.Mutex
	err = onAllCores(ideas, func(i *idea) error {
		c, err := w.weigh(*i)
		of.Lock()
		defer of.Unlock()
		changes[i] = c
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, i := range ideas {
		if c := changes[i]; c != nil && w.helps(c) {
			list = append(list, *c)
		}
	}
	return list, nil
}

// onAllCores calls body for all of a list, on all cores.
func onAllCores[T any](list []T, body func(T) error) error {
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for _, of := range list {
		work.Go(func() error { return body(of) })
	}
	return work.Wait()
}

// helps reports whether a change is worth a line: it frees something, or makes a job faster that fits.
func (w *weigher) helps(c *Change) bool {
	if w.Need == Speed {
		return c.Slower != nil && *c.Slower <= -0.01 && c.Verdict == plan.Fits
	}
	return c.Frees() >= max(w.before/200, 1)
}

// rank puts first what makes a job fit, then what costs least time, then what frees most. A job that lacked memory, as
// its user knows, although its plan fits, takes more than is planned: then what frees most comes first.
func (w *weigher) rank(list []Change) {
	order := map[plan.Result]int{plan.Fits: 0, plan.Tight: 1, plan.DoesNotFit: 2, plan.Unknown: 3}
	slower := func(c *Change) float64 {
		if c.Slower == nil {
			return 0
		}
		return *c.Slower
	}
	exceeds := w.Need != Speed && !w.Plan.Lacks()
	slices.SortStableFunc(list, func(a, b Change) int {
		frees := cmp.Compare(b.Frees(), a.Frees())
		switch {
		case exceeds:
			return frees
		case a.Verdict != b.Verdict:
			return cmp.Compare(order[a.Verdict], order[b.Verdict])
		case a.Verdict == plan.DoesNotFit:
			return frees
		}
		return cmp.Or(cmp.Compare(slower(&a), slower(&b)), cmp.Compare(w.cost(&a), w.cost(&b)), frees)
	})
}

// weigh plans an idea from the edited files. It returns nil for one that changes nothing, for a job that the engine
// refuses, and for texts that cannot be edited.
func (w *weigher) weigh(i idea) (*Change, error) {
	c, err := w.planned(i)
	if errors.As(err, new(*fault.Input)) {
		return nil, nil
	}
	return c, err
}

func (w *weigher) planned(i idea) (*Change, error) {
	applied, err := Apply(w.Request, w.Plan.Job.Files, i.settings)
	if err != nil || applied == nil {
		return nil, err
	}
	with, err := applied.planned()
	if err != nil {
		return nil, err
	}
	return w.changed(i, applied, with), nil
}

// planned plans the edited files.
func (a *Applied) planned() (*plan.Plan, error) {
	j, err := a.amended().Resolve()
	if err != nil {
		return nil, err
	}
	return plan.New(j)
}

// changed says what a plan of the edited files holds beside that of the job.
func (w *weigher) changed(i idea, applied *Applied, with *plan.Plan) *Change {
	j := with.Job
	c := &Change{Applied: *applied, Why: i.why, Device: w.device, Before: w.before, Verdict: with.Verdict.Result,
		idea: i}
	c.After, _ = with.Held(w.device, w.Phase)
	if now, err := with.Time(w.Machine); err == nil && w.step != nil {
		gpus := float64(j.World) / float64(w.Plan.Job.World)
		slower := secondsOf(now)/secondsOf(w.step)*gpus - 1
		c.Slower = &slower
	}
	return c
}

// secondsOf returns the time of a token.
func secondsOf(s *steptime.Step) float64 { return s.Total.Expected.Seconds() / float64(s.Tokens) }
