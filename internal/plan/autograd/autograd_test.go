package autograd

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
)

// memory is a Memory that checks every call.
type memory struct {
	t    interface{ Fatalf(string, ...any) }
	live map[int]ledger.Bytes
	of   map[int]ledger.Component
	next int
	peak ledger.Bytes
	log  []string
}

func newMemory(t interface{ Fatalf(string, ...any) }) *memory {
	return &memory{t: t, live: map[int]ledger.Bytes{}, of: map[int]ledger.Component{}}
}

func (m *memory) Allocate(bytes ledger.Bytes, component ledger.Component, _ func() string) int {
	if bytes <= 0 {
		m.t.Fatalf("%d bytes of %q are allocated", bytes, component)
	}
	m.next++
	m.live[m.next], m.of[m.next] = bytes, component
	m.peak = max(m.peak, m.sum())
	m.log = append(m.log, fmt.Sprintf("+%d", bytes))
	return m.next
}

func (m *memory) Relabel(id int, component ledger.Component, _ func() string) {
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

func (m *memory) component(name ledger.Component) (sum ledger.Bytes) {
	for id, bytes := range m.live {
		if m.of[id] == name {
			sum += bytes
		}
	}
	return sum
}

// events returns the allocations and frees since the last call.
func (m *memory) events() string {
	text := strings.Join(m.log, " ")
	m.log = nil
	return text
}

// weight returns a matrix of so many fp32 elements.
func weight(elements int64) *Parameter {
	return &Parameter{Elements: elements, DType: dtype.F32, Trainable: true}
}

// linear multiplies by a weight. It saves its input for the weight's gradient.
func linear(t *Tape, x *Tensor, w *Parameter, out int64) *Tensor {
	o := Operation{Inputs: []*Tensor{x, w.Tensor()}, Outputs: []Output{{Elements: out, DType: dtype.F32}},
		Product: true, Kept: true}
	if w.Trainable {
		o.Saved = []*Tensor{x}
	}
	return t.Do(o)[0]
}

func TestLinear(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	w := weight(12)
	x := tape.New(3, dtype.F32)
	y := linear(tape, x, w, 4)
	tape.Drop(x) // y has saved it
	if got := m.events(); got != "+12 +16" {
		t.Errorf("forward: %s", got)
	}
	// The incoming gradient and the weight's are allocated. The input and the
	// incoming gradient are freed.
	tape.Backward(y)
	if got := m.events(); got != "+16 +48 -12 -16" {
		t.Errorf("backward: %s", got)
	}
	tape.Drop(y)
	if m.sum() != 48 || m.component(ledger.Gradients) != 48 || !w.HasGradient() {
		t.Errorf("%v are left, %v of gradients", m.sum(), m.component(ledger.Gradients))
	}
	w.DropGradient()
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

func TestFrozenWeightSavesNothing(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
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

// TestTiedParameter uses a weight twice. Its gradient is complete once. The sum of
// the two views is a third tensor for a moment.
func TestTiedParameter(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
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
	tape := NewTape(m, nil)
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

// TestResidual adds a tensor and the result of a branch on it. The gradient of the
// sum goes both ways without a copy.
func TestResidual(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	w, first := weight(100), weight(100)
	x := tape.New(10, dtype.F32)
	h := linear(tape, x, first, 10)
	branch := linear(tape, h, w, 10)
	sum := tape.Do(Operation{Inputs: []*Tensor{h, branch}, Shared: []bool{true, true},
		Outputs: []Output{{Elements: 10, DType: dtype.F32}}})[0]
	tape.Drop(x, h, branch)
	m.events()
	tape.Backward(sum)
	// The incoming gradient. In the branch, the gradients of the input and of the
	// weight; then its saved tensor is freed. A sum in a new tensor, because the
	// incoming gradient is held until the pass is over. The gradient of the first
	// weight.
	if got := m.events(); got != "+40 +40 +400 -40 +40 -40 +400 -40 -40 -40" {
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
		tape := NewTape(m, nil)
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
		// The input and the result, and what a selective checkpoint keeps.
		kept := map[int]ledger.Bytes{0: 80, 1: 160, 2: 120}[c.Selective]
		if m.sum() != kept {
			t.Errorf("%+v: %v are held after the forward pass, expected %v", c, m.sum(), kept)
		}
		tape.Backward(y)
		tape.Drop(y)
		if m.component(ledger.Gradients) != 1200 {
			t.Errorf("%+v: gradients of %v, expected 1200 B", c, m.component(ledger.Gradients))
		}
		tape.Drop(x)
		if m.sum() != 1200 {
			t.Errorf("%+v: %v are left", c, m.sum())
		}
	}
}

// TestCompiledCheckpoint keeps the results of matmuls but the last one, which the
// backward pass does not read.
func TestCompiledCheckpoint(t *testing.T) {
	for compiled, want := range map[bool]ledger.Bytes{false: 160, true: 120} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		first, second := weight(100), weight(100)
		x := tape.New(10, dtype.F32)
		y := tape.Checkpoint(Checkpoint{Selective: 1, Compiled: compiled}, x, func(x *Tensor) *Tensor {
			return tape.Scope(func() *Tensor {
				made := linear(tape, linear(tape, x, first, 10), second, 10)
				result := []Output{{Elements: 10, DType: dtype.F32}}
				return tape.Do(Operation{Inputs: []*Tensor{made}, Outputs: result})[0]
			})
		})
		tape.Drop(x)
		if m.sum() != want {
			t.Errorf("compiled %t: %v are held after the forward pass, want %v", compiled, m.sum(), want)
		}
		tape.Backward(y)
		tape.Drop(y)
		if m.sum() != 800 {
			t.Errorf("compiled %t: %v are left, want the gradients of 800 B", compiled, m.sum())
		}
	}
}

// TestCheckpointStepByStep runs two matmuls under a checkpoint.
func TestCheckpointStepByStep(t *testing.T) {
	for c, want := range map[Checkpoint]struct{ forward, backward string }{
		// The incoming gradient, which is held until the pass is over. Both matmuls
		// again; the result is freed. The gradients of the second matmul, and those
		// of the first. Then the input and the result are freed.
		{}: {"+40 +44 +48 -44", "+48 +44 +48 -48 +44 +528 -44 +40 +440 -44 -40 -40 -48 -48"},
		// The result is held until its gradients are done.
		{Reentrant: true}: {"+40 +44 +48 -44", "+48 +44 +48 +44 +528 -44 +40 +440 -44 -48 -40 -40 -48 -48"},
		// The checkpoint has kept the results of both matmuls.
		{Selective: 1}: {"+40 +44 +48", "+48 +44 +528 -44 +40 +440 -44 -40 -40 -48 -48"},
	} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		first, second := weight(110), weight(132)
		x := tape.New(10, dtype.F32)
		y := tape.Checkpoint(c, x, func(x *Tensor) *Tensor {
			return linear(tape, linear(tape, x, first, 11), second, 12)
		})
		tape.Drop(x)
		if got := m.events(); got != want.forward {
			t.Errorf("%+v: forward: %s, want %s", c, got, want.forward)
		}
		tape.Backward(y)
		tape.Drop(y)
		if got := m.events(); got != want.backward {
			t.Errorf("%+v: backward: %s, want %s", c, got, want.backward)
		}
	}
}

// TestCheckpointKeepsOthers has a body that reads another tensor beside its input,
// as blocks of a decoder read the encoder's output.
func TestCheckpointKeepsOthers(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	w := weight(110)
	x, other := tape.New(10, dtype.F32), tape.New(11, dtype.F32)
	y := tape.Checkpoint(Checkpoint{}, x, func(x *Tensor) *Tensor {
		return tape.Scope(func() *Tensor {
			factors := []*Tensor{linear(tape, x, w, 11), other}
			return tape.Do(Operation{Inputs: factors, Saved: factors,
				Outputs: []Output{{Elements: 11, DType: dtype.F32}}})[0]
		})
	}, other)
	tape.Drop(x, other)
	if m.sum() != 40+44+44 {
		t.Errorf("%v are held after the forward pass, expected the input, the other tensor and the result", m.sum())
	}
	tape.Backward(y)
	tape.Drop(y)
	if m.sum() != 440 {
		t.Errorf("%v are left, expected the gradient", m.sum())
	}
}

// TestResidualCheckpoint runs a residual block. It expects the allocations and
// frees of PyTorch 2.15 in torch.profiler. The gradient of the branch is added in
// place to that of the other way. Only the reentrant checkpoint needs a new tensor
// for the sum, as it still holds the incoming gradient.
func TestResidualCheckpoint(t *testing.T) {
	const (
		again    = " +32 +28 +28 -28" // the branch and the sum; then the branch is freed
		gradient = " +32 +4404 -32 +28 +4400 -32"
	)
	for reentrant, want := range map[bool]string{
		false: "+4 +28" + again + " -28" + gradient + " -28 -28 -4",
		true:  "+4 +28" + again + gradient + " +28 -28 -28 -28 -28 -4",
	} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		first, second := weight(1100), weight(1101)
		x := tape.New(7, dtype.F32)
		tape.RequireGradient(x)
		y := tape.Checkpoint(Checkpoint{Reentrant: reentrant}, x, func(x *Tensor) *Tensor {
			branch := linear(tape, linear(tape, x, first, 8), second, 7)
			return tape.Do(Operation{Inputs: []*Tensor{x, branch}, Shared: []bool{true, true},
				Outputs: []Output{{Elements: 7, DType: dtype.F32}}})[0]
		})
		loss := tape.Do(Operation{Inputs: []*Tensor{y}, Outputs: []Output{{Elements: 1, DType: dtype.F32}}})[0]
		tape.Drop(y)
		m.events()
		tape.Backward(loss)
		if got := m.events(); got != want {
			t.Errorf("reentrant %v: %s, want %s", reentrant, got, want)
		}
	}
}

func TestNothingDependsOnIt(t *testing.T) {
	for name, dead := range map[string]func(tape *Tape, x *Tensor, w *Parameter) *Tensor{
		"a product": func(tape *Tape, x *Tensor, w *Parameter) *Tensor { return linear(tape, x, w, 10) },
		"a selective checkpoint": func(tape *Tape, x *Tensor, w *Parameter) *Tensor {
			return tape.Checkpoint(Checkpoint{Selective: 1}, x, func(x *Tensor) *Tensor {
				return linear(tape, linear(tape, x, w, 10), w, 10)
			})
		},
	} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		w, complete := weight(100), 0
		w.OnGradient = func(*Parameter) { complete++ }
		x := tape.New(10, dtype.F32)
		for pass := 1; pass <= 2; pass++ {
			y := linear(tape, x, w, 10)
			tape.Drop(dead(tape, y, w))
			tape.Backward(y)
			tape.Drop(y)
			if m.sum() != 440 || complete != pass {
				t.Errorf("%s, pass %d: %v are left, expected the batch and a gradient, 440 B, which was complete "+
					"%d times",
					name, pass, m.sum(), complete)
			}
		}
		// A loss that needs no gradient ends the pass as well.
		tape.Drop(dead(tape, x, w))
		tape.Backward(tape.New(1, dtype.F32))
		if m.sum() != 444 || len(tape.nodes) != 0 {
			t.Errorf("%s: %v are left, expected 444 B, and %d nodes", name, m.sum(), len(tape.nodes))
		}
	}
}

