package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
)

func gib(bytes float64) string {
	if math.IsNaN(bytes) {
		return "-"
	}
	return fmt.Sprintf("%.2f", bytes/(1<<30))
}

func percent(x float64) string { return fmt.Sprintf("%+.1f %%", 100*x) }

func against(estimate, measured float64) string {
	if math.IsNaN(estimate) {
		return "-"
	}
	return percent(estimate/measured - 1)
}

func compared(results []result) []result {
	return slices.DeleteFunc(slices.Clone(results), func(r result) bool { return len(r.compared) == 0 })
}

// expressed counts the runs that are planned.
func expressed(results []result) (n int) {
	for i := range results {
		if results[i].isExpressed() {
			n++
		}
	}
	return n
}

// mainTable returns one line per row, worst first.
func mainTable(results []result) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"run", "measured", "GiB", "planned", "interval", "error", "DeepSpeed's estimator",
		"accelerate estimate-memory"})
	for _, r := range compared(results) {
		c := r.compared[0]
		t.AppendRow(table.Row{r.ID, c.Quantity + ", " + c.Point, gib(c.measured), gib(c.planned), c.interval(),
			percent(c.error()),
			against(c.deepSpeed, c.measured), against(c.accel, c.measured)})
	}
	return t
}

// interval returns the planned interval in GiB, and on which side of it the measured figure is.
func (c comparison) interval() string {
	if !c.hasInterval() {
		return "-"
	}
	text := fmt.Sprintf("%s to %s", gib(c.lower), gib(c.upper))
	switch {
	case c.isAbove():
		text += ", above"
	case !c.isInside():
		text += ", below"
	}
	return text
}

func missingTable(results []result) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"run", "why it is not planned"})
	for _, r := range results {
		if !r.isExpressed() {
			t.AppendRow(table.Row{r.ID, strings.ReplaceAll(r.reason, "\n", " ")})
		}
	}
	return t
}

// statistics sum up the absolute errors of the main figures.
type statistics struct {
	rows                   int
	median, ninetieth, all float64
	bias                   float64 // the median of the signed errors
}

func statisticsOf(errors []float64) statistics {
	s := statistics{rows: len(errors)}
	absolute := make([]float64, len(errors))
	for i, e := range errors {
		absolute[i] = math.Abs(e)
	}
	s.median, s.ninetieth, s.all, s.bias = quantile(absolute, 0.5), quantile(absolute, 0.9), quantile(absolute, 1),
		quantile(errors, 0.5)
	return s
}

// quantile returns the least value that at most 1-share of the values exceed.
func quantile(values []float64, share float64) float64 {
	sorted := slices.DeleteFunc(slices.Clone(values), math.IsNaN)
	if len(sorted) == 0 {
		return math.NaN()
	}
	slices.Sort(sorted)
	at := int(math.Ceil(share*float64(len(sorted)))) - 1
	return sorted[max(at, 0)]
}

func errorsOf(results []result, estimate func(comparison) float64) []float64 {
	var errors []float64
	for _, r := range compared(results) {
		errors = append(errors, estimate(r.compared[0])/r.compared[0].measured-1)
	}
	return errors
}

// programs are the programs whose estimates are compared.
var programs = []struct {
	name     string
	estimate func(comparison) float64
}{
	{"plimsoll plan", func(c comparison) float64 { return c.planned }},
	{"DeepSpeed's estimator", func(c comparison) float64 { return c.deepSpeed }},
	{"accelerate estimate-memory", func(c comparison) float64 { return c.accel }},
}

func programTable(results []result) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"program", "rows", "median of the absolute error", "90th percentile", "largest"})
	for _, p := range programs {
		errors := slices.DeleteFunc(errorsOf(results, p.estimate), math.IsNaN)
		s := statisticsOf(errors)
		t.AppendRow(table.Row{p.name, s.rows, percent(s.median)[1:], percent(s.ninetieth)[1:], percent(s.all)[1:]})
	}
	return t
}

// repositoryFolder is a repository with the first folder of a path in it.
var repositoryFolder = regexp.MustCompile(`^[\w-]+/[\w-]+/[\w-]+`)

// family returns the source of the row.
func (r row) family() string {
	s := r.Source
	for _, cut := range []string{"https://", "github.com/", "blob/main/", "tree/master/"} {
		s = strings.Replace(s, cut, "", 1)
	}
	s, _, _ = strings.Cut(strings.TrimSpace(s), " + ")
	if name := repositoryFolder.FindString(s); name != "" {
		return name
	}
	return s
}

