package recipe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
)

// bridgeRanks matches the number of GPUs in the names of Megatron-Bridge's recipes.
var bridgeRanks = lazyregexp.New(`_(\d{1,5})gpu_`)

// Keys of the sections that a source of Megatron-Bridge makes, beside those of its configuration.
const (
	bridgeGPUs      = "gpus_of_recipe"
	bridgeUnplanned = "not_planned" // of the model: why it is none that is planned
)

// bridgeSections are the sections of Megatron-Bridge that change what is planned.
var bridgeSections = strings.Fields("model train optimizer ddp dist mixed_precision dataset peft comm_overlap")

// bridgeSource makes a configuration of Megatron-Bridge of a recipe: a function of Python that returns it. A source of
// one such function needs no name.
func bridgeSource(source *python.Source, function string) *strict.Value {
	if root := nemoSource(source, function); root != nil {
		return root
	}
	if function == "" {
		named := configurationsOf(source)
		if len(named) != 1 {
			return nil
		}
		function = named[0]
	}
	made := source.Call(function)
	if !isConfiguration(made) {
		return nil
	}
	at := max(0, source.Names[function].At)
	function = source.Defined(function)
	root := &strict.Value{Kind: '{', At: int64(at)}
	for _, m := range made.Members {
		if slices.Contains(bridgeSections, m.Name) {
			Give(root, m.Name, root.At, bridgeSection(m.Name, m.Is, at))
		}
	}
	if found := bridgeRanks.FindStringSubmatch(function); found != nil {
		if n, err := strconv.Atoi(found[1]); err == nil && n > 0 {
			Give(root, bridgeGPUs, root.At, strict.Of(n))
		}
	}
	return root
}

// isConfiguration reports whether a value is a configuration of Megatron-Bridge.
func isConfiguration(v *python.Value) bool {
	return v != nil && v.Kind == python.Object && v.Name() == "ConfigContainer"
}

// configurationsOf returns the public functions of a source that return a configuration of Megatron-Bridge.
func configurationsOf(source *python.Source) (names []string) {
	for _, name := range source.Functions {
		if len(names) < 64 && !strings.HasPrefix(name, "_") && isConfiguration(source.Call(name)) {
			names = append(names, name)
		}
	}
	return names
}

// bridgeSection returns a section. What only a run can tell is left out where no plan depends on it.
func bridgeSection(name string, v *python.Value, at int) *strict.Value {
	if v.At >= 0 {
		at = v.At
	}
	if v.Kind != python.Object {
		return Literal(v, at)
	}
	section := &strict.Value{Kind: '{', At: int64(at)}
	if name == "model" {
		bridgeShape(section, v, at)
	}
	for _, m := range v.Members {
		is := m.Is
		if is.Kind == python.Symbol { // types of torch, and functions such as silu
			Give(section, m.Name, int64(at), strict.Of(is.Text))
			continue
		}
		value := Literal(is, max(m.At, at))
		if isComputed(value) && slices.Contains(silentBridge, m.Name) {
			continue
		}
		Give(section, m.Name, int64(max(m.At, at)), value)
	}
	if v.Partial {
		Give(section, "arguments", int64(at), computedValue("arguments of "+v.Name(), at))
	}
	if name == "peft" {
		Give(section, "_target_", int64(at), strict.Of(v.Name()))
	}
	return section
}

// bridgeShape gives a section the sizes of the model that AutoBridge reads in its config.json.
func bridgeShape(section *strict.Value, v *python.Value, at int) {
	unplanned := func(format string, values ...any) {
		Give(section, bridgeUnplanned, int64(at), strict.Of(fmt.Sprintf(format, values...)))
	}
	loaded := v.From
	isAuto := loaded != nil && loaded.Name() == "from_hf_pretrained" && len(loaded.Given) > 0
	switch {
	case !isAuto && v.Name() == "GPTModelProvider":
		return
	case !isAuto:
		unplanned("%s makes the model", v.Name())
		return
	case loaded.Given[0].Kind != python.Text:
		unplanned("its name is %s, which only a run can tell", loaded.Given[0])
		return
	}
	name := loaded.Given[0].Text
	config, err := model.Described(name)
	if err != nil {
		unplanned("%v", err)
		return
	}
	kind := config.Root.Member("model_type")
	of, is := CoreShape{}, false
	if kind != nil {
		of, is = CoreShapeOf(kind.Value.Text)
	}
	if !is {
		unplanned("it is %s, whose layers are not planned in Megatron core yet", name)
		return
	}
	of.Arguments(section, config.Root, int64(at))
	if err := CoreLayers(section, config.Root, int64(at)); err != nil {
		unplanned("%v", err)
	}
	if m := config.Root.Member("num_nextn_predict_layers"); m != nil && m.Value.Kind == '0' && m.Value.Text != "0" {
		Give(section, "mtp_num_layers", int64(at), strict.Bare(m.Value.Text, int64(at)))
	}
	for key, is := range map[string]any{"cross_entropy_loss_fusion": true, "seq_length": nil, "moe_grouped_gemm": true,
		"moe_permute_fusion": true, "moe_token_dispatcher_type": "alltoall"} {
		if positions := config.Root.Member("max_position_embeddings"); key == "seq_length" && positions != nil {
			Give(section, key, int64(at), strict.Bare(positions.Value.Text, int64(at)))
		} else if is != nil && (section.Member("num_experts") != nil || !strings.HasPrefix(key, "moe_")) {
			Give(section, key, int64(at), strict.Of(is))
		}
	}
}

// computedSections refuses values of a recipe that only a run can tell.
func (s *megatronSections) computedSections() error {
	for _, section := range s.Root.Members {
		if isComputed(section.Value) && section.Name != "dataset" && section.Name != "comm_overlap" {
			return s.Inputf(section.Value.At, "%s of the recipe is %s, which only a run can tell", section.Name,
				saidBy(section.Value)).WithHint(s.instead())
		}
		for _, m := range section.Value.Members {
			isRead := section.Name != "dataset" && section.Name != "comm_overlap" || strings.HasPrefix(m.Name, "seq")
			if isRead && isComputed(m.Value) {
				return s.Inputf(m.Value.At, "%s.%s of the recipe is %s, which only a run can tell", section.Name,
					m.Name, saidBy(m.Value)).WithHint(s.instead())
			}
		}
	}
	return nil
}

const bridgeInstead = "give the run_config.yaml that Megatron-Bridge writes beside its checkpoints"
