package main

import (
	"cmp"
	"maps"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/internal/base/fault"
	release "plimsoll/internal/base/version"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/show/report"
)

// megatronOptions are the flags of a plan of Megatron-LM.
type megatronOptions struct {
	arguments  string
	vocabulary int
	imbalance  float64
}

func megatronFlags(c *cobra.Command, o *megatronOptions) {
	flags := c.Flags()
	flags.StringVar(&o.arguments, "megatron", "",
		"`arguments` of Megatron-LM as they are typed, or a file with them: a script, a list or YAML")
	flags.Var((*countFlag)(&o.vocabulary), "vocabulary", "with --megatron: tokens of the vocabulary, before padding")
	flags.Float64Var(&o.imbalance, "expert-imbalance", 1,
		"with --megatron: tokens of the fullest rank of experts, as a `factor` of the mean")
}

// besideMegatron are the flags that say something beside Megatron-LM's arguments.
var besideMegatron = []string{"megatron", "vocabulary", "expert-imbalance", "gpus", "nodes", "gpu", "gpu-memory",
	"host-memory",
	"config", "torch", "alloc-conf", "explain", "out", "json", "markdown", "format", "html",
	"table", "color"}

// byMegatron takes a configuration of NeMo or Megatron-Bridge as the arguments of Megatron-LM.
func (o *planOptions) byMegatron() {
	if len(o.request.Configs) != 1 || o.megatron.arguments != "" {
		return
	}
	if path := o.request.Configs[0]; recipe.TrainsByMegatron(path) {
		o.megatron.arguments, o.request.Configs = path, nil
	}
}

// onlyMegatron are the flags that say nothing without Megatron-LM's arguments.
var onlyMegatron = map[string]string{
	"expert-imbalance": "other plans divide tokens evenly among experts, and their interval has room for a fuller rank",
	"vocabulary":       "other models have their vocabulary in config.json",
}

// withoutMegatron refuses flags that a plan of any other program would not read.
func withoutMegatron(c *cobra.Command) error {
	for _, name := range slices.Sorted(maps.Keys(onlyMegatron)) {
		if c.Flags().Changed(name) {
			return fault.Inputf("--%s is given without --megatron", name).WithHint(onlyMegatron[name])
		}
	}
	return nil
}

// planMegatron plans a training with Megatron-LM.
func planMegatron(c *cobra.Command, o planOptions) (*report.PlanDocument, error) {
	var wrong error
	c.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(besideMegatron, f.Name) && wrong == nil {
			wrong = fault.Inputf("--%s is given beside --megatron, whose arguments say it", f.Name).
				WithHint("leave one of the two out")
		}
	})
	if wrong != nil {
		return nil, wrong
	}
	if len(o.request.Configs) > 0 {
		return nil, fault.Inputf("%s is given beside --megatron", o.request.Configs[0]).
			WithHint("leave one of the two out")
	}
	if o.megatron.imbalance < 1 {
		return nil, fault.Inputf("--expert-imbalance is %v, expected 1 or more", o.megatron.imbalance)
	}
	arguments, err := recipe.ReadMegatron(o.megatron.arguments)
	if err != nil {
		return nil, err
	}
	request := megatron.Request{World: int64(o.request.GPUs) * int64(max(1, o.request.Nodes)),
		Vocabulary: int64(o.megatron.vocabulary), Imbalance: o.megatron.imbalance,
		PerNode: int64(o.request.GPUs), HostMemory: o.request.HostMemory}
	if request.Torch, err = release.Parse(cmp.Or(o.request.Torch, "2.13.0")); err != nil {
		return nil, &fault.Input{What: "--torch", Err: err}
	}
	if o.request.GPU != "" {
		if request.GPU, err = gpu.Find(o.request.GPU); err != nil {
			return nil, err
		}
	}
	if o.request.GPUMemory > 0 {
		request.GPU.Memory = o.request.GPUMemory
	}
	j, err := megatron.Decide(arguments, request)
	if err != nil {
		return nil, err
	}
	configuration, err := allocator.ParseConfiguration(o.request.Allocator, request.Torch)
	if err != nil {
		return nil, &fault.Input{What: "--alloc-conf", Err: err}
	}
	devices, verdict, err := plan.NewMegatron(j, configuration)
	if err != nil {
		return nil, err
	}
	return report.NewMegatronDocument(c.Root().Version, o.megatron.arguments, o.request, j, devices, verdict)
}
