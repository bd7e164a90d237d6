package report

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/plan/advice"
	"plimsoll/internal/plan/plan"
)

// PlanAdvice is a change that was planned.
type PlanAdvice struct {
	Edits   []amend.Edit `json:"edits"`
	Flags   []string     `json:"flags"` // for settings that no file says
	Why     string       `json:"why"`
	Device  ledger.Kind  `json:"device"`
	Before  ledger.Bytes `json:"before_bytes"`
	After   ledger.Bytes `json:"after_bytes"`
	Verdict plan.Result  `json:"verdict"` // with the change
	// Slower is the time of a token with the change over that without, less 1; null where times are not known.
	Slower *float64 `json:"slower"`
}

// Advise adds advice, the best first.
func (d *PlanDocument) Advise(list []advice.Advice) {
	for i := range list {
		a := &list[i]
		d.Advice = append(d.Advice, PlanAdvice{Edits: append([]amend.Edit{}, a.Edits...),
			Flags: append([]string{}, a.Flags...), Why: a.Why, Device: a.Device, Before: a.Before, After: a.After,
			Verdict: a.Verdict, Slower: a.Slower})
	}
}

// shownAdvice is how many changes text shows.
const shownAdvice = 3

// advised returns the best changes, which come before what is planned.
func (d *PlanDocument) advised() Section {
	if len(d.Advice) == 0 {
		return nil
	}
	var facts Facts
	for i := range d.Advice[:min(shownAdvice, len(d.Advice))] {
		facts.add("advice", "%s", d.Advice[i].line())
	}
	if rest := len(d.Advice) - shownAdvice; rest > 0 {
		facts.add("", "%d more: --json", rest)
	}
	if w := d.Applied; w != nil {
		with := ""
		if len(w.Flags) > 0 {
			with = ", together with " + strings.Join(w.Flags, " ")
		}
		facts.add("written", "%s, in place of %s: %s%s", strings.Join(w.Files, ", "), strings.Join(w.Replaces, ", "),
			w.Verdict, with)
	}
	return Section{facts}
}

// PlanApplied is the advice whose files were written. Flags belong to it, as no file says them.
type PlanApplied struct {
	Files    []string    `json:"files"`
	Replaces []string    `json:"replaces"` // files that they are copies of
	Flags    []string    `json:"flags"`
	Verdict  plan.Result `json:"verdict"`
}

// line says a change, and what its plan says.
func (a *PlanAdvice) line() string {
	var parts []string
	for i, e := range a.Edits {
		if i > 0 && e.File == a.Edits[i-1].File { // names may be long
			e.File = "line"
			parts = append(parts, strings.Replace(e.String(), "line:", "line ", 1))
			continue
		}
		parts = append(parts, e.String())
	}
	change := strings.Join(append(parts, a.Flags...), ", ")
	what := fmt.Sprintf("frees %v", a.Before-a.After)
	if a.After > a.Before {
		what = fmt.Sprintf("takes %v of what is free", a.After-a.Before)
	}
	if a.Slower != nil {
		switch slower := 100 * *a.Slower; {
		case slower >= 0.5:
			what += fmt.Sprintf(", %.0f %% slower", slower)
		case slower <= -0.5:
			what += fmt.Sprintf(", %.0f %% faster", -slower)
		}
	}
	return fmt.Sprintf("%s %s: %s (%s)", change, what, a.Verdict, a.Why)
}
