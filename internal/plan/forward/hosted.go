package forward

import (
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// hostedExperts runs experts on the host: KTMoEFunction in kt_kernel/sft/autograd.py. The GPU keeps nothing of them for
// the backward pass. The first rank receives the tokens of all ranks, joins them, and gets their results; the plan is
// its. In the backward pass it does the same with gradients.
func (p *pass) hostedExperts(m *model.Mixture, x, weights *autograd.Tensor) *autograd.Tensor {
	tokens, ranks := x.Elements/p.network.Hidden, p.HostRanks
	const id, wide = 8, 4
	routing := tokens * m.Chosen * (id + weights.DType.Size())
	o := autograd.Operation{Inputs: []*autograd.Tensor{x, weights},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}},
		Scratch: tokens * m.Chosen * wide, BackwardScratch: tokens * m.Chosen * wide}
	if ranks > 1 {
		all, others := ranks*x.Bytes(), (ranks-1)*x.Bytes()
		o.Scratch = max(others+all+(2*ranks-1)*routing+ranks*tokens*m.Chosen*wide, all)
		o.BackwardScratch = others + 2*all + ranks*tokens*m.Chosen*(wide+2)
	}
	return p.Do(o)[0]
}