func familyTable(results []result) table.Writer {
	groups := map[string][]result{}
	for _, r := range compared(results) {
		groups[r.family()] = append(groups[r.family()], r)
	}
	names := make([]string, 0, len(groups))
	for name := range groups {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if d := len(groups[b]) - len(groups[a]); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	t := table.NewWriter()
	t.AppendHeader(table.Row{"source", "rows", "median error", "median of the absolute error", "90th percentile"})
	for _, name := range names {
		s := statisticsOf(errorsOf(groups[name], programs[0].estimate))
		t.AppendRow(table.Row{name, s.rows, percent(s.bias), percent(s.median)[1:], percent(s.ninetieth)[1:]})
	}
	return t
}

func writeTable(out io.Writer, results []result) { fmt.Fprintln(out, mainTable(results).Render()) }

func writeMissing(out io.Writer, results []result) {
	fmt.Fprintln(out, missingTable(results).Render())
}

func writeSummary(out io.Writer, results []result) {
	fmt.Fprintf(out, "%d of %d rows are expressed\n%s\n%s\n%s\n", expressed(results), len(results),
		programTable(results).Render(), familyTable(results).Render(), coverageTable(results).Render())
}

// writeDetail lists every figure of every row.
func writeDetail(out io.Writer, results []result) {
	for _, r := range results {
		fmt.Fprintf(out, "\n%s  (%s)\n", r.ID, r.Source)
		seen := ""
		for _, c := range r.compared {
			if line := strings.Join(c.variant.Plan, " "); line != seen {
				fmt.Fprintln(out, "   plimsoll plan", line)
				seen = line
			}
			fmt.Fprintf(out, "    %-14s %-50s measured %8s planned %8s %8s  %s\n", c.Quantity, c.Point,
				gib(c.measured), gib(c.planned), percent(c.error()), c.what)
		}
		for _, f := range r.left {
			fmt.Fprintf(out, "    %-14s %-50s not compared: %s\n", f.Quantity, f.Point, r.reason)
		}
	}
}

// method is the text of the report before its tables.
const method = `# Accuracy

How far may you trust a plan? Here are public measurements of real training runs, each beside its plan.
` + "`make accuracy`" + ` compares them, and writes this page.

Each measured run is expressed as a user would express it: config.json of the model, a program's own configuration or
DeepSpeed's, TrainingArguments, adapter_config.json and flags. Runs are rows of cmd/accuracy/memory.jsonl: the flags of
a command line and the files that they name, written by hand from a source, with its figures. No figure is fitted to a
run, and the program recognizes no run by its name. What a source does not say is the default of its program, such as
the dropout of LoRA. A vocabulary or an inner width that a source lacks follows from the number of parameters. Where a
program takes its longest sample first, only that micro batch has the length of the source. The longest of the others,
which are drawn at random, is shorter in the ratio of the logarithms of their number and of the number of all samples.
Where a source does not give the length of sequences, 128 tokens are taken. float8 is planned as bf16. A run without a
verdict, or one that is refused, is not expressed, and stands below with the reason.

Benchmarks of a module by itself, such as those of liger-kernel, have no job to plan. There the module runs on the
planner's model of autograd, twice, as the benchmark does.

Each measured figure stands beside the planned figure that corresponds to it. That is the peak that PyTorch's
allocator reports as allocated or reserved, or the memory that the driver reports as in use. The latter includes the
CUDA context. It is the peak of the full run, or of the step that the source names. A measured sum of components is
compared with the sum of the planned ones. On the host, tools report what the whole machine uses. There the planned
difference is added to the first measured figure. The error of a run is the error of its main figure, its peak.

Two other programs estimate the same runs. The first is DeepSpeed's estimator of model states
(estimate_zero2 and estimate_zero3_model_states_mem_needs; the latter for every method that shards parameters). The
second is accelerate estimate-memory ("Training using Adam", on one GPU, which has no figure for quantized models).
Both leave out activations, and neither knows adapters.

`

// seen is the text of the report on what the planner said of runs before it could be mended for them.
const seen = `The planner was mended where these runs showed that it was wrong. So their errors now are not what you should
expect of a job of yours. What it said when it first planned a run is nearer to that. The history of this page has it:
[accuracy-history.csv](accuracy-history.csv) names the commit for each run, the last before anybody here had planned
it. ` + "`make accuracy`" + ` adds a run to that file before anybody has seen its error, and never changes a line of it.

In November 2026 others planned 85 published runs that no developer had seen, each expressed by hand. The median of the
absolute error was 4.2 %%, the 90th percentile 12.5 %%, and 64 %% of the figures were in their intervals.
Mechanisms that were found thereby were mended since ([mechanisms.md](mechanisms.md)).

The 88 rows of 5d2b190b were gathered for what earlier runs lacked: other programs, adapters, models of remote code and
old releases. They were written down and committed before one of them was planned. Three ran out of memory and have no
error. Some of their first errors are of the rows and not of the planner: what their first writing had misread, or left
out of a configuration.

The 36 rows of 87fbc096 are of three sources that no row had: notebooks of Unsloth, the benchmarks of IBM's
fms-acceleration, and a blog of Hugging Face. There are also Qwen's own figures, and logs of torchtitan. They were
committed before one of them was planned, too. Six ran out of memory and have no error. The first writing of six rows
had left out that TRL's trainer prepares quantized models, and that of Qwen's rows had a later Qwen. How long the
longest sample of a notebook was, no source says.

The 27 rows of c95b4de3 are of notes, logs and threads that no row had: llama-recipes on RTX 3090s and V100s, Unsloth,
encoder-decoders and a question answering model of the Trainer, GLM-4, torchtitan, torchtune and ms-swift. They were
committed before one of them was planned. Five ran out of memory and have no error: the plan refused one of them, and
said of two that they fit.
`

// worst is the text of the report on sources.
const worst = `Runs of one source are alike. In the next table each source has one value, the median of its runs. Figures
of the host are apart, and of each run the worst figure is shown, too.
`

// intervals is the text of the report on intervals.
const intervals = `Every planned peak has an interval that 90 %% of runs should be in. It follows from mechanisms, such as
the fragments of the allocator. Only its last source, what is not modelled, was set by these runs: 15 %% of what is no
state ([plan.md](plan.md#the-interval)). A figure is compared with the
interval of its own level: allocated, reserved, or in use with context and NCCL. A figure that its source has rounded
counts with half of its last digit. The median of the half widths is %.1f %% of the planned figure. Modules by themselves
have no interval.
`

// ofLevels is the text before the figures of each level.
const ofLevels = `That is of the main figure of a run. These are all figures of all runs, also those of other phases and steps:
`

// ofMegatron is the text of the report on Megatron-LM.
const ofMegatron = `Runs of Megatron-LM are planned from their arguments ([megatron.md](megatron.md)). What the last rank
logs is compared: the bytes that stay allocated between steps, and their maximum.
`

// goldenTable returns the errors and the intervals of the two figures of runs of Megatron-LM.
func goldenTable(results []goldenResult) table.Writer {
	var allocated, most []float64
	for _, r := range results {
		if r.unread != nil || r.plan.err != nil {
			continue
		}
		if r.allocated > 0 {
			allocated = append(allocated, float64(r.plan.allocated)/float64(r.allocated)-1)
		}
		if r.most > 0 {
			most = append(most, float64(r.plan.peak)/float64(r.most)-1)
		}
	}
	c := coverageOfGolden(results)
	t := table.NewWriter()
	t.AppendHeader(table.Row{"figure", "rows", "planned", "median of the absolute error", "90th percentile",
		"inside of the interval"})
	for _, line := range []struct {
		name   string
		errors []float64
		coverage
	}{{"allocated", allocated, c.allocated}, {"max_allocated", most, c.most}} {
		s := statisticsOf(line.errors)
		t.AppendRow(table.Row{line.name, len(results), s.rows, percent(s.median)[1:], percent(s.ninetieth)[1:],
			line.coverage})
	}
	return t
}

// page is what the report is made of: runs and steps beside their plans, and their first scores.
type page struct {
	results           []result
	golden            []goldenResult
	steps             []stepResult
	first, firstSteps history
}

// readHistories reads the first scores, which are beside the page.
func (p *page) readHistories(file string) (err error) {
	if p.first, err = readHistory(historyFile(file)); err != nil {
		return err
	}
	p.firstSteps, err = readHistory(stepHistoryFile(file))
	return err
}

// write scores what is new, and writes the page and the first scores.
func (p *page) write(file string) error {
	if err := p.readHistories(file); err != nil {
		return err
	}
	folder := filepath.Dir(file)
	if err := errors.Join(p.first.add(p.results, folder), p.firstSteps.addSteps(p.steps, folder)); err != nil {
		return err
	}
	if err := errors.Join(p.first.write(historyFile(file)), p.firstSteps.write(stepHistoryFile(file))); err != nil {
		return err
	}
	return os.WriteFile(file, documentOf(*p), 0o644)
}

// checkDocument fails if the report in the file is not that of the results.
func checkDocument(file string, p page) error {
	have, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := p.readHistories(file); err != nil {
		return err
	}
	for _, r := range p.results {
		if _, known := p.first[r.ID]; !known {
			return fmt.Errorf("%s has no first score of %s: run make accuracy", historyFile(file), r.ID)
		}
	}
	for _, r := range p.steps {
		if _, known := p.firstSteps[r.ID]; !known {
			return fmt.Errorf("%s has no first score of %s: run make accuracy", stepHistoryFile(file), r.ID)
		}
	}
	if !bytes.Equal(have, documentOf(p)) {
		return fmt.Errorf("%s is not what the planner gives now: run make accuracy", file)
	}
	return nil
}

// ofSteps, ofStepSources and ofFarSteps are the texts of the section on step times.
const (
	ofSteps = `Published step times and throughputs are rows of cmd/accuracy/steps.jsonl. Each is a job that plan reads: the flags
of its command line and the files that they name, written by hand from its source. The history of their first scores is
[step-time-history.csv](step-time-history.csv). A first score is that of the commit before which nobody here had
computed the row. Eleven rows of pytorch/ao were first scored as of another H100: logs of that project show one of 95
GiB.
`
	ofStepSources = `Rows that helped to set a share or a count of [the model](step-time.md#what-programs-achieve) are apart. The errors
of the others were known, too, when the model was mended. So of rows that nobody had seen only the first scores speak.
MPT models are planned as GPT-2 of their sizes.

Eight rows were left out after their errors had been seen. Six runs of QwenLM/Qwen train LoRA on two nodes: their steps
are predicted 34 to 60 %% too short, and their batch is not clear. Two of pytorch/torchtune train all of a model on an
A6000: their steps are predicted 117 and 230 %% too long, and the published rate exceeds the data sheet of the card. Ten
rows of a table without an address were not entered; they took 1.6 to 2.2 times what is predicted. Nor were those of
mosaicml/llm-foundry in fp8, and most of NVIDIA-NeMo/Megatron-Bridge.
`
	ofFarSteps = `These rows are outside of their intervals, worst first, or have no prediction:
`
)

func documentOf(p page) []byte {
	results, first := p.results, p.first
	var b strings.Builder
	b.WriteString(method)
	fmt.Fprintf(&b, "## Summary\n\n%d of %d runs are expressed.\n\n%s\n\n%s\n\n", expressed(results),
		len(results), programTable(results).RenderMarkdown(), familyTable(results).RenderMarkdown())
	fmt.Fprintf(&b, "## Before and after runs were seen\n\n"+seen+"\n%s\n\n"+worst+"\n%s\n\n",
		firstTable(scoresNow(results), first).RenderMarkdown(), sourceTable(results, first).RenderMarkdown())
	fmt.Fprintf(&b, "## Intervals\n\n"+intervals+"\n%s\n\n"+ofLevels+"\n%s\n\n", 100*widthOf(results),
		coverageTable(results).RenderMarkdown(), levelTable(results).RenderMarkdown())
	fmt.Fprintf(&b, "## Megatron-LM\n\n"+ofMegatron+"\n%s\n\n", goldenTable(p.golden).RenderMarkdown())
	fmt.Fprintf(&b, "## Step times\n\n"+ofSteps+"\n%s\n\n"+ofStepSources+"\n%s\n\n"+ofFarSteps+"\n%s\n\n",
		firstTable(stepScores(p.steps), p.firstSteps).RenderMarkdown(), stepTable(p.steps).RenderMarkdown(),
		farStepTable(p.steps).RenderMarkdown())
	fmt.Fprintf(&b, "## Runs\n\nWorst first; sizes in GiB.\n\n%s\n\n", mainTable(results).RenderMarkdown())
	fmt.Fprintf(&b, "## What is not expressed\n\n%s\n", missingTable(results).RenderMarkdown())
	return []byte(b.String())
}
