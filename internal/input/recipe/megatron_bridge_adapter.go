package recipe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Keys of Megatron-Bridge's LoRA and CanonicalLoRA (megatron/bridge/peft/lora.py and canonical_lora.py of August 2026).
// Those of the second list change no memory: adapters on layers of Megatron core have the type of the model.
var (
	bridgeAdapterKeys = strings.Fields(`target_modules dim dropout dropout_position a2a_experimental
		share_expert_adapters _target_ _call_`)
	silentBridgeAdapter = strings.Fields(`alpha lora_A_init_method lora_B_init_method lora_dtype canonical_mapping
		params_to_save`)
)

// The modules that are adapted by default, by the class of the adapter.
var bridgeTargets = map[string]string{"LoRA": "linear_qkv linear_proj linear_fc1 linear_fc2",
	"CanonicalLoRA": "linear_q linear_k linear_v linear_proj linear_fc1_up linear_fc1_gate linear_fc2"}

// bridgeAdapter reads the adapter of a recipe of Megatron-Bridge.
func (s *megatronSections) bridgeAdapter() error {
	peft := s.find("peft")
	if !On(peft) || peft.IsEmpty() {
		return nil
	}
	if peft.Kind != '{' {
		return s.fault("peft", "its class says no settings")
	}
	class := target(peft)
	class = class[strings.LastIndexByte(class, '.')+1:]
	if bridgeTargets[class] == "" {
		return s.Inputf(peft.At, "peft is %s, which is not planned yet", class).
			WithHint("plimsoll plans LoRA and CanonicalLoRA of " + s.program)
	}
	for _, m := range peft.Members {
		v := s.find("peft." + m.Name)
		known := slices.Contains(bridgeAdapterKeys, m.Name) || slices.Contains(silentBridgeAdapter, m.Name)
		if !known && On(v) && !v.IsEmpty() {
			return s.fault("peft."+m.Name, "it changes the adapters")
		}
	}
	a := &CoreAdapter{At: s.Position(peft.At), Program: BridgeTuner, Rank: 32, Canonical: class == "CanonicalLoRA",
		AllToAll: s.is("peft.a2a_experimental"), DropsAfter: s.word("peft.dropout_position") == "post"}
	if share := s.find("peft.share_expert_adapters"); share != nil && !share.IsEmpty() && !On(share) {
		return s.fault("peft.share_expert_adapters", "each expert has an adapter of its own")
	}
	s.adapter = a
	return s.bridgeNumbers(a, class)
}

// bridgeNumbers reads the rank, the dropout and the modules of an adapter.
func (s *megatronSections) bridgeNumbers(a *CoreAdapter, class string) (err error) {
	if v := s.find("peft.dim"); v != nil {
		if a.Rank, err = strconv.ParseInt(v.Text, 10, 32); err != nil || a.Rank < 1 {
			return s.Inputf(v.At, "dim is %s, expected the rank of the adapters", v).WithHint("give a whole number")
		}
	}
	if v := s.find("peft.dropout"); v != nil && !v.IsEmpty() {
		if a.Dropout, err = strconv.ParseFloat(v.Text, 64); err != nil || !(a.Dropout >= 0 && a.Dropout < 1) {
			return s.Inputf(v.At, "dropout is %s, expected a share below 1", v).WithHint("give a number")
		}
	}
	targets := strings.Fields(bridgeTargets[class])
	if v := s.find("peft.target_modules"); v != nil {
		if v.Kind != '[' || len(v.Elements) == 0 {
			return s.fault("peft.target_modules", "other modules are adapted than it names")
		}
		targets = v.Texts()
	}
	if a.Canonical {
		if targets, err = s.canonicalTargets(targets); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(targets, func(name string) bool { return strings.Contains(name, "output_layer") }) {
		return s.fault("peft.target_modules", "it has the output layer")
	}
	return a.targetWildcards(targets)
}

// canonicalTargets returns the joined layers for the projections that a list names. Megatron-Bridge runs all of a
// layer's adapters, so a list has all of its projections or none.
func (s *megatronSections) canonicalTargets(names []string) (targets []string, err error) {
	parts := map[string][]string{"linear_qkv": {"linear_q", "linear_k", "linear_v"},
		"linear_fc1": {"linear_fc1_up", "linear_fc1_gate"}}
	joined := map[string]string{}
	for layer, list := range parts {
		for _, part := range list {
			joined[part] = layer
		}
	}
	count := map[string]int{}
	for _, name := range names {
		if parts[name] != nil || strings.Contains(name, "*") {
			return nil, s.Inputf(s.find("peft.target_modules").At, "target_modules of CanonicalLoRA has %s, which is "+
				"not planned", name).WithHint("name projections: linear_q, linear_k, linear_v, linear_fc1_up, " +
				"linear_fc1_gate")
		}
		layer := joined[name]
		if layer == "" {
			targets = append(targets, name)
		} else if count[layer]++; count[layer] == 1 {
			targets = append(targets, layer)
		}
	}
	for layer, n := range count {
		if n != len(parts[layer]) {
			return nil, s.Inputf(s.find("peft").At, "CanonicalLoRA adapts %d of the %d projections of %s: its forward "+
				"pass calls the adapters of all", n, len(parts[layer]), layer).
				WithHint(fmt.Sprintf("name %s", strings.Join(parts[layer], ", ")))
		}
	}
	return targets, nil
}
