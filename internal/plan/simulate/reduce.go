package simulate

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/plan/autograd"
)

// reduceBuckets are the buckets of gradients that are reduced together, one for each type that they are reduced in
// (ipg_buckets of the ZeRO optimizers).
type reduceBuckets struct{ all []*reduceBucket }

// reduceBucket has the parameters whose gradients are in it.
type reduceBucket struct {
	communicated dtype.Type
	parameters   []*autograd.Parameter
	elements     int64
}

// of returns the bucket of a type.
func (r *reduceBuckets) of(t dtype.Type) *reduceBucket {
	for _, b := range r.all {
		if b.communicated == t {
			return b
		}
	}
	b := &reduceBucket{communicated: t}
	r.all = append(r.all, b)
	return b
}

func (b *reduceBucket) add(p *autograd.Parameter) {
	b.parameters = append(b.parameters, p)
	b.elements += p.Elements
}

func (b *reduceBucket) clear() { b.parameters, b.elements = b.parameters[:0], 0 }

// communicated returns the type that a gradient is reduced in: communication_data_type, or with torch_autocast its type
// for linear modules and the parameter's own for others (runtime/torch_autocast.py).
func (e *deepSpeed) communicated(p *autograd.Parameter) dtype.Type {
	switch t := e.recipe.Autocast; {
	case t != dtype.Invalid && e.linear[p.Index]:
		return t
	case t != dtype.Invalid:
		return p.DType
	}
	return e.communicates()
}

// communicates returns communication_data_type, or its counterpart where ranks share a sequence.
func (e *deepSpeed) communicates() dtype.Type {
	if e.Parallel.DeepSpeedUlysses {
		return cmp.Or(e.recipe.SequenceCommunication, dtype.F32)
	}
	return cmp.Or(e.recipe.Communication, e.ParameterType)
}

// bucketType returns the type of a bucket's memory. Before 0.17.2 it was that of the parameters.
func (e *deepSpeed) bucketType(b *reduceBucket) dtype.Type {
	if e.since(0, 17, 2) {
		return b.communicated
	}
	return e.ParameterType
}

// bucketTypes returns the types of all buckets.
func (e *deepSpeed) bucketTypes() []dtype.Type {
	var r reduceBuckets
	for _, p := range e.trained {
		r.of(e.communicated(p))
	}
	if len(r.all) == 0 || !e.since(0, 17, 2) {
		return []dtype.Type{e.ParameterType}
	}
	types := make([]dtype.Type, len(r.all))
	for i, b := range r.all {
		types[i] = b.communicated
	}
	return types
}

// bucketElementBytes returns the size of an element in all buckets together.
func (e *deepSpeed) bucketElementBytes() (sum int64) {
	for _, t := range e.bucketTypes() {
		sum += t.Size()
	}
	return sum
}

// whyTypes names the types of the buckets, if they are not the parameters' type alone.
func (e *deepSpeed) whyTypes() string {
	types := e.bucketTypes()
	if len(types) == 1 && types[0] == e.ParameterType {
		return ""
	}
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = t.String()
	}
	return fmt.Sprintf(" (%s)", strings.Join(names, " and "))
}

// narrows reports whether a parameter is gathered in the type of torch_autocast, and then cast back to its own.
func (e *deepSpeed) narrows(p *autograd.Parameter) bool {
	t := e.recipe.Autocast
	return e.Parallel.Shard > 1 && t != dtype.Invalid && t != p.DType && e.linear[p.Index] &&
		p.Quantized == autograd.Unquantized
}

// quantizedGroup is the number of elements that share a scale (CUDAQuantizer in zero/partition_parameters.py).
const quantizedGroup = 8000

// quantizes reports whether parameters are gathered in 8 bits (qwZ of ZeRO++).
func (e *deepSpeed) quantizes() bool { return e.recipe.QuantizedGather && e.Parallel.Shard > 1 }

// linearParameters says which parameters are of torch.nn.Linear: matrices and biases of modules that are no embedding.
// torch_autocast reduces and gathers them in its type.
func (e *deepSpeed) linearParameters() []bool {
	list := make([]bool, len(e.parameters))
	if e.recipe.AutocastsOthers {
		return list
	}
	matrices := map[string]bool{}
	module := func(name string) string { return name[:max(0, strings.LastIndexByte(name, '.'))] }
	for _, p := range e.Model.Parameters {
		made := e.modules.ByName[p.Name]
		if made == nil || !strings.HasSuffix(p.Name, ".weight") || made.Matrices > 0 || len(p.Shape) != 2 {
			continue
		}
		// A tied head is a linear module that has the embedding's weight.
		if !made.Embedding || p.TiedTo != "" || e.tied(p.Name) {
			list[made.Index], matrices[module(p.Name)] = true, true
		}
	}
	for _, p := range e.Model.Parameters {
		if made := e.modules.ByName[p.Name]; made != nil && matrices[module(p.Name)] {
			list[made.Index] = true
		}
	}
	for _, a := range e.modules.Adapters {
		for _, p := range a.Parameters() {
			list[p.Index] = p.Rows > 0
		}
	}
	return list
}

// tied reports whether another module has the weight, too.
func (e *deepSpeed) tied(name string) bool {
	for _, p := range e.Model.Parameters {
		if p.TiedTo == name {
			return true
		}
	}
	return false
}
