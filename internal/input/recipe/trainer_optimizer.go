package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
)

// TrainerOptimizer is the optimizer of TrainingArguments.
type TrainerOptimizer struct {
	Name string // as in TrainingArguments: "adamw_torch_fused"

	LR          float64 `key:"learning_rate"`
	Beta1       float64 `key:"adam_beta1"`
	Beta2       float64 `key:"adam_beta2"`
	Epsilon     float64 `key:"adam_epsilon"`
	WeightDecay float64 `key:"weight_decay"`

	// Assumed says that no file names the optimizer. Name is then the default of the newest releases.
	Assumed bool
	LowRank *LowRank // of GaLore and APOLLO, nil for others
	// StepsInBackward says that every parameter has an optimizer, which steps once its gradient is complete.
	StepsInBackward bool
}

// TrainerOptimizers are the members of OptimizerNames (training_args.py) of
// transformers 4.40, 4.57 and 5.23. adamw_hf was removed in 4.4x, and
// adamw_apex_fused in 4.5x. Those with _layerwise update each layer in the
// backward pass; galore and apollo project gradients to a low rank.
var TrainerOptimizers = strings.Fields(`adafactor adagrad adalomo adamw_8bit adamw_anyprecision adamw_apex_fused
	adamw_bnb_8bit adamw_hf adamw_torch adamw_torch_4bit adamw_torch_8bit adamw_torch_fused adamw_torch_npu_fused
	adamw_torch_xla ademamix ademamix_8bit apollo_adamw apollo_adamw_layerwise galore_adafactor
	galore_adafactor_layerwise galore_adamw galore_adamw_8bit galore_adamw_8bit_layerwise galore_adamw_layerwise
	grokadamw lion_32bit lion_8bit lomo paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit
	paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit schedule_free_adamw
	schedule_free_radam schedule_free_sgd sgd stable_adamw`)

// optimizer returns the optimizer with its hyperparameters.
func (r *trainingReader) optimizer() (o TrainerOptimizer, err error) {
	r.Fill(&o)
	o.Name, o.Assumed = r.Word("optim"), !r.Gives("optim")
	if r.Truth("adafactor") {
		o.Name, o.Assumed = "adafactor", false // the flag of 4.x
	}
	if !slices.Contains(TrainerOptimizers, o.Name) {
		return o, r.Unknown("optim", "transformers", TrainerOptimizers)
	}
	if err := checkArguments(r.Reader, "optim_args"); err != nil {
		return o, err
	}
	family, _, _ := strings.Cut(o.Name, "_")
	low := family == "galore" || family == "apollo"
	o.StepsInBackward = strings.HasSuffix(o.Name, "_layerwise")
	err = r.Refuse([]strict.Conflict{
		{low && r.List("optim_target_modules") == nil, "optim",
			fmt.Sprintf("is %q, which needs optim_target_modules", o.Name), `add "optim_target_modules": "all-linear"`},
		{o.StepsInBackward && r.Integer(deepspeed.AccumulationKey) > 1, deepspeed.AccumulationKey,
			fmt.Sprintf("is more than 1, but %s updates each layer in the backward pass", o.Name),
			"set it to 1, or use the optimizer without _layerwise"},
	})
	if err == nil && low {
		o.LowRank, err = r.lowRank(family == "apollo")
	}
	return o, err
}

// checkArguments refuses a list of arguments that is not key=value, key=value.
func checkArguments(r *strict.Reader, path string) error {
	arguments := strings.ReplaceAll(r.Word(path), " ", "")
	if arguments == "" {
		return nil
	}
	for pair := range strings.SplitSeq(arguments, ",") {
		if key, is, found := strings.Cut(pair, "="); !found || key == "" || strings.Contains(is, "=") {
			v := r.Find(path)
			return r.Inputf(v.At, "%s is %s, expected key=value, key=value", path, v)
		}
	}
	return nil
}
