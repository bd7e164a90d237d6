//go:build linux

package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"charm.land/lipgloss/v2"

	"plimsoll/internal/measure/rehearse"
)

// Gantt is a picture of who did what and when: a row for each track.
type Gantt struct {
	*rehearse.Timeline
}

// The columns of a picture in text.
const (
	ganttName  = 16
	ganttCells = terminal - ganttName - 2
)

// inks are how activities are drawn: by a letter, or by a block in a color of the terminal.
var inks = []struct {
	activity rehearse.Activity
	letter   string
	style    lipgloss.Style
	class    string // in HTML
}{
	{rehearse.InForward, ">", lipgloss.NewStyle().Foreground(lipgloss.Green), "forward"},
	{rehearse.InBackward, "<", lipgloss.NewStyle().Foreground(lipgloss.Blue), "backward"},
	{rehearse.Waiting, "!", lipgloss.NewStyle().Foreground(lipgloss.Red), "waiting"},
	{rehearse.Summing, "n", lipgloss.NewStyle().Foreground(lipgloss.Yellow), "summing"},
	{rehearse.CopyingIn, "i", lipgloss.NewStyle().Foreground(lipgloss.Cyan), "copying-in"},
	{rehearse.Updating, "#", lipgloss.NewStyle().Foreground(lipgloss.Magenta), "updating"},
	{rehearse.CopyingOut, "o", lipgloss.NewStyle().Foreground(lipgloss.Yellow), "copying-out"},
}

// drawn returns a number of cells with an ink; -1 is nobody at work.
func drawn(ink, cells int, color bool) string {
	switch {
	case ink < 0:
		return strings.Repeat(" ", cells)
	case color:
		return inks[ink].style.Render(strings.Repeat("█", cells))
	}
	return strings.Repeat(inks[ink].letter, cells)
}

func (g Gantt) text(l layout) string {
	var b strings.Builder
	length := g.Length()
	end := seconds(length.Seconds())
	title := "the last step"
	if g.Steps > 1 {
		title = fmt.Sprintf("the last %d steps", g.Steps)
	}
	fmt.Fprintf(&b, "%-*s 0%*s\n", ganttName, title, ganttCells-1, end)
	for _, track := range g.Tracks {
		row := cells(track.Spans, length)
		fmt.Fprintf(&b, "%-*.*s ", ganttName, ganttName, track.Name)
		for from := 0; from < len(row); {
			to := from
			for to < len(row) && row[to] == row[from] {
				to++
			}
			b.WriteString(drawn(row[from], to-from, l.color))
			from = to
		}
		b.WriteString("\n")
	}
	var legend []string
	for i, ink := range inks {
		if g.shows(ink.activity) {
			legend = append(legend, drawn(i, 1, l.color)+" "+string(ink.activity))
		}
	}
	gap := "   "
	if len(legend) > 5 { // or the line leaves the terminal
		gap = "  "
	}
	fmt.Fprintf(&b, "%-*s %s\n", ganttName, "", strings.Join(legend, gap))
	return trimmedLines(b.String())
}

// shows reports whether an activity is in the picture.
func (g Gantt) shows(a rehearse.Activity) bool {
	return slices.ContainsFunc(g.Tracks, func(t rehearse.Track) bool {
		return slices.ContainsFunc(t.Spans, func(s rehearse.Span) bool { return s.Activity == a })
	})
}

// cells returns the ink of each cell of a row: that of the activity which takes most of the cell's time.
func cells(spans []rehearse.Span, length time.Duration) []int {
	row := make([]int, ganttCells)
	times := make([][]time.Duration, ganttCells) // of each ink
	width := max(length/ganttCells, 1)
	for _, s := range spans {
		for cell := int(s.From / width); cell < ganttCells && time.Duration(cell)*width < s.To; cell++ {
			if times[cell] == nil {
				times[cell] = make([]time.Duration, len(inks))
			}
			begin := time.Duration(cell) * width
			times[cell][inkOf(s.Activity)] += min(s.To, begin+width) - max(s.From, begin)
		}
	}
	for cell := range row {
		row[cell] = -1
		most := width / 4 // less is too little to show
		for ink, of := range times[cell] {
			if of > most {
				row[cell], most = ink, of
			}
		}
	}
	return row
}

func inkOf(a rehearse.Activity) int {
	for i := range inks {
		if inks[i].activity == a {
			return i
		}
	}
	return len(inks) - 1
}

func (g Gantt) markdown() string { return "```\n" + g.text(layout{}) + "```\n" }

// The size of a row in pixels.
const (
	ganttLeft   = 120
	ganttRowing = 22
	ganttBarred = 16
)

// chart draws the picture.
func (g Gantt) chart() *ganttChart {
	length := max(g.Length(), 1)
	c := &ganttChart{Width: ganttLeft + chartWidth, Height: chartTop + ganttRowing*len(g.Tracks) + 24}
	x := func(at time.Duration) float64 {
		return ganttLeft + (chartWidth-20)*float64(at)/float64(length)
	}
	for i, track := range g.Tracks {
		y := chartTop + ganttRowing*i
		c.Rows = append(c.Rows, ganttRow{y + ganttBarred - 4, track.Name})
		for _, s := range joined(track.Spans, length/chartWidth) {
			class := inks[inkOf(s.Activity)].class
			c.Bars = append(c.Bars, ganttBar{x(s.From), max(x(s.To)-x(s.From), 0.2), y, class,
				fmt.Sprintf("%s %s: %s", s.Activity, s.Of, seconds((s.To - s.From).Seconds()))})
		}
	}
	for i := range 6 {
		at, text := length*time.Duration(i)/5, "0"
		if i > 0 {
			text = seconds(at.Seconds())
		}
		c.Ticks = append(c.Ticks, tick{X: x(at), Y: float64(c.Height - 6), Text: text})
	}
	for _, ink := range inks {
		if g.shows(ink.activity) {
			c.Legend = append(c.Legend, ganttKey{ink.class, string(ink.activity)})
		}
	}
	return c
}

// joined joins spans of the same activity for the same layer whose gap is too small to see.
func joined(spans []rehearse.Span, gap time.Duration) []rehearse.Span {
	var all []rehearse.Span
	for _, s := range spans {
		if n := len(all) - 1; n >= 0 && all[n].Activity == s.Activity && all[n].Of == s.Of && s.From-all[n].To <= gap {
			all[n].To = s.To
			continue
		}
		all = append(all, s)
	}
	return all
}
