package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"

	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/steptime"
)

// stepRow is a published step time as a job that plan reads: the flags of its command line, and the files that they
// name. One of Seconds, Tokens and Total is what was published.
type stepRow struct {
	ID, Source string
	Plan       []string
	Files      map[string]json.RawMessage // an object, or the text of a file as a string
	Seconds    float64                    // of an optimizer step
	Tokens     float64                    // a second of each GPU
	Total      float64                    // tokens a second of all GPUs
	// Used is the share or count of package steptime that this row has helped to set, empty for other rows.
	Used string
}

// stepResult is a row beside what is predicted. Reason says why it is not.
type stepResult struct {
	stepRow
	published float64 // seconds
	time      steptime.Time
	reason    string
}

//go:embed steps.jsonl
var stepRows []byte

// readSteps reads rows, one a line.
func readSteps(text []byte) (rows []stepRow, _ error) {
	for i, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n")) {
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		var r stepRow
		if err := d.Decode(&r); err != nil {
			return nil, fmt.Errorf("steps.jsonl:%d: %w", i+1, err)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// predictSteps predicts all rows.
func predictSteps(rows []stepRow, folder string) []stepResult {
	results := make([]stepResult, len(rows))
	for i, r := range rows {
		results[i] = stepResult{stepRow: r}
		if err := results[i].predict(filepath.Join(folder, r.ID)); err != nil {
			results[i].reason = strings.ReplaceAll(err.Error(), filepath.Join(folder, r.ID)+"/", "")
		}
	}
	return results
}

// predict plans the row in a folder of its own, as "plimsoll plan" does.
func (r *stepResult) predict(folder string) error {
	job := variant{Plan: r.Plan, Files: r.Files}
	q, m, err := job.request(folder)
	if err != nil {
		return err
	}
	j, err := q.Resolve()
	if err != nil {
		return err
	}
	p := &plan.Plan{Job: j, Trained: j.Model.Elements()}
	if j.Adapter != nil { // whose parameters the plan counts
		if p, err = plan.New(j); err != nil {
			return err
		}
	}
	if steptime.UsesHost(j) {
		m.Host = roads.AssumedHost(j.RanksPerNode).Rate
	}
	s, err := p.Time(m)
	if err != nil {
		return err
	}
	r.time = s.Total
	switch {
	case r.Seconds > 0:
		r.published = r.Seconds
	case r.Total > 0:
		r.published = float64(s.Tokens) / r.Total
	default:
		r.published = float64(s.Tokens) / float64(j.World) / r.Tokens
	}
	return nil
}

// error returns the error relative to what was published.
func (r *stepResult) error() float64 { return r.time.Expected.Seconds()/r.published - 1 }

func (r *stepResult) isInside() bool {
	return r.time.Least.Seconds() <= r.published && r.published <= r.time.Most.Seconds()
}

func (r *stepResult) width() float64 {
	return (r.time.Most - r.time.Least).Seconds() / r.time.Expected.Seconds()
}

// origin returns where a row is from, without the file.
func (r *stepRow) origin() string {
	parts := strings.Split(strings.TrimPrefix(r.Source, "https://github.com/"), "/")
	return strings.Join(parts[:min(2, len(parts))], "/")
}

// stepSummary is what a group of rows says.
type stepSummary struct {
	rows, expressed, inside int
	errors, widths          []float64
}

func (s *stepSummary) add(r *stepResult) {
	s.rows++
	if r.reason != "" {
		return
	}
	s.expressed++
	s.errors = append(s.errors, math.Abs(r.error()))
	s.widths = append(s.widths, r.width())
	if r.isInside() {
		s.inside++
	}
}

// line returns the cells of a summary.
func (s *stepSummary) line(name string) table.Row {
	if s.expressed == 0 {
		return table.Row{name, s.rows, 0, "-", "-", "-", "-"}
	}
	of := statisticsOf(s.errors)
	return table.Row{name, s.rows, s.expressed, share(of.median), share(of.ninetieth),
		share(float64(s.inside) / float64(s.expressed)), share(statisticsOf(s.widths).median)}
}

func share(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }

// stepTable has a line for each source, and one for all rows that were held back.
func stepTable(results []stepResult) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"step times of", "rows", "expressed", "median of the absolute error", "90th percentile",
		"inside of the interval", "median width"})
	bySource := map[string]*stepSummary{}
	var all, held stepSummary
	for i := range results {
		r := &results[i]
		name := r.origin()
		if r.Used != "" {
			name += ", which set " + r.Used
		}
		if bySource[name] == nil {
			bySource[name] = &stepSummary{}
		}
		bySource[name].add(r)
		all.add(r)
		if r.Used == "" {
			held.add(r)
		}
	}
	var names []string
	for name := range bySource {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(bySource[b].rows, bySource[a].rows), cmp.Compare(a, b))
	})
	for _, name := range names {
		t.AppendRow(bySource[name].line(name))
	}
	t.AppendRow(held.line("all rows that set nothing"))
	t.AppendRow(all.line("all rows"))
	return t
}

// stepScores returns what is now said of step times.
func stepScores(results []stepResult) scored {
	now := scored{}
	for i := range results {
		now[results[i].ID] = math.NaN()
		if results[i].reason == "" {
			now[results[i].ID] = results[i].error()
		}
	}
	return now
}

// farStepTable lists the rows that are outside of their intervals, worst first, and those that are not predicted.
func farStepTable(results []stepResult) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"row", "published, s", "predicted, s", "interval", "error"})
	far := slices.Clone(results)
	slices.SortStableFunc(far, func(a, b stepResult) int {
		return cmp.Compare(math.Abs(b.error()), math.Abs(a.error()))
	})
	for i := range far {
		r := &far[i]
		switch {
		case r.reason != "":
			t.AppendRow(table.Row{r.ID, "-", "-", "-", strings.Join(strings.Fields(r.reason), " ")})
		case !r.isInside():
			seconds := func(d time.Duration) string { return fmt.Sprintf("%.3g", d.Seconds()) }
			t.AppendRow(table.Row{r.ID, fmt.Sprintf("%.3g", r.published), seconds(r.time.Expected),
				seconds(r.time.Least) + " to " + seconds(r.time.Most), percent(r.error())})
		}
	}
	return t
}

// addSteps scores the rows that have no score yet. A row that is not predicted has none: NaN.
func (h history) addSteps(results []stepResult, folder string) error {
	said, err := git(folder, "log", "-1", "--format=%h %cs")
	if err != nil {
		return err
	}
	commit, date, _ := strings.Cut(strings.TrimSpace(said), " ")
	for i := range results {
		r := &results[i]
		if _, known := h[r.ID]; known {
			continue
		}
		value := math.NaN()
		if r.reason == "" {
			value = math.Round(1000*r.error()) / 1000
		}
		h[r.ID] = score{r.ID, commit, date, "step", value}
	}
	return nil
}
