package plan

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestArchitectures compares the plan of every architecture with what PyTorch and
// transformers hold in the same training, pass by pass. testdata/architectures.py
// has measured it:
//
//	python3 testdata/architectures.py ../../input/model/testdata/variants/*.json > testdata/architectures.golden
func TestArchitectures(t *testing.T) {
	text, err := os.ReadFile("testdata/architectures.golden")
	if err != nil {
		t.Fatal(err)
	}
	var torch, transformers string
	measured := map[string][]ledger.Bytes{}
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, "# torch %s transformers %s", &torch, &transformers); n == 2 {
			continue
		}
		fields := strings.Fields(line)
		for _, field := range fields[1:] {
			var bytes ledger.Bytes
			if _, err := fmt.Sscan(field, (*int64)(&bytes)); err != nil {
				t.Fatal(err)
			}
			measured[fields[0]] = append(measured[fields[0]], bytes)
		}
	}
	for name, want := range measured {
		t.Run(name, func(t *testing.T) {
			compareArchitecture(t, job.Request{
				Model:     filepath.Join("../../input/model/testdata/variants", name+".json"),
				Precision: "bf16", MicroBatch: 2, Sequence: 256,
				Torch: strings.Split(torch, "+")[0], Transformers: transformers,
			}, want)
		})
	}
}

// TestRouterLossOfCheckpoints compares what the loss of routers adds if blocks are
// recomputed: its gradients wait for the second run of a block. PyTorch's figures are
// those of scripts/measure/train.py --gradient-checkpointing with and without it.
func TestRouterLossOfCheckpoints(t *testing.T) {
	plain, balanced := passes(t, "qwen3-moe"), passes(t, "qwen3-moe-balanced")
	bare := []ledger.Bytes{9611544, 6535432, 12575968, 7041412, 16652828, 13576712, 19617248, 14082692}
	with := []ledger.Bytes{9644312, 6568264, 12592352, 7041412, 16685596, 13609544, 19633632, 14082692}
	const scalars = 64 // the sums of the loss
	for i := range with {
		planned, found := balanced[i]-plain[i], with[i]-bare[i]
		if math.Abs(float64(planned-found)) > scalars {
			t.Errorf("figure %d: the loss adds %v, in PyTorch %v", i, planned.Exact(), found.Exact())
		}
	}
}

// passes returns the peak and the end of every pass of two steps with recomputation.
func passes(t *testing.T, name string) (figures []ledger.Bytes) {
	request := job.Request{Model: filepath.Join("../../input/model/testdata/variants", name+".json"), Precision: "bf16",
		MicroBatch: 2, Sequence: 256, Torch: "2.15.0", Transformers: "5.23.0", Recompute: "full"}
	j, err := request.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	unheld(j)
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.Devices[0].Phases {
		phase := &p.Devices[0].Phases[i]
		if phase.Name == ledger.Forward || phase.Name == ledger.Backward {
			peak, end := without(phase, ledger.MatmulWorkspaces)
			figures = append(figures, peak, end)
		}
	}
	return figures
}

// batchAndAngles are the tokens and labels, which the plan drops later than the
// script, and the cosines and sines of rotary positions, which it does not have.
const batchAndAngles = 32 << 10

// shortLived are tensors that a norm or a block drops when it returns, and the
// plan one operation earlier: at most three of the residual stream in fp32.
// Logits of a vocabulary hide them.
const shortLived = 3 * 512 * 128 * 4

// compareArchitecture compares the passes of two steps with peaks and ends in the
// order of the passes.
func compareArchitecture(t *testing.T, request job.Request, want []ledger.Bytes) {
	j, err := request.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	unheld(j)
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for i := range p.Devices[0].Phases {
		phase := &p.Devices[0].Phases[i]
		if phase.Name != ledger.Forward && phase.Name != ledger.Backward || phase.Iteration == ledger.Once {
			continue
		}
		if phase.Iteration == ledger.Steady && compared == 4 && len(want) == 4 { // one step was measured
			continue
		}
		if compared+2 > len(want) {
			t.Fatalf("more passes than %d", len(want)/2)
		}
		peak, end := without(phase, ledger.MatmulWorkspaces)
		if h := j.Model.Network.Sound(); h != nil && phase.Name == ledger.Backward { // and so it has with sound
			sound := ledger.Bytes(4 * j.Sequences() * h.Bins * h.Frames())
			if end -= sound; request.Precision != "fp32" { // which saves it
				peak -= sound
			}
		}
		if phase.Name == ledger.Backward { // the script has dropped the images
			for _, tower := range j.Model.Network.Towers {
				pixels := ledger.Bytes(4 * j.Images.Pixels(tower))
				if end -= pixels; !j.Model.Network.OnlyImages() || request.Precision != "fp32" {
					peak -= pixels
				}
			}
		}
		for k, planned := range []ledger.Bytes{peak, end} {
			found := want[compared+k]
			off := float64(planned)/float64(found) - 1
			allowed := float64(batchAndAngles)
			if len(j.Model.Network.Towers) > 0 { // angles of every sequence
				allowed *= 3
			}
			if h := &j.Model.Network.Head; k == 0 && (h.Outputs < 1000 || h.PerSequence) { // no logits hide them
				allowed += shortLived
			}
			if math.Abs(off) > 0.003 && math.Abs(float64(planned-found)) > allowed {
				t.Errorf("%s %s, %s: planned %v, PyTorch %v (%+.2f %%)", phase.Iteration, phase.Name,
					[]string{"peak", "end"}[k], planned.Exact(), found.Exact(), 100*off)
			}
		}
		compared += 2
	}
	if compared != len(want) {
		t.Errorf("compared %d figures of %d", compared, len(want))
	}
}
