package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
)

// otherNames maps flags of other programs to advice on ours.
var otherNames = map[string]string{
	"batch-size":                  "--micro-batch",
	"train-batch-size":            "--micro-batch",
	"per-device-train-batch-size": "--micro-batch",
	"micro-batch-size":            "--micro-batch",
	"gradient-accumulation-steps": "--grad-accum",
	"batch":                       "--micro-batch",
	"bs":                          "--micro-batch",
	"max-seq-length":              "--seq-len",
	"max-length":                  "--seq-len",
	"sequence-length":             "--seq-len",
	"cutoff-len":                  "--seq-len",
	"nproc-per-node":              "--gpus",
	"num-gpus":                    "--gpus",
	"num-processes":               "--gpus",
	"world-size":                  "--gpus and --nodes",
	"nnodes":                      "--nodes",
	"num-machines":                "--nodes",
	"model-name-or-path":          "--model",
	"attn-implementation":         "--attention",
	"dtype":                       "--precision",
	"torch-dtype":                 "--precision",
	"bf16":                        "--precision bf16, or amp-bf16 for autocast",
	"fp16":                        "--precision amp-fp16, or fp16 for weights in fp16",
	"optim":                       "--optimizer",
	"4bit":                        "--qlora in place of --lora",
	"8bit":                        "--optimizer adamw_bnb_8bit for states, or --quantization int8 with --lora",
	"load-in-4bit":                "--quantization nf4",
	"load-in-8bit":                "--quantization int8",
	"qlora":                       "--lora with a rank, and --quantization nf4",
	"lora-r":                      "--lora",
	"lora-rank":                   "--lora",
	"lora-target":                 "--lora-targets",
	"lora-target-modules":         "--lora-targets",
	"peft":                        "--lora with a rank, or --adapter with an adapter_config.json of PEFT",
	"zero-stage":                  "--zero",
	"stage":                       "--zero",
	"zero1":                       "--zero 1",
	"zero2":                       "--zero 2",
	"zero3":                       "--zero 3",
	"quantize":                    "--quantization",
	"sequence":                    "--seq-len",
	"context-length":              "--seq-len",
	"context":                     "--seq-len",
	"ctx":                         "--seq-len",
	"tp":                          "--tensor-parallel",
	"cp":                          "--context-parallel",
	"ep":                          "--expert-parallel",
	"torch-compile":               "--compile",
	"config-file":                 "--config",
	"gpu-count":                   "--gpus",
	"n-gpus":                      "--gpus",
	"devices":                     "--gpus",
	"vram":                        "--gpu-memory",
	"ram":                         "--host-memory",
	"cpu-memory":                  "--host-memory",
	"model-name":                  "--model",
	"model-id":                    "--model",
	"flash-attn":                  "--attention flash",
	"flash-attention":             "--attention flash",
	"use-flash-attention-2":       "--attention flash",
	"offload-optimizer":           "--zero-offload optimizer with --zero, or --offload states",
	"cpu-offload":                 "--zero-offload optimizer with --zero, or --offload states",
	"offload-param":               "--zero-offload parameters with --zero",
	"gpu-type":                    "--gpu",
	"gpu-name":                    "--gpu",
	"accelerator":                 "--gpu",
	"device":                      "--gpu",
	"num-gpus-per-node":           "--gpus",
	"gpus-per-node":               "--gpus",
	"output":                      "--out",
	"o":                           "--out",
	"use-lora":                    "--lora with a rank, or --adapter with an adapter_config.json of PEFT",
}

// withoutMemory are flags of trainers that change no byte of a plan.
var withoutMemory = []string{
	"learning-rate", "lr", "epochs", "num-train-epochs", "num-epochs", "max-steps", "weight-decay", "warmup-steps",
	"warmup-ratio", "lr-scheduler-type", "seed", "dataset", "dataset-name", "output-dir", "logging-steps", "report-to",
}

