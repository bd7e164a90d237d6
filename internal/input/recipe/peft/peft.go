// Package peft reads adapter_config.json of PEFT.
package peft

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Adapter is an adapter_config.json of PEFT: the few parameters that are
// trained in place of the model's. The defaults are those of PEFT 0.20.
type Adapter struct {
	File string
	Type string // peft_type, one of Rules

	LoRA
	OFT
	Kronecker
	Prompt
	Bias        string // which biases of the model are trained: "none", "all" or "lora_only"
	FanInFanOut bool

	// TargetsHint says how targets are given to an adapter that no file describes.
	TargetsHint string
	// ModulesToSave are modules that are fully trained, beside the adapter.
	ModulesToSave []string
	// TrainableTokens are the rows of embeddings that are trained, by module;
	// "" is the input embedding.
	TrainableTokens map[string][]int
	// Parameters are names of adapted parameters (not modules).
	Parameters []string
	// ListsLinear says that "all-linear" stands for the last names of the modules that are linear now: a program lists
	// them, and PEFT adds none of those that were linear before transformers fused the experts.
	ListsLinear bool
	// TiesWeights is ensure_weight_tying: tied weights stay tied when they are
	// adapted or trained.
	TiesWeights bool
	// ReplicatesLayers reports whether layer_replication lists layers to
	// repeat.
	ReplicatesLayers bool

	BaseModel string
	Notes     []strict.Note

	targets, excluded, feedforward match
	saved                          match
	layers                         layers
	ranks                          []pattern
	place, parametersPlace         fault.Position // of target_modules and of target_parameters
}

// LoRA is what adapters of low rank have.
type LoRA struct {
	Rank       int // of ADALORA the initial rank
	Alpha      float64
	Dropout    float64
	DoRA       bool
	RankScaled bool   // use_rslora
	LoRABias   bool   // B has a bias
	Weights    string // init_lora_weights: "true", "false", "gaussian", "pissa", ...

	SaveProjection bool // of VERA: the shared matrices are saved, too
	Repeated       int  // of MISS: the width of its matrix, which is repeated; 0 for one as wide as the module
}

// OFT is what rotations have. Blocks is their number of blocks, or 0: then BlockSize is their size. Terms is the length
// of the Neumann series in place of an inverse, 0 for none.
type OFT struct {
	Blocks, BlockSize, Terms int
	SharesBlock              bool // all blocks are one
}

// Kronecker is what LOKR has: the weight is a product of two matrices, each of which may have a low rank. Factor is the
// size that the first one should have, or -1.
type Kronecker struct {
	Factor       int
	DividesFirst bool // decompose_both: the first one may have a low rank, too
}

// Prompt is what trained tokens have, which are put before those of every sequence. Encoder is the width of the network
// that makes them, 0 for that of the model.
type Prompt struct {
	VirtualTokens, Encoder int
}

// Parse parses the text of a file. The name of the file is for messages
// only. Every error is a *fault.Input.
func Parse(file string, text []byte) (*Adapter, error) {
	document, err := strict.Parse(file, text)
	if err != nil {
		return nil, err
	}
	return Read(document)
}

// Read reads a parsed document.
func Read(document *strict.Document) (*Adapter, error) {
	kind, err := adapterType(document)
	if err != nil {
		return nil, err
	}
	checked, err := strict.Schema{Program: "PEFT's " + kind, Rule: Rules()[kind]}.Read(document)
	if err != nil {
		return nil, err
	}
	r := &adapterReader{checked}
	a := &Adapter{File: document.File, Type: kind, place: fault.Position{File: document.File}}
	r.fill(a)
	if err := r.matches(a); err != nil {
		return nil, err
	}
	if err := cmp.Or(r.Refuse(r.conflicts(a)), r.unplanned()); err != nil {
		return nil, err
	}
	a.Notes = r.Notes
	return a, nil
}

// adapterType returns peft_type. The rule of the other keys depends on it.
func adapterType(d *strict.Document) (string, error) {
	r, err := strict.Schema{Program: "PEFT", Rule: strict.Object(rule.Text.For("peft_type")).AndOthers()}.Read(d)
	if err != nil {
		return "", err
	}
	kind := r.Find("peft_type")
	if kind == nil {
		return "", fault.File(d.File).Inputf("peft_type is missing").WithHint(`add "peft_type": "LORA"`)
	}
	planned := slices.Sorted(maps.Keys(Rules()))
	switch {
	case slices.Contains(planned, kind.Text):
		return kind.Text, nil
	case slices.Contains(unplannedAdapters, kind.Text):
		return "", d.Inputf(kind.At, "peft_type is %s, which is not planned yet", kind).
			WithHint("plimsoll plans " + strings.Join(planned, ", "))
	}
	return "", d.Inputf(kind.At, "peft_type is %s, which PEFT does not know", kind).
		WithHint(strict.DidYouMean(kind.Text, slices.Concat(planned, unplannedAdapters)))
}

// adapterReader reads an adapter_config.json.
type adapterReader struct{ *strict.Reader }

func (r *adapterReader) fill(a *Adapter) {
	a.BaseModel = r.Word("base_model_name_or_path")
	// The classes PeftModelFor... in peft_model.py add the head of the task.
	a.ModulesToSave = append(r.List("modules_to_save"), map[string][]string{
		"SEQ_CLS": {"classifier", "score"}, "TOKEN_CLS": {"classifier", "score"}, "QUESTION_ANS": {"qa_outputs"},
	}[r.Word("task_type")]...)
	switch a.Type {
	case "LORA", "ADALORA":
		r.fillLoRA(a)
	case "IA3":
		a.FanInFanOut = r.Truth("fan_in_fan_out")
	case "OFT":
		a.Bias, a.SharesBlock, a.Blocks = r.Word("bias"), r.Truth("block_share"), int(r.Integer("r"))
		a.FanInFanOut, a.BlockSize = r.Truth("fan_in_fan_out"), int(r.Integer("oft_block_size"))
		if r.Truth("use_cayley_neumann") {
			a.Terms = int(r.Integer("num_cayley_neumann_terms"))
		}
	case "VERA":
		a.Rank, a.Dropout, a.Bias = int(r.Integer("r")), r.Number("vera_dropout"), r.Word("bias")
		a.FanInFanOut, a.SaveProjection = r.Truth("fan_in_fan_out"), r.Truth("save_projection")
	case "LOHA", "LOKR":
		a.Rank, a.Alpha = int(r.Integer("r")), r.Number("alpha")
		if a.Type == "LOKR" {
			a.Factor, a.DividesFirst = int(r.Integer("decompose_factor")), r.Truth("decompose_both")
		}
		for _, key := range []string{"rank_dropout", "module_dropout"} {
			if r.Number(key) > 0 {
				r.Note(key, "leaves out parts of the adapter at random, and the plan has all of it")
			}
		}
	case "MISS":
		a.Rank, a.Dropout, a.Bias = int(r.Integer("r")), r.Number("miss_dropout"), r.Word("bias")
		if r.Word("init_weights") == "mini" {
			a.Repeated = int(r.Integer("mini_r"))
		}
	case "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING":
		a.VirtualTokens = int(r.Integer("num_virtual_tokens"))
		if a.Type != "PROMPT_TUNING" {
			a.Encoder = int(r.Integer("encoder_hidden_size"))
		}
	}
}

func (r *adapterReader) fillLoRA(a *Adapter) {
	a.Rank = int(r.Integer("r"))
	if a.Type == "ADALORA" {
		if r.Gives("r") && a.Rank != 8 {
			r.Note("r", `has no effect on ADALORA, which reads "init_r"`)
		}
		a.Rank = int(r.Integer("init_r"))
	}
	a.Alpha, a.Dropout, a.Bias = r.Number("lora_alpha"), r.Number("lora_dropout"), r.Word("bias")
	a.FanInFanOut, a.LoRABias = r.Truth("fan_in_fan_out"), r.Truth("lora_bias")
	a.DoRA, a.RankScaled = r.Truth("use_dora"), r.Truth("use_rslora")
	a.Weights = r.Word("init_lora_weights")
	a.Parameters = r.List("target_parameters")
	a.TiesWeights = r.Truth("ensure_weight_tying")
	a.TrainableTokens = r.tokens()
	a.ReplicatesLayers = r.some("layer_replication")
}

// changing are keys of LoraConfig that give its modules other weights or passes, which are not planned.
var changing = map[string]string{"use_qalora": "inputs are pooled by groups",
	"use_bdlora":        "weights are block-diagonal",
	"velora_config":     "the backward pass has compressed inputs",
	"monteclora_config": "weights have parameters of their distribution",
	"kasa_config":       "modules have singular values of their own",
	"arrow_config":      "several adapters run, and a router chooses among them",
	"megatron_config":   "modules are those of Megatron core"}

