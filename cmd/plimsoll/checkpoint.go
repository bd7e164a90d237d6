//go:build !page

package main

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/foreign"
	"plimsoll/internal/state/optim/kernel"
)

func checkpointCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "checkpoint",
		Short: "Show, verify and convert checkpoints of optimizer state",
		Long: `Checkpoint works on the checkpoints that the optimizer service writes. PATH is
the folder of a checkpoint, or a folder with several, of which checkpoint takes
the newest.`,
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
		Long: `Inspect shows the step of a checkpoint, the files of its ranks, and every
parameter with its shape and dtypes. It reads none of the tensors.`,
		Example: `  plimsoll checkpoint inspect checkpoints
  plimsoll checkpoint inspect checkpoints/step-00000300 --json`,
		Args: paths("PATH"),
		RunE: func(c *cobra.Command, arguments []string) error { return runInspect(c, arguments[0], format) },
	}
	outputFlags(command, &format, "print one JSON document")
	return command
}

func runInspect(c *cobra.Command, path string, format report.Format) error {
	opened, err := checkpoint.OpenAny(path)
	if err != nil {
		return err
	}
	return present(c, report.CheckpointOf(c.Root().Version, opened).Page(), format)
}

func verifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify PATH",
		Short: "Compare every byte of a checkpoint with its checksums",
		Long: `Verify reads every byte of every file of a checkpoint and compares it with the
checksums. At the first damage it ends with exit code 2, and names the file, the
bytes and the parameters.`,
		Example: `  plimsoll checkpoint verify checkpoints`,
		Args:    paths("PATH"),
		RunE:    func(c *cobra.Command, arguments []string) error { return runVerify(c, arguments[0]) },
	}
}

func runVerify(c *cobra.Command, path string) error {
	opened, err := checkpoint.OpenAny(path)
	if err != nil {
		return err
	}
	progress := newProgress(os.Stderr, c.ErrOrStderr())
	progress.Begin("verifying "+opened.Path(), opened.Bytes(), activity.Bytes)
	err = opened.Verify(interruptible(c), progress.Advance)
	progress.End()
	if err != nil {
		return err
	}
	return present(c, report.CheckpointOf(c.Root().Version, opened).Verified(), report.Text)
}

// Formats of other programs.
const (
	torchFormat       = "torch"     // a file of torch.save
	deepspeedFormat   = "deepspeed" // a folder of engine.save_checkpoint; universal when it is written
	distributedFormat = "dcp"       // a folder of torch.distributed.checkpoint.save
	megatronFormat    = "megatron"  // a folder of Megatron's dist_checkpointing
)

// conversion holds the flags of the convert command.
type conversion struct {
	state, moments, to, from string
	ranks                    int
	names, like              string
	weights, rename          []string
}

// choice is a flag with a list of values.
type choice struct {
	name   string
	value  *string
	usage  string
	values []string
}

func (f *conversion) choices() []choice {
	return []choice{
		{"state", &f.state, "`format` of the master weights: VALUES", kernel.StateNames()},
		{"moments", &f.moments, "`dtype` of the moments: VALUES; int8 for Adam and AdamW only, and never for " +
			"embeddings and small parameters, which stay fp32", kernel.MomentNames()},
		{"to", &f.to, "`format` of OUT: VALUES",
			[]string{torchFormat, deepspeedFormat, distributedFormat, megatronFormat}},
		{"from", &f.from, "`format` of PATH: VALUES",
			[]string{torchFormat, deepspeedFormat, distributedFormat, megatronFormat}},
	}
}

