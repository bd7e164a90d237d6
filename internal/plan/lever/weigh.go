package lever

import (
	"cmp"
	"errors"
	"slices"
	"strings"

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
	if q.Plan.Verdict.Result == plan.DoesNotFit && len(list) > 1 && list[0].Verdict == plan.DoesNotFit {
		c, err := w.combined(list)
		if err != nil || c == nil {
			return list, err
		}
		list = append([]Change{*c}, list...)
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
	for _, l := range levers {
		if l.For != w.Need {
			continue
		}
		for _, settings := range l.Ways(w.Plan.Job) {
			c, err := w.weigh(idea{l.Why, settings})
			if err != nil {
				return nil, err
			}
			if c != nil && w.helps(c) {
				list = append(list, *c)
			}
		}
	}
	return list, nil
}

// helps reports whether a change is worth a line: it frees something, or makes a job faster that fits.
func (w *weigher) helps(c *Change) bool {
	if w.Need == Speed {
		return c.Slower != nil && *c.Slower <= -0.01 && c.Verdict == plan.Fits
	}
	return c.Frees() >= max(w.before/200, 1)
}

// combined joins changes that free something, from the one that frees most on, until the job fits. It returns nil if
// no other change frees more beside the first.
func (w *weigher) combined(list []Change) (best *Change, err error) {
	joined := list[0].idea
	for _, c := range list[1:] {
		with := joined.and(c.idea)
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
	j, err := applied.amended().Resolve()
	if err != nil {
		return nil, err
	}
	with, err := plan.New(j)
	if err != nil {
		return nil, err
	}
	c := &Change{Applied: *applied, Why: i.why, Device: w.device, Before: w.before, Verdict: with.Verdict.Result,
		idea: i}
	c.After, _ = with.Held(w.device, w.Phase)
	if now, err := with.Time(w.Machine); err == nil && w.step != nil {
		gpus := float64(j.World) / float64(w.Plan.Job.World)
		slower := secondsOf(now)/secondsOf(w.step)*gpus - 1
		c.Slower = &slower
	}
	return c, nil
}

// secondsOf returns the time of a token.
func secondsOf(s *steptime.Step) float64 { return s.Total.Expected.Seconds() / float64(s.Tokens) }
