package roads

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/optim/kernel"
)

// TestTableOfTheDocs computes the table of docs/roads.md: what each parameter of a node costs in a step of which
// nothing hides.
func TestTableOfTheDocs(t *testing.T) {
	text, err := os.ReadFile("../../../docs/roads.md")
	if err != nil {
		t.Fatal(err)
	}
	const each = 1 << 30
	sizes := make([]int64, 1024)
	for i := range sizes {
		sizes[i] = each / int64(len(sizes))
	}
	f := kernel.Format{Algorithm: kernel.Adam, State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16,
		Gradient: dtype.BF16}
	for i := range machines {
		m := &machines[i]
		rank := Job{Ranks: m.GPUs, Forward: 1e9, Backward: 2e9} // so long that the last copies out hide
		cpu := CPU{Traffic: ledger.Bytes(f.TrafficBytes(each)), Gradients: 2 * each, Parameters: 2 * each,
			Mode: overlap.None}
		row := "| " + m.Title
		settings := Settings{ChunkBytes: DefaultChunk, Fraction: 1}
		recovering := settings
		recovering.Recovery = true
		for _, s := range []Step{
			m.Rates.CPU(cpu, rank),
			NewLayout(adamW(sizes...), recovering).Step(m.Rates, rank),
			NewLayout(adamW(sizes...), settings).Step(m.Rates, rank),
			Resident(adamW(sizes...), m.Rates),
		} {
			row += fmt.Sprintf(" | %.1f", s.Exposed.Seconds()/float64(each*m.GPUs)*1e12)
		}
		if row += " |\n"; !strings.Contains(string(text), row) {
			t.Errorf("docs/roads.md lacks the row\n%s", row)
		}
	}
}

// TestSourcesOfTheDocs: the page names every source of a published rate.
func TestSourcesOfTheDocs(t *testing.T) {
	text, err := os.ReadFile("../../../docs/roads.md")
	if err != nil {
		t.Fatal(err)
	}
	page := strings.Join(strings.Fields(string(text)), " ")
	for _, m := range machines {
		for _, source := range m.Sources {
			if !strings.Contains(page, source) {
				t.Errorf("docs/roads.md lacks the source %q", source)
			}
		}
	}
}

// TestParametersHideBehindTheUpdate: docs/delta.md says that parameters cross to the GPU in less time than the host
// updates them, on every machine that is published and in each format.
func TestParametersHideBehindTheUpdate(t *testing.T) {
	const elements = 1 << 30
	for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
		f := kernel.Format{Algorithm: kernel.Adam, State: kernel.Split, Moments: moments, Parameter: dtype.BF16,
			Gradient: dtype.BF16}
		for _, m := range machines {
			s := m.Rates.CPU(CPU{Traffic: ledger.Bytes(f.TrafficBytes(elements)), Gradients: 2 * elements,
				Parameters: 2 * elements}, Job{Ranks: m.GPUs})
			if s.In >= s.Update {
				t.Errorf("%s, moments %v: parameters take %v, and their update %v", m.Name, moments, s.In, s.Update)
			}
		}
	}
}

// TestPublishedOverhead: on GB200 Megatron's first design adds 0.1 to 0.2 s to an iteration of DeepSeek-V3 (pull
// request 2811). By the law 15.7 GB of a GPU add 0.08 s: the copies in, at what nvbandwidth measured on GB300
// (NVIDIA/Megatron-LM issue 6491), and the update.
func TestPublishedOverhead(t *testing.T) {
	sizes := make([]int64, 2048)
	for i := range sizes {
		sizes[i] = 671e9 / 256 / int64(len(sizes))
	}
	parameters := adamW(sizes...)
	for i := range parameters { // bf16 moments
		parameters[i].States = []int64{2 * sizes[i], 2 * sizes[i]}
	}
	l := NewLayout(parameters, Settings{Whole: true, ChunkBytes: DefaultChunk, Fraction: 1})
	rates := Rates{Link: Link{In: 211e9, Out: 193e9}, Device: 7.7e12}
	s := l.Step(rates, Job{Ranks: 1, Forward: 5e9, Backward: 10e9})
	if got := s.Exposed.Seconds(); got < 0.075 || got > 0.085 {
		t.Errorf("an iteration takes %.3f s longer", got)
	}
}
