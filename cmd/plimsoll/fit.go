package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/fit"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/show/report"
)

// fitOptions are the flags of the verb.
type fitOptions struct {
	question fit.Question
	clip     float64
	machine  machineOptions
	write    string
	long     bool
	format   report.Format
}

// fitCommand returns the command that searches recipes.
func fitCommand() *cobra.Command {
	var options fitOptions
	command := &cobra.Command{
		Use:   "fit [MODEL] [GPU] [CONFIG...]",
		Short: "Search the fastest recipe of a job that fits",
		Long: `Fit searches the recipes of a job for the fastest that fits: micro batch and
accumulation, ZeRO's stages, FSDP, gradient checkpointing, and what is offloaded
to the host. Every recipe that it reports was planned, as by plimsoll plan.
Times are those of the same model.

Files of the user decide the engine. Their settings become edits of the same
files: --write writes edited copies.

A job is described as to plimsoll plan. Settings that are given are kept.`,
		Example: `  plimsoll fit --model llama-3-8b --gpus 8 --gpu H100-80GB --seq-len 4096 \
    --precision amp-bf16 --batch 64
  plimsoll fit --model qwen2.5-3b --gpu RTX-4090 --host-memory 64GiB \
    --precision bf16 --master split --machine rtx-4090
  plimsoll fit --model llama-3-8b ds_config.json args.json --gpus 8 \
    --gpu H100-80GB --write tuned`,
		RunE: func(c *cobra.Command, _ []string) error {
			return reported(func() error { return runFit(c, options) })
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	q := &options.question
	jobFlags(command, &q.Request, &options.clip)
	jobArguments(command, &q.Request, &q.Request.Configs)
	group(command, statesOnHost, func() {
		restFlags(command, &q.States)
		tierOnPaperFlags(command, &q.States.Tier, "also recipes with the states of plimsoll.torch.AdamW")
	})
	group(command, megatron.Program, func() { megatronFlags(command, &q.Request.MegatronArguments) })
	group(command, machineSpeed, func() {
		machineFlags(command, &options.machine)
		networkFlag(command, &options.machine)
	})
	group(command, "Search and result", func() {
		flags.Var((*countFlag)(&q.Batch), "batch", "sequences of an optimizer step on all ranks (default: any)")
		flags.BoolVar(&q.FewerGPUs, "fewer-gpus", false, "also try a half of the GPUs, a quarter and so on")
		flags.BoolVar(&q.AnyMoments, "any-moments", false, "also try moments of fewer bits for states on the host: "+
			"they take fewer bytes and are rounded")
		flags.BoolVar(&q.Tight, "allow-tight", false, "count recipes as fitting whose upper end does not fit")
		flags.StringVar(&options.write, "write", "", "write the files of the fastest recipe to a `folder`")
		flags.BoolVar(&options.long, "long", false, "show all that the search has found, and not one screen of it")
		htmlFlag(command)
		outputFlags(command, &options.format, "print one JSON document")
	})
	return command
}

// search searches with less garbage collection: plans make much garbage, and little of it lives.
func search(q fit.Question) (*fit.Answer, error) {
	if os.Getenv("GOGC") == "" {
		defer debug.SetGCPercent(debug.SetGCPercent(400))
	}
	return fit.Search(q)
}

func runFit(c *cobra.Command, o fitOptions) error {
	q := &o.question
	if err := checkMegatron(c, &q.Request); err != nil {
		return err
	}
	q.Request.Clip = given(c, "clip", &o.clip)
	of, err := o.machine.read(c, &q.Request)
	if err != nil {
		return err
	}
	base, err := q.Request.Resolve()
	if err != nil {
		return err
	}
	var sources []string
	if q.Machine, sources, err = of(base); err != nil {
		return err
	}
	if base.Megatron == nil {
		sources = assume(base, &q.Machine.Rates, sources)
	}
	answer, err := search(*q)
	if err != nil {
		return err
	}
	made := &amend.Result{}
	if answer.Fastest != nil {
		if made, err = answer.Amend(answer.Fastest); err != nil {
			return err
		}
	}
	document := report.NewFit(c.Root().Version, q.Request, answer, made, sources)
	if o.write != "" && answer.Fastest != nil {
		if document.Written, err = writeRecipe(o.write, answer, made); err != nil {
			return err
		}
		if len(document.Written) == 0 {
			fmt.Fprintln(c.ErrOrStderr(), "plimsoll: --write wrote no file: flags say the job, or its files say the "+
				"recipe already")
		}
	}
	page := document.Page()
	if err := present(c, page, o.format); err != nil {
		return err
	}
	if answer.Fastest == nil && document.Asked != plan.Fits {
		return outcome(exitDoesNotFit)
	}
	return nil
}

// writeRecipe writes the edited files of the user, and a new configuration where the recipe needs one.
func writeRecipe(folder string, a *fit.Answer, made *amend.Result) ([]string, error) {
	texts, err := byName("--write", made.Texts)
	if err != nil {
		return nil, err
	}
	config, err := a.Fastest.NewConfig()
	if err != nil {
		return nil, err
	}
	if config != nil {
		texts[fit.ConfigFile] = edited{text: config}
	}
	if len(texts) == 0 {
		return nil, nil
	}
	return writeNew("--write", folder, texts)
}

// edited is the text of a file, and the file that it is an edit of; empty for none.
type edited struct {
	text     []byte
	original string
}

// byName returns texts by the names of their files, without folders. It refuses two files of one name.
func byName(flag string, texts map[string][]byte) (map[string]edited, error) {
	named := map[string]edited{}
	for file, text := range texts {
		name := filepath.Base(file)
		if _, twice := named[name]; twice {
			return nil, fault.File(file).Inputf("%s writes to one folder, and two of the files are named %s", flag,
				name).WithHint("rename one of the two")
		}
		named[name] = edited{text, file}
	}
	return named, nil
}

// writeNew writes files to a folder. It overwrites none. An edited file may be read by those who may read the original.
func writeNew(flag, folder string, texts map[string]edited) ([]string, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, &fault.Input{What: flag + " cannot be made", Err: err, Hint: "give another folder"}
	}
	var written []string
	for name, e := range texts {
		path := filepath.Join(folder, name)
		file, _, err := files.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return nil, &fault.Input{Where: fault.Position{File: path}, Err: err,
				Hint: "give " + flag + " a folder without this file"}
		}
		if e.original != "" {
			err = files.TakeAccess(file, e.original)
		}
		if err == nil {
			_, err = file.Write(e.text)
		}
		if err = cmp.Or(err, file.Close()); err != nil {
			return nil, err
		}
		written = append(written, path)
	}
	slices.SortFunc(written, strings.Compare)
	return written, nil
}