// usual are flags that ask for what a plan does by itself.
var usual = map[string]string{
	"full": trainsAll, "full-finetune": trainsAll, "full-finetuning": trainsAll, "finetune": trainsAll,
	"sft": trainsAll,
}

const trainsAll = "leave it out: all parameters are trained unless --lora, --qlora or --adapter is given"

var unknownShort = regexp.MustCompile(`^unknown shorthand flag: .* in (-\S+)$`)

var unknownFlag = regexp.MustCompile(`^unknown flag: --([^\s=]+)`)

// measured is a number with a unit.
var measured = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) ?[A-Za-z%]+(?:/s)?$`)

// badFlag returns the error of flags that cannot be parsed, with the flag that was probably meant.
func badFlag(c *cobra.Command, err error) error {
	if before := c.Flags().Args(); c.HasSubCommands() && len(before) > 0 {
		return noArguments(c, before) // the flags are those of another command
	}
	if before := c.Flags().Args(); len(before) > 0 && slices.Contains(launchers, before[0]) && c.Name() == "plan" {
		return programWithoutDashes(c, append(before, "..."))
	}
	bad := &fault.Input{Err: err, Hint: "see " + c.CommandPath() + " --help"}
	var value *pflag.InvalidValueError
	var inner *fault.Input
	if errors.As(err, &value) && errors.As(err, &inner) && inner.Hint != "" { // the hint stands behind all of the error
		bad.Hint, inner.Hint = inner.Hint, ""
		return bad
	}
	if value != nil && inner == nil {
		kind := value.GetFlag().Value.Type()
		number := measured.FindStringSubmatch(value.GetValue())
		if number != nil && (kind == "float64" || kind == "int") {
			bad.Hint = "write " + number[1] + ", without a unit"
		}
		return bad
	}
	var lacking *pflag.ValueRequiredError
	if errors.As(err, &lacking) {
		kind, usage := pflag.UnquoteUsage(lacking.GetFlag())
		bad.Hint = fmt.Sprintf("--%s %s: %s", lacking.GetFlag().Name, kind, usage)
		return bad
	}
	found := unknownFlag.FindStringSubmatch(err.Error())
	if short := unknownShort.FindStringSubmatch(err.Error()); short != nil {
		bad = fault.Inputf("unknown flag: %s", short[1]).
			WithHint("names of flags have two dashes before them; see " + c.CommandPath() + " --help")
		found = []string{short[1], strings.TrimLeft(short[1], "-")}
	}
	if found == nil {
		return bad
	}
	name := strings.ToLower(strings.ReplaceAll(found[1], "_", "-"))
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	ours := otherNames[name]
	if pkg := strings.TrimSuffix(name, "-version"); slices.Contains(recipe.Packages(), pkg) {
		ours = fmt.Sprintf("--release %s=VERSION", pkg)
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(ours, "--"), " ")
	if nearest := fault.Nearest(name, names); ours == "" || c.Flags().Lookup(first) == nil {
		if ours = ""; nearest != "" {
			ours = "--" + nearest
		}
	}
	if slices.Contains(withoutMemory, name) && c.Flags().Lookup("micro-batch") != nil {
		bad.Hint = "leave it out: memory does not depend on it"
	} else if usual[name] != "" && c.Flags().Lookup("lora") != nil {
		bad.Hint = usual[name]
	} else if ours != "" {
		bad.Hint = "did you mean " + ours + "? " + bad.Hint
	} else if others := commandsWith(c.Root(), name); len(others) > 0 {
		bad.Hint = "a flag of " + fault.OneOf(others...) + "; " + bad.Hint
	}
	return bad
}

// commandsWith returns the commands that have a flag: at most three, plan first.
func commandsWith(root *cobra.Command, flag string) (names []string) {
	for _, g := range commandGroups {
		for _, name := range g.commands {
			if c, _, err := root.Find([]string{name}); err == nil && c != root && c.Flags().Lookup(flag) != nil {
				names = append(names, c.CommandPath())
			}
		}
	}
	return names[:min(len(names), 3)]
}
