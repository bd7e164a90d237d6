package job

import (
	"strings"

	"plimsoll/internal/plan/autograd"
)

// sameShape returns states with the shape and type of the parameter.
func sameShape(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		states := make([]State, len(names))
		for i, name := range names {
			states[i] = State{name, p.Elements * p.DType.Size()}
		}
		return states
	}
}

// inFP32 returns states in fp32, for parameters of any type.
func inFP32(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		states := make([]State, len(names))
		for i, name := range names {
			states[i] = State{name, p.Elements * 4}
		}
		return states
	}
}

// factored returns Adafactor's states: a row and a column for a matrix, and the
// full second moment for a vector.
func factored(p *autograd.Parameter) []State {
	if p.Rows == 0 {
		return []State{{"exp_avg_sq", p.Elements * 4}}
	}
	return []State{{"exp_avg_sq_row", p.Rows * max(1, p.Matrices) * 4}, {"exp_avg_sq_col", p.Elements / p.Rows * 4}}
}

// blockwise returns bitsandbytes' states: a byte for each element, and an fp32 scale for 256 of them. Tensors below
// 4096 elements have fp32 states. So have embeddings in transformers' Trainer.
func blockwise(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		var states []State
		for i, name := range names {
			if p.Elements < 4096 || p.Embedding {
				states = append(states, State{name, p.Elements * 4})
				continue
			}
			scales := (p.Elements + 255) / 256 * 4
			states = append(states, State{name, p.Elements}, State{[]string{"absmax1", "absmax2"}[i], scales})
		}
		return states
	}
}

// doubled returns AdEMAMix's states of bitsandbytes: the first one holds two averages of the gradient.
func doubled(states func(*autograd.Parameter) []State) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		list := states(p)
		for i, s := range list {
			if strings.HasSuffix(s.Name, "1") {
				list[i].Bytes *= 2
			}
		}
		return list
	}
}

// nibbles returns torchao's 4-bit states: half a byte for each element, and an
// fp32 scale for 128 of them.
func nibbles(p *autograd.Parameter) []State {
	if p.Elements < 4096 {
		return inFP32("exp_avg", "exp_avg_sq")(p)
	}
	bytes := (p.Elements+1)/2 + (p.Elements+127)/128*4
	return []State{{"exp_avg", bytes}, {"exp_avg_sq", bytes}}
}
