package main

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestHistory holds the first scores against the history of the page.
func TestHistory(t *testing.T) {
	const root, page = "../..", "docs/accuracy.md"
	kept, err := readHistory(filepath.Join(root, historyFile(page)))
	if err != nil {
		t.Fatal(err)
	}
	if len(kept) < 100 {
		t.Errorf("%d runs have a first score", len(kept))
	}
	if !isWhole(root) {
		t.Skip("this clone has not all of the history, or git is not there")
	}
	told, err := historyOf(root, page)
	if err != nil {
		t.Fatal(err)
	}
	for run, s := range told {
		have, known := kept[run]
		if !known {
			t.Errorf("%s was first planned at %s, and has no first score", run, s.commit)
			continue
		}
		page, err := git(root, "show", have.commit+":"+page)
		if err != nil {
			t.Fatal(err)
		}
		if have.commit == s.commit && have != s {
			t.Errorf("the first score is %+v; in the history it is %+v", have, s)
		}
		for _, earlier := range scoresOf(page) {
			if have.commit != s.commit && earlier.run == run {
				t.Errorf("%s was known at %s, which has its first score", run, have.commit)
			}
		}
	}
}

// TestFirstScores adds runs that have no score, and leaves those that have one.
func TestFirstScores(t *testing.T) {
	if _, err := git("../..", "log", "-1"); err != nil {
		t.Skip(err)
	}
	var results []result
	for _, id := range []string{"old", "new", "refused"} {
		r := gpt2On(figure{Quantity: "max_allocated", Point: "whole run", Value: 4, Unit: "GiB"})
		if r.ID = id; id == "refused" {
			r.variants[0].Plan = []string{"--model", "none"}
		}
		results = append(results, compare(r, t.TempDir()))
	}
	file := filepath.Join(t.TempDir(), "first.csv")
	first := history{"old": {"old", "0000000", "2026-01-01", "max_allocated, whole run", 7}}
	if err := first.add(results, "../.."); err != nil {
		t.Fatal(err)
	}
	if err := first.write(file); err != nil {
		t.Fatal(err)
	}
	read, err := readHistory(file)
	if err != nil {
		t.Fatal(err)
	}
	have := read["new"]
	if math.Abs(have.error-results[1].compared[0].error()) > 0.001 || have.commit == "" || have.date == "" {
		t.Errorf("the new run has %+v", have)
	}
	if read["old"].error != 7 || len(read) != 3 || !math.IsNaN(read["refused"].error) {
		t.Errorf("the history is now %+v", read)
	}
	if err := os.WriteFile(file, []byte("run,error\nx,1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readHistory(file); err == nil {
		t.Error("a file with other columns was read")
	}
}

// TestOneValueASource lets a source with many runs weigh as much as one with few, and tells host and GPU apart.
func TestOneValueASource(t *testing.T) {
	of := func(source string, errors ...float64) (results []result) {
		for _, e := range errors {
			c := comparison{figure: figure{Quantity: "max_allocated"}, measured: float64(ledger.GiB)}
			c.planned = c.measured * (1 + e)
			host := c
			host.Quantity, host.planned = "cpu_rss", 3*c.measured
			results = append(results, result{row: row{Source: source}, compared: []comparison{c, host}})
		}
		return results
	}
	results := append(of("many", 0.1, -0.1, 0.1, 0.1), of("few", -0.5)...)
	values, runs := bySource(results, func(r result) float64 { return r.mainOf(false) })
	if runs != 5 || len(values) != 2 || math.Abs(values[0]+values[1]-0.6) > 1e-9 {
		t.Errorf("%d runs, %v", runs, values)
	}
	if values, runs = bySource(results, func(r result) float64 { return r.mainOf(true) }); runs != 0 {
		t.Errorf("%d runs of the host, %v", runs, values)
	}
	values, runs = bySource(results, func(r result) float64 { return r.worstOf(true) })
	if runs != 5 || values[0] != 2 {
		t.Errorf("%d runs of the host, %v", runs, values)
	}
}
