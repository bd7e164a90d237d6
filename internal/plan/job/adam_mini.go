package job

import (
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/autograd"
)

// adamMini is Adam-mini: a first moment, and one second moment for a head of queries and keys, for a row of other
// matrices, or for all of a parameter (Adam_mini in adam_mini 1.1.1). Biases have Adam's moments.
const adamMini = "adam-mini"

var adamMiniKind = optimizerKind{name: adamMini, variant: Loop, choose: (*resolver).mini, loopTensors: 2, full: true,
	aliases: aliases{"adam_mini": {}, "adammini": {}}}

// Names of parameters, by what Adam-mini does to them.
var (
	miniHeads = strings.Fields("k_proj q_proj wq wk query key")
	miniRows  = strings.Fields(`embed embd wte lm_head output final_layer v_proj wv value feed_forward linear mlp o_proj
		wo attn.proj`)
)

// namedAny reports whether a name holds one of others.
func namedAny(name string, of []string) bool {
	return slices.ContainsFunc(of, func(part string) bool { return strings.Contains(name, part) })
}

// mini sets the states of Adam-mini, which depend on the heads of the model.
func (r *resolver) mini(o *Optimizer) error {
	network := r.job.Model.Network
	var heads int64
	if blocks := network.Blocks(); len(blocks) > 0 {
		heads = blocks[0].Attention.Heads
	}
	refused := func(why string) error {
		return fault.Inputf("Adam-mini cannot be planned for %s, which has %s", r.job.Model.Name, why).
			WithHint("use --optimizer adamw")
	}
	if heads == 0 || network.Hidden == 0 {
		return refused("no heads of attention")
	}
	head := network.Hidden * network.Hidden / heads
	seconds := map[string]int64{} // elements of the second moment
	for _, p := range r.job.Model.Parameters {
		name := strings.ToLower(p.Name)
		switch {
		case p.TiedTo != "" || p.Frozen:
		case strings.Contains(name, "bias"):
			seconds[p.Name] = p.Elements()
		case namedAny(name, miniHeads):
			if seconds[p.Name] = p.Elements() / head; p.Elements()%head != 0 {
				return refused("no whole number of heads in " + p.Name)
			}
		case namedAny(name, miniRows):
			if len(p.Shape) != 2 {
				return refused(p.Name + ", which is no matrix")
			}
			seconds[p.Name] = p.Shape[0]
		default:
			seconds[p.Name] = 1
		}
	}
	o.States = func(p *autograd.Parameter) []State {
		return []State{{"m", p.Elements * p.DType.Size()}, {"vmean", seconds[p.Name] * p.DType.Size()}}
	}
	return nil
}
