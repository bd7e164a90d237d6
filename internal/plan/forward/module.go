package forward

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// Module is a part of a network that runs by itself, as in a benchmark.
type Module int

// The modules.
const (
	FirstNorm        Module = iota // the norm before the feed-forward network of the first block
	FirstFeedForward               // the feed-forward network of the first block
	HeadWithLoss                   // the output head and the loss
	LossAlone                      // the loss of logits
)

// RunModule runs the forward pass of a module on x, and returns its result. x is hidden states, or the logits of
// LossAlone.
func RunModule(t *autograd.Tape, network *model.Network, parameters Parameters, options Options, m Module,
	x *autograd.Tensor) *autograd.Tensor {
	p := &pass{Tape: t, Options: options, network: network, parameters: parameters,
		casts: &casts{weights: map[*autograd.Parameter]*autograd.Tensor{}}}
	defer p.In(ledger.ResidualActivations, p.whyResidual)()
	return t.Scope(func() *autograd.Tensor {
		block := &network.Blocks()[0]
		switch m {
		case FirstNorm:
			return p.norm(block.FeedForwardNorm, x)
		case FirstFeedForward:
			return p.feedForward(&block.FeedForward, x)
		case LossAlone:
			return p.crossEntropy(x)
		default:
			result := p.head(x)
			if result.Logits != nil {
				t.Drop(result.Logits)
			}
			return result.Loss
		}
	})
}
