package explain

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestBalance: whatever an error of PyTorch says, its holders and the free memory are no more than the card, and all of
// it if nothing is rounded.
func TestBalance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		share := func(name string) ledger.Bytes { return ledger.Bytes(rapid.Int64Range(0, 20<<10).Draw(t, name)) << 20 }
		tensors, pieces, outside, free := share("tensors"), share("pieces"), share("outside"), share("free")
		others, rest := share("others"), share("rest")
		total := tensors + pieces + outside + free + others + rest
		f := evidence.GPUOutOfMemory{Backend: "CUDA", Total: known(total), Free: known(free), Allocated: known(tensors),
			Reserved: known(tensors + pieces), Requested: known(share("requested")),
			Others: []evidence.GPUProcess{{PID: 9, Used: known(others)}}}
		if rapid.Bool().Draw(t, "knows itself") {
			f.Self = known(tensors + pieces + outside)
		}
		e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, f)}})
		sum := free
		for _, h := range e.Holders {
			sum += h.Bytes
		}
		if sum > total || sum < total-rounding {
			t.Errorf("%v of %v have a holder: %+v", sum, total, e.Holders)
		}
	})
}

// TestBrokenSizes: what no machine has is a fault of the program, and what no GPU of the size has is said so.
func TestBrokenSizes(t *testing.T) {
	for text, want := range map[string]struct {
		resource Resource
		words    string
	}{
		"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.\n": {NotMemory, "shape"},
		"RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8070450532247928832 bytes. " +
			"Error code 12 (Cannot allocate memory)\n": {NotMemory, "shape"},
		"RuntimeError: CUDA out of memory. Tried to allocate 90.00 GiB (GPU 0; 79.15 GiB total capacity; 1.00 GiB " +
			"already allocated; 77.00 GiB free; 1.10 GiB reserved in total by PyTorch)\n": {GPU, "no GPU of 79.2 GiB"},
		"RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max " +
			"allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool.\n": {GPU, "17.3 GiB of Metal"},
	} {
		if e := explainText(t, text); e.Cause.Resource != want.resource || !strings.Contains(e.Cause.Text, want.words) {
			t.Errorf("%q: %q (%s)", text, e.Cause.Resource, e.Cause.Text)
		}
	}
}

// TestPlannedPartsAreNoHolders: bytes of a plan do not stand beside a measured total.
func TestPlannedPartsAreNoHolders(t *testing.T) {
	e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, oom(nil))},
		Request: &job.Request{Model: "llama-3.1-8b", GPUs: 4, GPU: "A100-80GB", Sequence: 1024}})
	var sum ledger.Bytes
	for _, h := range e.Holders {
		sum += h.Bytes
	}
	if sum > 80*gib {
		t.Errorf("%v of 80 GiB have a holder: %+v", sum, e.Holders)
	}
	if !strings.Contains(strings.Join(e.Notes, " "), "The plan of the job divides what its tensors hold: ") {
		t.Errorf("no note divides the tensors: %q", e.Notes)
	}
}
