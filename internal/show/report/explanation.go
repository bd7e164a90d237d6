package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/lever"
)

// ExplanationPage shows why a job has failed: first the answer, then what it rests on and what to do.
func ExplanationPage(e *explain.Explanation) *Page { return explanationPage(e, explainedSections(e)) }

func explanationPage(e *explain.Explanation, sections []explainedSection) *Page {
	p := &Page{Title: "Why the job failed", Document: e, Narrow: true,
		Sections: []Section{{Paragraph(e.Cause.Text + ".")}, {explainedFacts(e)}}}
	if e.Cause.Resource == explain.None {
		p.Title = "No failure"
	}
	for _, section := range sections {
		if len(section.items) > 0 {
			s := Section{Paragraph(section.title + ":"), List(section.items)}
			if section.title == holdersTitle {
				s = append(s, holdersPicture(e.Holders))
			}
			p.Sections = append(p.Sections, s)
		}
	}
	return p
}

// explainedSection is a list of an explanation.
type explainedSection struct {
	title string
	rank  int // in a short page: the sections of the lowest rank come first
	items []string
}

// holdersTitle is that of the list of those who held what ran out.
const holdersTitle = "who held it"

// holdersPicture draws a bar for each of them: one may be a part of another.
func holdersPicture(holders []explain.Holder) Block {
	var rows []barRow
	for _, h := range holders {
		component := ledger.Component(h.Component)
		rows = append(rows, barRow{shortened(h.Text, 28), []barPart{{
			component: wholeOf(component), title: component.Title(), size: float64(h.Bytes)}}})
	}
	return stacked("Who held it", rows, sizeWords)
}

func explainedSections(e *explain.Explanation) []explainedSection {
	return []explainedSection{
		{"evidence", 0, evidenceItems(e)},
		{holdersTitle, 2, holderItems(e)},
		{"what it is not", 5, ruledOutItems(e)},
		{"what to change", 1, editItems(e)},
		{"what to collect", 3, collectItems(e)},
		{"notes", 4, e.Notes},
	}
}

const (
	// shortExplanation is how many lines of 80 columns a short explanation has at most: those of a terminal.
	shortExplanation = 24
	// shortItem is how long an item of a short explanation is, in bytes.
	shortItem  = 148
	moreByLong = "More: --long."
)

// ShortExplanationPage is what fits on a terminal of 24 lines: the answer, and of each list what there is room for.
func ShortExplanationPage(e *explain.Explanation) *Page {
	if whole := ExplanationPage(e); linesOf(whole) <= shortExplanation {
		return whole
	}
	d := newDigest(e)
	for round := range longestSection(d.all) {
		for _, i := range d.order {
			if round < len(d.all[i].items) && round == len(d.shown[i].items) {
				d.put(i, round, shortened(d.all[i].items[round], shortItem))
			}
		}
	}
	for _, i := range d.order {
		for n := range d.shown[i].items {
			d.put(i, n, d.all[i].items[n])
		}
	}
	page := explanationPage(e, d.shown)
	page.Sections = append(page.Sections, Section{Paragraph(moreByLong)})
	return page
}

// digest is a short explanation that is being made.
type digest struct {
	explanation *explain.Explanation
	all, shown  []explainedSection
	order       []int // of the sections, by their ranks
}

func newDigest(e *explain.Explanation) *digest {
	d := &digest{explanation: e, all: explainedSections(e)}
	for i, s := range d.all {
		d.shown, d.order = append(d.shown, explainedSection{title: s.title}), append(d.order, i)
	}
	slices.SortFunc(d.order, func(a, b int) int { return cmp.Compare(d.all[a].rank, d.all[b].rank) })
	return d
}

// put makes an item the n-th of a section, if there is room for it.
func (d *digest) put(section, n int, item string) {
	before := d.shown[section].items
	d.shown[section].items = append(slices.Clone(before[:n]), item)
	if n < len(before) {
		d.shown[section].items = append(d.shown[section].items, before[n+1:]...)
	}
	if linesOf(explanationPage(d.explanation, d.shown)) > shortExplanation-2 {
		d.shown[section].items = before
	}
}

func longestSection(sections []explainedSection) (most int) {
	for _, s := range sections {
		most = max(most, len(s.items))
	}
	return most
}

// shortened returns an item, or the beginning of one that is too long.
func shortened(item string, most int) string {
	if len(item) <= most {
		return item
	}
	cut := strings.LastIndexByte(item[:most], ' ')
	if cut < most/2 {
		cut = most
	}
	return strings.ToValidUTF8(item[:cut], "") + " ..."
}

// linesOf is the number of lines of a page on 80 columns.
func linesOf(p *Page) int { return strings.Count(p.text(), "\n") }

func explainedFacts(e *explain.Explanation) Facts {
	var facts Facts
	resource := resourceText(e.Cause.Resource)
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
		facts.add("also ended", "rank %s", strings.Join(victims, ", "))
	}
	return facts
}

// resourceTexts are the words for resources whose names are those of a document.
var resourceTexts = map[explain.Resource]string{explain.GPU: "GPU memory", explain.Host: "host memory",
	explain.CGroup: "memory of the cgroup", explain.SharedMemory: "shared memory (/dev/shm)",
	explain.LockedMemory: "locked memory (ulimit -l)", explain.AddressSpace: "address space (ulimit -v)",
	explain.NUMANode: "memory of a NUMA node", explain.Disk: "space on a disk",
	explain.Processes: "processes or threads", explain.NotMemory: "nothing: it is not memory",
	explain.None: "nothing"}

func resourceText(r explain.Resource) string { return cmp.Or(resourceTexts[r], string(r)) }

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
		items = append(items, resourceText(r.Resource)+": "+r.Why)
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
