package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/guptarohit/asciigraph"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/state/optim/kernel"
)

// TuningSchema is the schema of the JSON document.
const TuningSchema = "plimsoll.tune/1"

// Tuning is the document of a host profile that was just measured.
type Tuning struct {
	Schema  string           `json:"schema"`
	Version string           `json:"version"`
	Host    RehearsedHost    `json:"host"`
	File    string           `json:"file"` // that the profile was written to
	Profile *profile.Profile `json:"profile"`

	ascii bool // draw with ASCII characters alone
}

// NewTuning makes the document of a profile.
func NewTuning(version string, h *host.Host, file string, p *profile.Profile, ascii bool) *Tuning {
	return &Tuning{Schema: TuningSchema, Version: version, Host: newHost(h), File: file, Profile: p, ascii: ascii}
}

// Page shows the speed of updates, the times of the trainer, the splits that follow, and the links.
func (d *Tuning) Page() *Page {
	p := d.Profile
	var facts Facts
	facts.add("host", "%s", d.Host)
	facts.add("trainer", "%s", d.trainer())
	facts.add("step", "%s", d.step())
	if left := d.leftOut(); len(left) > 0 {
		facts.add("left out", "%s, for lack of time: give a larger --budget", strings.Join(left, ", "))
	}
	if p.InDoubt() {
		facts.add("warning", "other processes used %.0f %% of these CPUs meanwhile: tune again when the host is idle",
			100*p.Others)
	}
	sections := []Section{{facts}, {Paragraph("speed of an update of all ranks, in GB/s"), d.updates()}}
	if plot := d.plot(); plot != "" {
		sections = append(sections, Section{plot})
	}
	sections = append(sections,
		Section{Paragraph("time of the trainer"), d.times()},
		Section{Paragraph("cores of each rank where a step is the shortest"), d.splits()},
		Section{d.links()})
	var verdict []string
	for _, s := range p.Splits {
		if s.State == p.State && s.Moments == p.Moments {
			verdict = append(verdict, fmt.Sprintf("%s: %v", counted(s.Ranks, "rank"), &s))
		}
	}
	page := &Page{
		Title: "Tuning of this host", Sections: sections, Verdict: strings.Join(verdict, "; "), Document: d,
		Narrow: true, Piped: true,
		Hints: []string{"written to " + d.File,
			"run, serve, rehearse and plan use it; --host-profile none ignores it"},
	}
	page.Brief = func(detail int) *Page {
		t := d.splits()
		rows := t.Rows[:min(len(t.Rows), max(1, detail))]
		return &Page{Verdict: page.Verdict, Hints: page.Hints, Sections: []Section{
			{facts.chosen("host", "left out", "warning")},
			{Paragraph("cores of each rank where a step is the shortest"), &Table{Style: t.Style, Columns: t.Columns,
				Rows: rows}},
			{d.links(), next("--long shows the speed of updates and the time of the trainer, core by core")}}}
	}
	return page
}

// leftOut lists the formats for which there was no time.
func (d *Tuning) leftOut() (formats []string) {
	for _, state := range []string{kernel.Split.String(), kernel.FP32.String()} { // others only where asked for
		for _, moments := range kernel.MomentNames() {
			for _, s := range d.Profile.TrainerTimes {
				if name := state + "/" + moments; d.Profile.Split(s.Ranks, state, moments) == nil &&
					!slices.Contains(formats, name) {
					formats = append(formats, name)
				}
			}
		}
	}
	return formats
}

// trainer says what took the place of a trainer.
func (d *Tuning) trainer() string {
	p := d.Profile
	switch {
	case p.Load == profile.LoadBuiltIn:
		return "one thread of each rank that computes as if it launched kernels"
	case p.LoadTimes == profile.TimeOfSteps:
		return strings.Join(p.Command, " ") + ": the time between the marks of its steps"
	}
	return strings.Join(p.Command, " ") + ": the time of the whole run, its start included"
}

// step says what a predicted step is made of.
func (d *Tuning) step() string {
	p := d.Profile
	text := "the update follows forward and backward"
	if p.Overlap != profile.NoOverlap {
		text = "the update runs beside " + p.Overlap
	}
	if p.Load == profile.LoadCommand && p.StepsHoldUpdate {
		return text + "; measured as a whole, because the command uses the optimizer service"
	}
	return text + "; it is assumed to take as long as these two at their fastest"
}

func (d *Tuning) updates() *Table {
	t := (&Table{Style: Plain}).with(Number, "ranks").with(Words, "node", "state", "moments").with(Number, "1 core",
		"best", "at cores", "knee")
	for i := 4; i <= 5; i++ {
		t.Columns[i].Decimals = 1
	}
	for _, c := range d.Profile.Curves {
		node := "all"
		if c.NUMANode != profile.AllNodes {
			node = fmt.Sprint(c.NUMANode)
		}
		best := slices.MaxFunc(c.Points, func(a, b profile.Point) int {
			return cmp.Compare(a.BytesPerSecond, b.BytesPerSecond)
		})
		t.add(c.Ranks, node, c.State, c.Moments, c.Points[0].BytesPerSecond/1e9, best.BytesPerSecond/1e9, best.Cores,
			c.Knee)
	}
	return t
}

