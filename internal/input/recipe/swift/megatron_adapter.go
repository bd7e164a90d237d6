package swift

import (
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// adapt reads the adapters of a command: prepare_adapter in swift/megatron/utils/utils.py. Float16Module makes them the
// type of the model behind all that lora_dtype says (wrap_model in swift/megatron/utils/megatron_lm_utils.py).
func (m *megatronReader) adapt() error {
	tuner := m.find("tuner_type")
	if tuner == nil || tuner.Text != "lora" {
		return nil
	}
	a := &recipe.CoreAdapter{At: m.Position(tuner.At), Program: recipe.SwiftTuner, Rank: 8, Dropout: .05,
		ByExpert: true}
	for _, key := range []string{"lora_bias", "target_regex"} {
		if v := m.find(key); v != nil && v.Text != "none" && v.Kind != 'n' {
			return m.Inputf(v.At, "%s is %s, which is not planned yet on layers of Megatron core", key, v).
				WithHint("plimsoll plans target_modules, and lora_bias none")
		}
	}
	var err error
	if v := m.find("lora_rank"); v != nil {
		if a.Rank, err = strconv.ParseInt(v.Text, 10, 32); err != nil || a.Rank < 1 {
			return m.Inputf(v.At, "lora_rank is %s, expected the rank of the adapters", v).
				WithHint("give a whole number")
		}
	}
	if v := m.find("lora_dropout"); v != nil {
		if a.Dropout, err = strconv.ParseFloat(v.Text, 64); err != nil || !(a.Dropout >= 0 && a.Dropout < 1) {
			return m.Inputf(v.At, "lora_dropout is %s, expected a share below 1", v).WithHint("give a number")
		}
	}
	if a.Dropout > 0 {
		m.note(tuner.At, "lora_dropout is %v: PEFT from 0.19 on does not hand it to layers of Megatron core, so none "+
			"is planned (LoraParallelLinear in mcore-bridge 1.6.5); with an older PEFT its masks and results are "+
			"held, too", a.Dropout)
		a.Dropout = 0
	}
	m.adapter = a
	return m.targets()
}

// targets reads which modules are adapted, and which are trained as copies.
func (m *megatronReader) targets() error {
	names := []string{"all-linear"}
	if v := m.find("target_modules"); v != nil {
		names = words(v)
	}
	for _, name := range names {
		if name == "all-router" || name == "all-embedding" || name == "router" || strings.Contains(name, "embedding") ||
			name == "output_layer" {
			v := m.find("target_modules")
			return m.Inputf(v.At, "target_modules has %s: adapters on routers, embeddings and the output layer are "+
				"not planned yet", name).WithHint("plimsoll plans all-linear and names of linear layers")
		}
	}
	if v := m.find("modules_to_save"); v != nil {
		m.adapter.Trained = words(v)
		for _, name := range m.adapter.Trained {
			if !slices.Contains(recipe.CoreCopies, name) {
				return m.Inputf(v.At, "modules_to_save has %s, which is not planned yet on Megatron core", name).
					WithHint("plimsoll plans " + strings.Join(recipe.CoreCopies, " and "))
			}
		}
	}
	return m.adapter.TargetNames(names)
}

// words returns the words of a list or of one value.
func words(v *strict.Value) []string {
	if v.Kind == '[' {
		return v.Texts()
	}
	return []string{v.Text}
}
