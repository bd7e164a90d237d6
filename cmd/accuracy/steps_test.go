package main

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// Bounds for step times: of all rows, and of those that no share was set by.
const (
	leastStepsExpressed = 0.95
	mostStepMedian      = 0.10
	mostStepNinetieth   = 0.30
	mostStepWidth       = 0.50
)

func predictedSteps(t *testing.T) []stepResult {
	t.Helper()
	rows, err := readSteps(stepRows)
	if err != nil {
		t.Fatal(err)
	}
	return predictSteps(rows, t.TempDir())
}

// TestStepTimes holds predictions to published step times.
func TestStepTimes(t *testing.T) {
	var all, held stepSummary
	for _, r := range predictedSteps(t) {
		all.add(&r)
		if r.Used == "" {
			held.add(&r)
		}
		if r.reason == "" && !(r.published > 0) {
			t.Errorf("%s: %g s were published", r.ID, r.published)
		}
	}
	for name, s := range map[string]*stepSummary{"all": &all, "held back": &held} {
		of, inside := statisticsOf(s.errors), float64(s.inside)/float64(s.expressed)
		width := statisticsOf(s.widths).median
		if float64(s.expressed) < leastStepsExpressed*float64(s.rows) || of.median > mostStepMedian ||
			of.ninetieth > mostStepNinetieth || inside < 0.85 || width > mostStepWidth {
			t.Errorf("%s: %d of %d rows are expressed, median %.1f %%, 90th percentile %.1f %%, %.1f %% inside, "+
				"width %.1f %%", name, s.expressed, s.rows, 100*of.median, 100*of.ninetieth, 100*inside, 100*width)
		}
	}
}

// TestStepRows: every row has one figure, a source and a name of its own, and its files are named by its flags.
func TestStepRows(t *testing.T) {
	rows, err := readSteps(stepRows)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		figures := 0
		for _, f := range []float64{r.Seconds, r.Tokens, r.Total} {
			if f > 0 {
				figures++
			}
		}
		if figures != 1 || !strings.HasPrefix(r.Source, "https://") || seen[r.ID] {
			t.Errorf("%s: %d figures, source %q, known before: %v", r.ID, figures, r.Source, seen[r.ID])
		}
		seen[r.ID] = true
		for name := range r.Files {
			if !strings.Contains(" "+strings.Join(r.Plan, " ")+" ", " "+name+" ") {
				t.Errorf("%s: no flag names the file %s", r.ID, name)
			}
		}
	}
	if _, err := readSteps([]byte(`{"ID":"x","Unknown":1}`)); err == nil {
		t.Error("a key that no row has is taken")
	}
}

// TestStepRefused: a row that plan refuses has a reason, without the folder that it was planned in.
func TestStepRefused(t *testing.T) {
	row := stepRow{ID: "x", Plan: []string{"--model", "config.json", "--gpu", "A100-80GB"}, Tokens: 1,
		Files: map[string]json.RawMessage{"config.json": json.RawMessage(`{"model_type":"nothing"}`)}}
	folder := t.TempDir()
	r := predictSteps([]stepRow{row}, folder)[0]
	if r.reason == "" || strings.Contains(r.reason, folder) {
		t.Errorf("the reason is %q", r.reason)
	}
	var s stepSummary
	if s.add(&r); s.expressed != 0 || s.rows != 1 {
		t.Errorf("%+v", s)
	}
	h := history{}
	if err := h.addSteps([]stepResult{r}, "."); err != nil || !math.IsNaN(h["x"].error) {
		t.Errorf("%v, %v", h, err)
	}
}
