//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"plimsoll/internal/after/view"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/run/launch"
)

// drawable returns the output if it is a terminal that can draw a view, or nil.
func drawable(out io.Writer) *os.File {
	file, isFile := out.(*os.File)
	if isFile && view.CanDraw(file) {
		return file
	}
	return nil
}

// show begins to show a job that is about to start. It returns what ends that. Without a terminal it prints tables to
// stderr.
func (o *runOptions) show(c *cobra.Command) (end func(), err error) {
	j, stdout, stderr := &o.job, drawable(c.OutOrStdout()), drawable(c.ErrOrStderr())
	if stdout == nil && stderr == nil {
		p := view.Print(c.ErrOrStderr(), o.interval)
		j.Recording.Observe = p.Add
		return p.Close, nil
	}
	config := view.Config{Leave: "leaves the view; the job goes on, and what it prints follows"}
	if term.IsTerminal(int(j.Stdin.Fd())) {
		if j.Stdin, err = os.Open(os.DevNull); err != nil {
			return nil, err
		}
	}
	if stderr != nil {
		config.Terminal, config.Stderr = stderr, stderr
		if err := hideErrors(j, &config); err != nil {
			return nil, err
		}
	}
	if stdout != nil {
		config.Terminal, config.Stdout = stdout, stdout
		j.Stdout = nil
	}
	v, err := view.Open(config)
	if err != nil {
		return nil, err
	}
	j.Recording.Observe = v.Add
	return func() {
		v.Close()
		j.Logf = logTo(c)
	}, nil
}

// hideErrors keeps messages of plimsoll, and what ranks print to stderr, from the terminal. The messages go to a file
// in memory: unlike a pipe it keeps no writer waiting, and does not break when its reader is killed.
func hideErrors(j *launch.Job, config *view.Config) error {
	descriptor, err := unix.MemfdCreate("messages", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	if _, err := unix.FcntlInt(uintptr(descriptor), unix.F_SETFL, unix.O_APPEND); err != nil {
		return err
	}
	file := os.NewFile(uintptr(descriptor), "messages")
	j.HideErrors, j.Stderr = true, file
	j.Logf = func(format string, values ...any) {
		fmt.Fprintf(file, "plimsoll: %s\n", fault.Printable(fmt.Sprintf(format, values...)))
	}
	read := int64(0)
	config.Messages = func() (lines []string) {
		text, _ := io.ReadAll(io.NewSectionReader(file, read, 1<<20))
		full := text[:bytes.LastIndexByte(text, '\n')+1]
		read += int64(len(full))
		for line := range bytes.Lines(full) {
			lines = append(lines, string(bytes.TrimSuffix(line, []byte{'\n'})))
		}
		return lines
	}
	return nil
}

// shower shows records.
type shower interface {
	Add(*samples.Record)
	Close()
}

// nothing shows nothing.
type nothing struct{}

func (nothing) Add(*samples.Record) {}
func (nothing) Close()              {}

// display returns what shows records on stdout: a view on a terminal, else tables if they are wanted. The context ends
// when the user has left the view, or interrupts the command.
func display(c *cobra.Command, interval time.Duration, tables bool) (shower, context.Context, error) {
	ctx, terminal := interruptible(c), drawable(c.OutOrStdout())
	switch {
	case terminal != nil:
		v, err := view.Open(view.Config{Terminal: terminal, Leave: "leaves the view; the job goes on"})
		if err != nil {
			return nil, nil, err
		}
		context.AfterFunc(ctx, v.Close) // the user interrupts the command
		viewed, leave := context.WithCancel(ctx)
		go func() {
			<-v.Left()
			leave()
		}()
		return v, viewed, nil
	case tables:
		return view.Print(c.OutOrStdout(), interval), ctx, nil
	}
	return nothing{}, ctx, nil
}

// replay shows a recording.
func replay(c *cobra.Command, o watchOptions) error {
	file, _, err := files.Open(o.replayFile)
	if err != nil {
		return &fault.Input{What: "--replay", Err: err}
	}
	defer file.Close()
	if o.once {
		var state view.State
		if _, err := samples.Read(o.replayFile, file, func(r *samples.Record) error {
			state.Add(r)
			return nil
		}); err != nil {
			return err
		}
		_, err := io.WriteString(c.OutOrStdout(), state.Text(view.PlainWidth))
		return err
	}
	shown, ctx, err := display(c, o.interval, true)
	if err != nil {
		return err
	}
	err = view.Replay(ctx, o.replayFile, file, shown.Add)
	if v, drawn := shown.(*view.View); drawn && err == nil {
		<-v.Left() // the user may look at it for as long as they like
	}
	shown.Close()
	if err == nil {
		err = ctx.Err()
	}
	return leftOr(c, err)
}
