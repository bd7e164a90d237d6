//go:build linux

package report

import (
	"fmt"
	"html"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host/hosttest"
	"plimsoll/internal/measure/rehearse"
)

// picturedPages are pages with pictures, by what they show.
func picturedPages(t *testing.T) map[string]*Page {
	t.Helper()
	size := func(gib ledger.Bytes) *ledger.Bytes { gib *= ledger.GiB; return &gib }
	line := func(c ledger.Component, planned ledger.Bytes, measured *ledger.Bytes) ledger.Line {
		return ledger.Line{Part: "bf16", Component: c, Planned: planned * ledger.GiB, Measured: measured}
	}
	pages := map[string]*Page{
		"explain": ExplanationPage(&explain.Explanation{Cause: explain.Cause{Text: "Rank 3 was killed"},
			Holders: []explain.Holder{
				{Component: "optimizer_states", Bytes: 24 * ledger.GiB, Text: "moments of rank 3"},
				{Component: "process 7705", Bytes: 3 * ledger.GiB, Text: "python3, <anonymous> memory"}}}),
		"rehearse": {Sections: []Section{{rehearsedPicture(ledger.Comparison{line(ledger.Parameters, 2, size(2)),
			line(ledger.MasterWeightsLow, 2, size(2)), line(ledger.ExpAvg, 4, size(4)),
			line(ledger.ExpAvgSq, 4, size(4)), line(ledger.Process, 0, size(1))})},
			{stepsPicture([]rehearse.Step{{Seconds: 3, NormSeconds: 1, UpdateSeconds: 1.5},
				{Seconds: 2, NormSeconds: .5, UpdateSeconds: 1.5}})}}},
	}
	for _, m := range hosttest.Corpus(t) {
		pages["topology of "+m.Name] = NewTopology("test", m.Discover(t)).Page()
	}
	return pages
}

var (
	pictureIn = regexp.MustCompile(`(?s)<h3>[^<]*</h3>\n<svg viewBox="0 0 (\d+) (\d+)" role="img" aria-label="([^"]+)">.*?</svg>`)
	boxIn     = regexp.MustCompile(`<rect class="([^"]+)" x="([\d.-]+)" y="([\d.-]+)" width="([\d.-]+)" height="([\d.]+)"><title>([^<]+)</title>`)
)

// TestPictures: a page for browsers has pictures whose boxes lie within them and do not overlap. Each box has a color
// that the page knows and a title, and the label says all numbers to those who see no picture. Text and Markdown have
// none.
func TestPictures(t *testing.T) {
	for name, page := range picturedPages(t) {
		var out strings.Builder
		if err := WriteHTML(&out, page, "test", nil, nil); err != nil {
			t.Fatal(err)
		}
		found := pictureIn.FindAllStringSubmatch(out.String(), -1)
		if len(found) == 0 {
			t.Errorf("%s: the page has no picture", name)
		}
		for _, picture := range found {
			checkPicture(t, name, picture)
		}
		if strings.Contains(page.text()+page.markdown(), "svg") {
			t.Errorf("%s: a picture is in the text", name)
		}
	}
}

