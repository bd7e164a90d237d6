package swift

import (
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// model gives the sizes of the model, which ms-swift reads in its config.json.
func (m *megatronReader) model() error {
	name := m.find("model")
	if name == nil {
		return m.Inputf(m.Root.At, "model is not given: its config.json says the sizes of the model").
			WithHint("add --model with a name of the catalog or the path of a config.json")
	}
	config, err := model.Described(name.Text)
	if err != nil {
		return m.Inputf(name.At, "model is %s: %v", name, err).
			WithHint("name a model of the catalog (plimsoll models), or the path of its config.json")
	}
	kind := config.Root.Member("model_type")
	if kind == nil {
		return m.Inputf(name.At, "model is %s, whose config.json has no model_type", name)
	}
	of, is := recipe.CoreShapeOf(kind.Value.Text)
	if !is {
		return m.Inputf(name.At, "model is %s, of type %s, whose layers are not planned in Megatron core yet", name,
			kind.Value.Text).WithHint("plimsoll plans " + recipe.CoreTypes)
	}
	of.Arguments(m.made, config.Root, name.At)
	length := m.made.Member("seq_length").Value
	recipe.Give(m.made, "max_position_embeddings", name.At, length) // rotary embeddings have no table
	m.types(config.Root, name.At)
	if config.Root.Member("quantization_config") != nil {
		m.note(name.At, "the weights of %s are quantized, and are made 16 bits while they load", name.Text)
	}
	if err := recipe.CoreLayers(m.made, config.Root, name.At); err != nil {
		return m.Inputf(name.At, "%v", err).WithHint("ms-swift would make all layers mixtures")
	}
	return nil
}

// types gives the type of the weights: what the command says, or the config.json.
func (m *megatronReader) types(config *strict.Value, at int64) {
	said := ""
	for _, key := range []string{"dtype", "torch_dtype"} {
		if v := config.Member(key); v != nil {
			said = v.Value.Text
		}
	}
	if v := m.find("torch_dtype"); v != nil {
		said = v.Text
	}
	is := "bf16"
	if said == "float16" || said == "float32" {
		is = "fp16"
	}
	if said == "" {
		m.note(at, "bf16 weights: neither torch_dtype nor the config.json says their type")
	}
	for _, key := range []string{"fp16", "bf16"} {
		if m.isOn(key) {
			is = key
		}
	}
	m.give(is, is, true)
}
