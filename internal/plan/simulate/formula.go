package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
)

// listedSizes is how many sizes of tensors a formula lists. The last term adds up all others.
const listedSizes = 6

// formula returns the formula of a component that holds blocks. It evaluates to the sum of the blocks.
func (m *measures) formula(component ledger.Component, held []alike) ledger.Formula {
	var sum ledger.Bytes
	for _, b := range held {
		sum += b.total()
	}
	if m == nil {
		return m.ofTensors(component, held)
	}
	for _, f := range m.formulas(component) {
		if padded, ok := pad(f, sum); ok {
			return padded
		}
	}
	return m.ofTensors(component, held)
}

// formulas returns the formulas that a component may have, the likeliest first.
func (m *measures) formulas(component ledger.Component) []ledger.Formula {
	combine, known := m.sums[component]
	if !known {
		return nil
	}
	if _, done := m.combined[component]; !done {
		m.combined[component] = combine()
	}
	return m.combined[component]
}

// pad returns the formula, with the padding of shards that makes it equal to the sum. It reports false where the sum is
// another: shards of parameters have at most a hundredth of padding, and only shards have any.
func pad(f ledger.Formula, sum ledger.Bytes) (ledger.Formula, bool) {
	ranks := int64(1)
	for _, t := range f {
		if last := t[len(t)-1]; last.Divides {
			ranks = last.Number
		}
	}
	full, whole := f.Times(ranks, "ranks").Bytes()
	padding := sum*ledger.Bytes(ranks) - full
	switch {
	case !whole || padding < 0 || padding > 0 && ranks == 1 || padding > full/100:
		return nil, false
	case padding == 0:
		return f, true
	}
	return append(f[:len(f):len(f)], ledger.Term{ledger.Of(int64(padding), "B of padding"),
		ledger.Per(ranks, "ranks")}), true
}

// ofTensors returns the sum over tensors: their number, and the tokens and bytes of each.
func (m *measures) ofTensors(component ledger.Component, held []alike) ledger.Formula {
	var f ledger.Formula
	listed := held
	if len(held) > listedSizes+1 {
		listed = held[:listedSizes]
	}
	for _, b := range listed {
		f = append(f, m.ofSize(component, b))
	}
	var rest ledger.Bytes
	var tensors int64
	for _, b := range held[len(listed):] {
		rest, tensors = rest+b.total(), tensors+b.count
	}
	if tensors > 0 {
		f = append(f, ledger.Term{ledger.Of(int64(rest), fmt.Sprintf("B in %s smaller blocks", ledger.Count(tensors)))})
	}
	return f
}

// ofSize returns the product for tensors of one size.
func (m *measures) ofSize(component ledger.Component, b alike) ledger.Term {
	unit := "block"
	if ofPasses(component) {
		unit = "tensor"
	}
	if b.count > 1 {
		unit += "s"
	}
	t, bytes := ledger.Term{ledger.Of(b.count, unit)}, int64(b.bytes)
	if m == nil {
		return append(t, ledger.Of(bytes, "B"))
	}
	if of, known := m.types[component]; known && bytes%of.Size() == 0 {
		return append(t, ledger.Of(bytes/of.Size(), "elements"), ledger.Of(of.Size(), fmt.Sprintf("B (%v)", of)))
	}
	if m.tokens > 1 && bytes%m.tokens == 0 && ofPasses(component) {
		return append(t, ledger.Of(m.tokens, "tokens"), ledger.Of(bytes/m.tokens, "B a token"))
	}
	return append(t, ledger.Of(bytes, "B"))
}

// ofPasses reports whether a component holds what a forward and a backward pass make of the tokens.
func ofPasses(c ledger.Component) bool {
	switch c {
	case ledger.Batch, ledger.Activations, ledger.LogitsAndLoss, ledger.ActivationGradients:
		return true
	}
	return c.PartOf() == ledger.Activations && c != ledger.AutocastWeights && c != ledger.FakeQuantizedWeights &&
		c != ledger.DequantizedWeights
}