// unplanned refuses keys that change what an adapter holds. It notes the ones that hold little.
func (r *adapterReader) unplanned() error {
	switch {
	case r.Knows("mini_r") && r.Word("init_weights") == "bat":
		return r.Fault("init_weights", `is "bat", which is not planned yet: every pass makes the adapted weight, `+
			"block by block", `set it to true, or to "mini"`)
	case r.Knows("encoder_reparameterization_type") && r.Word("encoder_reparameterization_type") == "LSTM":
		return r.Fault("encoder_reparameterization_type", "is LSTM, which is not planned yet", "set it to MLP")
	}
	if !r.Knows("use_qalora") {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(changing)) {
		if v := r.Find(key); v != nil && !v.IsEmpty() && v.Text != "false" {
			return r.Fault(key, "is given: "+changing[key]+", which is not planned yet", "remove it to plan the "+
				"adapter without, and expect its memory to differ")
		}
	}
	if r.Gives("alora_invocation_tokens") {
		r.Note("alora_invocation_tokens", "masks the outputs of adapters, which takes more than the plan says")
	}
	return nil
}

// some reports whether the file has a key with a value that is not empty.
func (r *adapterReader) some(key string) bool {
	v := r.Find(key)
	return v != nil && !v.IsEmpty()
}

// tokens returns trainable_token_indices.
func (r *adapterReader) tokens() map[string][]int {
	v := r.Find("trainable_token_indices")
	if v == nil {
		return nil
	}
	indices := func(list *strict.Value) []int {
		numbers := []int{}
		for _, element := range list.Elements {
			numbers = append(numbers, int(element.Integer))
		}
		return numbers
	}
	if v.Kind == '[' {
		return map[string][]int{"": indices(v)}
	}
	tokens := map[string][]int{}
	for _, m := range v.Members {
		tokens[m.Name] = indices(m.Value)
	}
	return tokens
}

// conflicts returns what PEFT refuses, in __post_init__ of its configurations
// and at the start of its tuners.
func (r *adapterReader) conflicts(a *Adapter) []strict.Conflict {
	switch a.Type {
	case "LORA", "ADALORA":
		return slices.Concat(r.targetConflicts(a), r.layerConflicts(true), r.adaLoRAConflicts(a), r.loraConflicts(a))
	case "VERA":
		return slices.Concat(r.targetConflicts(a), r.layerConflicts(false))
	case "OFT":
		return append(slices.Concat(r.targetConflicts(a), r.layerConflicts(false)), strict.Conflict{
			(a.Blocks != 0) == (a.BlockSize != 0), "oft_block_size",
			fmt.Sprintf("is %d and r is %d: one of the two has to be 0, as their product is the width", a.BlockSize,
				a.Blocks), `set "r": 0 beside a size, or "oft_block_size": 0 beside r`})
	case "IA3":
		return slices.Concat(r.targetConflicts(a), r.feedforwardConflicts())
	case "LOHA", "LOKR", "MISS":
		return slices.Concat(r.targetConflicts(a), r.layerConflicts(false))
	case "LN_TUNING":
		return r.targetConflicts(a)
	default:
		return r.promptConflicts(a)
	}
}

// pattern reports whether target_modules is a pattern.
func (r *adapterReader) pattern() bool {
	targets := r.Find("target_modules")
	return targets != nil && targets.Kind == '"'
}

func (r *adapterReader) targetConflicts(a *Adapter) []strict.Conflict {
	targets := r.Find("target_modules")
	return []strict.Conflict{{targets != nil && !r.pattern() && len(targets.Elements) == 0 && a.Parameters == nil,
		"target_modules", "is empty: nothing would be adapted", `name modules, or write "all-linear"`}}
}

// layerConflicts are those of the keys that restrict the layers. Only LoRA
// refuses them beside a pattern.
func (r *adapterReader) layerConflicts(lora bool) []strict.Conflict {
	const pattern = "needs target_modules to be a list: a pattern chooses the layers itself"
	return []strict.Conflict{
		{lora && r.pattern() && r.Gives("layers_to_transform"), "layers_to_transform", pattern,
			"remove it, or list the modules"},
		{lora && r.pattern() && r.Gives("layers_pattern"), "layers_pattern", pattern,
			"remove it, or list the modules"},
		{r.some("layers_pattern") && !r.Gives("layers_to_transform"), "layers_pattern",
			"is given without layers_to_transform", `add "layers_to_transform": [0, 1]`},
	}
}

