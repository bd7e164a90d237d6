//go:build linux

package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/export"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/cycle"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/tier"
)

// rehearseOptions are the flags of the verb.
type rehearseOptions struct {
	request rehearse.Request
	clip    float64
	scaling struct {
		scale, minimum    float64
		power, hysteresis int
		window            int64
		consecutive       bool
	}
	zenFlow struct {
		ratio    float64
		interval int
	}
	states      stateOptions
	tier        tierOptions
	trace       string // a file
	format      report.Format
	hostProfile string
}

func rehearseCommand() *cobra.Command {
	var options rehearseOptions
	command := &cobra.Command{
		Use:   "rehearse --model NAME|PATH",
		Short: "Run real optimizer steps on this host, without GPU or weights",
		Long: `Rehearse holds the optimizer state of a model in this host's memory, at full
size, and runs real optimizer steps over it with synthetic gradients. It shows
whether the state fits, the bytes per parameter, the time of a step, the cores
of each rank, and how near a step comes to the speed of memory.

With --overlap rehearse adds a trainer whose passes take the given times. It
shows how long this trainer waits for the optimizer, and what the law predicts.

With --offload states rehearse moves the states as plimsoll.torch.StateOffload
does: to a device, which updates them, and back. Host memory stands in for the
device. The step by the CPU is rehearsed beside it, and the result says on
which road a trainer waits less.

With --tier rehearse holds the state in files on disks, as the optimizer service
does with this flag, and compares a step with what the disks do by themselves.

With --steps 0 rehearse allocates nothing and only shows the plan.

"plimsoll models" lists the models that --model knows by name.`,
		Example: `  plimsoll rehearse --model qwen2.5-0.5b
  plimsoll rehearse --model path/to/config.json --deepspeed ds_config.json \
    --ranks 2
  plimsoll rehearse --model llama-3-70b --world-size 8 --steps 0 --json
  plimsoll rehearse --model qwen2.5-0.5b --overlap forward --forward-ms 400
  plimsoll rehearse --model qwen2.5-0.5b --tier /mnt/nvme --memory 512MiB
  plimsoll rehearse --model qwen2.5-0.5b --offload states --link-in 22 \
    --link-out 22 --forward-ms 400`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runRehearse(c, options) },
	}
	rehearseFlags(command, &options)
	return command
}

func rehearseFlags(c *cobra.Command, o *rehearseOptions) {
	q, scaling, flags := &o.request, &o.scaling, c.Flags()
	flags.SortFlags = false
	choiceOrFileFlag(c, &q.Model, "model", "",
		"`name` in the catalog, a config.json or a folder with one, *.safetensors or its index", model.Catalog())
	onlineFlag(c, &q.Online)
	flags.StringVar(&q.DeepSpeed, "deepspeed", "", "DeepSpeed's configuration, a JSON `file`")
	flags.IntVar(&q.Ranks, "ranks", 1, "ranks on this host")
	flags.IntVar(&q.WorldSize, "world-size", 0,
		"ranks of the whole job, --ranks of them on this host (default: --ranks)")
	flags.IntVar(&q.Steps, "steps", 10, "optimizer steps; 0 only plans")
	choiceFlag(c, &q.Optimizer, "optimizer", "", "optimizer `name`: VALUES (default: that of --deepspeed, or adamw)",
		append(optim.RuleNames(), cycle.Muon))
	choiceFlag(c, &q.Precision, "precision", "",
		"training `dtype`: VALUES (default: that of --deepspeed, or bf16)", kernel.NumberTypeNames())
	choiceFlag(c, &q.State, "state", "",
		"`format` of the master weights: VALUES (default: split for bf16, else fp32)", kernel.StateNames())
	choiceFlag(c, &q.Moments, "moments", "",
		"`dtype` of the moments: VALUES; int8 for Adam and AdamW only (default: fp32)", kernel.MomentNames())
	choiceFlag(c, &q.EmbeddingMoments, "embedding-moments", "",
		"`dtype` of the moments of embeddings beside --moments int8: VALUES (default: fp32)",
		rehearse.EmbeddingMoments)
	choiceFlag(c, &q.GradientType, "grad-dtype", "", "`dtype` of the gradients: VALUES (default: the training dtype)",
		kernel.NumberTypeNames())
	flags.Float64Var(&o.clip, "clip", 1, "clip gradients to this global `norm`; 0 turns clipping off "+
		"(default: that of --deepspeed, or 1)")
	flags.Float64Var(&scaling.scale, "loss-scale", 0, "fixed loss scale for fp16 gradients; 0 for a dynamic one "+
		"(default of this flag and the next five: that of --deepspeed, or DeepSpeed's default)")
	flags.IntVar(&scaling.power, "initial-scale-power", 16, "the first dynamic loss scale is 2 to this power")
	flags.Int64Var(&scaling.window, "loss-scale-window", 1000, "steps without overflow that double the loss scale")
	flags.IntVar(&scaling.hysteresis, "hysteresis", 2, "overflows that halve the loss scale")
	flags.BoolVar(&scaling.consecutive, "consecutive-hysteresis", false, "count only overflows of consecutive steps")
	flags.Float64Var(&scaling.minimum, "min-loss-scale", 1, "smallest loss scale")
	flags.IntVar(&q.Workers, "workers", 0, "optimizer workers of each rank (default: one for each of its cores)")
	hostProfileFlag(c, &o.hostProfile)
	reserveFlag(c, &q.Reserve)
	choiceFlag(c, &q.Pace.Mode, "overlap", "",
		"add a paced trainer, and run the update behind its `passes`: VALUES", overlap.Modes())
	flags.Float64Var(&q.Pace.ForwardMilliseconds, "forward-ms", 0, "`milliseconds` of the trainer's forward pass")
	flags.Float64Var(&q.Pace.BackwardMilliseconds, "backward-ms", 0,
		"`milliseconds` of its last backward pass (default: twice --forward-ms)")
	flags.IntVar(&q.Pace.Layers, "layers", 0,
		"layers of equal size, after the embeddings (default: the blocks of the model)")
	flags.Int64Var(&q.Pace.Tokens, "tokens", 0,
		"tokens of the microbatch that takes --forward-ms; shows from how many on nothing is exposed")
	flags.Float64Var(&o.zenFlow.ratio, "topk-ratio", 0.1, "--overlap zenflow: the share of the columns that every "+
		"step updates")
	flags.IntVar(&o.zenFlow.interval, "update-interval", 4, "--overlap zenflow: the steps of which one updates all "+
		"other columns")
	flags.Float64Var(&q.Pace.ClippedPercent, "clipped-percent", 0, "--overlap backward: how many of a hundred "+
		"steps are clipped, and so retracted and made again")
	tierFlags(c, &o.tier, tierOptions{memory: bytesFlag(tier.DefaultMemory)})
	stateFlags(c, &o.states)
	htmlFlag(c)
	flags.StringVar(&o.trace, "perfetto", "", "also write what trainer and workers did in the last step to a `file` "+
		"for ui.perfetto.dev")
	longFlag(c)
	outputFlags(c, &o.format, "print one JSON document")
	flags.Lookup("clip").DefValue = "0" // hidden in the help
}

