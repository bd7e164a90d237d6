// Package bridge makes arguments of Megatron-LM of a model's config.json, as the programs do that load models of the
// Hugging Face hub into Megatron core: mcore-bridge of ms-swift, and mbridge and Megatron-Bridge of verl.
package bridge

import (
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// Sizes gives the sizes of the model that a value names to arguments of Megatron-LM, and returns its config.json. A
// folder of another host may name a model of the catalog; a note says so then.
func Sizes(d *strict.Document, made, name *strict.Value) (*strict.Value, []recipe.Note, error) {
	var notes []recipe.Note
	config, err := model.Described(name.Text)
	if absent, known := model.DescribedAbsent(name.Text); err != nil && absent != nil {
		config, err = absent, nil
		notes = append(notes, recipe.Note{Where: d.Position(name.At), What: "the sizes of " + known + ", which " +
			name.Text + " names: its own config.json is not here, and may have others"})
	}
	if err != nil {
		return nil, nil, d.Inputf(name.At, "model is %s: %v", name, err).
			WithHint("name a model of the catalog (plimsoll models), or the path of its config.json")
	}
	kind := config.Root.Member("model_type")
	if kind == nil {
		return nil, nil, d.Inputf(name.At, "model is %s, whose config.json has no model_type", name)
	}
	of, is := recipe.CoreShapeOf(kind.Value.Text)
	if !is {
		return nil, nil, d.Inputf(name.At, "model is %s, of type %s, whose layers are not planned in Megatron core yet",
			name, kind.Value.Text).WithHint("plimsoll plans " + recipe.CoreTypes)
	}
	of.Arguments(made, config.Root, name.At)
	if length := made.Member("seq_length"); length != nil { // of no rotary embedding's size
		recipe.Give(made, "max_position_embeddings", name.At, length.Value)
	}
	if err := recipe.CoreLayers(made, config.Root, name.At); err != nil {
		return nil, nil, d.Inputf(name.At, "%v", err).WithHint("they would make all layers mixtures")
	}
	return config.Root, notes, nil
}