func checkPicture(t *testing.T, name string, picture []string) {
	t.Helper()
	var width, height float64
	if _, err := fmt.Sscan(picture[1]+" "+picture[2], &width, &height); err != nil {
		t.Fatal(err)
	}
	ends := map[string]float64{} // of the last box in a row
	label := html.UnescapeString(picture[3])
	boxes := boxIn.FindAllStringSubmatch(picture[0], -1)
	if len(boxes) == 0 || strings.Count(picture[0], "<rect") != len(boxes) {
		t.Errorf("%s: %d boxes have a color and a title, of %d", name, len(boxes), strings.Count(picture[0], "<rect"))
	}
	for _, b := range boxes {
		var x, y, w, h float64
		if _, err := fmt.Sscan(strings.Join(b[2:6], " "), &x, &y, &w, &h); err != nil {
			t.Fatal(err)
		}
		if x < ends[b[3]]-0.11 || x+w > width || y < 0 || y+h > height || w < 0 {
			t.Errorf("%s: a box from %.1f to %.1f at %.1f is outside of %.0f x %.0f, or over another", name, x, x+w, y,
				width, height)
		}
		ends[b[3]] = x + w
		if !strings.Contains(pageText, "."+b[1]+" { fill") {
			t.Errorf("%s: the page has no color %q", name, b[1])
		}
		title := html.UnescapeString(b[6])
		says := title[strings.LastIndex(title, ": ")+2:]
		says, _, _ = strings.Cut(says, ", ") // of a core: what else is said of it
		if !strings.Contains(label, says) {
			t.Errorf("%s: the label %q does not say %q", name, label, says)
		}
	}
}

// TestPicturesToScale: bars are as long as what they show.
func TestPicturesToScale(t *testing.T) {
	p := stacked("title", []barRow{{"a", []barPart{{component: ledger.Parameters, title: "parameters", size: 3 << 30}}},
		{"b", []barPart{{component: ledger.Gradients, title: "gradients", size: 1 << 30},
			{component: ledger.Parameters, title: "parameters", size: 2 << 30}}}}, sizeWords).(*Picture)
	if p.Boxes[0].Width != 3*p.Boxes[1].Width || p.Boxes[2].X != p.Boxes[1].X+p.Boxes[1].Width ||
		p.Boxes[0].Class != p.Boxes[2].Class {
		t.Errorf("%+v", p.Boxes)
	}
	of := func(size float64) barRow { return barRow{"row", []barPart{{size: size * (1 << 30)}}} }
	d := differing("title", []barRow{of(2), of(-1)}).(*Picture)
	zero := d.Rules[0].X
	if d.Boxes[0].X != zero || d.Boxes[1].X+d.Boxes[1].Width != zero || d.Boxes[0].Width != 2*d.Boxes[1].Width ||
		d.Boxes[0].Class == d.Boxes[1].Class {
		t.Errorf("%+v, zero is at %v", d.Boxes, zero)
	}
}

// TestOneColorAComponent: a component with a color of its own has it in a plan, in a chart over time and in a picture,
// whatever else is there. Its part has it, too, and no two components of a page have the same.
func TestOneColorAComponent(t *testing.T) {
	others := []ledger.Component{ledger.Process, ledger.PageTables, ledger.PythonProcess, ledger.FreeHeap}
	for i, c := range steadyColors {
		for _, list := range [][]ledger.Component{{c}, append(slices.Clone(others), c), append([]ledger.Component{c},
			others...), append(slices.Clone(steadyColors), others...)} {
			classes := colorClasses(list)
			if classes[c] != colorClass(i) {
				t.Errorf("%s has %s beside %v", c, classes[c], list)
			}
			seen := map[string]bool{}
			for _, class := range classes {
				if class != otherColor && seen[class] {
					t.Errorf("%s stands for two components of %v", class, list)
				}
				seen[class] = true
			}
		}
	}
	parts := colorClasses([]ledger.Component{ledger.ExpAvg, ledger.ExpAvgSq})
	if whole := colorClasses([]ledger.Component{ledger.OptimizerStates})[ledger.OptimizerStates]; whole != parts[ledger.
		ExpAvg] || whole == parts[ledger.ExpAvgSq] {
		t.Errorf("the whole has %s, its parts %v", whole, parts)
	}
	titles, classes := pageColors([]pigment{{component: ledger.Gradients, title: "gradients"}, {title: "other"},
		{title: "unused"}})
	own := colorClass(slices.Index(steadyColors, ledger.Gradients))
	if at := slices.Index(titles, "gradients"); classes[at] != own ||
		!slices.Equal(classes[1:], []string{otherColor, "unused"}) {
		t.Errorf("the page has %v for %v", classes, titles)
	}
}
