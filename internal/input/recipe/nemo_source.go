package recipe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
)

// nemoModels are the classes of NeMo 2 whose layers are those of a GPT of Megatron core, unless their configuration
// names a specification of layers (nemo/collections/llm/gpt/model of September 2025, commit 8cfedd72).
var nemoModels = strings.Fields(`GPTModel LlamaModel MistralModel MixtralModel Qwen2Model Qwen3Model NemotronModel
	Starcoder2Model StarcoderModel Phi3Model Baichuan2Model`)

// Keys of the sections that a recipe of NeMo 2 makes, beside those of Megatron-Bridge, whose names they have.
const (
	nemoRecipe    = "nemo_recipe"
	nemoEach      = "gpus_of_each_node"
	nemo2Program  = "NeMo 2"
	overlapBucket = 128 << 20 // elements; of MegatronCommOverlapCallback
)

// nemoSource makes the sections of a recipe of NeMo 2: a function of Python that returns run.Partial with a model, a
// trainer, data and an optimizer. Their keys have the names of Megatron-Bridge's, which began as NeMo's.
func nemoSource(source *python.Source, function string) *strict.Value {
	if function == "" {
		return nil
	}
	made := source.Call(function)
	if !isNeMoRecipe(made) {
		return nil
	}
	n := &nemoReader{root: &strict.Value{Kind: '{', At: int64(max(0, source.Names[function].At))}}
	n.at = int(n.root.At)
	Give(n.root, nemoRecipe, n.root.At, strict.Of(true))
	n.ranks(made.Attribute("trainer"))
	n.model(made.Attribute("model"))
	n.data(made)
	n.section("optimizer", made.Attribute("optim").Attribute("config"))
	if peft := made.Attribute("peft"); peft != nil && peft.Kind != python.None {
		n.section("peft", peft)
		n.give("peft", "_target_", strict.Of(builtOf(peft)))
	}
	return n.root
}

// isNeMoRecipe reports whether a value is a recipe of NeMo 2.
func isNeMoRecipe(v *python.Value) bool {
	return v != nil && v.Kind == python.Object && strings.HasSuffix(v.Class, "run.Partial") &&
		v.Attribute("trainer") != nil && v.Attribute("model") != nil
}

// nemoRecipesOf returns the public functions of a source that return a recipe of NeMo 2.
func nemoRecipesOf(source *python.Source) (names []string) {
	for _, name := range source.Functions {
		if len(names) < 16 && !strings.HasPrefix(name, "_") && isNeMoRecipe(source.Call(name)) {
			names = append(names, name)
		}
	}
	return names
}

// nemoReader makes sections.
type nemoReader struct {
	root *strict.Value
	at   int
	of   [3]int // tensor, pipeline and context parallel degrees
}

// give sets a key of a section. What only a run can tell is left out where no plan depends on it.
func (n *nemoReader) give(section, key string, is *strict.Value) {
	if isComputed(is) && (slices.Contains(silentBridge, key) || slices.Contains(silentBridgeAdapter, key)) {
		return
	}
	if n.root.Member(section) == nil {
		Give(n.root, section, int64(n.at), &strict.Value{Kind: '{', At: int64(n.at)})
	}
	Give(n.root.Member(section).Value, key, max(is.At, int64(n.at)), is)
}

// section gives a section the arguments of run.Config. Those that only a run can tell are refused where they are read.
func (n *nemoReader) section(section string, v *python.Value) {
	if v == nil || v.Kind == python.None {
		return
	}
	if v.Kind != python.Object {
		Give(n.root, section, int64(n.at), Literal(v, n.at))
		return
	}
	for _, m := range fieldsOf(v) {
		n.give(section, m.Name, n.literal(m.Is))
	}
	if v.Partial {
		n.give(section, "arguments", computedValue("arguments of "+builtOf(v), n.at))
	}
}

func (n *nemoReader) literal(v *python.Value) *strict.Value {
	if v.Kind == python.Symbol { // types of torch, and functions such as silu
		is := strict.Of(v.Text)
		is.At = int64(n.at)
		return is
	}
	return Literal(v, n.at)
}

// fieldsOf returns the arguments of run.Config and, behind them, the fields of its class that they leave open.
func fieldsOf(v *python.Value) []python.Member {
	fields := slices.Clone(v.Members)
	if len(v.Given) == 0 {
		return fields
	}
	for _, m := range v.Given[0].Members {
		if m.Is.Kind != python.Function && v.Attribute(m.Name) == nil {
			fields = append(fields, m)
		}
	}
	return fields
}

