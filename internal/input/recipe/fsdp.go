package recipe

import (
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// FSDP is how PyTorch's Fully Sharded Data Parallel shards a model.
type FSDP struct {
	Version  int    `key:"version"` // 1 or 2 (fully_shard)
	Strategy string // "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" or "hybrid_shard_zero2"

	// WrapPolicy says how modules are grouped into units, which FSDP
	// all-gathers one at a time: "transformer_based_wrap", "size_based_wrap" or
	// "no_wrap".
	WrapPolicy string `key:"auto_wrap_policy"`
	// WrapLayers are classes of layers; none means the default of the model's
	// class.
	WrapLayers []string `key:"transformer_layer_cls_to_wrap"`
	WrapBySize int64    `key:"min_num_params"` // the minimum number of parameters of a unit

	OffloadParameters       bool   // to the CPU, with gradients and optimizer state
	ActivationCheckpointing bool   `key:"activation_checkpointing"`
	UseOrigParams           bool   `key:"use_orig_params"`   // always true with version 2
	BackwardPrefetch        string `key:"backward_prefetch"` // "backward_pre", "backward_post" or "none"
	ForwardPrefetch         bool   `key:"forward_prefetch"`
	SyncModuleStates        bool   `key:"sync_module_states"`
	RAMEfficientLoading     bool   `key:"cpu_ram_efficient_loading"` // only the first rank reads the weights
	// StateDictType is "full_state_dict", "sharded_state_dict" or
	// "local_state_dict".
	StateDictType string `key:"state_dict_type"`
}

// The words that accelerate 1.15 accepts (utils/constants.py), in any case.
var (
	fsdpStrategies = []string{"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
	fsdpPolicies   = []string{"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}
	fsdpPrefetches = []string{"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}
	fsdpStateDicts = []string{"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}
)

var (
	// A program that has accelerate's str_to_bool takes strings, too.
	anyBoolean = rule.Boolean.Lax()
	anyInteger = rule.Integer.Lax()

	isStrategy  = strict.Text(fsdpStrategies...).InAnyCase()
	isStateDict = strict.Text(fsdpStateDicts...).InAnyCase()
	isPrefetch  = strict.Text(fsdpPrefetches...).InAnyCase()
)

// UnitsAtEnds says which units FSDP2 has beside the blocks and the root. Only a model whose head is not tied to its
// embedding has them.
type UnitsAtEnds struct {
	Embedding bool // of the embedding
	Tail      bool // of the last norm with the head, which stays gathered between the passes
}

// fsdpKeys are the keys that the Trainer and accelerate share.
var fsdpKeys = strict.Merge(
	anyBoolean.For("activation_checkpointing forward_prefetch"),
	anyBoolean.Default(true).For("use_orig_params sync_module_states"),
	strict.Keys{
		"reshard_after_forward":         isStrategy.Or(anyBoolean),
		"transformer_layer_cls_to_wrap": rule.NameOrNames,
		"backward_prefetch":             isPrefetch.OrNull().Default("NO_PREFETCH"),
	})

// trainerFSDPRule is fsdp_config of TrainingArguments: _process_fsdp_args in
// training_args.py of transformers 5.23, which ignores other keys.
var trainerFSDPRule = strict.Object(fsdpKeys, anyBoolean.For(`cpu_ram_efficient_loading cpu_offload limit_all_gathers xla
	xla_fsdp_v2 xla_fsdp_grad_ckpt`), strict.Keys{
	"version":                  anyInteger.From(1).To(2).Default(2),
	"auto_wrap_policy":         strict.Text(fsdpPolicies...).Default("TRANSFORMER_BASED_WRAP"),
	"min_num_params":           anyInteger.From(0),
	"state_dict_type":          isStateDict.Default("FULL_STATE_DICT"),
	"xla_fsdp_settings":        rule.Free,
	"offload_params":           strict.Rule{}.Noting(`has no effect: the Trainer reads "cpu_offload"`),
	"sharding_strategy":        strict.Rule{}.Noting(`has no effect: the Trainer reads "reshard_after_forward"`),
	"mixed_precision":          strict.Rule{}.Noting("has no effect: the Trainer takes it from bf16 and fp16"),
	"backward_prefetch_policy": strict.Rule{}.Noting(`has no effect: the Trainer reads "backward_prefetch"`),
}).Prefixed("fsdp_").NotingOthers()

// accelerateFSDPRule is fsdp_config of an accelerate configuration: launch.py
// and FullyShardedDataParallelPlugin of accelerate 1.15.
var accelerateFSDPRule = strict.Object(fsdpKeys, anyBoolean.For("offload_params"), strict.Keys{
	"version":                   anyInteger.From(1).To(2).Default(1),
	"auto_wrap_policy":          strict.Text(fsdpPolicies...).InAnyCase().OrNull().Default("NO_WRAP"),
	"min_num_params":            anyInteger.From(0).Default(1e8),
	"state_dict_type":           isStateDict, // the default depends on the version
	"cpu_ram_efficient_loading": anyBoolean.Default(true),
	"sharding_strategy":         isStrategy.Or(anyInteger.From(1).To(5)),
	"ignored_modules":           rule.Text.OrNull(),
	"backward_prefetch_policy":  strict.Rule{}.Noting(`has no effect: accelerate reads "fsdp_backward_prefetch"`),
}).Prefixed("fsdp_").NotingOthers().OrNull()

// readFSDP reads fsdp_config. What the older keys and words beside it say is in
// older, and the key for offloading differs between programs.
func readFSDP(s *strict.Reader, older FSDP, offload string) (*FSDP, error) {
	f := FSDP{Strategy: older.Strategy, OffloadParameters: older.OffloadParameters}
	s.Fill(&f)
	if older.Version > 0 && !s.Gives("version") {
		f.Version = older.Version
	}
	if f.WrapLayers == nil {
		f.WrapLayers = older.WrapLayers
	}
	if older.WrapBySize > 0 && !s.Gives("min_num_params") {
		f.WrapBySize = older.WrapBySize
	}
	if s.Gives(offload) {
		f.OffloadParameters = s.Truth(offload)
	}
	f.WrapPolicy, f.StateDictType = strings.ToLower(f.WrapPolicy), strings.ToLower(f.StateDictType)
	if f.BackwardPrefetch = strings.ToLower(f.BackwardPrefetch); f.BackwardPrefetch == "no_prefetch" {
		f.BackwardPrefetch = "none"
	}

	reshard := s.Find("reshard_after_forward")
	word := reshard != nil && slices.Contains(fsdpStrategies, strings.ToUpper(reshard.Text))
	if err := s.Refuse([]strict.Conflict{
		{f.Version == 2 && word, "reshard_after_forward", "is a strategy, but FSDP2 takes true or false",
			`write true for full_shard and false for shard_grad_op; the others need "version": 1`},
		{f.Version == 2 && f.StateDictType == "local_state_dict", "state_dict_type",
			"is LOCAL_STATE_DICT, which FSDP2 does not know", "use SHARDED_STATE_DICT"},
		{f.RAMEfficientLoading && !f.SyncModuleStates, "sync_module_states",
			"is false, but with cpu_ram_efficient_loading only the first rank has the weights",
			"set it to true, or cpu_ram_efficient_loading to false"},
	}); err != nil {
		return nil, err
	}
	switch {
	case word:
		f.Strategy = strings.ToLower(reshard.Text)
	case reshard != nil && f.Version == 2 && reshard.Truth:
		f.Strategy = "full_shard"
	case reshard != nil && f.Version == 2:
		f.Strategy = "shard_grad_op"
	}
	f.dropIgnored(s)
	return &f, nil
}

// dropIgnored notes keys that have no effect and resets their values.
func (f *FSDP) dropIgnored(s *strict.Reader) {
	note := func(key, why string) {
		if s.Gives(key) {
			s.Note(key, "has no effect "+why)
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
		note("min_num_params", "at 0: FSDP then wraps no modules")
		f.WrapPolicy = "no_wrap"
	}
}

// UsualStateDict returns what accelerate saves under a version of FSDP where nobody says it
// (FullyShardedDataParallelPlugin).
func UsualStateDict(version int) string {
	if version == 1 {
		return "full_state_dict"
	}
	return "sharded_state_dict"
}
