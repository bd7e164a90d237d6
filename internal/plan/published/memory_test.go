package published_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// TestPrimeRLMemory compares the table of memory in docs/step-time.md with what is planned for the same runs: what
// PyTorch's allocator of rank 0 reserves at most, without offload.
func TestPrimeRLMemory(t *testing.T) {
	text, err := os.ReadFile("../../../docs/step-time.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []struct {
		row      string
		gib      float64
		sequence int
	}{{"8K", 63.1, 8 << 10}, {"16K", 67.0, 16 << 10}, {"32K", 73.7, 32 << 10}, {"64K", 90.3, 64 << 10}} {
		const launcher = "expandable_segments:True"
		expandable := primeRL(t, p.sequence, launcher, nil)
		row := fmt.Sprintf("| prime-rl, %s | %.1f GiB | %.1f GiB | %+.1f %% | %.1f GiB | %.1f GiB |", p.row, p.gib,
			expandable, 100*(expandable/p.gib-1), primeRL(t, p.sequence, "", nil),
			primeRL(t, p.sequence, launcher, &autograd.Offload{}))
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/step-time.md lacks the row\n%s", row)
		}
	}
}

// primeRL returns the GiB that are reserved at most over 8 H200, as the branch of the pull request configures the job:
// see steptime.TestPublished.
func primeRL(t *testing.T, sequence int, allocator string, inputs *autograd.Offload) float64 {
	t.Helper()
	noClip := 0.0
	j, err := job.Request{Model: "qwen3-30b-a3b", GPUs: 8, GPU: "H200", FSDP: "2", Precision: "amp-bf16",
		ExpertParallel: 8, Attention: "flash", Sequence: sequence, Recompute: "full", Loss: "fused", Clip: &noClip,
		Optimizer: "adamw/for-loop", Torch: "2.11.0", Allocator: allocator}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	j.OffloadActivations = inputs
	p, err := plan.New(j)
	if err != nil {
		t.Fatal(err)
	}
	var most ledger.Bytes
	for _, phase := range p.Devices[0].Phases {
		most = max(most, phase.PeakReserved)
	}
	return float64(most) / float64(ledger.GiB)
}