// builtOf returns the name of the class that run.Config makes, without its module.
func builtOf(v *python.Value) string {
	name := v.Class
	if len(v.Given) > 0 && strings.HasSuffix(v.Class, "run.Config") {
		name = v.Given[0].Text
	}
	return name[strings.LastIndexByte(name, '.')+1:]
}

// ranks reads the ranks of the trainer, its strategy, its precision and its callbacks.
func (n *nemoReader) ranks(trainer *python.Value) {
	strategy := trainer.Attribute("strategy")
	if strategy == nil || builtOf(strategy) != "MegatronStrategy" {
		n.unplanned("its strategy is not MegatronStrategy")
		return
	}
	each, nodes := trainer.Attribute("devices"), trainer.Attribute("num_nodes")
	isWhole := func(v *python.Value) bool { return v != nil && v.Kind == python.Number && v.Whole && v.Number > 0 }
	if isWhole(each) {
		Give(n.root, nemoEach, int64(n.at), strict.Of(int(each.Number)))
		if nodes == nil || isWhole(nodes) {
			ranks := int(each.Number)
			if nodes != nil {
				ranks *= int(nodes.Number)
			}
			Give(n.root, bridgeGPUs, int64(n.at), strict.Of(ranks))
		}
	}
	for _, m := range strategy.Members {
		switch m.Name {
		case "ddp":
			if m.Is.Kind == python.Object {
				n.section("ddp", m.Is)
			} else if m.Is.Kind != python.Text || m.Is.Text != "megatron" {
				n.unplanned("ddp of its strategy is %s", m.Is)
			}
		case "fsdp":
			if m.Is.Kind != python.None {
				n.unplanned("fsdp of its strategy is %s", m.Is)
			}
		default:
			if slices.Contains(nemoDegrees, m.Name) {
				n.give("model", m.Name, n.literal(m.Is))
			} else if !strings.HasPrefix(m.Name, "ckpt_") && !slices.Contains(silentStrategy, m.Name) {
				n.unplanned("%s of its strategy is not planned yet", m.Name)
			}
		}
	}
	for i, key := range nemoDegrees[:3] {
		if n.of[i] = 1; isWhole(strategy.Attribute(key)) {
			n.of[i] = int(strategy.Attribute(key).Number)
		}
	}
	n.precision(trainer.Attribute("plugins"))
	n.callbacks(trainer.Attribute("callbacks"))
}

// nemoDegrees are arguments of MegatronStrategy that say how ranks share the model; the first three divide a replica
// among ranks. silentStrategy change no memory.
var (
	nemoDegrees = strings.Fields(`tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
		virtual_pipeline_model_parallel_size sequence_parallel expert_model_parallel_size expert_tensor_parallel_size
		num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
		account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage pipeline_model_parallel_layout`)
	silentStrategy = strings.Fields(`pipeline_dtype gradient_as_bucket_view use_te_rng_tracker progress_interval
		save_ckpt_format lazy_init use_sharp megatron_log_level use_tp_pp_dp_mapping replace_progress_bar
		find_unused_parameters use_gloo_process_groups restore_config pipeline_model_parallel_comm_backend`)
)

// precision reads MegatronMixedPrecision.
func (n *nemoReader) precision(plugin *python.Value) {
	if plugin == nil || plugin.Kind != python.Object || builtOf(plugin) != "MegatronMixedPrecision" {
		n.unplanned("its precision is not that of MegatronMixedPrecision")
		return
	}
	n.section("mixed_precision", plugin)
	section := n.root.Member("mixed_precision").Value
	section.Members = slices.DeleteFunc(section.Members, func(m strict.Member) bool { return m.Name == "precision" })
	types := map[string]string{"bf16-mixed": "bf16", "16-mixed": "fp16"}
	if v := plugin.Attribute("precision"); v != nil && types[v.Text] != "" {
		n.give("mixed_precision", types[v.Text], strict.Of(true))
		return
	}
	n.unplanned("its precision is neither bf16-mixed nor 16-mixed")
}

// callbacks reads what callbacks change: MegatronCommOverlapCallback overlaps the communication of data parallel ranks.
func (n *nemoReader) callbacks(list *python.Value) {
	if list == nil || list.Kind == python.None {
		return
	}
	if list.Kind != python.List {
		n.unplanned("its callbacks are %s, which only a run can tell", list)
		return
	}
	for _, c := range list.Elements {
		if builtOf(c) != "MegatronCommOverlapCallback" {
			continue
		}
		ranks := 1
		if v := n.root.Member(bridgeGPUs); v != nil {
			ranks, _ = strconv.Atoi(v.Value.Text)
		}
		if ranks > n.of[0]*n.of[1]*n.of[2] { // _get_optimizer_overlap_cfgs
			n.give("ddp", "overlap_grad_reduce", strict.Of(true))
			n.give("ddp", "overlap_param_gather", strict.Of(true))
			n.give("ddp", "bucket_size", strict.Of(overlapBucket))
		}
		for _, m := range c.Members {
			section := "comm_overlap"
			if slices.Contains([]string{"overlap_grad_reduce", "overlap_param_gather", "bucket_size"}, m.Name) {
				section = "ddp"
			}
			if m.Name == "defer_embedding_wgrad_compute" {
				section = "model"
			}
			n.give(section, m.Name, n.literal(m.Is))
		}
	}
}

