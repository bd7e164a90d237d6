//go:build !page

package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/fault"
)

// newProgress draws a bar on a terminal. Anywhere else it writes a line at the start and the end of an activity.
func newProgress(terminal *os.File, stderr io.Writer) activity.Progress {
	if stderr == terminal && term.IsTerminal(int(terminal.Fd())) {
		return &bar{out: oneLine{terminal}}
	}
	return &lines{out: stderr}
}

// terminalProgress draws a bar on a terminal. Anywhere else it is nil: for work that is mostly too short to speak of.
func terminalProgress(c *cobra.Command) activity.Progress {
	if b, drawn := newProgress(os.Stderr, c.ErrOrStderr()).(*bar); drawn {
		return b
	}
	return nil
}

// bar is the progress bar of one activity after the other.
type bar struct {
	out oneLine
	bar *progressbar.ProgressBar
}

func (b *bar) Begin(label string, parts int64, unit activity.Unit) {
	const figures = len(" 100% || (1002.3/1002.3 GiB, 1002.3 MiB/s) [10m10s:10m10s]")
	columns := b.out.columns()
	name := ansi.Truncate(fault.Printable(label), max(columns/2, columns-figures-10), "~")
	options := []progressbar.Option{
		progressbar.OptionSetWriter(b.out),
		progressbar.OptionSetDescription(name),
		progressbar.OptionSetWidth(min(max(columns-figures-ansi.StringWidth(name), 5), 40)),
		progressbar.OptionSetTheme(progressbar.ThemeASCII),
		progressbar.OptionThrottle(100 * time.Millisecond),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetRenderBlankState(true),
	}
	switch unit {
	case activity.Bytes:
		options = append(options, progressbar.OptionShowBytes(true), progressbar.OptionUseIECUnits(true),
			progressbar.OptionShowCount())
	case activity.Counts:
		options = append(options, progressbar.OptionShowCount())
	}
	b.bar = progressbar.NewOptions64(parts, options...)
}

// Failing to draw the bar does not stop the work.
func (b *bar) Advance(parts int64) { _ = b.bar.Add64(parts) }
func (b *bar) End()                { _ = b.bar.Finish() }

// oneLine keeps what is drawn in one line of a terminal, also after its window has become smaller.
type oneLine struct{ file *os.File }

// columns returns the width of the terminal, without the last column: some terminals break the line there.
func (o oneLine) columns() int {
	if n, _, err := term.GetSize(int(o.file.Fd())); err == nil && n > 1 {
		return n - 1
	}
	return 79
}

// Write cuts what is drawn between two returns to the beginning of the line.
func (o oneLine) Write(drawn []byte) (int, error) {
	parts := strings.Split(string(drawn), "\r")
	for i, part := range parts {
		parts[i] = ansi.Truncate(part, o.columns(), "")
	}
	if _, err := io.WriteString(o.file, strings.Join(parts, "\r")); err != nil {
		return 0, err
	}
	return len(drawn), nil
}

// lines says when an activity begins and ends.
type lines struct {
	out      io.Writer
	activity string
	began    time.Time
}

func (l *lines) Begin(label string, _ int64, _ activity.Unit) {
	l.activity, l.began = fault.Printable(label), time.Now()
	fmt.Fprintf(l.out, "%s ...\n", l.activity)
}

func (l *lines) Advance(int64) {}

func (l *lines) End() {
	fmt.Fprintf(l.out, "%s: %.1f s\n", l.activity, time.Since(l.began).Seconds())
}
