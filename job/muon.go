package job

import (
	"plimsoll/autograd"
	"plimsoll/ledger"
)

// muon is torch.optim.Muon for the matrices of hidden layers, and torch.optim.AdamW for the rest: embeddings, the
// output head, and what is no matrix (plimsoll.torch.muon_groups). A stack of matrices, as fused experts are, counts as
// its matrices.
const muon = "muon"

var muonOptimizer = Optimizer{lists: 1, loopTensors: 2,
	States: func(p *autograd.Parameter) []State {
		if p.Hidden {
			return sameShape("momentum_buffer")(p)
		}
		return sameShape("exp_avg", "exp_avg_sq")(p)
	},
	listsWhy: "torch.optim.Muon orthogonalizes a matrix at a time in bf16 (_zeropower_via_newtonschulz in " +
		"torch/optim/_muon.py); torch.optim.AdamW has all other parameters, and a list of its own",
}

// muonPasses returns the temporaries of Muon's step over the hidden matrices, and of AdamW's step over the others.
func (o *Optimizer) muonPasses(parameters []*autograd.Parameter) [][]ledger.Bytes {
	var others []*autograd.Parameter
	var largest []ledger.Bytes
	most := ledger.Bytes(0)
	for _, p := range parameters {
		if !p.Hidden {
			others = append(others, p)
			continue
		}
		list := orthogonalized(p)
		sum := ledger.Bytes(0)
		for _, bytes := range list {
			sum += bytes
		}
		if sum > most {
			largest, most = list, sum
		}
	}
	return [][]ledger.Bytes{largest, o.temporaries(others)}
}

// orthogonalized returns the temporaries of a matrix's update: the momentum ahead of the gradient (Nesterov) in their
// type, and in bf16 the matrix before and behind an iteration, its Gram matrix, and the polynomial of that.
func orthogonalized(p *autograd.Parameter) []ledger.Bytes {
	matrices := max(1, p.Matrices)
	columns := p.Elements / (matrices * p.Rows)
	gram := ledger.Bytes(2 * matrices * min(p.Rows, columns) * min(p.Rows, columns))
	matrix := ledger.Bytes(2 * p.Elements)
	return []ledger.Bytes{ledger.Bytes(p.Elements * p.DType.Size()), matrix, gram, gram, matrix}
}
