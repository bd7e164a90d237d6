package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// withRouterLoss adds the loss of the load of experts (load_balancing_loss_func of
// transformers) if there is one. The outputs hold the logits of the routers.
func (p *pass) withRouterLoss(r Result) Result {
	if len(p.routers) == 0 {
		return r
	}
	defer p.In(ledger.LogitsAndLoss, p.whyRouters)()
	r.RouterLogits = p.routers
	r.Loss = p.Scope(func() *autograd.Tensor {
		inputs := []*autograd.Tensor{r.Loss}
		if p.RoutersTogether {
			inputs = append(inputs, p.routersTogether())
		} else {
			for _, logits := range p.routers {
				inputs = append(inputs, p.load(logits, logits.Elements/p.tokens()))
			}
		}
		return p.Do(autograd.Operation{Inputs: inputs,
			Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
	return r
}

func (p *pass) whyRouters() string {
	return "the logits of all routers and their probabilities, for the loss of the load of experts " +
		"(output_router_logits)"
}

// load returns the sums of the probabilities of every expert.
func (p *pass) load(logits *autograd.Tensor, experts int64) *autograd.Tensor {
	probabilities := p.softmax(logits, logits.DType)
	wide := p.follow(probabilities, p.cast(probabilities, dtype.F32))
	return p.follow(wide, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{wide},
		Outputs: []autograd.Output{{Elements: experts, DType: dtype.F32}}})[0])
}

// routersTogether returns these sums of the logits of all routers, joined. The
// choices of all tokens are counted by a number in int64 for each expert, in fp32 and
// with the mask of the batch once more in both.
func (p *pass) routersTogether() *autograd.Tensor {
	var elements, choices, experts int64
	for _, b := range p.network.Blocks() {
		if m := b.FeedForward.Mixture; m != nil {
			experts = int64(len(m.Experts))
			elements, choices = elements+p.tokens()*experts, choices+p.tokens()*m.Chosen
		}
	}
	joined := p.Do(autograd.Operation{Inputs: p.routers,
		Outputs: []autograd.Output{{Elements: elements, DType: p.routers[0].DType}}})[0]
	probabilities := p.softmax(joined, joined.DType)
	mask := p.New(elements, dtype.I64)
	const bytes = 2*8 + 2*4 // of one-hot numbers and masks
	return p.Do(autograd.Operation{
		Inputs: []*autograd.Tensor{probabilities}, Saved: []*autograd.Tensor{mask},
		Outputs: []autograd.Output{{Elements: experts, DType: dtype.F32}},
		Scratch: bytes * choices * experts,
	})[0]
}
