package main

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
)

// score is what the planner said of a run when it first planned it, before anybody could mend it for that run.
type score struct {
	run, commit, date string // of the page that first has the run, or of the last commit before it
	figure            string // what was measured
	error             float64
}

// history has the first score of each run.
type history map[string]score

var historyHeader = []string{"run", "commit", "date", "measured", "error"}

// readHistory reads the first scores. A file that is not there has none.
func readHistory(file string) (history, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return history{}, nil
	}
	if err != nil {
		return nil, err
	}
	lines, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	h := history{}
	for i, fields := range lines {
		if i == 0 {
			if !slices.Equal(fields, historyHeader) {
				return nil, fmt.Errorf("%s:1: columns are %v, expected %v", file, fields, historyHeader)
			}
			continue
		}
		value, err := strconv.ParseFloat(fields[4], 64)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, i+1, err)
		}
		h[fields[0]] = score{fields[0], fields[1], fields[2], fields[3], value}
	}
	return h, nil
}

// write writes the first scores, oldest first.
func (h history) write(file string) error {
	var scores []score
	for _, s := range h {
		scores = append(scores, s)
	}
	slices.SortFunc(scores, func(a, b score) int {
		return cmp.Or(cmp.Compare(a.date, b.date), cmp.Compare(a.run, b.run))
	})
	var out bytes.Buffer
	w := csv.NewWriter(&out)
	_ = w.Write(historyHeader) // a buffer takes everything
	for _, s := range scores {
		_ = w.Write([]string{s.run, s.commit, s.date, s.figure, strconv.FormatFloat(s.error, 'f', -1, 64)})
	}
	w.Flush()
	return os.WriteFile(file, out.Bytes(), 0o644)
}

// add scores the runs that have no score yet. The commit is the last one that did not know them. A run that is not
// expressed has no error: NaN.
func (h history) add(results []result, folder string) error {
	var commit, date string
	for _, r := range results {
		if _, known := h[r.ID]; known {
			continue
		}
		if commit == "" {
			last, err := git(folder, "log", "-1", "--format=%h %cs")
			if err != nil {
				return err
			}
			commit, date, _ = strings.Cut(strings.TrimSpace(last), " ")
		}
		figure, value := "", math.NaN() // of a run that is refused, or of one that ran out of memory
		if len(r.compared) > 0 {
			c := r.compared[0]
			figure, value = c.Quantity+", "+c.Point, math.Round(1000*c.error())/1000
		}
		h[r.ID] = score{r.ID, commit, date, figure, value}
	}
	return nil
}

// historyOf reads the first score of each run from the history of a page in a repository.
func historyOf(folder, page string) (history, error) {
	said, err := git(folder, "log", "--reverse", "--format=%h %cs", "--", page)
	if err != nil {
		return nil, err
	}
	h := history{}
	for line := range strings.Lines(said) {
		commit, date, _ := strings.Cut(strings.TrimSpace(line), " ")
		text, err := git(folder, "show", commit+":"+page)
		if err != nil {
			return nil, err
		}
		for _, s := range scoresOf(text) {
			if _, known := h[s.run]; !known {
				s.commit, s.date = commit, date
				h[s.run] = s
			}
		}
	}
	return h, nil
}

// scoresOf reads the table of runs of a page.
func scoresOf(page string) (scores []score) {
	var header []string
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "| ") {
			header = nil
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if header == nil {
			header = cells
		}
		run, figure, percent := slices.Index(header, "run"), slices.Index(header, "measured"),
			slices.Index(header, "error")
		if run < 0 || figure < 0 || percent < 0 || len(cells) != len(header) {
			continue
		}
		if value, err := strconv.ParseFloat(strings.TrimSuffix(cells[percent], " %"), 64); err == nil {
			scores = append(scores, score{run: cells[run], figure: cells[figure], error: math.Round(10*value) / 1000})
		}
	}
	return scores
}

// isWhole reports whether a repository has all its history.
func isWhole(folder string) bool {
	said, err := git(folder, "rev-parse", "--is-shallow-repository")
	return err == nil && strings.TrimSpace(said) == "false"
}

func git(folder string, words ...string) (string, error) {
	command := exec.Command("git", append([]string{"-C", folder}, words...)...)
	var complaint bytes.Buffer
	command.Stderr = &complaint
	said, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(words, " "), err, strings.TrimSpace(complaint.String()))
	}
	return string(said), nil
}

