package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/job"
)

// megatronFlags adds the flags of jobs of Megatron-LM.
func megatronFlags(c *cobra.Command, a *job.MegatronArguments) {
	flags := c.Flags()
	flags.StringVar(&a.Megatron, "megatron", "",
		"`arguments` of Megatron-LM as they are typed, or a file with them: a script, a list or YAML")
	flags.Var((*countFlag)(&a.Vocabulary), "vocabulary", "with --megatron: tokens of the vocabulary, before padding")
	flags.Float64Var(&a.ExpertImbalance, "expert-imbalance", 0,
		"with --megatron: tokens of the fullest rank of experts, as a `factor` of the mean")
	flags.Lookup("expert-imbalance").DefValue = "1" // a request without it is empty
}

// ofJob are the titles of flags that describe a job. Of these besideMegatron say something beside the arguments of
// Megatron-LM.
var (
	ofJob = []string{"Model and files", "Machine", "Batches", "Training", "Sharding and parallelism",
		"Releases and what was measured", statesOnHost, machineSpeed}
	besideMegatron = strings.Fields("gpus nodes gpu gpu-memory host-memory config torch environment alloc-conf rollout")
)

// checkMegatron takes the arguments of Megatron-LM from among the files of a request. Beside them it refuses flags that
// say nothing to Megatron-LM.
func checkMegatron(c *cobra.Command, q *job.Request) (wrong error) {
	if q.FindMegatron(); q.Megatron == "" {
		return nil
	}
	c.Flags().Visit(func(f *pflag.Flag) {
		title := strings.Join(f.Annotations[groupAnnotation], "")
		if slices.Contains(ofJob, title) && !slices.Contains(besideMegatron, f.Name) && wrong == nil {
			wrong = fault.Inputf("--%s is given beside --megatron, whose arguments say it", f.Name).
				WithHint("leave one of the two out")
		}
	})
	if wrong == nil && c.Flags().Changed("expert-imbalance") && q.ExpertImbalance == 0 {
		wrong = fault.Inputf("--expert-imbalance is 0, expected 1 or more")
	}
	return wrong
}
