package report

import (
	"encoding/json"
	"flag"
	"fmt"
	"html"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

var agreementSeed = flag.Uint64("seed", 1, "draws other jobs")

// drawnJob draws a job of any model, machine and way to train. It may be one that is refused.
func drawnJob(draws *rand.Rand) job.Request {
	of := func(words ...string) string { return words[draws.IntN(len(words))] }
	count := func(numbers ...int) int { return numbers[draws.IntN(len(numbers))] }
	q := job.Request{Model: of("gpt2", "qwen2.5-0.5b", "llama-3.2-1b", "qwen3-8b", "gemma-3-4b", "mixtral-8x7b",
		"llama-3-70b", "gpt-oss-20b"),
		GPU:  of("", "T4", "RTX-3060-12GB", "RTX-4090", "A100-40GB", "H100-80GB", "GB200"),
		GPUs: count(1, 1, 2, 4, 8), Nodes: count(1, 1, 2), Sequence: count(128, 512, 2048, 8192),
		MicroBatch: count(1, 1, 4, 8), Accumulation: count(1, 1, 4),
		HostMemory: ledger.Bytes(count(0, 0, 16, 64, 256, 1024)) * ledger.GiB,
		Precision:  of("", "bf16", "fp16", "fp32", "amp-bf16"), Recompute: of("", "none", "full", "selective"),
		Optimizer: of("", "", "adamw/fused", "adamw_bnb_8bit", "sgd", "plimsoll/split", "adafactor")}
	switch of("plain", "fsdp", "zero", "lora", "qlora", "pipeline", "states", "cpu", "megatron") {
	case "fsdp":
		q.FSDP, q.OffloadParameters = of("1", "2"), count(0, 1) > 0
	case "zero":
		q.ZeRO, q.ZeROOffload = of("1", "2", "3"), job.ZeROOffloads[:count(0, 1)]
	case "lora":
		q.LoRA, q.LoRATargets = count(8, 64), []string{"all-linear"}
	case "qlora":
		q.QLoRA = 16
	case "pipeline":
		q.FSDP, q.PipelineParallel, q.Accumulation = "2", 2, 8
	case "states":
		q.Offload.What = job.OffloadStates
	case "cpu":
		q = job.Request{Model: q.Model, CPU: true, Sequence: q.Sequence, HostMemory: q.HostMemory}
	case "megatron":
		q = job.Request{GPU: q.GPU, GPUs: q.GPUs, HostMemory: q.HostMemory,
			MegatronArguments: job.MegatronArguments{Megatron: fmt.Sprintf("--num-layers %d --hidden-size 2048 "+
				"--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size %d "+
				"--bf16 --vocab-size 32000", count(8, 24), q.MicroBatch)}}
	}
	return q
}

// TestAgreement: of 200 drawn jobs the document, the text, its long form, Markdown and the page for browsers have one
// verdict, one peak and the same components at it. With -short they are 40.
func TestAgreement(t *testing.T) {
	wanted := 200
	if testing.Short() {
		wanted = 40
	}
	draws := rand.New(rand.NewPCG(*agreementSeed, 5))
	planned, judged, most := 0, 0, 20*wanted
	for drawn := 0; planned < wanted && drawn < most; drawn++ {
		q := drawnJob(draws)
		d, _ := withoutLadder(t, q)
		if d == nil {
			continue
		}
		planned++
		if d.Limit != nil {
			judged++
		}
		agrees(t, fmt.Sprintf("job %d: %+v", drawn, q), d)
	}
	t.Logf("%d jobs, %d with a verdict", planned, judged)
	if planned < wanted || judged < wanted/2 {
		t.Errorf("%d jobs were planned, %d with a verdict", planned, judged)
	}
}

// agrees holds what people read of a plan to its document, as a program reads it.
func agrees(t *testing.T, name string, d *PlanDocument) {
	t.Helper()
	var written, long, markdown, browser strings.Builder
	if err := WriteJSON(&written, d); err != nil {
		t.Fatal(err)
	}
	read, err := ParsePlan("plan.json", []byte(written.String()))
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	page := d.Page()
	if err := WriteHTML(&browser, page, "test", nil, nil); err != nil {
		t.Fatal(err)
	}
	text := page.text()
	page.Brief = nil
	long.WriteString(page.text())
	markdown.WriteString(page.markdown())
	device := read.limiting()
	if read.Limit != nil {
		words := wordsOf(read.Limit)
		for of, text := range map[string]string{"text": text, "long text": long.String(),
			"Markdown": markdown.String(), "page for browsers": html.UnescapeString(browser.String())} {
			if flat := strings.Join(strings.Fields(text), " "); !strings.Contains(flat, words) {
				t.Errorf("%s: the %s does not say %q", name, of, words)
			}
		}
	}
	checkLargest(t, name, device, text, viewOf(t, browser.String()))
}

// wordsOf says the point where a job comes nearest to its limit, as a reader of the document would.
func wordsOf(l *PlanLimit) string {
	phase := string(l.Phase)
	if l.Iteration != "" {
		phase = "the " + string(l.Iteration) + " " + phase
	}
	device := map[ledger.Kind]string{ledger.GPU: "GPU", ledger.Host: "host"}[l.Device]
	return fmt.Sprintf("%v of %v on the %s in %s", l.Needed, l.Capacity, device, phase)
}

// viewOf returns what the script of a page draws.
func viewOf(t *testing.T, page string) (view memoryView) {
	t.Helper()
	_, rest, _ := strings.Cut(page, `<script type="application/json" id="memory-data">`)
	data, _, found := strings.Cut(rest, "</script>")
	if !found {
		t.Fatal("the page has no devices")
	}
	if err := json.Unmarshal([]byte(data), &view); err != nil {
		t.Fatal(err)
	}
	return view
}

// checkLargest holds the largest components of the text and what the page draws to the peak of the document's device.
func checkLargest(t *testing.T, name string, device *ledger.Device, text string, view memoryView) {
	t.Helper()
	peak, sums := device.Peak(), map[string]ledger.Bytes{}
	for _, h := range held(device, peak) {
		sums[wholeOf(h.Component).Title()] += h.Bytes
	}
	at := slices.IndexFunc(view.Devices, func(d memoryDevice) bool { return d.Title == titleOf(device) })
	if at < 0 {
		t.Errorf("%s: the page has no %s", name, titleOf(device))
		return
	}
	shown := view.Devices[at].Phases[view.Devices[at].Peak]
	if shown.Used != peak.PeakUsed || !strings.Contains(shown.Name, string(peak.Name)) &&
		!alike(peak, phaseOf(device, shown.Name)) {
		t.Errorf("%s: the page opens with %s of %v, the document with %s of %v", name, shown.Name, shown.Used,
			peak.Name, peak.PeakUsed)
	}
	drawn := map[string]ledger.Bytes{}
	for _, h := range shown.Held {
		drawn[view.Palette[h.Color]] += h.Bytes
	}
	flat := strings.Join(strings.Fields(text), " ")
	_, largest, found := strings.Cut(flat, " largest ")
	largest, _, _ = strings.Cut(largest, " next ")
	for part := range strings.SplitSeq(largest, ", ") {
		title, bytes := splitSize(part)
		if !found || sums[title].String() != bytes || drawn[title] != sums[title] {
			t.Errorf("%s: the text says %q, the document has %v and the page draws %v", name, part, sums[title],
				drawn[title])
		}
	}
}

// phaseOf returns the phase that a row of a page begins with.
func phaseOf(device *ledger.Device, row string) *ledger.Phase {
	for _, r := range phaseRows(device) {
		if r.name == row {
			return r.phase
		}
	}
	return &ledger.Phase{}
}

// splitSize cuts "optimizer states 9.21 GiB" before the number.
func splitSize(part string) (title, bytes string) {
	words := strings.Fields(part)
	n := max(0, len(words)-2)
	return strings.Join(words[:n], " "), strings.Join(words[n:], " ")
}
