package report

import (
	"cmp"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// PlannedProgram is a program that has planned itself, on GPUs that are not there.
type PlannedProgram struct {
	Command []string `json:"command"`
	Torch   string   `json:"torch"`
	CUDA    string   `json:"cuda"`
	Ranks   int      `json:"ranks"`
	Played  []int    `json:"played_ranks"`
	Steps   int      `json:"steps"`
	// Retries are how often the allocator has freed its cache for want of memory.
	Retries int64 `json:"allocator_retries"`
	// Failed is how the program ran out of memory, in PyTorch's own words; empty if it did not.
	Failed string `json:"out_of_memory,omitempty"`
	// WhatIf are replays of the first rank's allocations. The first is under the settings that the program ran with.
	WhatIf []ReplayedProgram `json:"what_if,omitempty"`
	// Otherwise says what was done otherwise than in a real run.
	Otherwise []string `json:"otherwise"`
	// Unmodelled are functions of CUDA's libraries that were called, and did nothing.
	Unmodelled []string `json:"unmodelled_functions"`
}

// ReplayedProgram is what the allocator would have reserved with other settings.
type ReplayedProgram struct {
	Settings string       `json:"settings"` // of PYTORCH_CUDA_ALLOC_CONF
	Reserved ledger.Bytes `json:"peak_reserved_bytes"`
}

// NewProgramDocument makes the document of a program that has planned itself.
func NewProgramDocument(version string, p PlannedProgram, devices []ledger.Device) *PlanDocument {
	verdict := plan.Judge(devices)
	if p.Failed != "" {
		verdict.Result = plan.DoesNotFit
	}
	return &PlanDocument{
		Schema: PlanSchema, Version: version, Verdict: verdict.Result, Limit: newPlanLimit(verdict), Devices: devices,
		Model: PlannedModel{Name: p.name(), Source: strings.Join(p.Command, " ")}, Program: &p,
		Assumptions: []string{}, StateFormats: []plan.StateFormat{}, Inputs: p.files(),
	}
}

// files are the files that the command names: run --plan refuses others.
func (p *PlannedProgram) files() []Input {
	inputs := []Input{}
	for _, word := range p.Command {
		if !slices.Contains([]string{".py", ".json", ".yaml", ".yml", ".toml"}, filepath.Ext(word)) {
			continue
		}
		if sum, err := hashOf(word); err == nil {
			inputs = append(inputs, Input{word, sum})
		}
	}
	return inputs
}

// name returns the file of the program, or its first word.
func (p *PlannedProgram) name() string {
	for _, word := range p.Command {
		if strings.HasSuffix(word, ".py") {
			return word
		}
	}
	return p.Command[0]
}

// programPage shows what the program held.
func (d *PlanDocument) programPage() *Page {
	p := d.Program
	sections := []Section{{p.run(math.MaxInt)}}
	palette := paletteOf(d.Devices)
	for i := range d.Devices {
		sections = append(sections, d.device(&d.Devices[i], palette))
	}
	var rest Facts
	if p.Failed != "" {
		rest.add("failed", "%s", p.Failed)
	}
	rest = append(rest, p.whatIf()...)
	if len(p.Otherwise) > 0 {
		rest.add("otherwise", "%s", strings.Join(p.Otherwise, "; "))
	}
	if len(p.Unmodelled) > 0 {
		rest.add("not modelled", "%s: functions of CUDA's libraries that were called and did nothing",
			strings.Join(p.Unmodelled, ", "))
	}
	rest.add("not here", "workspaces of cuDNN")
	return &Page{
		Title:    "Plan of " + p.name(),
		Sections: append(sections, Section{rest}),
		Verdict:  d.programVerdict(),
		Tone:     d.tone(),
		Document: d,
		Dense:    true,
		Brief:    d.programBrief,
	}
}

// programBrief is what the program held on one screen: where the device that is nearest to its limit is filled, and by
// which lines of the program.
func (d *PlanDocument) programBrief(detail int) *Page {
	p := d.Program
	device := d.limiting()
	var largest, rest Facts
	largest.add("largest", "%s", largestOf(device))
	for _, h := range heaviest(device, min(detail, 3)) {
		largest.add("", "%s", shortened(h.Component.Title()+": "+h.Why, 2*briefLine))
	}
	if p.Failed != "" {
		sentences := strings.SplitAfter(p.Failed, ". ")
		rest.add("failed", "%s", strings.TrimSpace(strings.Join(sentences[:min(2, len(sentences))], "")))
	}
	rest = append(rest, p.whatIf()...)
	if n := len(p.Otherwise) + len(p.Unmodelled); n > 0 {
		rest.add("otherwise", "%d things were done otherwise than on a GPU: --long", n)
	}
	rest.add("next", "%s", d.nextOfProgram())
	bars := Bars{Device: device, palette: paletteOf(d.Devices), most: min(max(2, detail-2), 8)}
	return &Page{
		Sections: []Section{{p.run(2 * briefLine)}, {bars, largest, rest}},
		Verdict:  d.programVerdict(),
		Tone:     d.tone(),
		Document: d,
	}
}

// heaviest are the holdings of a device's peak that take most.
func heaviest(device *ledger.Device, most int) []ledger.Holding {
	list := held(device, device.Peak())
	slices.SortStableFunc(list, func(a, b ledger.Holding) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return list[:min(most, len(list))]
}

// nextOfProgram says what to do after the plan.
func (d *PlanDocument) nextOfProgram() string {
	switch {
	case d.Limit == nil:
		return "give --gpu NAME for a verdict; plimsoll models --gpus lists them"
	case d.Verdict == plan.Fits:
		return "--vary batch=1..64 with {batch} in an argument finds the largest; --long shows every figure"
	}
	return "--vary NAME=A,B with {NAME} in an argument tries others, and --what-if settings of the allocator"
}

// briefLine is about how many bytes of a value a line of a brief page takes.
const briefLine = terminal - 16

// run says the program in so many bytes, and how it was run.
func (p *PlannedProgram) run(most int) (facts Facts) {
	facts.add("program", "%s", shortened(strings.Join(p.Command, " "), most))
	ranks := "rank 0"
	if len(p.Played) > 1 {
		ranks = fmt.Sprintf("ranks %d and %d", p.Played[0], p.Played[1])
	}
	facts.add("run", "%s of %s, %d optimizer steps, torch %s with CUDA %s; no GPU was used, and no numbers were "+
		"computed", ranks, ledger.Count(int64(p.Ranks)), p.Steps, p.Torch, p.CUDA)
	return facts
}

// whatIf says what the allocator would have reserved with other settings.
func (p *PlannedProgram) whatIf() (facts Facts) {
	for i, r := range p.WhatIf[min(1, len(p.WhatIf)):] {
		own := p.WhatIf[0].Reserved
		change := fmt.Sprintf("%v less", own-r.Reserved)
		if r.Reserved >= own {
			change = fmt.Sprintf("%v more", r.Reserved-own)
		}
		name := ""
		if i == 0 {
			name = "what if"
		}
		facts.add(name, "%s: PyTorch reserves at most %v, %s than as it ran; the requests were replayed", r.Settings,
			r.Reserved, change)
	}
	return facts
}

func (d *PlanDocument) programVerdict() string {
	switch {
	case d.Program.Failed != "":
		largest := d.Devices[0]
		for _, other := range d.Devices[1:] {
			if other.Kind == ledger.GPU && other.Peak().PeakUsed > largest.Peak().PeakUsed {
				largest = other
			}
		}
		peak := largest.Peak()
		return fmt.Sprintf("does not fit: the program runs out of memory: it needs %v of %v on the GPU in %s",
			peak.PeakUsed, largest.Capacity, phaseText(peak.Name, peak.Iteration))
	case d.Limit == nil:
		return fmt.Sprintf("no verdict: the GPU needs %v; give --gpu or --gpu-memory", d.Devices[0].Peak().PeakUsed)
	}
	return d.verdictLine()
}
