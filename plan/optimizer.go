package plan

import (
	"slices"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// optimizer describes the states of an optimizer and the temporaries of its step.
// States have their names in torch.optim.
type optimizer struct {
	Name    string
	Variant Variant
	// states returns the states of a parameter. They may differ for small
	// tensors.
	states func(p *autograd.Parameter) []state
	// copies is the number of lists that a foreach step makes, each as large as
	// all parameters. loopCopies is the number of tensors that a step over single
	// parameters makes, each as large as the largest parameter.
	copies, loopCopies int64
	copiesWhy          string
	// managed means that states are in CUDA's managed memory (paged optimizers),
	// outside torch's allocator.
	managed bool
}

// state is one state tensor.
type state struct {
	name  string
	bytes int64
}

// Variant is the implementation of a step in torch.optim.
type Variant string

// The variants.
const (
	Foreach Variant = "foreach"
	Fused   Variant = "fused"
	Loop    Variant = "for-loop"
)

// Optimizers returns the sorted names of the optimizers that can be planned.
func Optimizers() []string {
	names := make([]string, 0, len(optimizerKinds))
	for name := range optimizerKinds {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

var optimizerKinds = map[string]optimizer{
	"adamw": {states: alike("exp_avg", "exp_avg_sq"), copies: 1, loopCopies: 2,
		copiesWhy: "torch.optim.AdamW(foreach=True) makes the list exp_avg_sq_sqrt = " +
			"torch._foreach_sqrt(exp_avg_sqs): one more copy of a moment of all parameters (torch/optim/adam.py, " +
			"_multi_tensor_adam)"},
	"adam": {states: alike("exp_avg", "exp_avg_sq"), copies: 1, loopCopies: 2,
		copiesWhy: "torch.optim.Adam(foreach=True) makes the list exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs) " +
			"(torch/optim/adam.py, _multi_tensor_adam)"},
	"sgd":          {states: alike()},
	"sgd-momentum": {states: alike("momentum_buffer")},
	"adagrad": {states: alike("sum"), copies: 2, loopCopies: 2,
		copiesWhy: "torch.optim.Adagrad(foreach=True) makes the lists std and numerator (torch/optim/adagrad.py, " +
			"_multi_tensor_adagrad)"},
	"rmsprop": {states: alike("square_avg"), copies: 1, loopCopies: 1,
		copiesWhy: "torch.optim.RMSprop(foreach=True) makes the list avg = torch._foreach_sqrt(square_avgs) " +
			"(torch/optim/rmsprop.py)"},
	"lion": {states: alike("exp_avg"), copies: 1, loopCopies: 1,
		copiesWhy: "the update is a list of its own"},
	"adafactor":   {states: factored, loopCopies: 3},
	"adamw-8bit":  {states: blockwise("state1", "state2")},
	"lion-8bit":   {states: blockwise("state1")},
	"adamw-32bit": {states: wide("state1", "state2")},
	"adamw-apex":  {states: wide("exp_avg", "exp_avg_sq")},
	"lion-32bit":  {states: wide("state1")},
	"adamw-4bit":  {states: nibbles},
	"lomo":        {states: alike()},
}

// alike returns states with the shape and type of the parameter.
func alike(names ...string) func(*autograd.Parameter) []state {
	return func(p *autograd.Parameter) []state {
		states := make([]state, len(names))
		for i, name := range names {
			states[i] = state{name, p.Elements * p.DType.Size()}
		}
		return states
	}
}

// wide returns states in fp32, for parameters of any type.
func wide(names ...string) func(*autograd.Parameter) []state {
	return func(p *autograd.Parameter) []state {
		states := make([]state, len(names))
		for i, name := range names {
			states[i] = state{name, p.Elements * 4}
		}
		return states
	}
}

// factored returns Adafactor's states: a row and a column for a matrix, and the
// full second moment for a vector.
func factored(p *autograd.Parameter) []state {
	if p.Rows == 0 {
		return []state{{"exp_avg_sq", p.Elements * 4}}
	}
	return []state{{"exp_avg_sq_row", p.Rows * max(1, p.Matrices) * 4}, {"exp_avg_sq_col", p.Elements / p.Rows * 4}}
}

// blockwise returns bitsandbytes' states: a byte for each element, and an fp32
// scale for 256 of them. Tensors below 4096 elements have fp32 states, and so
// have embeddings in transformers' Trainer.
func blockwise(names ...string) func(*autograd.Parameter) []state {
	return func(p *autograd.Parameter) []state {
		var states []state
		for i, name := range names {
			if p.Elements < 4096 || p.Embedding {
				states = append(states, state{name, p.Elements * 4})
				continue
			}
			scales := (p.Elements + 255) / 256 * 4
			states = append(states, state{name, p.Elements}, state{[]string{"absmax1", "absmax2"}[i], scales})
		}
		return states
	}
}

// nibbles returns torchao's 4-bit states: half a byte for each element, and an
// fp32 scale for 128 of them.
func nibbles(p *autograd.Parameter) []state {
	if p.Elements < 4096 {
		return wide("exp_avg", "exp_avg_sq")(p)
	}
	bytes := (p.Elements+1)/2 + (p.Elements+127)/128*4
	return []state{{"exp_avg", bytes}, {"exp_avg_sq", bytes}}
}

// scratch returns the sizes of the temporaries at the peak of a step: tensors
// like all parameters, or tensors like the largest.
func (o *optimizer) scratch(parameters []*autograd.Parameter) []ledger.Bytes {
	var list []ledger.Bytes
	var largest ledger.Bytes
	for _, p := range parameters {
		bytes := ledger.Bytes(p.Elements * p.DType.Size())
		if o.Name == "adafactor" {
			bytes = ledger.Bytes(p.Elements * dtype.F32.Size())
		}
		largest = max(largest, bytes)
		if o.Variant == Foreach {
			for range o.copies {
				list = append(list, bytes)
			}
		}
	}
	if o.Variant == Loop || o.Variant == Foreach && o.copies == 0 {
		for range o.loopCopies {
			list = append(list, largest)
		}
	}
	return list
}
