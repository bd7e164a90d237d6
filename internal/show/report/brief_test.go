package report

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
)

// briefJobs are jobs of many kinds: with and without a verdict, on GPUs, hosts and the CPU, with engines and stages.
func briefJobs() (list []job.Request) {
	for _, model := range []string{"gpt2", "qwen2.5-7b", "mixtral-8x7b", "llama-3-70b"} {
		for _, gpu := range []string{"", "RTX-4090", "H100-80GB"} {
			for _, way := range []func(*job.Request){
				func(*job.Request) {},
				func(q *job.Request) { q.GPUs, q.FSDP, q.Precision = 8, "2", "amp-bf16" },
				func(q *job.Request) {
					q.GPUs, q.ZeRO, q.Precision, q.HostMemory = 4, "3", "bf16", 256*ledger.GiB
					q.ZeROOffload = job.ZeROOffloads
				},
				func(q *job.Request) { q.QLoRA, q.HostMemory = 16, 32*ledger.GiB },
				func(q *job.Request) {
					q.GPUs, q.FSDP, q.PipelineParallel, q.Accumulation, q.Precision = 8, "2", 4, 8, "amp-bf16"
				},
			} {
				q := job.Request{Model: model, GPU: gpu, Sequence: 1024}
				way(&q)
				list = append(list, q)
			}
		}
	}
	return append(list, job.Request{Model: "gpt2", CPU: true, Sequence: 128})
}

// documentOf plans a job, with its ladder where it lacks memory. It returns nil for a job that is refused.
func documentOf(t *testing.T, q job.Request) *PlanDocument {
	t.Helper()
	d, p := withoutLadder(t, q)
	if d == nil {
		return nil
	}
	if need := lever.NeedOf(p); (need == lever.GPUMemory || need == lever.HostMemory) && !testing.Short() {
		var err error
		if d.Ladder, err = lever.Climb(lever.Question{Need: need, Request: q, Plan: p}); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// withoutLadder plans a job. It returns nil for a job that is refused.
func withoutLadder(t *testing.T, q job.Request) (*PlanDocument, *plan.Plan) {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		return nil, nil
	}
	p, err := plan.New(j)
	if errors.As(err, new(*fault.Input)) {
		return nil, nil
	}
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewPlanDocument("test", q, p)
	if err != nil {
		t.Fatal(err)
	}
	return d, p
}

// TestBrief: a plan is one screen of 24 lines of 80 columns, whose last fact says what to do next. It, the page for
// browsers and the document show the same device, phase and components.
func TestBrief(t *testing.T) {
	planned := 0
	for _, q := range briefJobs() {
		d := documentOf(t, q)
		if d == nil {
			continue
		}
		planned++
		name := fmt.Sprintf("%s on %d %s", q.Model, q.GPUs, q.GPU)
		text := d.Page().text()
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		isWide := func(l string) bool { return utf8.RuneCountInString(l) > 80 }
		if len(lines) > 24 || slices.ContainsFunc(lines, isWide) {
			t.Errorf("%s: %d lines, or one of more than 80 columns:\n%s", name, len(lines), text)
		}
		if !strings.Contains(text, "\nnext ") {
			t.Errorf("%s: nothing to do next:\n%s", name, text)
		}
		checkOnePeak(t, name, d, text)
	}
	if planned < 30 {
		t.Errorf("%d jobs were planned", planned)
	}
}

// TestBriefOfAProgram: a program that planned itself is one screen, too, whatever it said and whatever was done
// otherwise. It names the lines of the program that hold most.
func TestBriefOfAProgram(t *testing.T) {
	quiet := PlannedProgram{Command: []string{"python", "train.py"}, Torch: "2.15.0+cu132", CUDA: "13.2", Ranks: 1,
		Played: []int{0}, Steps: 2}
	loud := quiet
	loud.Command = append(loud.Command, strings.Fields(strings.Repeat("--learning_rate 1e-4 ", 12))...)
	loud.Ranks, loud.Played = 64, []int{0, 63}
	loud.Failed = "CUDA out of memory. Tried to allocate 250.00 MiB. " + strings.Repeat("See the documentation. ", 30)
	loud.Otherwise = []string{"no network", "files were written to a folder that is gone"}
	loud.Unmodelled = []string{"cusolverDnXsyevd"}
	loud.WhatIf = []ReplayedProgram{{"", 3 * ledger.GiB}, {"expandable_segments:True", 2 * ledger.GiB}}
	for _, q := range briefJobs() {
		of := documentOf(t, q)
		if of == nil {
			continue
		}
		for name, p := range map[string]PlannedProgram{"quiet": quiet, "loud": loud} {
			if p.Failed != "" && q.GPU == "" { // memory without an end does not run out
				continue
			}
			d := NewProgramDocument("test", p, of.Devices)
			text := d.Page().text()
			lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
			isWide := func(l string) bool { return utf8.RuneCountInString(l) > 80 }
			if len(lines) > 24 || slices.ContainsFunc(lines, isWide) {
				t.Errorf("%s: %d lines, or one of more than 80 columns:\n%s", name, len(lines), text)
			}
			wanted := []string{"\nnext "}
			if p.Failed == "" {
				most := heaviest(d.limiting(), 1)[0]
				why, _, _ := strings.Cut(most.Why, " ")
				wanted = append(wanted, most.Component.Title()+": "+why)
			}
			if p.Failed != "" {
				wanted = append(wanted, "Tried to allocate 250.00 MiB.", "3 things", "what if", "ranks 0 and 63")
			}
			for _, words := range wanted {
				if !strings.Contains(text, words) {
					t.Errorf("%s: no %q in:\n%s", name, words, text)
				}
			}
			checkOnePeak(t, name, d, text)
		}
	}
}

// checkOnePeak holds the pages of a plan to the limit of its document.
func checkOnePeak(t *testing.T, name string, d *PlanDocument, text string) {
	t.Helper()
	device := d.limiting()
	peak := device.Peak()
	if l := d.Limit; l != nil && (l.Phase != peak.Name || l.Iteration != peak.Iteration || l.Needed != peak.PeakUsed) {
		t.Errorf("%s: the limit is %+v, the peak %s %s of %v", name, *l, peak.Name, peak.Iteration, peak.PeakUsed)
	}
	largest := largestOf(device)
	component, _, _ := strings.Cut(largest, " ")
	if !strings.Contains(text, "largest     "+component) {
		t.Errorf("%s: the text does not begin with %q", name, component)
	}
	long := strings.ReplaceAll(d.device(device, paletteOf(d.Devices))[0].text(dense), "\n", " ")
	view := Bars{Device: device, palette: paletteOf(d.Devices)}.view()
	shown := view.Phases[view.Peak]
	if shown.Used != peak.PeakUsed || len(peak.Components) > 0 && !strings.Contains(long, shown.Name[:4]) {
		t.Errorf("%s: the page for browsers opens with %s of %v, the peak is %s %s of %v", name, shown.Name, shown.Used,
			peak.Name, peak.Iteration, peak.PeakUsed)
	}
	var sum ledger.Bytes
	for _, h := range held(device, peak) {
		sum += h.Bytes
	}
	var inPage ledger.Bytes
	for _, h := range shown.Held {
		if h.Title != "reserved, but not in use" {
			inPage += h.Bytes
		}
	}
	if sum != inPage {
		t.Errorf("%s: the page for browsers shows %v of components, the document %v", name, inPage, sum)
	}
}
