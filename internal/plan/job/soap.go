package job

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// soap is SOAP of pytorch_optimizer (optimizer/soap.py in 4.1): Adam in the basis of Shampoo's factors. Every side of a
// matrix has a factor and its basis, unless it is longer than soapLongest.
const soap = "soap"

const soapLongest = 10_000 // max_precondition_dim

var soapKind = optimizerKind{name: soap, variant: Loop, uncounted: true, full: true, choose: (*resolver).soap,
	states: soapStates,
	passes: func(_ *Optimizer, parameters []*autograd.Parameter) [][]ledger.Bytes {
		return [][]ledger.Bytes{soapTemporaries(parameters)}
	},
	why: "the step over the matrix that makes the most, in a step that decomposes its factors " +
		"(get_orthogonal_matrix_qr): gradient and momentum in the basis and back, outer products, and what a " +
		"factor's QR makes"}

// soapSides returns the sizes of a matrix, and the elements of the factors of its two sides; 0 for a side without one.
func soapSides(p *autograd.Parameter) (rows, columns, first, second int64) {
	if p.Rows == 0 {
		return 0, 0, 0, 0
	}
	rows, columns = p.Rows, p.Elements/p.Rows
	if rows <= soapLongest {
		first = rows * rows
	}
	if columns <= soapLongest {
		second = columns * columns
	}
	return rows, columns, first, second
}

func soapStates(p *autograd.Parameter) []State {
	_, _, first, second := soapSides(p)
	states := sameShape("exp_avg", "exp_avg_sq")(p)
	if factors := (first + second) * p.DType.Size(); factors > 0 {
		states = append(states, State{"GG", factors}, State{"Q", factors})
	}
	return states
}

// soapTemporaries are those of the parameter that makes the most. The tests measure the real step.
func soapTemporaries(parameters []*autograd.Parameter) []ledger.Bytes {
	var most int64
	for _, p := range parameters {
		rows, columns, first, second := soapSides(p)
		elements := 4 * p.Elements
		outer := second // the outer product of the last side stays
		if second == 0 {
			outer = first
		}
		if first > 0 {
			elements = 7*p.Elements + 4*first + outer + second + 3*rows
		}
		if second > 0 {
			elements = max(elements, 7*p.Elements+2*first+5*second+3*columns)
		}
		most = max(most, elements*p.DType.Size())
	}
	return []ledger.Bytes{ledger.Bytes(most)}
}

// soap refuses what SOAP was not measured with.
func (r *resolver) soap(*Optimizer) error {
	if r.job.ParameterType != dtype.F32 {
		return fault.Inputf("SOAP is planned for parameters in fp32, and these are in %v: it converts factors of "+
			"other types to decompose them, which is not planned yet", r.job.ParameterType).
			WithHint("give --precision amp-bf16, or use --optimizer adamw")
	}
	for _, p := range r.job.Model.Parameters {
		if len(p.Shape) > 2 && !p.Frozen {
			return fault.Inputf("SOAP has a factor for each dimension, which is planned for matrices only, but %s has "+
				"%d dimensions", p.Name, len(p.Shape)).WithHint("use --optimizer adamw")
		}
	}
	r.assume("SOAP decomposes factors (torch.linalg.qr, eigh): their workspace on a GPU was not measured")
	return nil
}
