package main

import (
	"os"
	"strings"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"plimsoll/host"
	"plimsoll/model"
	"plimsoll/optim/kernel"
	"plimsoll/rehearse"
	"plimsoll/report"
)

func rehearseCommand() *cobra.Command {
	var request rehearse.Request
	var clip float64
	var scaling struct {
		scale, minimum    float64
		power, hysteresis int
		window            int64
		consecutive       bool
	}
	var format report.Format
	command := &cobra.Command{
		Use:   "rehearse --model NAME|PATH",
		Short: "Run a real optimizer step on this host, without GPU or weights",
		Long: `Rehearse holds the optimizer state of a model in this host's memory, at full
size, and runs real optimizer steps over it with synthetic gradients. It shows
whether the state fits, how many bytes a parameter it takes, how long a step
takes, on which cores, and how near that is to what this memory can do.

With --steps 0 nothing is allocated and only the plan is shown.

The catalog of models:
` + wrapped(model.Catalog()),
		Example: `  plimsoll rehearse --model qwen2.5-0.5b
  plimsoll rehearse --model path/to/config.json --deepspeed ds_config.json --ranks 2
  plimsoll rehearse --model llama-3-70b --world-size 8 --steps 0 --json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			request.Clip = given(c, "clip", &clip)
			request.LossScaling = rehearse.LossScaling{
				LossScale:             given(c, "loss-scale", &scaling.scale),
				InitialScalePower:     given(c, "initial-scale-power", &scaling.power),
				LossScaleWindow:       given(c, "loss-scale-window", &scaling.window),
				Hysteresis:            given(c, "hysteresis", &scaling.hysteresis),
				ConsecutiveHysteresis: given(c, "consecutive-hysteresis", &scaling.consecutive),
				MinLossScale:          given(c, "min-loss-scale", &scaling.minimum),
			}
			return runRehearsal(c, request, format)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&request.Model, "model", "",
		"catalog name, config.json or a folder with one, *.safetensors or its index")
	flags.StringVar(&request.DeepSpeed, "deepspeed", "", "DeepSpeed configuration `file`")
	flags.IntVar(&request.Ranks, "ranks", 1, "ranks on this host")
	flags.IntVar(&request.WorldSize, "world-size", 0,
		"ranks of the whole job, of which --ranks run here (default: --ranks)")
	flags.IntVar(&request.Steps, "steps", 10, "optimizer steps; 0 plans and allocates nothing")
	flags.StringVar(&request.Precision, "precision", "",
		"`type` that the model is trained in: bf16, fp16 or fp32 (default: the recipe's, or bf16)")
	flags.StringVar(&request.State, "state", "", "state `format`: split or fp32 (default: split for bf16, else fp32)")
	flags.StringVar(&request.Moments, "moments", "",
		"moment `type`: fp32, or rounded to bf16 or, of Adam only, to int8 (default: fp32)")
	flags.StringVar(&request.EmbeddingMoments, "embedding-moments", "",
		"moment `type` of embeddings with --moments int8: fp32 or int8 (default: fp32)")
	flags.StringVar(&request.GradientType, "grad-dtype", "",
		"gradient `type`: bf16, fp16 or fp32 (default: that of the training)")
	flags.Float64Var(&clip, "clip", 1, "clip gradients to this global norm, 0 for not at all "+
		"(default: the recipe's, or 1)")
	flags.Float64Var(&scaling.scale, "loss-scale", 0,
		"with fp16 gradients: a fixed loss scale, 0 for a dynamic one (default of this and the next five: "+
			"the recipe's, or DeepSpeed's)")
	flags.IntVar(&scaling.power, "initial-scale-power", 16, "the first loss scale is 2 to this power")
	flags.Int64Var(&scaling.window, "loss-scale-window", 1000, "steps without overflow that double the loss scale")
	flags.IntVar(&scaling.hysteresis, "hysteresis", 2, "overflows that halve the loss scale")
	flags.BoolVar(&scaling.consecutive, "consecutive-hysteresis", false, "count only overflows of consecutive steps")
	flags.Float64Var(&scaling.minimum, "min-loss-scale", 1, "where the loss scale stops")
	flags.IntVar(&request.Workers, "workers", 0, "workers of each rank (default: one for each of its cores)")
	reserveFlag(command, &request.Reserve)
	outputFlags(command, &format, "print one JSON document")
	flags.Lookup("clip").DefValue = "0" // hidden in the help
	for flag, values := range map[string][]string{
		"state":             {"split", "fp32"},
		"moments":           kernel.MomentNames(),
		"embedding-moments": {"fp32", "int8"},
		"precision":         {"bf16", "fp16", "fp32"},
		"grad-dtype":        {"bf16", "fp16", "fp32"},
	} {
		mustRegister(command, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	mustRegister(command, "model", completeModel)
	return command
}

// given returns the value of a flag, or nil where the flag was left out.
func given[T any](c *cobra.Command, flag string, value *T) *T {
	if !c.Flags().Changed(flag) {
		return nil
	}
	return value
}

// completeModel offers the models of the catalog, and files.
func completeModel(_ *cobra.Command, _ []string, start string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, name := range model.Catalog() {
		if strings.HasPrefix(name, start) {
			names = append(names, name)
		}
	}
	return names, cobra.ShellCompDirectiveDefault
}

// wrapped lists names in lines of up to 78 characters.
func wrapped(names []string) string {
	lines := text.WrapSoft(strings.Join(names, " "), 76)
	return "  " + strings.ReplaceAll(lines, "\n", "\n  ")
}

// mustRegister panics only when the flag does not exist.
func mustRegister(c *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := c.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err)
	}
}

func runRehearsal(c *cobra.Command, request rehearse.Request, format report.Format) error {
	job, err := request.Resolve()
	if err != nil {
		return err
	}
	here, err := host.Local()
	if err != nil {
		return err
	}
	plan, err := rehearse.NewPlacement(job, here)
	if err != nil {
		return err
	}
	verdict := plan.Verdict()
	var measurement *rehearse.Measurement
	if verdict.Fits && job.Steps > 0 {
		progress := newProgress(os.Stderr, c.ErrOrStderr())
		if measurement, err = plan.Run(interruptible(c), progress); err != nil {
			return err
		}
	}
	document := report.NewRehearsal(c.Root().Version, plan, verdict, measurement)
	if err := document.Page().Write(c.OutOrStdout(), format); err != nil {
		return err
	}
	switch {
	case !verdict.Fits && job.Steps > 0:
		return outcome(exitDoesNotFit)
	case !document.WithinTolerance():
		return outcome(exitDiffers)
	}
	return nil
}
