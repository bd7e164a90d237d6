package recipe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/fault"
)

// Adapter is an adapter_config.json of PEFT: the few parameters that are
// trained in place of the model's. The defaults are those of PEFT 0.20.
type Adapter struct {
	File string
	Type string // "LORA", "ADALORA", "IA3", "VERA", "LN_TUNING", "PROMPT_TUNING", "PREFIX_TUNING" or "P_TUNING"

	Rank        int // of LORA and VERA; of ADALORA the initial rank
	Alpha       float64
	Dropout     float64
	DoRA        bool
	RankScaled  bool   // use_rslora
	Bias        string // which biases of the model are trained: "none", "all" or "lora_only"
	LoRABias    bool   // B has a bias
	FanInFanOut bool
	Weights     string // init_lora_weights: "true", "false", "gaussian", "pissa", ...

	// ModulesToSave are modules that are fully trained, beside the adapter.
	ModulesToSave []string
	// TrainableTokens are the rows of embeddings that are trained, by module;
	// "" is the input embedding.
	TrainableTokens map[string][]int
	// Parameters are names of adapted parameters (not modules).
	Parameters []string
	// TiesWeights is ensure_weight_tying: tied weights stay tied when they are
	// adapted or trained.
	TiesWeights bool
	// ReplicatesLayers reports whether layer_replication lists layers to
	// repeat.
	ReplicatesLayers bool

	SaveProjection bool // of VERA: the shared matrices are saved, too

	Prompt Prompt // of PROMPT_TUNING, PREFIX_TUNING and P_TUNING

	BaseModel string
	Notes     []Note

	targets, excluded, feedforward match
	saved                          match
	layers                         layers
	ranks                          []pattern
	place                          fault.Position // of target_modules
}

// Prompt is a trained prefix of virtual tokens.
type Prompt struct {
	VirtualTokens int
	TokenWidth    int // 0 = the model's
	Submodules    int // 0 = the model's: 1, or 2 with an encoder and a decoder
	Layers, Heads int // 0 = the model's
	// The network that computes the prompt, if there is one.
	Projection    bool   // of PREFIX_TUNING
	Encoder       string // of P_TUNING: "MLP" or "LSTM"
	EncoderWidth  int    // 0 = TokenWidth
	EncoderLayers int
}

// LoadAdapter reads the file at path.
func LoadAdapter(path string) (*Adapter, error) {
	return load(path, adapterKind, ParseAdapter)
}

// ParseAdapter parses the text of a file. The name of the file is for messages
// only. Every error is a *fault.Input.
func ParseAdapter(file string, text []byte) (*Adapter, error) {
	document, err := parseDocument(file, text)
	if err != nil {
		return nil, err
	}
	kind, err := adapterType(document)
	if err != nil {
		return nil, err
	}
	c, err := schema{"PEFT's " + kind, isObject(adapterSchemas[kind]).notingOthers()}.read(document)
	if err != nil {
		return nil, err
	}
	a := &Adapter{File: file, Type: kind, place: fault.Position{File: file}}
	c.fillAdapter(a)
	if err := c.adapterMatches(a); err != nil {
		return nil, err
	}
	if err := c.refuse(c.adapterConflicts(a)); err != nil {
		return nil, err
	}
	a.Notes = c.notes
	return a, nil
}

// adapterType returns peft_type. The schema of the other keys depends on it.
func adapterType(d *document) (string, error) {
	c, err := schema{"PEFT", isObject(map[string]rule{"peft_type": isText()}).andOthers()}.read(d)
	if err != nil {
		return "", err
	}
	kind := c.root.find("peft_type")
	if kind == nil {
		return "", &fault.Input{
			Where: fault.Position{File: d.file},
			What:  "there is no peft_type",
			Hint:  `add "peft_type": "LORA"`,
		}
	}
	planned := slices.Sorted(maps.Keys(adapterSchemas))
	switch {
	case adapterSchemas[kind.text] != nil:
		return kind.text, nil
	case slices.Contains(unplannedAdapters, kind.text):
		return "", d.bad(kind.at, fmt.Sprintf("peft_type is %s, which is not planned yet", kind),
			"planned are "+strings.Join(planned, ", "))
	}
	in := &fault.Input{Where: d.position(kind.at), What: fmt.Sprintf("peft_type is %s, which PEFT does not know", kind)}
	if near := fault.Nearest(kind.text, slices.Concat(planned, unplannedAdapters)); near != "" {
		in.Hint = fmt.Sprintf("did you mean %q?", near)
	}
	return "", in
}

