package report

import (
	"fmt"
	"strings"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/plan/lever"
)

// ExplanationPage shows why a job has failed: first the answer, then what it rests on and what to do.
func ExplanationPage(e *explain.Explanation) *Page {
	p := &Page{Title: "Why the job failed", Document: e, Narrow: true,
		Sections: []Section{{Paragraph(e.Cause.Text + ".")}, {explainedFacts(e)}}}
	if e.Cause.Resource == explain.None {
		p.Title = "No failure"
	}
	for _, section := range []struct {
		title string
		items []string
	}{
		{"evidence", evidenceItems(e)},
		{"who held it", holderItems(e)},
		{"what it is not", ruledOutItems(e)},
		{"what to change", editItems(e)},
		{"what to collect", collectItems(e)},
		{"notes", e.Notes},
	} {
		if len(section.items) > 0 {
			p.Sections = append(p.Sections, Section{Paragraph(section.title + ":"), List(section.items)})
		}
	}
	return p
}

func explainedFacts(e *explain.Explanation) Facts {
	var facts Facts
	resource := string(e.Cause.Resource)
	switch {
	case e.Cause.Resource == explain.Undetermined:
		resource = "not known"
	case e.Cause.Detail != "":
		resource += ", " + e.Cause.Detail
	}
	facts.add("ran out", "%s", resource)
	facts.add("confidence", "%s", e.Confidence)
	victims := []string{}
	for _, v := range e.Victims {
		victims = append(victims, fmt.Sprint(v.Rank))
	}
	if len(victims) > 0 {
		facts.add("took along", "rank %s", strings.Join(victims, ", "))
	}
	return facts
}

// place is a line of a file, as compilers write it.
func place(file string, line int) string {
	if line == 0 {
		return file
	}
	return fmt.Sprintf("%s:%d", file, line)
}

// evidenceItems keep what the line says, and its text where it is short.
func evidenceItems(e *explain.Explanation) []string {
	var items []string
	for _, f := range e.Evidence {
		items = append(items, place(f.File, f.Line)+": "+f.Says)
	}
	return items
}

func holderItems(e *explain.Explanation) []string {
	var items []string
	for _, h := range e.Holders {
		items = append(items, fmt.Sprintf("%v: %s (%s)", h.Bytes, h.Text, h.Component))
	}
	return items
}

func ruledOutItems(e *explain.Explanation) []string {
	var items []string
	for _, r := range e.RuledOut {
		items = append(items, string(r.Resource)+": "+r.Why)
	}
	return items
}

// shownEdits is how many planned changes text shows. It shows all others.
const shownEdits = 6

// editItems shows the best planned changes, one of each kind.
func editItems(e *explain.Explanation) []string {
	var items []string
	planned, shown := 0, map[string]bool{}
	for _, edit := range e.Edits {
		if edit.Planned == nil {
			items = append(items, editItem(edit))
			continue
		}
		planned++
		if keys := keysOf(edit.Planned); len(shown) < shownEdits && !shown[keys] {
			shown[keys] = true
			items = append(items, weighed(edit.Planned))
		}
	}
	if rest := planned - len(shown); rest > 0 {
		items = append(items, fmt.Sprintf("%d more that were planned: --json", rest))
	}
	return items
}

// keysOf returns what a change changes, whatever the values are.
func keysOf(c *lever.Change) string {
	var keys []string
	for _, e := range c.Edits {
		keys = append(keys, e.Key)
	}
	for _, f := range c.Flags {
		name, _, _ := strings.Cut(f, " ")
		keys = append(keys, name)
	}
	return strings.Join(keys, " ")
}

// editItem says a change that was not planned.
func editItem(e explain.Edit) string {
	text := e.Key + ": "
	if e.From != "" {
		text += e.From + " -> "
	}
	text += e.To
	if e.Frees > 0 {
		text += fmt.Sprintf(" frees %v", e.Frees)
	}
	return text + "; " + e.Why
}

func collectItems(e *explain.Explanation) []string {
	var items []string
	for _, c := range e.Collect {
		items = append(items, c.Command+": "+c.Why)
	}
	return items
}