func convertCommand() *cobra.Command {
	var flags conversion
	command := &cobra.Command{
		Use:   "convert PATH OUT",
		Short: "Write a checkpoint for other ranks, another format, or PyTorch",
		Long: `Convert writes a checkpoint to the folder OUT, in another format or for another
number of ranks. Master weights stay exact, and moments are rounded to nearest.
Convert keeps what no flag names. You need not convert a checkpoint in order to
load it: the service loads it for any number of ranks and in any format.

With --to torch, OUT is a file for torch.load: a dict with the "state" and
"param_groups" of a torch.optim optimizer, the "names" of the parameters in the
same order, and their fp32 "master" weights by name. Match by name, not by
position: your optimizer may have another order. With --from torch, PATH is such
a file.

With --from deepspeed, PATH is a folder of engine.save_checkpoint, of ZeRO 1 to
3, or a universal checkpoint. With --from dcp, it is a folder of
torch.distributed.checkpoint.save, such as FSDP2's, and with --from megatron,
one of Megatron's dist_checkpointing. With --to deepspeed, OUT is a universal
checkpoint of DeepSpeed, and with --to dcp, a folder for
torch.distributed.checkpoint.load. No number is rounded, and no pickle is
executed.

With --like, OUT takes the place of a state that the trainer itself has saved:
of a file of torch.save, such as optimizer.pt of Hugging Face's Trainer, or with
--to deepspeed or megatron of a checkpoint of ZeRO 1 to 3 or of Megatron. OUT
has its order, its hyperparameters and all else that is no optimizer state.

Programs may have other names for the same parameter. With --rename, PATH has
the names of OUT before the two are compared.`,
		Example: `  plimsoll checkpoint convert checkpoints converted --ranks 4
  plimsoll checkpoint convert checkpoints converted --state fp32 --moments bf16
  plimsoll checkpoint convert checkpoints optimizer.pt --to torch
  plimsoll checkpoint convert optimizer.pt converted --from torch --state split
  plimsoll checkpoint convert output/global_step500 converted --from deepspeed
  plimsoll checkpoint convert fsdp/step-500 converted --from dcp --ranks 8
  plimsoll checkpoint convert checkpoints universal --to deepspeed
  plimsoll checkpoint convert checkpoints zero --to deepspeed \
    --like saved/global_step500
  plimsoll checkpoint convert checkpoints fsdp --to dcp
  plimsoll checkpoint convert checkpoints out --to megatron \
    --like saved/iter_0000100
  plimsoll checkpoint convert checkpoints new.pt --to torch \
    --like optimizer.pt --names names.json
  plimsoll checkpoint convert checkpoints out --to megatron \
    --like saved/iter_0000100 --rename names.txt`,
		Args: paths("PATH", "OUT"),
		RunE: func(c *cobra.Command, arguments []string) error {
			return runConvert(c, arguments[0], arguments[1], flags)
		},
	}
	command.Flags().SortFlags = false
	for _, f := range flags.choices() {
		choiceFlag(command, f.value, f.name, "", f.usage, f.values)
	}
	command.Flags().StringVar(&flags.like, "like", "", "`PATH` of a state that the job has saved that shall load OUT: "+
		"OUT has its order and all that is no state (--to torch, deepspeed and megatron)")
	command.Flags().StringVar(&flags.names, "names", "", "`FILE` with a JSON list of the optimizer's parameters, "+
		"where a file of torch.save has none")
	command.Flags().StringArrayVar(&flags.weights, "weights", nil, "`FILE` of safetensors or torch.save with the "+
		"weights, where a file of torch.save has none (repeat it for several)")
	command.Flags().StringArrayVar(&flags.rename, "rename", nil, "`FROM=TO`: the parameter FROM of PATH is TO in OUT; "+
		"a * stands for one part of a name, such as the number of a layer. Also a file of such lines, or with a JSON "+
		"object (repeat it for several)")
	command.Flags().Var((*countFlag)(&flags.ranks), "ranks", "number of ranks to shard the state for")
	return command
}

func runConvert(c *cobra.Command, path, out string, flags conversion) error {
	to, err := flags.apply()
	if err == nil {
		err = convert(c, path, out, flags, to)
	}
	return unlessTooLarge[*checkpoint.DoesNotFit](c, err)
}

// apply checks the flags and returns the conversion.
func (f conversion) apply() (checkpoint.Conversion, error) {
	to := checkpoint.Conversion{Ranks: f.ranks}
	for _, flag := range f.choices() {
		if *flag.value != "" && !slices.Contains(flag.values, *flag.value) {
			return to, fault.Inputf("--%s is %q", flag.name, *flag.value).
				WithHint("use " + strings.Join(flag.values, ", "))
		}
	}
	if err := f.checkFiles(); err != nil {
		return to, err
	}
	if f.to != "" && (f.state != "" || f.moments != "" || f.ranks != 0) {
		return to, fault.Inputf("--to %s writes everything in fp32: --state, --moments and --ranks do not go with it",
			f.to).WithHint("leave these flags out")
	}
	if state, err := kernel.ParseState(f.state); err == nil {
		to.State = &state
	}
	if moments, err := kernel.ParseMoments(f.moments); err == nil {
		to.Moments = &moments
	}
	return to, nil
}