// TestSharedGradient adds a parameter to a tensor. Its gradient is a copy of the
// incoming gradient, which has another reference.
func TestSharedGradient(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	bias := weight(10)
	x := tape.New(10, dtype.F32)
	y := tape.Do(Operation{Inputs: []*Tensor{x, bias.Tensor()}, Shared: []bool{true, true},
		Outputs: []Output{{Elements: 10, DType: dtype.F32}}})[0]
	tape.Drop(x)
	m.events()
	tape.Backward(y)
	if got := m.events(); got != "+40 +40 -40" || m.component(ledger.Gradients) != 40 {
		t.Errorf("backward: %s with gradients of %v", got, m.component(ledger.Gradients))
	}
}

// TestView tests that a storage lives until its last view is dropped.
func TestView(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	x := tape.New(10, dtype.F32)
	view := tape.Do(Operation{Inputs: []*Tensor{x}, Outputs: []Output{{Elements: 5, DType: dtype.F32, View: true}}})[0]
	tape.Drop(x)
	tape.Drop(x) // x is dropped already
	if m.sum() != 40 {
		t.Errorf("%v are held by a view of 40 B", m.sum())
	}
	tape.Drop(view)
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

// TestList holds tensors in a list, which is dropped as a whole.
func TestList(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	var list *Tensor
	tape.Scope(func() *Tensor {
		x, y := tape.New(10, dtype.F32), tape.New(20, dtype.F32)
		list = tape.List(x, y)
		tape.Hold(list)
		return nil
	})
	if m.sum() != 120 {
		t.Errorf("%v are held by a list of 120 B", m.sum())
	}
	tape.Drop(list)
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

// TestRetainsGraph keeps what an operation saved until the backward pass ends.
func TestRetainsGraph(t *testing.T) {
	for retains, want := range map[bool]string{false: "+40 +40 -44 -40 -40 -40", true: "+40 +40 -40 -40 -44 -40"} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		tape.RetainsGraph = retains
		x := tape.New(10, dtype.F32)
		tape.RequireGradient(x)
		y := tape.Do(Operation{Inputs: []*Tensor{x},
			Outputs: []Output{{Elements: 10, DType: dtype.F32}, {Elements: 11, DType: dtype.F32, Saved: true}}})
		tape.Drop(x, y[1])
		m.events()
		tape.Backward(y[0])
		if got := m.events(); got != want {
			t.Errorf("retains %v: %s, want %s", retains, got, want)
		}
	}
}

// TestReplaces writes the gradient over a saved tensor. The input is held until its gradient is complete.
func TestReplaces(t *testing.T) {
	for replaces, want := range map[bool]string{false: "+40 +40 -44 -40 -40 -40", true: "+40 -40 -44 -40"} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		x := tape.New(10, dtype.F32)
		tape.RequireGradient(x)
		y := tape.Do(Operation{Inputs: []*Tensor{x}, Replaces: replaces,
			Outputs: []Output{{Elements: 10, DType: dtype.F32}, {Elements: 11, DType: dtype.F32, Saved: true}}})
		tape.Drop(x, y[1])
		m.events()
		tape.Backward(y[0])
		if got := m.events(); got != want {
			t.Errorf("replaces %v: %s, want %s", replaces, got, want)
		}
	}
}

