package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"plimsoll/fault"
	"plimsoll/rehearse"
)

// newProgress draws a bar on a terminal. Anywhere else it writes a line at the start and the end of an activity.
func newProgress(terminal *os.File, stderr io.Writer) rehearse.Progress {
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
