package report

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/plan/plan"
)

// TestTuningOfManyCores shows a profile of six formats, two NUMA nodes and a GPU within 80 columns, in ASCII.
func TestTuningOfManyCores(t *testing.T) {
	p := &profile.Profile{
		State: "split", Moments: "fp32", Overlap: profile.OverlapForward, Load: profile.LoadCommand,
		Command: []string{"python", "train.py"}, LoadTimes: profile.TimeOfSteps, StepsHoldUpdate: true, Others: 0.5,
		TrainerTimes: []profile.TrainerTimes{{Ranks: 2, Points: []profile.TrainerPoint{{Cores: 1, Seconds: 0.5},
			{Cores: 95, Seconds: 0.25}}}},
		Links: []profile.Link{{GPU: "0000:17:00.0", ToGPU: 2.51e10, FromGPU: 2.62e10, Together: 4.8e10}},
	}
	for i, format := range []string{"split fp32", "split bf16", "split int8", "fp32 fp32", "fp32 bf16"} {
		state, moments, _ := strings.Cut(format, " ")
		c := profile.Curve{Ranks: 2, NUMANode: profile.AllNodes, State: state, Moments: moments, Knee: 24 + i}
		for _, cores := range []int{1, 2, 4, 8, 16, 32, 64, 95} {
			c.Points = append(c.Points, profile.Point{Cores: cores, BytesPerSecond: 1e10 * min(float64(cores), 40)})
		}
		p.Curves = append(p.Curves, c)
		p.Splits = append(p.Splits, profile.Split{Ranks: 2, State: state, Moments: moments, Trainer: 72, Optimizer: 24,
			BytesPerSecond: 4e11, Slowdown: 1.01})
	}
	ofNode := p.Curves[0]
	ofNode.Ranks, ofNode.NUMANode = 1, 1
	p.Curves = append(p.Curves, ofNode)
	h, err := host.Of("../../../examples/machines/two-socket.txtar")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := NewTuning("test", h, "host.json", p, true).Page().Write(&b, Text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"python train.py: the time between the marks of its steps", "measured as a whole",
		"left out    fp32/int8, for lack of time", "other processes used 50 %",
		"GB/s of 2 ranks over the cores of each",
		"    2 all  split bf16      10.0 400.0       64   25\n",
		"    1 1    split fp32      10.0 400.0       64   24\n",
		"    2            95 250 ms     1.00\n", "0000:17:00.0        25.1          26.2      48.0\n",
		"2 ranks: 72 cores for the trainer, 24 cores for the optimizer\n  written to host.json\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing", want)
		}
	}
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(line); n > 81 || n != len(line) {
			t.Errorf("a line of %d columns, or not in ASCII: %s", n-1, line)
		}
	}
	if t.Failed() {
		t.Log("\n" + b.String())
	}
	var drawn strings.Builder
	if err := NewTuning("test", h, "host.json", p, false).Page().Write(&drawn, Markdown); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(drawn.String(), "```text\nGB/s of 2 ranks") || !strings.Contains(drawn.String(), "┤") {
		t.Errorf("the plot is missing:\n%s", drawn.String())
	}
}

// TestHostStepHasEachFormatOnce: overlapped steps take other memory, but the same update. A format that the profile
// lacks is left out.
func TestHostStepHasEachFormatOnce(t *testing.T) {
	p := &profile.Profile{
		Splits: []profile.Split{{Ranks: 1, State: "split", Moments: "fp32", Optimizer: 2, BytesPerSecond: 1e10}},
		Curves: []profile.Curve{{Ranks: 1, NUMANode: profile.AllNodes, State: "split", Moments: "fp32",
			BytesPerParameter: 26}},
	}
	d := &PlanDocument{StateFormats: []plan.StateFormat{
		{State: "split", Moments: "fp32", Bytes: 14e9, BytesPerParameter: 14},
		{State: "split", Moments: "bf16", Bytes: 10e9, BytesPerParameter: 10},
		{State: "split", Moments: "fp32", Overlap: "async", Bytes: 16e9, BytesPerParameter: 16},
	}}
	d.Job.Ranks, d.Job.Nodes = 1, 1
	d.PredictHostStep(p, "host.json")
	want := []HostStepTime{{State: "split", Moments: "fp32", Seconds: 2.6, BytesPerSecond: 1e10, OptimizerCores: 2}}
	if d.HostStep == nil || !slices.Equal(d.HostStep.Formats, want) {
		t.Errorf("%+v, want %+v", d.HostStep, want)
	}
}
