package autograd

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/dtype"
	"plimsoll/ledger"
)

// memory is a Memory that notices what must not happen.
type memory struct {
	t    interface{ Fatalf(string, ...any) }
	live map[int]ledger.Bytes
	of   map[int]string
	next int
	peak ledger.Bytes
	log  []string
}

func newMemory(t interface{ Fatalf(string, ...any) }) *memory {
	return &memory{t: t, live: map[int]ledger.Bytes{}, of: map[int]string{}}
}

func (m *memory) Allocate(bytes ledger.Bytes, component string) int {
	if bytes <= 0 {
		m.t.Fatalf("%d bytes of %q are allocated", bytes, component)
	}
	m.next++
	m.live[m.next], m.of[m.next] = bytes, component
	m.peak = max(m.peak, m.sum())
	m.log = append(m.log, fmt.Sprintf("+%d", bytes))
	return m.next
}

func (m *memory) Relabel(id int, component string) {
	if _, ok := m.live[id]; !ok {
		m.t.Fatalf("%d is given another name and is not allocated", id)
	}
	m.of[id] = component
}

func (m *memory) Free(id int) {
	bytes, ok := m.live[id]
	if !ok {
		m.t.Fatalf("%d is freed and is not allocated", id)
	}
	m.log = append(m.log, fmt.Sprintf("-%d", bytes))
	delete(m.live, id)
}

func (m *memory) sum() (sum ledger.Bytes) {
	for _, bytes := range m.live {
		sum += bytes
	}
	return sum
}

func (m *memory) component(name string) (sum ledger.Bytes) {
	for id, bytes := range m.live {
		if m.of[id] == name {
			sum += bytes
		}
	}
	return sum
}

// events are what happened since the last call.
func (m *memory) events() string {
	text := strings.Join(m.log, " ")
	m.log = nil
	return text
}

// weight is a matrix of this many fp32 elements.
func weight(elements int64) *Parameter {
	return &Parameter{Elements: elements, DType: dtype.F32, Trainable: true}
}

// linear is a product with a weight: it saves its input for the gradient of
// the weight.
func linear(t *Tape, x *Tensor, w *Parameter, out int64) *Tensor {
	o := Operation{Inputs: []*Tensor{x, w.Tensor()}, Outputs: []Output{{Elements: out, DType: dtype.F32}}, Product: true, Kept: true}
	if w.Trainable {
		o.Saved = []*Tensor{x}
	}
	return t.Do(o)[0]
}

func TestLinear(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m)
	w := weight(12)
	x := tape.New(3, dtype.F32)
	y := linear(tape, x, w, 4)
	tape.Drop(x) // saved
	if got := m.events(); got != "+12 +16" {
		t.Errorf("forward: %s", got)
	}
	// The incoming gradient and the weight's, and then all but that are freed.
	tape.Backward(y)
	if got := m.events(); got != "+16 +48 -12 -16" {
		t.Errorf("backward: %s", got)
	}
	tape.Drop(y)
	if m.sum() != 48 || m.component(Gradients) != 48 || !w.HasGradient() {
		t.Errorf("%v are left, %v of gradients", m.sum(), m.component(Gradients))
	}
	w.DropGradient()
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

func TestFrozenWeightSavesNothing(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m)
	w := weight(12)
	w.Trainable = false
	x := tape.New(3, dtype.F32)
	y := linear(tape, x, w, 4)
	tape.Drop(x)
	if m.sum() != 16 || y.NeedsGradient() {
		t.Errorf("%v are held after a product that nothing needs the gradient of", m.sum())
	}
	tape.Backward(y)
	tape.Drop(y)
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

// TestTiedParameter uses a weight twice: its gradient is complete once, and the
// sum of two views is a third tensor for a moment.
func TestTiedParameter(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m)
	w := weight(100)
	complete := 0
	w.OnGradient = func(*Parameter) { complete++ }
	x := tape.New(10, dtype.F32)
	h := linear(tape, x, w, 10)
	y := linear(tape, h, w, 10)
	tape.Drop(x, h)
	tape.Backward(y)
	tape.Drop(y)
	if complete != 1 {
		t.Errorf("the gradient was complete %d times", complete)
	}
	if m.sum() != 400 || m.peak < 1200 {
		t.Errorf("%v are left of at most %v, expected 400 of 1200 and some", m.sum(), m.peak)
	}
}

// TestAccumulation adds the gradient of a second pass in place.
func TestAccumulation(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m)
	w := weight(50)
	for range 2 {
		x := tape.New(5, dtype.F32)
		y := linear(tape, x, w, 10)
		tape.Drop(x)
		tape.Backward(y)
		tape.Drop(y)
	}
	if m.sum() != 200 {
		t.Errorf("%v are left, expected one gradient of 200 B", m.sum())
	}
}

