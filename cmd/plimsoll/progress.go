package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"plimsoll/fault"
)

// progress follows what a verb is doing: activities one after the other, each of a number of parts.
type progress interface {
	Begin(activity string, parts int64)
	Advance(parts int64)
	End()
}

// newProgress draws a bar on a terminal. Anywhere else it writes a line at the start and the end of an activity.
func newProgress(terminal *os.File, stderr io.Writer) progress {
	if stderr == terminal && term.IsTerminal(int(terminal.Fd())) {
		return &bar{out: stderr}
	}
	return &lines{out: stderr}
}

type bar struct {
	out io.Writer
	bar *progressbar.ProgressBar
}

func (b *bar) Begin(activity string, parts int64) {
	b.bar = progressbar.NewOptions64(parts,
		progressbar.OptionSetWriter(b.out),
		progressbar.OptionSetDescription(fault.Printable(activity)),
		progressbar.OptionSetWidth(30),
		progressbar.OptionShowCount(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetRenderBlankState(true),
	)
}

// Failing to draw the bar does not stop the work.
func (b *bar) Advance(parts int64) { _ = b.bar.Add64(parts) }
func (b *bar) End()                { _ = b.bar.Finish() }

type lines struct {
	out      io.Writer
	activity string
	began    time.Time
}

func (l *lines) Begin(activity string, _ int64) {
	l.activity, l.began = fault.Printable(activity), time.Now()
	fmt.Fprintf(l.out, "%s ...\n", l.activity)
}

func (l *lines) Advance(int64) {}

func (l *lines) End() {
	fmt.Fprintf(l.out, "%s: %.1f s\n", l.activity, time.Since(l.began).Seconds())
}

// logTo returns a function that writes a message to the user while ranks run.
func logTo(c *cobra.Command) func(format string, values ...any) {
	return func(format string, values ...any) {
		fmt.Fprintf(c.ErrOrStderr(), "plimsoll: %s\n", fault.Printable(fmt.Sprintf(format, values...)))
	}
}
