package job

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/autograd"
)

// TestSOAP holds the states and the temporaries of a matrix to those of pytorch_optimizer, in the step that decomposes
// factors. Sides longer than the limit have none.
func TestSOAP(t *testing.T) {
	for _, c := range []struct{ rows, columns int64 }{{140, 60}, {60, 140}, {120, 110}, {10_001, 8}, {8, 10_001}} {
		t.Run(fmt.Sprintf("%dx%d", c.rows, c.columns), func(t *testing.T) {
			measured := torchtest.Answer[struct {
				States int64
				Steps  []int64
			}](t, torchtest.Forked("torch", "pytorch_optimizer"), "../../../scripts/measure/optimizer.py",
				"pytorch_optimizer.SOAP", "--shapes", fmt.Sprintf("%dx%d", c.rows, c.columns), "--steps", "3",
				"--set", "precondition_frequency=2")
			p := &autograd.Parameter{Elements: c.rows * c.columns, Rows: c.rows, DType: dtype.F32}
			var states int64
			for _, s := range soapStates(p) {
				states += s.Bytes
			}
			if states != measured.States {
				t.Errorf("states of %d bytes, PyTorch has %d", states, measured.States)
			}
			planned := int64(soapTemporaries([]*autograd.Parameter{p})[0])
			if off := planned - measured.Steps[2]; off < -planned/1000 || off > planned/1000 {
				t.Errorf("temporaries of %d bytes, PyTorch has %d", planned, measured.Steps[2])
			}
		})
	}
}

// TestSOAPIsRefused with parameters and models that were not measured.
func TestSOAPIsRefused(t *testing.T) {
	for model, precision := range map[string]string{"qwen2.5-0.5b": "bf16", "vit-base-patch16-224": "amp-bf16"} {
		if _, err := (Request{Model: model, Optimizer: "soap", Precision: precision}).Resolve(); err == nil {
			t.Errorf("%s in %s: planned", model, precision)
		}
	}
}