// TestResidual adds a tensor to what a branch made of it: the gradient of the
// sum goes both ways without a copy.
func TestResidual(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m)
	w, first := weight(100), weight(100)
	x := tape.New(10, dtype.F32)
	h := linear(tape, x, first, 10)
	branch := linear(tape, h, w, 10)
	sum := tape.Do(Operation{Inputs: []*Tensor{h, branch}, Shared: []bool{true, true}, Outputs: []Output{{Elements: 10, DType: dtype.F32}}})[0]
	tape.Drop(x, h, branch)
	m.events()
	tape.Backward(sum)
	// The incoming gradient; of the branch the input's and the weight's; a sum
	// of its own, because the branch still holds the incoming one; what is saved
	// and not needed any more; the gradient of the first weight.
	if got := m.events(); got != "+40 +40 +400 +40 -40 -40 -40 +400 -40 -40" {
		t.Errorf("backward: %s", got)
	}
	tape.Drop(sum)
	if m.sum() != 800 {
		t.Errorf("%v are left", m.sum())
	}
}

func TestCheckpoint(t *testing.T) {
	for _, c := range []Checkpoint{{}, {Reentrant: true}, {Selective: 1}, {Selective: 2}} {
		m := newMemory(t)
		tape := NewTape(m)
		weights := []*Parameter{weight(100), weight(100), weight(100)}
		x := tape.New(10, dtype.F32)
		tape.RequireGradient(x)
		y := tape.Checkpoint(c, x, func(x *Tensor) *Tensor {
			return tape.Scope(func() *Tensor {
				for _, w := range weights {
					x = linear(tape, x, w, 10)
				}
				return x
			})
		})
		tape.Drop(x)
		// The input and the result; of a selective one what it keeps.
		kept := map[int]ledger.Bytes{0: 80, 1: 160, 2: 120}[c.Selective]
		if m.sum() != kept {
			t.Errorf("%+v: %v are held after the forward pass, expected %v", c, m.sum(), kept)
		}
		tape.Backward(y)
		tape.Drop(y)
		if m.component(Gradients) != 1200 {
			t.Errorf("%+v: gradients of %v, expected 1200 B", c, m.component(Gradients))
		}
		tape.Drop(x)
		if m.sum() != 1200 {
			t.Errorf("%+v: %v are left", c, m.sum())
		}
	}
}

// TestEverythingIsFreed runs random programs: after the backward pass nothing
// is left but gradients, and every parameter that was used has one.
func TestEverythingIsFreed(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m := newMemory(r)
		tape := NewTape(m)
		var parameters []*Parameter
		for range rapid.IntRange(1, 4).Draw(r, "parameters") {
			w := weight(rapid.Int64Range(1, 50).Draw(r, "elements"))
			w.Trainable = rapid.Bool().Draw(r, "trainable")
			parameters = append(parameters, w)
		}
		used := map[*Parameter]bool{}
		program := func(x *Tensor) *Tensor {
			return tape.Scope(func() *Tensor {
				for range rapid.IntRange(1, 4).Draw(r, "operations") {
					w := parameters[rapid.IntRange(0, len(parameters)-1).Draw(r, "parameter")]
					switch rapid.IntRange(0, 4).Draw(r, "operation") {
					case 0:
						before := x
						x = linear(tape, x, w, rapid.Int64Range(1, 20).Draw(r, "out"))
						used[w] = true
						tape.Drop(before)
					case 1:
						h := linear(tape, x, w, x.Elements)
						used[w] = true
						x = tape.Do(Operation{Inputs: []*Tensor{x, h}, Shared: []bool{true, true}, Outputs: []Output{{Elements: x.Elements, DType: dtype.F32}}})[0]
					case 2:
						x = tape.Do(Operation{Inputs: []*Tensor{x}, Saved: []*Tensor{x}, Outputs: []Output{{Elements: x.Elements, DType: dtype.F32, Saved: true}}, Scratch: 7, BackwardScratch: 9})[0]
					case 3:
						x = tape.Do(Operation{Inputs: []*Tensor{x}, Outputs: []Output{{Elements: x.Elements, DType: dtype.F32, View: true}}})[0]
					case 4:
						c := Checkpoint{Reentrant: rapid.Bool().Draw(r, "reentrant"), Selective: rapid.IntRange(0, 2).Draw(r, "selective")}
						out := rapid.Int64Range(1, 20).Draw(r, "out")
						used[w] = true
						x = tape.Checkpoint(c, x, func(x *Tensor) *Tensor {
							return tape.Scope(func() *Tensor { return linear(tape, linear(tape, x, w, out), w, out) })
						})
					}
				}
				return x
			})
		}
		x := tape.New(5, dtype.F32)
		y := program(x)
		needs := y.NeedsGradient()
		tape.Drop(x)
		tape.Backward(y)
		tape.Drop(x, y)
		var gradients ledger.Bytes
		for _, w := range parameters {
			if w.HasGradient() {
				gradients += ledger.Bytes(4 * w.Elements)
			}
			if used[w] && w.Trainable && needs && !w.HasGradient() {
				r.Fatalf("a parameter that was used has no gradient")
			}
		}
		if m.sum() != gradients || m.component(Gradients) != gradients {
			r.Fatalf("%v are left, %v of it named gradients, and gradients take %v: %v", m.sum(), m.component(Gradients), gradients, m.of)
		}
	})
}
