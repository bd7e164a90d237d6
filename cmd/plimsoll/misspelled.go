package main

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/fault"
)

// otherNames maps flags of other programs to advice on ours.
var otherNames = map[string]string{
	"batch-size":                  "--micro-batch",
	"train-batch-size":            "--micro-batch",
	"per-device-train-batch-size": "--micro-batch",
	"micro-batch-size":            "--micro-batch",
	"gradient-accumulation-steps": "--grad-accum",
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
	"quantize":                    "--quantization",
	"sequence":                    "--seq-len",
	"context-length":              "--seq-len",
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
	"use-lora":                    "--lora with a rank, or --adapter with an adapter_config.json of PEFT",
}

var unknownShort = regexp.MustCompile(`^unknown shorthand flag: .* in (-\S+)$`)

var unknownFlag = regexp.MustCompile(`^unknown flag: --([^\s=]+)`)

// badFlag returns the error of flags that cannot be parsed, with the flag that was probably meant.
func badFlag(c *cobra.Command, err error) error {
	if before := c.Flags().Args(); c.HasSubCommands() && len(before) > 0 {
		return noArguments(c, before) // the flags are those of another command
	}
	bad := &fault.Input{Err: err, Hint: "see " + c.CommandPath() + " --help"}
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
	first, _, _ := strings.Cut(strings.TrimPrefix(ours, "--"), " ")
	if nearest := fault.Nearest(name, names); ours == "" || c.Flags().Lookup(first) == nil {
		if ours = ""; nearest != "" {
			ours = "--" + nearest
		}
	}
	if ours != "" {
		bad.Hint = "did you mean " + ours + "? " + bad.Hint
	}
	return bad
}
