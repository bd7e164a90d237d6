package report

import (
	_ "embed"
	"html/template"
	"io"
	"slices"
	"strings"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// htmlPage is what the template shows.
type htmlPage struct {
	Title, Version, Verdict string
	Tone                    string // a class of the verdict
	Hints                   []string
	Charts                  []*chart
	Phases                  []ledger.PhaseName
	Sections                [][]htmlBlock
	Memory                  *memoryView // nil for none
	Scripts                 htmlScripts
}

// htmlBlock is a block of a page: one of its fields is set.
type htmlBlock struct {
	Facts     Facts
	Columns   []htmlCell
	Rows      [][]htmlCell
	Paragraph string
	Gantt     *ganttChart
	Picture   *Picture
	Tree      Tree
}

type htmlCell struct {
	Text  string
	Right bool
}

// WriteHTML writes a page that needs no network: the page of a result, with charts of a recording. The timeline is nil
// where there is none. Only bars of devices need a script, and what it shows is in the page's tables as well.
func WriteHTML(w io.Writer, page *Page, version string, t *reconcile.Timeline, peaks []reconcile.Peak) error {
	p := htmlPage{Title: page.Title, Version: version, Verdict: page.Verdict, Tone: page.Tone.class(),
		Hints: page.Hints, Memory: newMemoryView(page), Scripts: scripts}
	if t != nil {
		for i := range t.Tracks {
			p.Charts = append(p.Charts, newChart(&t.Tracks[i], t, plannedPeak(&t.Tracks[i], peaks)))
		}
		for _, s := range t.Spans {
			if !slices.Contains(p.Phases, s.Phase) {
				p.Phases = append(p.Phases, s.Phase)
			}
		}
	}
	for _, s := range page.Sections {
		var blocks []htmlBlock
		for _, b := range s {
			blocks = append(blocks, htmlOf(b))
		}
		p.Sections = append(p.Sections, blocks)
	}
	var text strings.Builder
	if err := pageTemplate.Execute(&text, p); err != nil {
		return err
	}
	_, err := io.WriteString(w, safe.Text(text.String()))
	return err
}

// plannedPeak returns the highest planned peak of a track's device, or nil if there is none.
func plannedPeak(track *reconcile.Track, peaks []reconcile.Peak) *ledger.Bytes {
	var most *ledger.Bytes
	for _, p := range peaks {
		if p.Device == track.Kind && p.Rank == track.Rank && track.Rank >= 0 && p.Planned != nil &&
			(most == nil || *p.Planned > *most) {
			most = p.Planned
		}
	}
	return most
}

func htmlOf(b Block) htmlBlock {
	switch b := b.(type) {
	case Facts:
		return htmlBlock{Facts: b}
	case Paragraph:
		return htmlBlock{Paragraph: string(b)}
	case Tree:
		return htmlBlock{Tree: b}
	case List:
		var items Tree
		for _, item := range b {
			items = append(items, Node{Text: item})
		}
		return htmlBlock{Tree: items}
	case Bars:
		return htmlOf(timeline(b.Device))
	case *Picture:
		return htmlBlock{Picture: b}
	case interface{ chart() *ganttChart }:
		return htmlBlock{Gantt: b.chart()}
	case *Table:
		var h htmlBlock
		for _, c := range b.Columns {
			h.Columns = append(h.Columns, htmlCell{c.Title, c.Kind != Words})
		}
		for _, cells := range b.Rows {
			var row []htmlCell
			for i, cell := range cells {
				row = append(row, htmlCell{b.Columns[i].format(cell), b.Columns[i].Kind != Words})
			}
			h.Rows = append(h.Rows, row)
		}
		return h
	}
	return htmlBlock{Paragraph: b.markdown()}
}

// ganttChart is a picture in SVG.
type ganttChart struct {
	Width, Height int
	Rows          []ganttRow
	Bars          []ganttBar
	Ticks         []tick
	Legend        []ganttKey
}

type ganttRow struct {
	Y    int
	Name string
}

type ganttBar struct {
	X, Width float64
	Y        int
	Class    string
	Title    string
}

type ganttKey struct{ Class, Name string }