func (c *checking) fillAdapter(a *Adapter) {
	a.BaseModel = c.word("", "base_model_name_or_path")
	// The classes PeftModelFor... in peft_model.py add the head of the task.
	a.ModulesToSave = append(c.list("modules_to_save"), map[string][]string{
		"SEQ_CLS": {"classifier", "score"}, "TOKEN_CLS": {"classifier", "score"}, "QUESTION_ANS": {"qa_outputs"},
	}[c.word("", "task_type")]...)
	a.FanInFanOut = c.truth(false, "fan_in_fan_out")
	switch a.Type {
	case "LORA", "ADALORA":
		a.Rank = int(c.integer(8, "r"))
		if a.Type == "ADALORA" {
			a.Rank = int(c.integer(12, "init_r"))
			if c.root.find("r") != nil && c.integer(8, "r") != 8 {
				c.note("r", `has no effect on ADALORA, which reads "init_r"`)
			}
		}
		a.Alpha, a.Dropout = c.number(8, "lora_alpha"), c.number(0, "lora_dropout")
		a.DoRA, a.RankScaled, a.LoRABias = c.truth(false, "use_dora"), c.truth(false, "use_rslora"),
			c.truth(false, "lora_bias")
		a.Bias = c.word("none", "bias")
		a.Weights = c.word("true", "init_lora_weights")
		a.Parameters = c.list("target_parameters")
		a.TiesWeights = c.truth(false, "ensure_weight_tying")
		a.TrainableTokens = c.tokens()
		replicated := c.root.find("layer_replication")
		a.ReplicatesLayers = replicated != nil && len(replicated.elements) > 0
	case "VERA":
		a.Rank, a.Dropout = int(c.integer(256, "r")), c.number(0, "vera_dropout")
		a.Bias = c.word("none", "bias")
		a.SaveProjection = c.truth(true, "save_projection")
	case "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING":
		count := func(otherwise int64, key string) int { return int(c.integer(otherwise, key)) }
		a.Prompt = Prompt{
			VirtualTokens: count(0, "num_virtual_tokens"),
			TokenWidth:    count(0, "token_dim"),
			Submodules:    count(0, "num_transformer_submodules"),
			Layers:        count(0, "num_layers"),
			Heads:         count(0, "num_attention_heads"),
			Projection:    c.truth(false, "prefix_projection"),
			EncoderWidth:  count(0, "encoder_hidden_size"),
		}
		if a.Type == "P_TUNING" {
			a.Prompt.Encoder, a.Prompt.EncoderLayers = c.word("MLP", "encoder_reparameterization_type"),
				count(2, "encoder_num_layers")
		}
	}
}

// tokens returns trainable_token_indices.
func (c *checking) tokens() map[string][]int {
	v := c.root.find("trainable_token_indices")
	if v == nil {
		return nil
	}
	indices := func(list *value) []int {
		numbers := []int{}
		for _, element := range list.elements {
			numbers = append(numbers, int(element.integer))
		}
		return numbers
	}
	if v.kind == '[' {
		return map[string][]int{"": indices(v)}
	}
	tokens := map[string][]int{}
	for _, m := range v.members {
		tokens[m.name] = indices(m.value)
	}
	return tokens
}