func (r *adapterReader) loraConflicts(a *Adapter) []strict.Conflict {
	const beside = "does not go with target_parameters" // ParamWrapper
	parameters := a.Parameters != nil
	return []strict.Conflict{
		{a.DoRA && r.some("megatron_config"), "use_dora", "does not go with megatron_config", "remove one of the two"},
		{a.Type == "LORA" && a.Weights == "loftq" && !r.some("loftq_config"), "init_lora_weights",
			`is "loftq", which needs loftq_config`, `add "loftq_config": {"loftq_bits": 4}`},
		{a.LoRABias && a.Weights != "true" && a.Weights != "false", "lora_bias",
			fmt.Sprintf("is true, which does not go with init_lora_weights %q", a.Weights),
			"set init_lora_weights to true"},
		{a.LoRABias && a.DoRA, "lora_bias", "is true, which does not go with use_dora", "set one of the two to false"},
		{parameters && a.Dropout != 0, "lora_dropout", beside, "remove one of the two"},
		{parameters && a.FanInFanOut, "fan_in_fan_out", beside, "remove one of the two"},
		{parameters && a.LoRABias, "lora_bias", beside, "remove one of the two"},
		{parameters && a.DoRA, "use_dora", beside, "remove one of the two"},
	}
}

func (r *adapterReader) adaLoRAConflicts(a *Adapter) []strict.Conflict {
	if a.Type != "ADALORA" {
		return nil
	}
	total := r.Integer("total_step")
	return []strict.Conflict{
		{a.DoRA, "use_dora", "is true, which ADALORA does not know", "set it to false"},
		{r.some("loftq_config"), "loftq_config", "is given, which ADALORA does not know", "remove it"},
		{total == 0, "total_step", "is missing, but ADALORA needs it", `add "total_step" with the number of steps`},
		{total > 0 && r.Integer("tinit") >= total-r.Integer("tfinal"), "tinit",
			"and tfinal leave no step for the budget between them", "lower one of the two, or raise total_step"},
	}
}

func (r *adapterReader) promptConflicts(a *Adapter) []strict.Conflict {
	list := []strict.Conflict{{!r.Gives("num_virtual_tokens"), "num_virtual_tokens", "is missing",
		`add "num_virtual_tokens": 20`}}
	if a.Type != "PROMPT_TUNING" {
		return list
	}
	text := r.Word("prompt_tuning_init") == "TEXT"
	for _, key := range []string{"tokenizer_name_or_path", "prompt_tuning_init_text"} {
		list = append(list, strict.Conflict{text && !r.some(key), "prompt_tuning_init", `is "TEXT", which needs ` + key,
			fmt.Sprintf("add %q", key)})
	}
	return append(list, strict.Conflict{!text && r.some("tokenizer_kwargs"), "tokenizer_kwargs",
		`needs prompt_tuning_init to be "TEXT"`, "remove it"})
}

// feedforwardConflicts are those of IA3.
func (r *adapterReader) feedforwardConflicts() []strict.Conflict {
	feedforward, targets := r.Find("feedforward_modules"), r.Find("target_modules")
	if feedforward == nil || targets == nil || r.pattern() {
		return nil
	}
	var list []strict.Conflict
	for _, name := range feedforward.Texts() {
		list = append(list, strict.Conflict{!slices.Contains(targets.Texts(), name), "feedforward_modules",
			fmt.Sprintf("holds %q, which is not in target_modules", name), "add it there"})
	}
	return list
}

// OFTBlocks returns the number and the size of the blocks of a rotation: update_layer and adjust_oft_parameters in
// tuners/oft/layer.py.
func (a *Adapter) OFTBlocks(width int64) (count, size int64) {
	if a.Blocks > 0 {
		count = divisorNear(width, int64(a.Blocks))
		return count, width / count
	}
	size = divisorNear(width, int64(a.BlockSize))
	return width / size, size
}

// Factors returns the two factors of a width that LoKr divides it into, the smaller one first: factorization in
// tuners/lokr/layer.py.
func Factors(width, wanted int64) (first, second int64) {
	switch {
	case wanted > 0 && width%wanted == 0:
		return wanted, width / wanted
	case wanted == -1:
		wanted = width
	}
	first, second = 1, width
	for length := first + second; first < second; {
		next := first + 1
		for width%next != 0 {
			next++
		}
		if next+width/next > length || next > wanted {
			break
		}
		first, second = next, width/next
	}
	return min(first, second), max(first, second)
}

// divisorNear returns the divisor of a width that is nearest to a number.
func divisorNear(width, wanted int64) int64 {
	if wanted >= width {
		return width
	}
	above, below := wanted, wanted
	for width%above != 0 {
		above++
	}
	for width%below != 0 {
		below--
	}
	if wanted-below <= above-wanted {
		return below
	}
	return above
}