// TestMarks tests that marks are called in the backward pass, those of a
// checkpoint when it runs again.
func TestMarks(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	w := weight(100)
	var calls []string
	mark := func(name string) { tape.Mark(func() { calls = append(calls, name) }) }
	x := tape.New(10, dtype.F32)
	mark("first")
	y := tape.Checkpoint(Checkpoint{}, x, func(x *Tensor) *Tensor {
		mark("inside")
		return linear(tape, x, w, 10)
	})
	mark("last")
	w.OnGradient = func(*Parameter) { calls = append(calls, "gradient") }
	tape.Backward(y)
	if got := strings.Join(calls, " "); got != "last gradient inside first" {
		t.Error(got)
	}
}

// TestHold keeps a tensor beyond the scope that made it.
func TestHold(t *testing.T) {
	m := newMemory(t)
	tape := NewTape(m, nil)
	tape.In("a component", nil)
	var held *Tensor
	result := tape.Scope(func() *Tensor {
		held = tape.New(10, dtype.F32)
		tape.New(100, dtype.F32)
		tape.Hold(held)
		return tape.New(1, dtype.F32)
	})
	if m.sum() != 44 || m.component("a component") != 44 {
		t.Errorf("%v are held, expected 44 B", m.sum())
	}
	tape.Drop(held, result)
	if m.sum() != 0 {
		t.Errorf("%v are left", m.sum())
	}
}