// adapterConflicts returns the conflicts that PEFT refuses, in __post_init__ of
// its configurations and at the start of its tuners.
func (c *checking) adapterConflicts(a *Adapter) []conflict {
	targets := c.root.find("target_modules")
	word := targets != nil && targets.kind == '"'
	some := func(key string) bool {
		v := c.root.find(key)
		return v != nil && !(v.kind == '[' && len(v.elements) == 0) && !(v.kind == '{' && len(v.members) == 0) &&
			!(v.kind == '"' && v.text == "")
	}
	lora := a.Type == "LORA" || a.Type == "ADALORA"
	total := c.integer(0, "total_step")
	list := []conflict{
		{targets != nil && !word && len(targets.elements) == 0 && a.Parameters == nil, "target_modules",
			"is empty: nothing would be adapted", `name modules, or write "all-linear"`},
		{lora && word && c.root.find("layers_to_transform") != nil, "layers_to_transform",
			"needs target_modules to be a list: a pattern chooses the layers itself", "remove it, or list the modules"},
		{lora && word && c.root.find("layers_pattern") != nil, "layers_pattern",
			"needs target_modules to be a list: a pattern chooses the layers itself", "remove it, or list the modules"},
		{some("layers_pattern") && c.root.find("layers_to_transform") == nil, "layers_pattern",
			"is given without layers_to_transform", `add "layers_to_transform": [0, 1]`},
		{a.DoRA && some("megatron_config"), "use_dora", "does not go with megatron_config", "remove one of the two"},
		{a.Type == "ADALORA" && a.DoRA, "use_dora", "is true, which ADALORA does not know", "set it to false"},
		{a.Type == "ADALORA" && some("loftq_config"), "loftq_config", "is given, which ADALORA does not know",
			"remove it"},
		{a.Type == "LORA" && a.Weights == "loftq" && !some("loftq_config"), "init_lora_weights",
			`is "loftq", which needs loftq_config`, `add "loftq_config": {"loftq_bits": 4}`},
		{a.LoRABias && a.Weights != "true" && a.Weights != "false", "lora_bias",
			fmt.Sprintf("is true, which does not go with init_lora_weights %q", a.Weights),
			"set init_lora_weights to true"},
		{a.LoRABias && a.DoRA, "lora_bias", "is true, which does not go with use_dora", "set one of the two to false"},
		{a.Type == "ADALORA" && total == 0, "total_step", "is missing, and ADALORA needs it",
			`add "total_step" with the number of steps`},
		{a.Type == "ADALORA" && total > 0 && c.integer(0, "tinit") >= total-c.integer(0, "tfinal"), "tinit",
			"and tfinal leave no step for the budget between them", "lower one of the two, or raise total_step"},
		{strings.HasPrefix(a.Type, "P") && a.Prompt.VirtualTokens == 0, "num_virtual_tokens", "is missing",
			`add "num_virtual_tokens": 20`},
	}
	for _, key := range []string{"lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora"} { // ParamWrapper
		list = append(list, conflict{a.Parameters != nil && (c.truth(false, key) || c.number(0, key) != 0), key,
			"does not go with target_parameters", "remove one of the two"})
	}
	text := c.word("RANDOM", "prompt_tuning_init") == "TEXT"
	for _, key := range []string{"tokenizer_name_or_path", "prompt_tuning_init_text"} {
		list = append(list, conflict{text && !some(key), "prompt_tuning_init", `is "TEXT", which needs ` + key,
			fmt.Sprintf("add %q", key)})
	}
	list = append(list, conflict{!text && some("tokenizer_kwargs"), "tokenizer_kwargs",
		`needs prompt_tuning_init to be "TEXT"`, "remove it"})
	if feedforward := c.root.find("feedforward_modules"); feedforward != nil && targets != nil && !word {
		for _, name := range feedforward.texts() {
			list = append(list, conflict{!slices.Contains(targets.texts(), name), "feedforward_modules",
				fmt.Sprintf("holds %q, which is not in target_modules", name), "add it there"})
		}
	}
	return list
}
