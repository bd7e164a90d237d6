package report

import (
	"fmt"
	"strings"

	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
)

// shownAdvice is how many changes text shows.
const shownAdvice = 3

// advised returns the best changes, which come before what is planned.
func (d *PlanDocument) advised() Section {
	if len(d.Advice) == 0 && d.Ladder == nil && d.Applied == nil {
		return nil
	}
	var facts Facts
	for i := range d.Advice[:min(shownAdvice, len(d.Advice))] {
		facts.add("advice", "%s", weighed(&d.Advice[i]))
	}
	if rest := len(d.Advice) - shownAdvice; rest > 0 {
		facts.add("", "%d more: --json", rest)
	}
	if d.Applied != nil {
		facts = append(facts, d.Applied.facts()...)
	}
	return append(allRungs(d.Ladder), facts)
}

// PlanApplied is the advice whose files were written. Flags belong to it, as no file says them.
type PlanApplied struct {
	Files    []string    `json:"files"`
	Replaces []string    `json:"replaces"` // files that they are copies of
	Flags    []string    `json:"flags"`
	Verdict  plan.Result `json:"verdict"`
}

// facts says which files were written, and how the job stands with them.
func (w *PlanApplied) facts() (facts Facts) {
	with := ""
	if len(w.Flags) > 0 {
		with = ", together with " + strings.Join(w.Flags, " ")
	}
	facts.add("written", "%s, in place of %s: %s%s", strings.Join(w.Files, ", "), strings.Join(w.Replaces, ", "),
		w.Verdict, with)
	return facts
}

// weighed says a change, and what its plan says.
func weighed(c *lever.Change) string {
	what := fmt.Sprintf("frees %v", c.Frees())
	if c.Frees() < 0 {
		what = fmt.Sprintf("takes %v of what is free", -c.Frees())
	}
	if c.Slower != nil {
		switch slower := 100 * *c.Slower; {
		case slower >= 0.5:
			what += fmt.Sprintf(", %.0f %% slower", slower)
		case slower <= -0.5:
			what += fmt.Sprintf(", %.0f %% faster", -slower)
		}
	}
	if c.Verdict != plan.Unknown {
		what += ": " + string(c.Verdict)
	}
	return fmt.Sprintf("%v %s (%s)", c, what, c.Why)
}
