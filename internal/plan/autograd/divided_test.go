package autograd

import (
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
)

// divided runs the forward pass of two linear layers with an activation between them, and a backward pass in two
// halves.
func divided(t *testing.T, recompute bool) (m *memory, inputHalf, weightHalf string) {
	m = newMemory(t)
	tape := NewTape(m, nil)
	tape.DividesBackwardPass()
	first, second := weight(12), weight(20)
	first.Index, second.Index = 0, 1
	x := tape.New(3, dtype.F32)
	tape.RequireGradient(x)
	received := tape.Escape(x)
	body := func(x *Tensor) *Tensor {
		return tape.Scope(func() *Tensor {
			h := linear(tape, x, first, 4)
			h = tape.Do(Operation{Inputs: []*Tensor{h}, Saved: []*Tensor{h},
				Outputs: []Output{{Elements: 4, DType: dtype.F32}}})[0]
			return linear(tape, h, second, 5)
		})
	}
	var y *Tensor
	if recompute {
		y = tape.Checkpoint(Checkpoint{}, x, body)
	} else {
		y = body(x)
	}
	tape.Drop(x)
	m.events()
	d := tape.BackwardInput(y, received, true)
	tape.Drop(y)
	inputHalf = m.events()
	if first.HasGradient() || second.HasGradient() {
		t.Error("weights have gradients after the half of the input")
	}
	d.Weights()
	weightHalf = m.events()
	if left := m.component(ledger.Gradients); left != 128 || m.sum() != 128 {
		t.Errorf("%d B are left, %d B of gradients", m.sum(), left)
	}
	return m, inputHalf, weightHalf
}

// TestDivided: the half of the input makes the received gradient (20), that of the second layer's input, of the
// activation's (16 each) and of x (12), and frees only the output. The weights come one after the other, the first
// layer's first. The activation and what the first layer's group held are freed when no group holds them.
func TestDivided(t *testing.T) {
	_, input, weights := divided(t, false)
	if want := "+20 +16 +16 -16 +12 -20"; input != want {
		t.Errorf("half of the input: %s, expected %s", input, want)
	}
	if want := "+48 -16 +80 -16 -16 -20 -12 -12"; weights != want {
		t.Errorf("half of the weights: %s, expected %s", weights, want)
	}
}

// TestDividedCheckpoint: each of the three runs of the engine computes both activations and the output again (16, 16,
// 20). That for the first layer's weight reads the first layer's input only, so its activations stay until the second
// layer's group, the last one, is done.
func TestDividedCheckpoint(t *testing.T) {
	_, input, weights := divided(t, true)
	if want := "+20 +16 +16 +20 -20 +16 -16 +16 -16 -16 +12 -20"; input != want {
		t.Errorf("half of the input: %s, expected %s", input, want)
	}
	first, second := "+16 +16 +20 -20 +48 -16 ", "+16 +16 +20 -20 +80 -16 -16 -16 -16 -20 -12 -12"
	if weights != first+second {
		t.Errorf("half of the weights: %s, expected %s%s", weights, first, second)
	}
}
