//go:build linux

package report

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"

	"plimsoll/internal/measure/rehearse"
)

// picture is a step of 620 ms, ten to a cell.
func picture() Gantt {
	const ms = time.Millisecond
	span := func(a rehearse.Activity, of string, from, to time.Duration) rehearse.Span {
		return rehearse.Span{Activity: a, Of: of, From: from * ms, To: to * ms}
	}
	return Gantt{&rehearse.Timeline{Steps: 1, Tracks: []rehearse.Track{
		{Name: "trainer", Spans: []rehearse.Span{
			span(rehearse.InBackward, "block 1", 0, 100), span(rehearse.InBackward, "block 0", 100, 200),
			span(rehearse.Waiting, "block 0", 200, 250), span(rehearse.InForward, "block 0", 250, 620)}},
		{Name: "rank 0, CPU 0 of a long name", Spans: []rehearse.Span{
			span(rehearse.Summing, "block 1", 100, 104), // most of no cell, but all of its work
			span(rehearse.Summing, "block 0", 200, 201),
			span(rehearse.Updating, "block 0", 201, 250), span(rehearse.Updating, "block 0", 250, 290),
			span(rehearse.Updating, "block 1", 290, 301)}},
	}}}
}

func TestGantt(t *testing.T) {
	const want = "" +
		"the last step    0" + "                                                       620 ms\n" +
		"trainer          <<<<<<<<<<<<<<<<<<<<!!!!!>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>\n" +
		"rank 0, CPU 0 of           n         ##########\n" +
		"                 > forward   < backward   ! wait   n norm   # update\n"
	plain := picture().text(layout{})
	if plain != want {
		t.Errorf("got\n%swant\n%s", plain, want)
	}
	colored := picture().text(layout{color: true})
	if colored == ansi.Strip(colored) || strings.Contains(colored, "#") {
		t.Errorf("no colors: %q", colored)
	}
	for line := range strings.Lines(colored) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 80 {
			t.Errorf("%d columns: %s", width, line)
		}
	}
	if markdown := picture().markdown(); markdown != "```\n"+want+"```\n" {
		t.Errorf("Markdown:\n%s", markdown)
	}
}

// TestGanttInHTML: work that adjoins for one layer is one bar, and every bar has a class that the page knows.
func TestGanttInHTML(t *testing.T) {
	var html bytes.Buffer
	page := &Page{Title: "A step", Sections: []Section{{picture()}}}
	if err := WriteHTML(&html, page, "test", nil, nil); err != nil {
		t.Fatal(err)
	}
	for text, count := range map[string]int{
		"<svg": 1, "<rect": 8, `<rect class="updating"`: 2, "<title>update block 0: 89 ms</title>": 1, `<li><i class=`: 5,
	} {
		if got := strings.Count(html.String(), text); got != count {
			t.Errorf("%d times %s, want %d:\n%s", got, text, count, &html)
		}
	}
	for _, ink := range inks {
		if !strings.Contains(html.String(), "."+ink.class+" { fill:") {
			t.Errorf("the page has no color for %s", ink.class)
		}
	}
}