// isOfHost reports whether a figure is memory of the host.
func isOfHost(figure string) bool { return strings.HasPrefix(figure, "cpu_") }

// worstOf returns the largest absolute error of a row's figures of the host or of GPUs, and NaN without one.
func (r result) worstOf(host bool) float64 {
	worst := math.NaN()
	for _, c := range r.compared {
		if e := math.Abs(c.error()); isOfHost(c.Quantity) == host && !(e <= worst) {
			worst = e
		}
	}
	return worst
}

// mainOf returns the absolute error of a row's main figure if that is of the host, or of a GPU, and NaN else.
func (r result) mainOf(host bool) float64 {
	if isOfHost(r.compared[0].Quantity) != host {
		return math.NaN()
	}
	return math.Abs(r.compared[0].error())
}

// bySource returns one value for each source, the median of its runs', and how many runs there are. A source with many
// runs weighs as much as one with few.
func bySource(results []result, errorOf func(result) float64) (values []float64, runs int) {
	groups := map[string][]float64{}
	for _, r := range compared(results) {
		if e := errorOf(r); !math.IsNaN(e) {
			groups[r.family()] = append(groups[r.family()], e)
			runs++
		}
	}
	for _, errors := range groups {
		values = append(values, quantile(errors, 0.5))
	}
	return values, runs
}

// sourceTable has one value a source, of the host and of GPUs: when the runs were first planned, and now.
func sourceTable(results []result, first history) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"one value a source", "sources", "runs", "median", "90th percentile"})
	for _, host := range []bool{false, true} {
		of := map[bool]string{false: "GPU", true: "host"}[host]
		for _, line := range []struct {
			name    string
			errorOf func(result) float64
		}{
			{", peak, when first planned", func(r result) float64 {
				if s, known := first[r.ID]; known && isOfHost(s.figure) == host {
					return math.Abs(s.error)
				}
				return math.NaN()
			}},
			{", peak, now", func(r result) float64 { return r.mainOf(host) }},
			{", worst figure of a run, now", func(r result) float64 { return r.worstOf(host) }},
		} {
			values, runs := bySource(results, line.errorOf)
			t.AppendRow(table.Row{of + line.name, len(values), runs, percent(quantile(values, 0.5))[1:],
				percent(quantile(values, 0.9))[1:]})
		}
	}
	return t
}

// scored is what is now said of a row: its error, NaN if it is not expressed.
type scored map[string]float64

// firstTable compares first scores with those of now, for the rows that were first scored at each commit.
func firstTable(now scored, first history) table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"planned", "rows", "expressed", "median of the absolute error", "90th percentile"})
	rows, before, after := map[string]int{}, map[string][]float64{}, map[string][]float64{}
	known := func(list []float64, value float64) []float64 {
		if math.IsNaN(value) {
			return list
		}
		return append(list, value)
	}
	for id, value := range now {
		s := first[id]
		rows[s.commit]++
		before[s.commit], after[s.commit] = known(before[s.commit], s.error), known(after[s.commit], value)
	}
	most := func(a, b string) int { return cmp.Or(cmp.Compare(rows[b], rows[a]), cmp.Compare(a, b)) }
	for _, commit := range slices.SortedFunc(maps.Keys(rows), most) {
		for _, line := range []struct {
			name   string
			errors []float64
		}{{"first, at " + commit, before[commit]}, {"the same rows, now", after[commit]}} {
			of := statisticsOf(line.errors)
			t.AppendRow(table.Row{line.name, rows[commit], len(line.errors), share(of.median), share(of.ninetieth)})
		}
	}
	return t
}

// scoresNow returns what is now said of the runs that are measured.
func scoresNow(results []result) scored {
	now := scored{}
	for _, r := range results {
		switch {
		case len(r.compared) > 0:
			now[r.ID] = r.compared[0].error()
		case !r.isExpressed():
			now[r.ID] = math.NaN()
		}
	}
	return now
}

// stepHistoryFile is where the first scores of step times are, beside the page.
func stepHistoryFile(page string) string {
	return filepath.Join(filepath.Dir(page), "step-time-history.csv")
}

// historyFile is where the first scores are, beside the page.
func historyFile(page string) string {
	return filepath.Join(filepath.Dir(page), "accuracy-history.csv")
}
