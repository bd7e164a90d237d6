package main

import (
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/report"
)

// outputFlags adds --format, and --json as a short form of --format json.
func outputFlags(c *cobra.Command, format *report.Format, json string) {
	flags := c.Flags()
	flags.Var((*formatFlag)(format), "format",
		"`format` of the result: "+fault.OneOf(report.Formats()...)+" (default: text)")
	flags.VarPF((*jsonFlag)(format), "json", "", json).NoOptDefVal = "true"
	complete(c, "format", cobra.FixedCompletions(report.Formats(), cobra.ShellCompDirectiveNoFileComp))
}

// present writes a result for what is behind stdout.
func present(c *cobra.Command, page *report.Page, format report.Format) error {
	screen := report.ScreenOf(c.OutOrStdout(), os.Environ())
	screen.Table = page.Screen.Table
	page.Screen = screen
	return page.Write(c.OutOrStdout(), format)
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

// jsonFlag is a switch: it sets the format to JSON.
type jsonFlag report.Format

func (f *jsonFlag) String() string { return strconv.FormatBool(*f == jsonFlag(report.JSON)) }

// Type returns the name of the type for help texts.
func (*jsonFlag) Type() string { return "bool" }

func (f *jsonFlag) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil || !on {
		return err
	}
	return (*formatFlag)(f).Set(string(report.JSON))
}

// IsBoolFlag lets --json stand without a value.
func (*jsonFlag) IsBoolFlag() bool { return true }
