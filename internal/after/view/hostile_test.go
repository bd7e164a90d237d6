//go:build linux

package view

import (
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"plimsoll/internal/base/samples"
)

// TestHostileNames: what a job is called, what it runs and what it prints does not act on the terminal.
func TestHostileNames(t *testing.T) {
	const hostile = "h\x1b]0;title\x07\x1b[5m\u009b31m\u202e\u200b\u2028\r\nend"
	var s State
	for _, r := range []samples.Record{
		{Start: &samples.Start{Job: hostile, Command: []string{hostile}}},
		{Time: time.Second, Sample: &samples.Sample{Missed: []string{hostile},
			Groups:    []samples.Group{{Name: hostile, Limit: 1 << 20, Current: 1 << 20}},
			GPUs:      []samples.GPU{{Throttled: []string{hostile}}},
			Processes: []samples.Process{{PID: 1, Role: samples.RankProcess, Phase: hostile}}}},
		{Mark: &samples.Mark{Phase: hostile, Step: 1}},
		{Output: &samples.Output{Stream: hostile, Lines: []string{hostile}}},
		{Time: 2 * time.Second, End: &samples.End{ExitCode: 1}},
	} {
		s.Add(&r)
	}
	s.say(hostile)
	styles := regexp.MustCompile("\x1b\\[[0-9;]*m")
	shown := ""
	for _, pane := range []Pane{Table, Lines, Help} {
		for _, width := range []int{80, 200} {
			text := strings.Join(s.Render(Screen{Width: width, Pane: pane}), "\n")
			if strings.Contains(text, "\x1b[5m") {
				t.Errorf("pane %v blinks: %q", pane, text)
			}
			for _, r := range styles.ReplaceAllString(text, "") {
				if r != '\n' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
					t.Errorf("pane %v has %U: %q", pane, r, text)
				}
			}
			shown += text
		}
	}
	for _, part := range []string{"job h", "end", `\u202e`} {
		if !strings.Contains(shown, part) {
			t.Errorf("no pane shows %q", part)
		}
	}
}
