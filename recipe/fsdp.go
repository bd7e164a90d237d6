package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/fault"
)

// FSDP is how PyTorch's Fully Sharded Data Parallel shards a model.
type FSDP struct {
	Version  int    // 1 or 2 (fully_shard)
	Strategy string // "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" or "hybrid_shard_zero2"

	// WrapPolicy says how modules are grouped into units, which FSDP
	// all-gathers one at a time: "transformer_based_wrap", "size_based_wrap" or
	// "no_wrap".
	WrapPolicy string
	WrapLayers []string // classes of layers; none means the default of the model's class
	WrapBySize int64    // the minimum number of parameters of a unit

	OffloadParameters       bool // to the CPU, with gradients and optimizer state
	ActivationCheckpointing bool
	UseOrigParams           bool   // always true with version 2
	BackwardPrefetch        string // "backward_pre", "backward_post" or "none"
	ForwardPrefetch         bool
	SyncModuleStates        bool
	RAMEfficientLoading     bool   // only the first rank reads the weights
	StateDictType           string // "full_state_dict", "sharded_state_dict" or "local_state_dict"
}

// The words that accelerate 1.15 accepts (utils/constants.py), in any case.
var (
	fsdpStrategies = []string{"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
	fsdpPolicies   = []string{"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}
	fsdpPrefetches = []string{"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}
	fsdpStateDicts = []string{"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}
)

// isFlag returns the rule of a boolean that may be a string: accelerate's
// str_to_bool.
func isFlag() rule {
	r := isBoolean()
	r.lax = true
	return r
}

// isCount returns the rule of an integer that may be a string. isAmount does so
// for any number.
func isCount() rule {
	r := isInteger()
	r.lax = true
	return r
}

func isAmount() rule {
	r := isNumber()
	r.lax = true
	return r
}

// fsdpKeys are the keys that the Trainer and accelerate share.
var fsdpKeys = map[string]rule{
	"version":                       isCount().from(1).to(2),
	"reshard_after_forward":         isText(fsdpStrategies...).inAnyCase().or(isFlag()),
	"transformer_layer_cls_to_wrap": isText().or(isList(isText())).orNull(),
	"min_num_params":                isCount().from(0),
	"cpu_ram_efficient_loading":     isFlag(),
	"state_dict_type":               isText(fsdpStateDicts...).inAnyCase(),
	"activation_checkpointing":      isFlag(),
	"forward_prefetch":              isFlag(),
	"backward_prefetch":             isText(fsdpPrefetches...).inAnyCase().orNull(),
	"use_orig_params":               isFlag(),
	"sync_module_states":            isFlag(),
}

// trainerFSDPSchema is fsdp_config of TrainingArguments: _process_fsdp_args in
// training_args.py of transformers 5.23, which ignores other keys.
var trainerFSDPSchema = isPrefixed("fsdp_", fsdpKeys, map[string]rule{
	"auto_wrap_policy":         isText(fsdpPolicies...),
	"cpu_offload":              isFlag(),
	"limit_all_gathers":        isFlag(),
	"xla":                      isFlag(),
	"xla_fsdp_v2":              isFlag(),
	"xla_fsdp_settings":        isFree(),
	"xla_fsdp_grad_ckpt":       isFlag(),
	"offload_params":           rule{}.noting(`has no effect: the Trainer reads "cpu_offload"`),
	"sharding_strategy":        rule{}.noting(`has no effect: the Trainer reads "reshard_after_forward"`),
	"mixed_precision":          rule{}.noting("has no effect: the Trainer takes it from bf16 and fp16"),
	"backward_prefetch_policy": rule{}.noting(`has no effect: the Trainer reads "backward_prefetch"`),
}).notingOthers()

// accelerateFSDPSchema is fsdp_config of an accelerate configuration: launch.py
// and FullyShardedDataParallelPlugin of accelerate 1.15.
var accelerateFSDPSchema = isPrefixed("fsdp_", fsdpKeys, map[string]rule{
	"sharding_strategy":        isText(fsdpStrategies...).inAnyCase().or(isCount().from(1).to(5)),
	"auto_wrap_policy":         isText(fsdpPolicies...).inAnyCase().orNull(),
	"offload_params":           isFlag(),
	"ignored_modules":          isText().orNull(),
	"backward_prefetch_policy": rule{}.noting(`has no effect: accelerate reads "fsdp_backward_prefetch"`),
}).orNull()

// isPrefixed returns the rule of an object with keys that may have the prefix.
func isPrefixed(prefix string, lists ...map[string]rule) rule {
	keys := map[string]rule{}
	for _, list := range lists {
		for name, r := range list {
			keys[name], keys[prefix+name] = r, r
		}
	}
	return isObject(keys)
}

// fsdp reads a checked section into f, which holds the defaults. The key for
// offloading differs between programs.
func (c *checking) fsdp(section string, f FSDP, offload string) (*FSDP, error) {
	if err := c.oneSpelling(section, "fsdp_"); err != nil {
		return nil, err
	}
	at := func(key string) string { return c.spelled(section, "fsdp_", key) }
	lower := func(otherwise, key string) string { return strings.ToLower(c.word(otherwise, at(key))) }

	f.Version = int(c.integer(int64(f.Version), at("version")))
	f.WrapPolicy = lower(f.WrapPolicy, "auto_wrap_policy")
	f.WrapBySize = c.integer(f.WrapBySize, at("min_num_params"))
	if layers := c.list(at("transformer_layer_cls_to_wrap")); layers != nil {
		f.WrapLayers = layers
	}
	f.OffloadParameters = c.truth(f.OffloadParameters, at(offload))
	f.ActivationCheckpointing = c.truth(false, at("activation_checkpointing"))
	f.RAMEfficientLoading = c.truth(f.RAMEfficientLoading, at("cpu_ram_efficient_loading"))
	f.SyncModuleStates = c.truth(true, at("sync_module_states"))
	f.StateDictType = lower(f.StateDictType, "state_dict_type")
	f.UseOrigParams = c.truth(true, at("use_orig_params"))
	f.ForwardPrefetch = c.truth(false, at("forward_prefetch"))
	if f.BackwardPrefetch = lower("none", "backward_prefetch"); f.BackwardPrefetch == "no_prefetch" {
		f.BackwardPrefetch = "none"
	}

	reshard := c.root.find(at("reshard_after_forward"))
	word := reshard != nil && slices.Contains(fsdpStrategies, strings.ToUpper(reshard.text))
	if err := c.refuse([]conflict{
		{f.Version == 2 && word, at("reshard_after_forward"), "is a strategy, but FSDP2 takes true or false",
			`write true for full_shard and false for shard_grad_op; the others need "version": 1`},
		{f.Version == 2 && f.StateDictType == "local_state_dict", at("state_dict_type"),
			"is LOCAL_STATE_DICT, which FSDP2 does not know", "use SHARDED_STATE_DICT"},
		{f.RAMEfficientLoading && !f.SyncModuleStates, at("sync_module_states"),
			"is false, but with cpu_ram_efficient_loading only the first rank has the weights",
			"set it to true, or cpu_ram_efficient_loading to false"},
	}); err != nil {
		return nil, err
	}
	switch {
	case word:
		f.Strategy = strings.ToLower(reshard.text)
	case reshard != nil && f.Version == 2 && reshard.truth:
		f.Strategy = "full_shard"
	case reshard != nil && f.Version == 2:
		f.Strategy = "shard_grad_op"
	}
	c.ignoredByFSDP(&f, at)
	return &f, nil
}

// ignoredByFSDP notes keys that have no effect and resets their values.
func (c *checking) ignoredByFSDP(f *FSDP, at func(string) string) {
	note := func(key, why string) {
		if c.root.find(at(key)) != nil {
			c.note(at(key), "has no effect "+why)
		}
	}
	if f.Version == 2 {
		for _, key := range []string{"backward_prefetch", "forward_prefetch", "use_orig_params"} {
			note(key, "with FSDP2")
		}
		f.BackwardPrefetch, f.ForwardPrefetch, f.UseOrigParams, f.SyncModuleStates = "none", false, true, false
	}
	if f.WrapPolicy != "transformer_based_wrap" {
		note("transformer_layer_cls_to_wrap", "with "+strings.ToUpper(f.WrapPolicy))
		f.WrapLayers = nil
	}
	if f.WrapPolicy != "size_based_wrap" {
		if f.WrapBySize > 0 {
			note("min_num_params", "with "+strings.ToUpper(f.WrapPolicy))
		}
		f.WrapBySize = 0
	} else if f.WrapBySize == 0 {
		note("min_num_params", "as zero: nothing is wrapped")
		f.WrapPolicy = "no_wrap"
	}
}

// spelled returns the path of a key of the section, with the prefix if the file
// has it.
func (c *checking) spelled(section, prefix, key string) string {
	if v := c.root.find(section); v != nil && v.member(prefix+key) != nil {
		return section + "." + prefix + key
	}
	return section + "." + key
}

// oneSpelling refuses a key that the section has both with and without the
// prefix.
func (c *checking) oneSpelling(section, prefix string) error {
	v := c.root.find(section)
	if v == nil {
		return nil
	}
	for _, m := range v.members {
		if bare, is := strings.CutPrefix(m.name, prefix); is && v.member(bare) != nil {
			return &fault.Input{
				Where: c.position(m.at),
				What: fmt.Sprintf("%s and %s (line %d) are two names for one setting",
					m.name, bare, c.position(v.member(bare).at).Line),
				Hint: "remove one of the two",
			}
		}
	}
	return nil
}

// list returns a list of names, which the file may give as one string with
// commas.
func (c *checking) list(path string) []string {
	v := c.root.find(path)
	if v == nil {
		return nil
	}
	if v.kind == '"' {
		return strings.FieldsFunc(v.text, func(r rune) bool { return r == ',' || r == ' ' })
	}
	return v.texts()
}

// texts returns the elements of a list of strings.
func (v *value) texts() []string {
	var texts []string
	for _, element := range v.elements {
		texts = append(texts, element.text)
	}
	return texts
}
