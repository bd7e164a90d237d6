package model

import (
	"cmp"
	"reflect"
	"slices"
	"strings"
)

// FuseExperts returns the model with the parameters and the network that
// transformers has in memory since version 5, for any checkpoint. The weights of
// all experts of a layer are two tensors, routers are modules of their own kind,
// some modules have other names, and some heads are tied.
func (m *Model) FuseExperts() *Model {
	if m.Network == nil || m.Network.Opaque != nil {
		return m.fuseOpaque()
	}
	network := m.Network.clone()
	instead := map[string][]Parameter{} // replacements (names and shapes) by module
	for _, b := range network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && !x.Separate {
			x.fuse(network.Hidden, instead)
		}
	}
	if head := &network.Head; head.Projection == "embed_out" { // of GPT-NeoX
		instead[head.Projection] = []Parameter{{Name: "lm_head.weight"}}
		head.Projection = "lm_head"
	}
	fused := *m
	fused.Network, fused.Parameters = network, replaced(m.Parameters, instead)
	if network.HeldBody != "" {
		fused.moveBody(network.Body+".", network.HeldBody+".")
	}
	fused.tieHead()
	return &fused
}

// moveBody gives the module of everything but the head another name.
func (m *Model) moveBody(from, to string) {
	m.Parameters = slices.Clone(m.Parameters)
	for i := range m.Parameters {
		if p := &m.Parameters[i]; strings.HasPrefix(p.Name, from) {
			p.Name = to + p.Name[len(from):]
		}
	}
	network := renamed(reflect.ValueOf(*m.Network), from, to).Interface().(Network)
	m.Network = &network
}

// renamed returns a copy of a part of a network whose paths begin otherwise.
func renamed(v reflect.Value, from, to string) reflect.Value {
	made := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		text := v.String()
		if strings.HasPrefix(text, from) {
			text = to + text[len(from):]
		}
		made.SetString(text)
	case reflect.Pointer:
		if !v.IsNil() {
			made.Set(reflect.New(v.Type().Elem()))
			made.Elem().Set(renamed(v.Elem(), from, to))
		}
	case reflect.Slice:
		for i := range v.Len() {
			made = reflect.Append(made, renamed(v.Index(i), from, to))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			made.Field(i).Set(renamed(v.Field(i), from, to))
		}
	default:
		return v
	}
	return made
}

// alwaysTied are the types whose head transformers ties to the embeddings since version 5, whatever config.json says
// (configuration_t5.py and configuration_mt5.py of 5.0.0).
var alwaysTied = []string{"t5", "mt5"}

func (m *Model) tieHead() {
	for i := range m.Parameters {
		if p := &m.Parameters[i]; p.Name == "lm_head.weight" && slices.Contains(alwaysTied, m.Type) {
			p.TiedTo = "shared.weight"
		}
	}
}

// fuseOpaque fuses the experts of a model whose operations are unknown.
func (m *Model) fuseOpaque() *Model {
	if len(m.mixtures) == 0 {
		return m
	}
	fused, instead := *m, map[string][]Parameter{}
	for _, x := range m.mixtures {
		mixture := *x
		mixture.Experts = slices.Clone(x.Experts)
		mixture.fuse(m.hidden, instead)
	}
	fused.Parameters, fused.mixtures = replaced(m.Parameters, instead), nil
	if m.Network != nil {
		with, _ := fused.WithoutOperations() // the types of the parameters are as before
		return with
	}
	return &fused
}

// replaced returns the parameters with others in place of those of some modules.
func replaced(parameters []Parameter, instead map[string][]Parameter) []Parameter {
	var with []Parameter
	for _, p := range parameters {
		list, differs := instead[strings.TrimSuffix(p.Name, ".weight")]
		if !differs {
			with = append(with, p)
		}
		for _, other := range list {
			made := p
			made.Name = other.Name
			if other.Shape != nil {
				made.Shape = other.Shape
			}
			with = append(with, made)
		}
	}
	return with
}

// WithRouterLoss returns the model with the loss of the load of experts. It returns
// false if the class adds none.
func (m *Model) WithRouterLoss() (*Model, bool) {
	for _, b := range m.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && x.Auxiliary {
			with, network := *m, *m.Network
			network.RouterLoss, with.Network = true, &network
			return &with, true
		}
	}
	return m, false
}

// Untied returns the model with a head of its own, as litgpt makes all models to finetune them: it copies tied weights
// when it converts a checkpoint (litgpt/model.py, litgpt/scripts/convert_hf_checkpoint.py).
func (m *Model) Untied() *Model {
	untied := *m
	untied.Parameters = slices.Clone(m.Parameters)
	for i := range untied.Parameters {
		untied.Parameters[i].TiedTo = ""
	}
	return &untied
}

// clone copies the parts of the network that FuseExperts changes.
func (n *Network) clone() *Network {
	network := *n
	network.Stacks = make([]*Stack, len(n.Stacks))
	for i, s := range n.Stacks {
		stack := *s
		stack.Blocks = slices.Clone(s.Blocks)
		for k := range stack.Blocks {
			if x := stack.Blocks[k].FeedForward.Mixture; x != nil {
				mixture := *x
				mixture.Experts = slices.Clone(x.Experts)
				stack.Blocks[k].FeedForward.Mixture = &mixture
			}
		}
		network.Stacks[i] = &stack
	}
	return &network
}

// fuse replaces the parameters of the experts by two, and renames the others.
func (x *Mixture) fuse(hidden int64, instead map[string][]Parameter) {
	router := x.HeldRouter
	if router == "" {
		router = x.Path + ".gate"
	}
	instead[x.Router] = []Parameter{{Name: router + ".weight"}}
	x.Router = router
	if x.Correction != "" {
		name := router + ".moe_statics.e_score_correction_bias"
		instead[x.Correction] = []Parameter{{Name: name}}
		x.Correction = name
	}
	gateUp, down, times := x.ExpertsPath()+".gate_up_proj", x.ExpertsPath()+".down_proj", int64(2)
	if x.Ungated {
		gateUp, times = x.ExpertsPath()+".up_proj", 1
	}
	if x.Fused() {
		instead[strings.TrimSuffix(x.GateUp, ".weight")] = []Parameter{{Name: gateUp}}
		instead[strings.TrimSuffix(x.Down, ".weight")] = []Parameter{{Name: down}}
	} else {
		count, inner := int64(len(x.Experts)), x.Experts[0].Inner
		first, width := cmp.Or(x.Experts[0].Gate, x.Experts[0].Up), x.Width(hidden)
		for i := range x.Experts {
			e := &x.Experts[i]
			instead[e.Gate], instead[e.Up], instead[e.Down] = nil, nil, nil
			e.Gate, e.Up, e.Down = "", "", ""
		}
		instead[first] = []Parameter{
			{Name: gateUp, Shape: []int64{count, times * inner, width}},
			{Name: down, Shape: []int64{count, width, inner}},
		}
	}
	x.GateUp, x.Down = gateUp, down
}
