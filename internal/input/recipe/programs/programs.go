// Package programs lists the programs whose files Plimsoll reads, in the order that a file is recognized in. A package
// that reads files of any kind imports it.
package programs

import (
	"slices"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/axolotl"
	"plimsoll/internal/input/recipe/litgpt"
	"plimsoll/internal/input/recipe/llamafactory"
	"plimsoll/internal/input/recipe/openrlhf"
	"plimsoll/internal/input/recipe/slime"
	"plimsoll/internal/input/recipe/swift"
	"plimsoll/internal/input/recipe/torchtitan"
	"plimsoll/internal/input/recipe/torchtune"
	"plimsoll/internal/input/recipe/trainer"
	"plimsoll/internal/input/recipe/trl"
	"plimsoll/internal/input/recipe/verl"
)

// A program that wraps others comes before them, as its files have their keys, too.
func init() {
	recipe.Register(slices.Concat(
		[]*recipe.Kind{recipe.SeveralKind, swift.Megatron, slime.Kind, recipe.BridgeKind, recipe.ArgumentsKind,
			verl.Megatron, verl.Kind, openrlhf.Kind},
		recipe.OtherTrainings,
		[]*recipe.Kind{
			llamafactory.V1,
			swift.Kind,
			llamafactory.Kind,
			axolotl.Kind,
			recipe.NeMoKind,
			torchtune.Kind,
			torchtitan.Kind,
			litgpt.Kind,
			swift.Preset,
			trainer.Kind,
			trl.Kind,
			recipe.AccelerateKind,
			recipe.DeepSpeedKind,
			recipe.AdapterKind,
			recipe.ModelKind,
			recipe.QuantizationKind,
		},
		recipe.OtherFiles,
		[]*recipe.Kind{recipe.TrainingKind, recipe.FSDPKind},
	)...)
}