func runRehearse(c *cobra.Command, o rehearseOptions) error {
	o.request.Clip = given(c, "clip", &o.clip)
	o.request.LossScaling = rehearse.LossScaling{
		LossScale:             given(c, "loss-scale", &o.scaling.scale),
		InitialScalePower:     given(c, "initial-scale-power", &o.scaling.power),
		LossScaleWindow:       given(c, "loss-scale-window", &o.scaling.window),
		Hysteresis:            given(c, "hysteresis", &o.scaling.hysteresis),
		ConsecutiveHysteresis: given(c, "consecutive-hysteresis", &o.scaling.consecutive),
		MinLossScale:          given(c, "min-loss-scale", &o.scaling.minimum),
	}
	o.request.Pace.TopKRatio = given(c, "topk-ratio", &o.zenFlow.ratio)
	o.request.Pace.UpdateInterval = given(c, "update-interval", &o.zenFlow.interval)
	if err := o.tier.check(c); err != nil {
		return err
	}
	o.request.Tier = rehearse.TierRequest{Folders: o.tier.folders, Memory: ledger.Bytes(o.tier.memory)}
	if o.states.what != "" {
		if len(o.tier.folders) > 0 {
			return fault.Inputf("--offload states is given, and --tier: states that go to a device rest in memory").
				WithHint("leave one of the two out")
		}
		return runRehearseStates(c, o)
	}
	if err := o.states.refuse(c, o.request); err != nil {
		return err
	}
	if o.trace != "" && o.request.Pace.Mode == "" {
		return fault.Inputf("--perfetto needs a trainer: without --overlap a step has no timeline").
			WithHint("--overlap forward --forward-ms 100")
	}
	job, err := o.request.Resolve()
	if err != nil {
		return err
	}
	here, err := host.Local()
	if err != nil {
		return err
	}
	placement, err := o.place(c, job, here)
	if err != nil {
		return err
	}
	verdict := placement.Verdict()
	var measurement *rehearse.Measurement
	if verdict.Fits && job.Steps > 0 {
		release, err := placement.LockTier()
		if err != nil {
			return err
		}
		defer release()
		progress := newProgress(os.Stderr, c.ErrOrStderr())
		if measurement, err = placement.Run(interruptible(c), progress); err != nil {
			return err
		}
	}
	document := report.NewRehearsal(c.Root().Version, placement, verdict, measurement)
	var timeline *rehearse.Timeline
	if measurement != nil {
		timeline = measurement.Timeline
	}
	return o.write(c, document.Page(), rehearsed{verdict.Fits, document.WithinTolerance(), timeline})
}

// place places a job on a host, with the cores of a host profile.
func (o rehearseOptions) place(c *cobra.Command, job *rehearse.Job, here *host.Host) (*rehearse.Placement, error) {
	if job.Workers == 0 {
		profile := hostProfile{o.hostProfile, job.Reserve, logTo(c)}
		split, note := profile.split(here, job.Ranks, job.Format.State.String(), job.Format.Moments.String())
		if split != nil {
			job.TrainerCores, job.Notes = split.TrainerCores(binding.TrainerShare{}), append(job.Notes, note)
		}
	}
	return rehearse.NewPlacement(job, here)
}

// rehearsed is how a rehearsal went.
type rehearsed struct {
	fits, withinTolerance bool
	timeline              *rehearse.Timeline // of the last step; nil without one
}

// write writes the result, and the files that were asked for.
func (o rehearseOptions) write(c *cobra.Command, page *report.Page, r rehearsed) error {
	if err := present(c, page, o.format); err != nil {
		return err
	}
	if err := o.writeTrace(r); err != nil {
		return err
	}
	switch {
	case !r.fits && o.request.Steps > 0:
		return outcome(exitDoesNotFit)
	case !r.withinTolerance:
		return outcome(exitDiffers)
	}
	return nil
}

// writeTrace writes the trace that was asked for.
func (o rehearseOptions) writeTrace(r rehearsed) error {
	if o.trace == "" || r.timeline == nil {
		return nil
	}
	return writeFile("--perfetto", o.trace, func(w io.Writer) error { return export.WriteTimeline(w, r.timeline) })
}
