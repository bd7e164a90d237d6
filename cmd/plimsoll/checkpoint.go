package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/checkpoint"
	"plimsoll/fault"
	"plimsoll/optim/kernel"
	"plimsoll/rehearse"
	"plimsoll/report"
)

func checkpointCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "checkpoint",
		Short: "Show, verify and convert checkpoints of optimizer state",
		Long: `Checkpoint works on the checkpoints that the optimizer service writes. PATH is the
folder of one, or a folder that holds several, of which the newest is taken.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	command.AddCommand(inspectCommand(), verifyCommand(), convertCommand())
	return command
}

func inspectCommand() *cobra.Command {
	var format report.Format
	command := &cobra.Command{
		Use:   "inspect PATH",
		Short: "Show what a checkpoint holds",
		Long: `Inspect reads what a checkpoint consists of, and none of its numbers: its step,
the files of its ranks, and every parameter with its shape and types.`,
		Example: `  plimsoll checkpoint inspect checkpoints
  plimsoll checkpoint inspect checkpoints/step-00000300 --json`,
		Args: paths("PATH"),
		RunE: func(c *cobra.Command, arguments []string) error {
			opened, err := checkpoint.Open(arguments[0])
			if err != nil {
				return err
			}
			document := report.NewCheckpoint(c.Root().Version, opened)
			return document.Page().Write(c.OutOrStdout(), format)
		},
	}
	outputFlags(command, &format, "print one JSON document")
	return command
}

func verifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify PATH",
		Short: "Read every byte of a checkpoint and hold it against its checksums",
		Long: `Verify reads every byte of every file of a checkpoint. It ends with exit code 2 at
the first damage, and says in which file, at which bytes and in which parameters.`,
		Example: `  plimsoll checkpoint verify checkpoints`,
		Args:    paths("PATH"),
		RunE: func(c *cobra.Command, arguments []string) error {
			opened, err := checkpoint.Open(arguments[0])
			if err != nil {
				return err
			}
			progress := newProgress(os.Stderr, c.ErrOrStderr())
			progress.Begin("verifying "+opened.Path(), opened.Bytes())
			defer progress.End()
			if err := opened.Verify(interruptible(c), progress.Advance); err != nil {
				return err
			}
			return report.NewCheckpoint(c.Root().Version, opened).WriteVerified(c.OutOrStdout())
		},
	}
}

// torchFormat is the file format of torch.save.
const torchFormat = "torch"

// conversion holds the flags of the convert command.
type conversion struct{ state, moments, to, from string }

func convertCommand() *cobra.Command {
	var flags conversion
	var to checkpoint.Conversion
	command := &cobra.Command{
		Use:   "convert PATH OUT",
		Short: "Write a checkpoint for other ranks, in another format, or for PyTorch",
		Long: `Convert writes a checkpoint again, in the folder OUT: in another format of the
state, or cut for another number of ranks. Master weights stay exact, and moments
are rounded to nearest. What no flag names stays as it is. (A checkpoint is loaded
into any number of ranks and any format without being converted.)