// model reads the configuration of the model, whose class has the sizes.
func (n *nemoReader) model(made *python.Value) {
	config := made.Attribute("config")
	name := builtOf(made)
	switch {
	case !slices.Contains(nemoModels, name):
		n.unplanned("%s makes the model", name)
		return
	case config == nil || config.Kind != python.Object || len(config.Given) == 0 || len(config.Given[0].Members) == 0:
		n.unplanned("the class of its configuration is not here")
		return
	case config.Attribute("transformer_layer_spec") != nil,
		specifiesLayers(config.Given[0].Attribute("transformer_layer_spec")):
		n.unplanned("%s specifies layers of its own", builtOf(config))
		return
	}
	for _, m := range fieldsOf(config) {
		if m.Name != "transformer_layer_spec" && m.Is.Kind != python.None && n.member("model", m.Name) == nil {
			n.give("model", m.Name, n.literal(m.Is))
		}
	}
	if made.Attribute("model_transform") != nil {
		n.unplanned("model_transform changes the model")
	}
}

// specifiesLayers reports whether a specification of layers is another than NeMo's usual one.
func specifiesLayers(v *python.Value) bool {
	return v != nil && v.Kind != python.Function || v != nil && v.Text != "default_layer_spec"
}

func (n *nemoReader) member(section, key string) *strict.Value {
	if s := n.root.Member(section); s != nil {
		if m := s.Value.Member(key); m != nil {
			return m.Value
		}
	}
	return nil
}

// data reads the batches, the length of sequences and whose vocabulary the model has.
func (n *nemoReader) data(made *python.Value) {
	data := made.Attribute("data")
	for key, usual := range map[string]int{"micro_batch_size": 4, "global_batch_size": 8} {
		is := strict.Of(usual)
		if v := data.Attribute(key); v != nil {
			is = n.literal(v)
		}
		n.give("train", key, is)
	}
	length := data.Attribute("seq_length")
	packs := data.Attribute("packed_sequence_specs")
	if v := packs.Attribute("packed_sequence_size"); v != nil {
		length = v
	}
	if length != nil {
		n.give("dataset", "seq_length", n.literal(length))
	}
	n.vocabulary(made, data)
}

// vocabulary gives the number of tokens where the configuration of the model leaves it to the tokenizer: data that is
// made up has GPT-2's, and a finetuning that of the model on the hub that it resumes from.
func (n *nemoReader) vocabulary(made, data *python.Value) {
	if n.member("model", "vocab_size") != nil {
		return
	}
	name := resumedFrom(made.Attribute("resume"))
	switch {
	case name != "":
		if config, err := model.Described(name); err == nil {
			if m := config.Root.Member("vocab_size"); m != nil {
				n.give("model", "vocab_size", strict.Bare(m.Value.Text, int64(n.at)))
				n.give("model", "should_pad_vocab", strict.Of(true))
				return
			}
		}
		n.give("model", "tokenizer_model", strict.Of(name))
		n.give("model", "tokenizer_type", strict.Of("HuggingFaceTokenizer"))
	case data == nil || data.Attribute("tokenizer") != nil || builtOf(data) != "MockDataModule":
		n.give("model", "tokenizer_type", strict.Of("HuggingFaceTokenizer"))
	default:
		n.give("model", "tokenizer_type", strict.Of("GPT2BPETokenizer"))
	}
}

// resumedFrom returns the name of the model on the hub whose checkpoint a recipe begins with, or "": nemo://NAME.
func resumedFrom(resume *python.Value) string {
	for _, v := range []*python.Value{resume.Attribute("restore_config").Attribute("path"), resume.Attribute("path")} {
		if v != nil && v.Kind == python.Text {
			return strings.TrimPrefix(v.Text, "nemo://")
		}
	}
	return ""
}

// unplanned notes why the model or its training is none that is planned; the first reason is said.
func (n *nemoReader) unplanned(format string, values ...any) {
	if n.member("model", bridgeUnplanned) == nil {
		n.give("model", bridgeUnplanned, strict.Of(fmt.Sprintf(format, values...)))
	}
}
