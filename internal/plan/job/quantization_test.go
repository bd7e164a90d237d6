package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/model"
)

// TestNamesakes plans models of the catalog by other owners' names, and tells what they assume.
func TestNamesakes(t *testing.T) {
	t.Setenv("HF_HOME", t.TempDir())
	const plain, stored = "unsloth/Qwen2.5-0.5B-Instruct", "unsloth/Qwen2.5-0.5B-Instruct-bnb-4bit"
	adapter := filestest.InNewFolder(t)("lora.json", `{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}`)
	for name, test := range map[string]struct {
		request           Request
		bits              int
		double            bool
		assumption, fault string
	}{
		"the authors'": {request: Request{Model: "Qwen/Qwen2.5-0.5B-Instruct"}},
		"a copy":       {request: Request{Model: plain}, assumption: "its own config.json was not read"},
		"in NF4": {request: Request{Model: stored, Adapter: adapter}, bits: 4, double: true,
			assumption: "quantized while they load"},
		"in NF4, as asked for": {request: Request{Model: stored, Adapter: adapter, Quantization: "nf4"}, bits: 4,
			assumption: "quantized while they load"},
		"in NF4, but not so": {request: Request{Model: stored, Adapter: adapter, Quantization: "int8"},
			fault: "names weights in NF4, and the job has them in another form"},
		"in NF4, without an adapter": {request: Request{Model: stored}, fault: "without an adapter"},
	} {
		j, err := test.request.Resolve()
		if test.fault != "" {
			if err == nil || !strings.Contains(err.Error(), test.fault) {
				t.Errorf("%s: got %v, want %q", name, err, test.fault)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if j.Model.Name != "qwen2.5-0.5b" || j.Model.Source != model.FromCatalog {
			t.Errorf("%s: got %s of %s", name, j.Model.Name, j.Model.Source)
		}
		bits, double := 0, false
		if q := j.Quantization; q != nil {
			bits, double = q.Bits, q.DoubleQuant
		}
		if bits != test.bits || double != test.double {
			t.Errorf("%s: quantized as %+v", name, j.Quantization)
		}
		assumed := strings.Join(j.Assumptions, "\n")
		says := strings.Contains(assumed, "Qwen2.5-0.5B")
		if says != (test.assumption != "") || !strings.Contains(assumed, test.assumption) {
			t.Errorf("%s: assumed %q", name, j.Assumptions)
		}
	}
}
