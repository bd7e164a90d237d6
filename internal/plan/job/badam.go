package job

import (
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// badam is BAdam by layers: one block is trained at a time, with master weights and Adam's moments in fp32
// (BlockOptimizer in badam 1.4). The states of a block are dropped before the next one is trained.
const badam = "badam"

var badamKind = optimizerKind{name: badam, variants: []Variant{Foreach, Fused}, full: true,
	states: inFP32("master_weights", "exp_avg", "exp_avg_sq"), aliases: aliases{"badam_fused": {variant: Fused}},
	passes: func(o *Optimizer, parameters []*autograd.Parameter) [][]ledger.Bytes {
		return [][]ledger.Bytes{o.badamTemporaries(parameters)}
	},
	why: "BAdam's gradients in fp32 for a block, and the list of AdamW's step where it is foreach"}

// badamBlock is a part of the names of the block that is planned: from the first one the backward pass is longest.
const badamBlock = "layers.0."

// trainOneBlock freezes all but one block.
func (r *resolver) trainOneBlock() error {
	j := r.job
	partly := j.Model.Clone()
	found := false
	for i := range partly.Parameters {
		p := &partly.Parameters[i]
		block := strings.Contains(p.Name, badamBlock)
		found = found || block && !p.Frozen
		p.Frozen = p.Frozen || !block
	}
	if !found {
		return fault.Inputf("BAdam trains blocks whose names hold layers.0., layers.1. and so on, but %s has none",
			j.Model.Name).WithHint("use --optimizer adamw")
	}
	j.Model = partly
	r.assume("BAdam trains one block at a time: the plan trains the first one, from which the backward pass is longest")
	return nil
}

// badamTemporaries are the gradients in fp32, in place of those of the parameters, which are freed, and the list of a
// foreach step.
func (o *Optimizer) badamTemporaries(parameters []*autograd.Parameter) []ledger.Bytes {
	var list []ledger.Bytes
	for _, p := range parameters {
		if o.Variant == Foreach {
			list = append(list, ledger.Bytes(4*p.Elements))
		}
		list = append(list, ledger.Bytes((4-p.DType.Size())*p.Elements))
	}
	return list
}