// checkFiles refuses files that the formats do not take.
func (f conversion) checkFiles() error {
	switch {
	case f.to == megatronFormat && f.like == "":
		return fault.Inputf("--to megatron needs a checkpoint that the job itself has saved").
			WithHint("name it with --like, as docs/checkpoints.md says")
	case f.like != "" && f.to != megatronFormat && f.to != torchFormat && f.to != deepspeedFormat:
		return fault.Inputf("--like goes with --to torch, deepspeed and megatron only").WithHint("leave --like out")
	case len(f.weights) > 0 && f.from != torchFormat:
		return fault.Inputf("--weights goes with --from torch only").WithHint("leave --weights out")
	case f.names != "" && f.from != torchFormat && (f.to != torchFormat || f.like == ""):
		return fault.Inputf("--names goes with --from torch, or with --to torch --like").WithHint("leave --names out")
	}
	return nil
}

func convert(c *cobra.Command, path, out string, flags conversion, to checkpoint.Conversion) error {
	rules, err := checkpoint.ReadRenames(flags.rename)
	if err != nil {
		return err
	}
	interruptible(c)
	progress := newProgress(os.Stderr, c.ErrOrStderr())
	opened, err := open(c, path, flags, progress)
	if err != nil {
		return err
	}
	if err := opened.Rename(rules); err != nil {
		return err
	}
	if class := opened.Quantized(); class != "" {
		logTo(c)("the moments are of %s: the fp32 numbers that are written are the values of their codes", class)
	}
	if flags.to != "" {
		return leave(c, opened, out, flags, progress)
	}
	progress.Begin("writing "+out, -1, activity.Bytes) // the size depends on the format
	written, err := opened.Convert(c.Context(), out, to, progress.Advance)
	progress.End()
	if err != nil {
		return err
	}
	return say(c, "%s: step %d of %s", written, opened.Step(), opened.Path())
}

// leave writes the checkpoint for another program.
func leave(
	c *cobra.Command, opened *checkpoint.Checkpoint, out string, flags conversion, progress activity.Progress,
) error {
	write, reader := foreign.WriteTorch, "torch.load"
	switch {
	case flags.to == deepspeedFormat && flags.like != "":
		reader = "DeepSpeed on as many ranks as have saved " + flags.like
		write = func(ctx context.Context, c *checkpoint.Checkpoint, out string, advance func(int64)) error {
			return foreign.WriteDeepSpeed(ctx, c, out, flags.like, advance)
		}
	case flags.to == deepspeedFormat:
		write, reader = foreign.WriteUniversal, "DeepSpeed with load_universal"
	case flags.to == distributedFormat:
		write, reader = foreign.WriteDistributed, "torch.distributed.checkpoint.load"
	case flags.to == megatronFormat:
		reader = "Megatron with --load"
		write = func(ctx context.Context, c *checkpoint.Checkpoint, out string, advance func(int64)) error {
			return foreign.WriteMegatron(ctx, c, out, flags.like, advance)
		}
	case flags.like != "":
		reader = "optimizer.load_state_dict"
		write = func(ctx context.Context, c *checkpoint.Checkpoint, out string, advance func(int64)) error {
			return foreign.WriteTorchLike(ctx, c, out, flags.like, flags.names, advance)
		}
	}
	progress.Begin("writing "+out, foreign.BytesOfTorch(opened), activity.Bytes)
	err := write(c.Context(), opened, out, progress.Advance)
	progress.End()
	if err != nil {
		return err
	}
	return say(c, "%s: step %d of %s, for %s", out, opened.Step(), opened.Path(), reader)
}

// open opens the checkpoint to convert.
func open(
	c *cobra.Command, path string, flags conversion, progress activity.Progress,
) (*checkpoint.Checkpoint, error) {
	var read func(context.Context, string, func(int64)) (*checkpoint.Checkpoint, error)
	switch flags.from {
	case deepspeedFormat:
		read = foreign.OpenDeepSpeed
	case distributedFormat:
		read = foreign.OpenDistributed
	case megatronFormat:
		read = foreign.OpenMegatron
	case torchFormat:
		read = func(ctx context.Context, path string, advance func(int64)) (*checkpoint.Checkpoint, error) {
			beside := foreign.BesideTorch{Names: flags.names, Weights: flags.weights}
			return foreign.OpenTorch(ctx, path, beside, advance)
		}
	default:
		return checkpoint.Open(path)
	}
	progress.Begin("verifying "+path, -1, activity.Bytes)
	defer progress.End()
	return read(c.Context(), path, progress.Advance)
}

// paths accepts exactly the named arguments.
func paths(names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, arguments []string) error {
		if len(arguments) == len(names) {
			return nil
		}
		return fault.Inputf("%s takes %s, and %d arguments are given", c.CommandPath(), strings.Join(names, " "),
			len(arguments)).WithHint("see " + c.CommandPath() + " --help")
	}
}
