package swift

import (
	"plimsoll/internal/input/recipe/bridge"
	"plimsoll/internal/input/recipe/strict"
)

// model gives the sizes of the model, which ms-swift reads in its config.json.
func (m *megatronReader) model() error {
	name := m.find("model")
	if name == nil {
		return m.Inputf(m.Root.At, "model is not given: its config.json says the sizes of the model").
			WithHint("add --model with a name of the catalog or the path of a config.json")
	}
	config, notes, err := bridge.Sizes(m.Document, m.made, name)
	if err != nil {
		return err
	}
	m.notes = append(m.notes, notes...)
	m.types(config, name.At)
	if config.Member("quantization_config") != nil {
		m.note(name.At, "the weights of %s are quantized, and are made 16 bits while they load", name.Text)
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
