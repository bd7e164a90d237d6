package model

import (
	"strconv"

	"plimsoll/internal/base/dtype"
)

// construction collects the parameters of a model while its architecture is
// described.
type construction struct {
	*config
	*made
	body string // the module of a decoder without its head
}

// made is what has been described so far.
type made struct {
	weights    dtype.Type
	parameters []Parameter
	total      int64 // elements of the parameters so far
	network    *Network
	known      []architecture
	textType   string    // model_type of text_config, "" without one
	opaque     bool      // the operations are unknown
	encoders   []Encoder // then
	mixtures   []*Mixture
}

// withoutOperations says that the operations of the model are not planned: its
// parameters are all that is known.
func (s scope) withoutOperations() { s.opaque = true }

// scope is one module of the model, such as "model.layers.3.mlp". Its methods
// add the parameters of torch.nn's modules of the same names, in their order.
type scope struct {
	*construction
	path string
}

// in returns the scope of a module inside this one.
func (s scope) in(name string) scope { return scope{s.construction, s.path + name + "."} }

// add adds a tensor.
func (s scope) add(name, tiedTo string, shape ...int64) {
	count, ok := product(shape)
	if tiedTo != "" {
		count = 0
	}
	if !ok || s.total+count > maxElements || len(s.parameters) == maxParameters {
		s.fail(0, "", "the sizes make more than %d parameters or %d tensors", maxElements, maxParameters)
	}
	s.total += count
	s.parameters = append(s.parameters, Parameter{Name: s.path + name, Shape: shape, DType: s.weights, TiedTo: tiedTo})
}

// frozen adds a tensor that no gradient trains.
func (s scope) frozen(name string, shape ...int64) {
	s.tensor(name, shape...)
	s.parameters[len(s.parameters)-1].Frozen = true
}

// wide says that the last tensor stays in fp32.
func (s scope) wide() {
	s.parameters[len(s.parameters)-1].Wide = true
}

func (s scope) tensor(name string, shape ...int64) { s.add(name, "", shape...) }

// Methods for modules return their paths, for the description of the network.

func (s scope) embedding(name string, rows, width int64) string {
	s.tensor(name+".weight", rows, width)
	return s.module(name)
}

func (s scope) linear(name string, in, out int64, bias bool) string {
	s.tensor(name+".weight", out, in)
	if bias {
		s.tensor(name+".bias", out)
	}
	return s.module(name)
}

// norm adds an RMS norm: a weight and no bias.
func (s scope) norm(name string, width int64) Norm {
	s.tensor(name+".weight", width)
	return Norm{Path: s.module(name), Kind: RMSNorm}
}

func (s scope) layerNorm(name string, width int64) Norm {
	s.tensor(name+".weight", width)
	s.tensor(name+".bias", width)
	return Norm{Path: s.module(name), Kind: LayerNorm}
}

// head adds the projection to the vocabulary. It shares the storage of an
// embedding if the model ties its word embeddings.
func (s scope) head(name string, in, vocabulary int64, tied bool, embedding string) {
	if !s.flagOr(tied, "tie_word_embeddings") {
		embedding = ""
	}
	s.add(name+".weight", embedding, vocabulary, in)
	s.network.Head.Projection, s.network.Head.Outputs = s.module(name), vocabulary
}

// activation returns the function between the projections of a feed-forward
// network.
func (s scope) activation(otherwise string) string {
	for _, name := range []string{"hidden_activation", "hidden_act", "activation_function"} {
		if _, ok := s.find(name); ok {
			return s.textOr(otherwise, name)
		}
	}
	return otherwise
}

// repeat adds a list of modules with the same description.
func (s scope) repeat(name string, count int64, describe func(s scope, index int64)) {
	if count > maxModules {
		s.fail(0, "", "%s has %d modules, expected at most %d", s.path+name, count, maxModules)
	}
	list := s.in(name)
	for index := range count {
		describe(list.in(decimal(index)), index)
	}
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }
