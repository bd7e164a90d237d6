package main

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

// outputFlags adds --format, with --json and --markdown as short forms.
func outputFlags(c *cobra.Command, format *report.Format, json string) {
	flags := c.Flags()
	flags.Var((*formatFlag)(format), "format",
		"`format` of the result: "+fault.OneOf(report.Formats()...)+" (default: text)")
	flags.VarPF(&formatSwitch{format, report.JSON}, "json", "", json).NoOptDefVal = "true"
	flags.VarPF(&formatSwitch{format, report.Markdown}, "markdown", "", "print Markdown, for issues and chats").
		NoOptDefVal = "true"
	complete(c, "format", cobra.FixedCompletions(report.Formats(), cobra.ShellCompDirectiveNoFileComp))
}

// longFlag adds --long, which present obeys, to a verb whose result on a terminal is one screen.
func longFlag(c *cobra.Command) {
	c.Flags().Bool("long", false, "show all on a terminal, too, and not one screen of it")
}

// htmlFormat is the name of the format, and of the flag.
const htmlFormat = "html"

// htmlFlag adds --html, which present obeys.
func htmlFlag(c *cobra.Command) {
	c.Flags().String(htmlFormat, "", "also write the result to a `file` for any browser, which needs no network")
}

// present writes a result for what is behind stdout, and the page that --html names.
func present(c *cobra.Command, page *report.Page, format report.Format) error {
	return presentRecorded(c, page, format, nil, nil)
}

// presentRecorded writes the result of a recording, whose page has charts over time.
func presentRecorded(c *cobra.Command, page *report.Page, format report.Format, timeline *reconcile.Timeline,
	peaks []reconcile.Peak) error {
	screen := report.ScreenOf(c.OutOrStdout(), os.Environ())
	screen.Table = page.Screen.Table
	if long := c.Flags().Lookup("long"); long != nil {
		screen.Long = long.Value.String() == "true"
	}
	page.Screen = screen
	if err := page.Write(c.OutOrStdout(), format); err != nil {
		return err
	}
	flag := c.Flags().Lookup(htmlFormat)
	if flag == nil || flag.Value.String() == "" {
		return nil
	}
	return writeFile("--html", flag.Value.String(), func(w io.Writer) error {
		return report.WriteHTML(w, page, c.Root().Version, timeline, peaks)
	})
}

// say prints a sentence within the terminal.
func say(c *cobra.Command, format string, values ...any) error {
	return present(c, report.Sentence(fmt.Sprintf(format, values...)), report.Text)
}

// formatFlag is the format of a result on the command line. It is empty if none was given.
type formatFlag report.Format

func (f *formatFlag) String() string { return string(*f) }

// Type returns the name of the type for help texts.
func (*formatFlag) Type() string { return "format" }

func (f *formatFlag) Set(text string) error {
	format, err := report.ParseFormat(text)
	if err != nil {
		return err
	}
	if *f != "" && *f != formatFlag(format) {
		return fault.Inputf("%s was asked for before", *f).WithHint("ask for one format")
	}
	*f = formatFlag(format)
	return nil
}

// formatSwitch is a switch that sets a format.
type formatSwitch struct {
	format *report.Format
	to     report.Format
}

func (f *formatSwitch) String() string {
	return strconv.FormatBool(f.format != nil && *f.format == f.to)
}

// Type returns the name of the type for help texts.
func (*formatSwitch) Type() string { return "bool" }

func (f *formatSwitch) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil || !on {
		return err
	}
	return (*formatFlag)(f.format).Set(string(f.to))
}

// IsBoolFlag lets the switch stand without a value.
func (*formatSwitch) IsBoolFlag() bool { return true }

// logTo returns a function that writes a message to the user while ranks run.
func logTo(c *cobra.Command) func(format string, values ...any) {
	return func(format string, values ...any) {
		fmt.Fprintf(c.ErrOrStderr(), "plimsoll: %s\n", fault.Printable(fmt.Sprintf(format, values...)))
	}
}
