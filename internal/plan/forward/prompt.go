package forward

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// Prompt is what prompt tuning and P-tuning train: tokens before those of every sequence.
type Prompt struct {
	Tokens    int64
	Embedding *autograd.Parameter
	Layers    []PromptLayer // of P-tuning's network, with ReLU between them
}

// PromptLayer is a layer of the network that makes the tokens of P-tuning.
type PromptLayer struct{ Weight, Bias *autograd.Parameter }

// virtual returns the number of tokens in a micro batch that an adapter adds.
func (p *pass) virtual() int64 {
	if p.parameters.Prompt == nil {
		return 0
	}
	return p.Batch * p.parameters.Prompt.Tokens
}

// prompted puts the tokens of an adapter before the embeddings x (PeftModelForCausalLM.forward in peft_model.py).
func (p *pass) prompted(x *autograd.Tensor, width int64) *autograd.Tensor {
	prompt := p.parameters.Prompt
	if prompt == nil {
		return x
	}
	defer p.In(ledger.AdapterActivations, func() string {
		return "tokens that the adapter puts before those of every sequence"
	})()
	made := p.rows(prompt.Embedding, p.virtual()*width)
	for i, layer := range prompt.Layers {
		out := layer.Weight.Rows
		made = p.follow(made, p.small(layer.Weight, layer.Bias, made, layer.Weight.Elements/out, out))
		if i < len(prompt.Layers)-1 {
			made = p.follow(made, p.unary(made, made.DType, saveOutput))
		}
	}
	made = p.follow(made, p.cast(made, x.DType))
	all := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{made, x}, Shared: []bool{true, true},
		Outputs: []autograd.Output{{Elements: x.Elements + made.Elements, DType: x.DType}}})[0]
	p.Drop(made, x)
	return all
}