func (d *Tuning) times() *Table {
	t := (&Table{Style: Plain}).with(Number, "ranks", "cores of each").with(Words, "time").with(Number, "slowdown")
	t.Columns[3].Decimals = 2
	for _, times := range d.Profile.TrainerTimes {
		least := slices.MinFunc(times.Points, func(a, b profile.TrainerPoint) int {
			return cmp.Compare(a.Seconds, b.Seconds)
		}).Seconds
		for _, point := range times.Points {
			t.add(times.Ranks, point.Cores, seconds(point.Seconds), point.Seconds/least)
		}
	}
	return t
}

func (d *Tuning) splits() *Table {
	t := (&Table{Style: Plain}).with(Number, "ranks").with(Words, "state", "moments").with(Number, "trainer",
		"optimizer", "GB/s", "slowdown").with(Words, "")
	t.Columns[5].Decimals, t.Columns[6].Decimals = 1, 2
	for _, s := range d.Profile.Splits {
		shared := ""
		if s.Shared {
			shared = "in turns"
		}
		t.add(s.Ranks, s.State, s.Moments, s.Trainer, s.Optimizer, s.BytesPerSecond/1e9, s.Slowdown, shared)
	}
	return t
}

func (d *Tuning) links() Block {
	if len(d.Profile.Links) == 0 {
		return Paragraph("GPU links were not measured: " + d.Profile.LinksNote)
	}
	t := (&Table{Style: Plain}).with(Words, "GPU").with(Number, "to GPU GB/s", "from GPU GB/s", "both GB/s")
	for i := range 3 {
		t.Columns[i+1].Decimals = 1
	}
	for _, l := range d.Profile.Links {
		t.add(l.GPU, l.ToGPU/1e9, l.FromGPU/1e9, l.Together/1e9)
	}
	return t
}

// figure is text that keeps its lines.
type figure string

func (f figure) text(layout) string { return string(f) + "\n" }
func (f figure) markdown() string   { return "```text\n" + string(f) + "\n```\n" }

// The size of a plot, within a terminal.
const (
	plotWidth, plotHeight = terminal - 16, 12
	plotMarks             = "*o+x#@"
)

// asciiAxes replaces what asciigraph draws axes with.
var asciiAxes = strings.NewReplacer("┤", "|", "┼", "+", "└", "+", "─", "-", "┬", "+")

// plot draws the speed of each format over the cores of a rank, for the first number of ranks. It is empty where a rank
// has one core.
func (d *Tuning) plot() figure {
	var series [][]float64
	var marks []asciigraph.CharSet
	var legend []string
	cores, ranks := 0, 0
	for _, c := range d.Profile.Curves {
		last := c.Points[len(c.Points)-1].Cores
		if ranks == 0 {
			ranks, cores = c.Ranks, last
		}
		if c.Ranks != ranks || c.NUMANode != profile.AllNodes || last != cores || cores < 2 || c.Points[0].Cores != 1 {
			continue
		}
		mark := string(plotMarks[len(series)%len(plotMarks)])
		series, marks = append(series, speeds(c)), append(marks, asciigraph.CreateCharSet(mark))
		legend = append(legend, fmt.Sprintf("%s %s/%s", mark, c.State, c.Moments))
	}
	if len(series) == 0 {
		return ""
	}
	drawn := asciigraph.PlotMany(series, asciigraph.Width(plotWidth), asciigraph.Height(plotHeight),
		asciigraph.LowerBound(0), asciigraph.SeriesChars(marks...),
		asciigraph.YAxisValueFormatter(func(y float64) string { return fmt.Sprintf("%.1f", math.Abs(y)) }),
		asciigraph.XAxisRange(1, float64(cores)), asciigraph.XAxisTickCount(min(cores, 9)),
		asciigraph.XAxisValueFormatter(func(x float64) string { return fmt.Sprintf("%.0f", x) }))
	if d.ascii {
		drawn = asciiAxes.Replace(drawn)
	}
	title := fmt.Sprintf("GB/s of %s over the cores of each", counted(ranks, "rank"))
	return figure(title + "\n" + drawn + "\n" + strings.Join(wrapped(strings.Join(legend, "   "), terminal), "\n"))
}

// speeds returns GB/s for every number of cores, on straight lines between the points.
func speeds(c profile.Curve) (list []float64) {
	for i, p := range c.Points {
		if i > 0 {
			before := c.Points[i-1]
			for cores := before.Cores + 1; cores < p.Cores; cores++ {
				share := float64(cores-before.Cores) / float64(p.Cores-before.Cores)
				list = append(list, ((1-share)*before.BytesPerSecond+share*p.BytesPerSecond)/1e9)
			}
		}
		list = append(list, p.BytesPerSecond/1e9)
	}
	return list
}