// TestEverythingIsFreed runs random programs, with operations that do not reach
// the loss. After every backward pass only gradients are left. Every parameter
// that the loss depends on has one.
func TestEverythingIsFreed(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m := newMemory(r)
		tape := NewTape(m, nil)
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
					switch rapid.IntRange(0, 6).Draw(r, "operation") {
					case 0:
						before := x
						x = linear(tape, x, w, rapid.Int64Range(1, 20).Draw(r, "out"))
						used[w] = true
						tape.Drop(before)
					case 1:
						h := linear(tape, x, w, x.Elements)
						used[w] = true
						x = tape.Do(Operation{Inputs: []*Tensor{x, h}, Shared: []bool{true, true},
							Outputs: []Output{{Elements: x.Elements, DType: dtype.F32}}})[0]
					case 2:
						x = tape.Do(Operation{Inputs: []*Tensor{x}, Saved: []*Tensor{x},
							Outputs: []Output{{Elements: x.Elements, DType: dtype.F32, Saved: true}}, Scratch: 7,
							BackwardScratch: 9})[0]
					case 3:
						x = tape.Do(Operation{Inputs: []*Tensor{x},
							Outputs: []Output{{Elements: x.Elements, DType: dtype.F32, View: true}}})[0]
					case 4, 5, 6:
						c := Checkpoint{Reentrant: rapid.Bool().Draw(r, "reentrant"),
							Selective: rapid.IntRange(0, 2).Draw(r, "selective")}
						out, nested, dead := rapid.Int64Range(1, 20).Draw(r, "out"),
							rapid.Bool().Draw(r, "nested"), rapid.Bool().Draw(r, "dead")
						twice := func(x *Tensor) *Tensor { return linear(tape, linear(tape, x, w, out), w, out) }
						y := tape.Checkpoint(c, x, func(x *Tensor) *Tensor {
							if nested {
								x = tape.Checkpoint(Checkpoint{}, x, twice)
							}
							return twice(x)
						})
						if dead {
							tape.Drop(y)
						} else {
							x = y
							used[w] = true
						}
					}
				}
				return x
			})
		}
		for range rapid.IntRange(1, 3).Draw(r, "passes") {
			clear(used)
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
					r.Fatalf("the loss depends on a parameter that has no gradient")
				}
			}
			if m.sum() != gradients || m.component(ledger.Gradients) != gradients || len(tape.nodes) > 0 {
				r.Fatalf("%v are left, %v of it named gradients, and gradients take %v; %d nodes are left",
					m.sum(), m.component(ledger.Gradients), gradients, len(tape.nodes))
			}
			if rapid.Bool().Draw(r, "zero_grad") {
				for _, w := range parameters {
					w.DropGradient()
				}
			}
		}
	})
}