With --to torch, OUT is a file for torch.load: a dict with the "state" and
"param_groups" of a torch.optim optimizer, the "names" of the parameters in the
order of these, and their fp32 "master" weights by name. It need not be the order
of your optimizer: go by the names. With --from torch, PATH is such a file.`,
		Example: `  plimsoll checkpoint convert checkpoints converted --ranks 4
  plimsoll checkpoint convert checkpoints converted --state fp32 --moments bf16
  plimsoll checkpoint convert checkpoints optimizer.pt --to torch
  plimsoll checkpoint convert optimizer.pt converted --from torch --state split`,
		Args: paths("PATH", "OUT"),
		RunE: func(c *cobra.Command, arguments []string) error {
			err := flags.apply(c, &to)
			if err == nil {
				err = convert(c, arguments[0], arguments[1], flags, to)
			}
			var full *checkpoint.DoesNotFit
			if errors.As(err, &full) {
				sayTo(c)("%v", err)
				return outcome(exitDoesNotFit)
			}
			return err
		},
	}
	own := command.Flags()
	own.SortFlags = false
	own.StringVar(&flags.state, "state", "", "state `format`: split or fp32")
	own.StringVar(&flags.moments, "moments", "",
		"`type` of the moments: fp32, bf16 or int8 (Adam only; embeddings and small parameters stay fp32)")
	own.Var((*countFlag)(&to.Ranks), "ranks", "number of ranks to cut it for")
	own.StringVar(&flags.to, "to", "", "`format` of OUT: torch")
	own.StringVar(&flags.from, "from", "", "`format` of PATH: torch")
	for flag, values := range map[string][]string{
		"state":   kernel.StateNames(),
		"moments": kernel.MomentNames(),
		"to":      {torchFormat},
		"from":    {torchFormat},
	} {
		mustRegister(command, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	return command
}

// apply checks the flags and fills in the conversion.
func (f conversion) apply(c *cobra.Command, to *checkpoint.Conversion) error {
	for _, flag := range []struct {
		name, value string
		known       []string
	}{{"state", f.state, kernel.StateNames()}, {"moments", f.moments, kernel.MomentNames()},
		{"to", f.to, []string{torchFormat}}, {"from", f.from, []string{torchFormat}}} {
		if flag.value != "" && !slices.Contains(flag.known, flag.value) {
			return &fault.Input{What: fmt.Sprintf("--%s is %q", flag.name, flag.value),
				Hint: "use " + strings.Join(flag.known, ", ")}
		}
	}
	if f.to != "" && (f.from != "" || f.state != "" || f.moments != "" || c.Flags().Changed("ranks")) {
		return &fault.Input{What: "--to torch writes everything in fp32 to one file, and no other flag goes with it",
			Hint: "leave the other flags out"}
	}
	if f.state != "" {
		state, _ := kernel.ParseState(f.state) // was checked
		to.State = &state
	}
	if moments, err := kernel.ParseMoments(f.moments); err == nil {
		to.Moments = &moments
	}
	return nil
}

func convert(c *cobra.Command, path, out string, flags conversion, to checkpoint.Conversion) error {
	interruptible(c)
	progress := newProgress(os.Stderr, c.ErrOrStderr())
	opened, err := open(c, path, flags.from == torchFormat, progress)
	if err != nil {
		return err
	}
	if flags.to == torchFormat {
		progress.Begin("writing "+out, opened.ExportBytes())
		defer progress.End()
		if err := opened.WriteTorch(c.Context(), out, progress.Advance); err != nil {
			return err
		}
		_, err := fmt.Fprintf(c.OutOrStdout(), "%s: step %d of %s, for torch.load\n", out, opened.Step(), opened.Path())
		return err
	}
	progress.Begin("writing "+out, -1) // the size depends on the format
	defer progress.End()
	written, err := opened.Convert(c.Context(), out, to, progress.Advance)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.OutOrStdout(), "%s: step %d of %s\n", written, opened.Step(), opened.Path())
	return err
}

// open opens the checkpoint to convert.
func open(c *cobra.Command, path string, torch bool, progress rehearse.Progress) (*checkpoint.Checkpoint, error) {
	if !torch {
		return checkpoint.Open(path)
	}
	progress.Begin("verifying "+path, -1)
	defer progress.End()
	return checkpoint.OpenTorch(c.Context(), path, progress.Advance)
}

// paths accepts exactly the named arguments.
func paths(names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, arguments []string) error {
		if len(arguments) == len(names) {
			return nil
		}
		return &fault.Input{What: fmt.Sprintf("%s takes %s, and %d arguments are given", c.CommandPath(),
			strings.Join(names, " "), len(arguments)), Hint: "see " + c.CommandPath() + " --help"}
	}
}
