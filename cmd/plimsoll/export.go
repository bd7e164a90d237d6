//go:build !page

package main

import (
	"bufio"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/export"
	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

// exportOptions are the flags of the verb.
type exportOptions struct {
	to, out   string
	tolerance float64 // in percent
}

func exportCommand() *cobra.Command {
	var options exportOptions
	command := &cobra.Command{
		Use:   "export --to FORMAT [PLAN] [RECORDING]",
		Short: "Write a plan or a recorded run for a browser or another program",
		Long: `Export writes a plan, a recording, or both side by side, in one of these
formats:

  html        one page with charts and tables, for any browser, without network
  perfetto    a trace for ui.perfetto.dev (needs a recording)
  pprof       a profile for go tool pprof
  prometheus  metrics for the textfile collector of node_exporter
  csv         a table for a spreadsheet or pandas`,
		Example: `  plimsoll export --to html plan.json run.jsonl --out run.html
  plimsoll export --to perfetto run.jsonl --out run.perfetto-trace
  plimsoll export --to csv plan.json`,
		Args: func(_ *cobra.Command, arguments []string) error {
			if len(arguments) == 1 || len(arguments) == 2 {
				return nil
			}
			return fault.Inputf("export takes a plan, a recording or both: found %d arguments", len(arguments)).
				WithHint("plimsoll export --to html plan.json run.jsonl")
		},
		RunE: func(c *cobra.Command, arguments []string) error { return runExport(c, options, arguments) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	choiceFlag(command, &options.to, "to", "", "`format`: VALUES", exportFormats())
	flags.StringVar(&options.out, "out", "", "`file` to write (default: the standard output)")
	toleranceFlag(command, &options.tolerance)
	return command
}

func exportFormats() []string {
	names := []string{htmlFormat}
	for _, f := range export.Formats {
		names = append(names, f.Name)
	}
	return names
}

func runExport(c *cobra.Command, o exportOptions, arguments []string) error {
	write, err := newExporter(c, o, arguments)
	if err != nil {
		return err
	}
	buffered := func(w io.Writer) error { // an export may be as long as its recording
		buffer := bufio.NewWriterSize(w, 64<<10)
		return errors.Join(write(buffer), buffer.Flush())
	}
	if o.out == "" {
		return buffered(c.OutOrStdout())
	}
	return writeFile("--out", o.out, buffered)
}

// newExporter reads the files and returns the function that writes them.
func newExporter(c *cobra.Command, o exportOptions, arguments []string) (func(io.Writer) error, error) {
	var format *export.Format
	for i := range export.Formats {
		if export.Formats[i].Name == o.to {
			format = &export.Formats[i]
		}
	}
	if format == nil && o.to != htmlFormat {
		if o.to == "" {
			return nil, fault.Inputf("--to is missing: expected %s", fault.OneOf(exportFormats()...)).
				WithHint("give --to html for a page, or see plimsoll export --help")
		}
		return nil, fault.Inputf("--to is %q: expected %s", o.to, fault.OneOf(exportFormats()...))
	}
	version := c.Root().Version
	planFile, plan, recording, err := readCompared(arguments)
	switch {
	case err != nil:
		return nil, err
	case recording == nil && format != nil && format.NeedsRecording:
		return nil, fault.File(planFile).Inputf("a plan has no times: %s needs a recording", format.Name).
			WithHint("record a run with plimsoll run --record, or choose another format")
	case recording == nil && format == nil:
		return func(w io.Writer) error {
			return report.WriteHTML(w, plan.Page(), version, nil, nil)
		}, nil
	case recording == nil:
		p := reconcile.OnPaper(plan.Compared())
		return func(w io.Writer) error {
			return format.Write(w, &export.Source{Lines: p.Lines, Peaks: p.Peaks, Planned: true})
		}, nil
	}
	d := report.NewComparison(version, recording, planFile, plan, o.tolerance/100)
	timeline := recording.Timeline()
	if format == nil {
		return func(w io.Writer) error {
			return report.WriteHTML(w, d.Page(), version, timeline, d.Peaks)
		}, nil
	}
	return func(w io.Writer) error {
		return format.Write(w, &export.Source{Lines: d.Lines, Peaks: d.Peaks, Growth: d.Growth, Timeline: timeline,
			Recorded: true, Planned: d.Plan != nil})
	}, nil
}