// TestAttached compares what three blocks of two matmuls hold that keep their inputs in ctx.tensors with torch 2.15:
// all six until the loss and the outputs are gone, also under a non-reentrant checkpoint, and none after a reentrant
// one.
func TestAttached(t *testing.T) {
	for _, c := range []struct {
		name          string
		run           *Checkpoint
		forward, done ledger.Bytes
	}{
		{"plain", nil, 6, 6},
		{"non-reentrant", &Checkpoint{}, 6, 6},
		{"reentrant", &Checkpoint{Reentrant: true}, 3, 0}, // the inputs of three blocks
	} {
		m := newMemory(t)
		tape := NewTape(m, nil)
		frozen := &Parameter{Elements: 100, DType: dtype.F32}
		matmul := func(x *Tensor) *Tensor {
			return tape.Do(Operation{Inputs: []*Tensor{x, frozen.Tensor()}, Attached: []*Tensor{x}, Product: true,
				Outputs: []Output{{Elements: 100, DType: dtype.F32}}})[0]
		}
		block := func(x *Tensor) *Tensor { return tape.Scope(func() *Tensor { return matmul(matmul(x)) }) }
		x := tape.New(100, dtype.F32)
		tape.RequireGradient(x)
		loss := tape.Scope(func() *Tensor {
			y := x
			for range 3 {
				if c.run == nil {
					y = block(y)
				} else {
					y = tape.Checkpoint(*c.run, y, block)
				}
			}
			return tape.Do(Operation{Inputs: []*Tensor{y}, Outputs: []Output{{Elements: 1, DType: dtype.F32}}})[0]
		})
		tape.Drop(x)
		if got := m.sum() - 4; got != 400*c.forward {
			t.Errorf("%s: %d bytes are held before the backward pass, want %d", c.name, got, 400*c.forward)
		}
		tape.Backward(loss)
		if got := m.sum() - 4; got != 400*c.done {
			t.Errorf("%s: %d bytes are held after it, want %d", c.name, got, 400*c.done)
		}
		tape.Drop(loss)
		if m.sum() != 0 {
			t.Errorf("%s: %d bytes outlive the loss", c.name, m.sum())
		}
	}
}
