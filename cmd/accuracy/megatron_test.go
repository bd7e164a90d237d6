package main

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/machine/host/hosttest"
)

// TestMegatronAgainstGoldenValues bounds the errors of plans of Megatron-LM's functional tests.
func TestMegatronAgainstGoldenValues(t *testing.T) {
	var out bytes.Buffer
	results, err := planGolden(hosttest.Shared(t, "data/megatron-golden-dev.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	checkAddresses(t, nil, results)
	covered := compareMegatron(results, &out)
	checkCoverage(t, "allocated", covered.allocated)
	checkCoverage(t, "max_allocated", covered.most)
	var allocated, peak []float64
	rows := 0
	for line := range strings.Lines(out.String()) {
		rows++
		cells := strings.Split(strings.TrimSpace(line), "\t")
		if rows == 1 || len(cells) < 5 {
			continue
		}
		var bytes [4]float64
		for i, cell := range cells[1:] {
			var err error
			if bytes[i], err = strconv.ParseFloat(cell, 64); err != nil {
				t.Fatal(err)
			}
		}
		allocated = append(allocated, math.Abs(bytes[1]/bytes[0]-1))
		if bytes[2] > 0 {
			peak = append(peak, math.Abs(bytes[3]/bytes[2]-1))
		}
	}
	if len(allocated) < rows*17/20 {
		t.Errorf("%d of %d rows are planned", len(allocated), rows-1)
	}
	for _, c := range []struct {
		name                      string
		errors                    []float64
		mostMedian, mostNinetieth float64
	}{{"allocated", allocated, 0.005, 0.02}, {"max_allocated", peak, 0.01, 0.04}} {
		slices.Sort(c.errors)
		median, ninetieth := c.errors[len(c.errors)/2], c.errors[len(c.errors)*9/10]
		if median > c.mostMedian || ninetieth > c.mostNinetieth {
			t.Errorf("%s: the median of the absolute error is %.2f %% and the 90th percentile %.2f %%, "+
				"expected %.1f %% and %.1f %%", c.name, 100*median, 100*ninetieth, 100*c.mostMedian,
				100*c.mostNinetieth)
		}
	}
}

// TestMegatronRowsOfMeasurements bounds the errors of the runs of Megatron-LM among the measurements.
func TestMegatronRowsOfMeasurements(t *testing.T) {
	results, err := planGolden(hosttest.Shared(t, "data/measurements-dev.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	c := coverageOfGolden(results)
	checkCoverage(t, "allocated", c.allocated)
	checkCoverage(t, "max_allocated", c.most)
	if c.allocated.rows() < len(results)*3/4 {
		t.Errorf("%d of %d rows are planned", c.allocated.rows(), len(results))
	}
	for _, figure := range []struct {
		name                      string
		of                        func(goldenResult) float64
		mostMedian, mostNinetieth float64
	}{
		{"allocated", func(r goldenResult) float64 { return float64(r.plan.allocated) / float64(r.allocated) },
			0.02, 0.05},
		{"max_allocated", func(r goldenResult) float64 { return float64(r.plan.peak) / float64(r.most) }, 0.05, 0.15},
	} {
		var errors []float64
		for _, r := range results {
			if r.plan.err == nil {
				errors = append(errors, figure.of(r)-1)
			}
		}
		if s := statisticsOf(errors); s.median > figure.mostMedian || s.ninetieth > figure.mostNinetieth {
			t.Errorf("%s: the median of the absolute error is %.2f %% and the 90th percentile %.2f %%", figure.name,
				100*s.median, 100*s.ninetieth)
		}
	}
}

// TestChangedGoldenRows: every row has a line with its path, and five cells or the reason why it is not planned.
func TestChangedGoldenRows(t *testing.T) {
	const row = `{"path": %q, "family": "gpt", "test": "x", "platform": "dev_dgx_h100", "args": {"num-layers": 2,
		"hidden-size": 64, "num-attention-heads": 4, "seq-length": 64, "max-position-embeddings": 64,
		"micro-batch-size": 1, "global-batch-size": 8, "vocab-size": 512, "bf16": true%s},
		"allocated": {"1": 5e6}, "max_allocated": {"1": 6e6, "5": 7e6}}`
	changes := map[string]string{"as it is": "", "in words": `, "tensor-model-parallel-size": "2"`,
		"null":    `, "tensor-model-parallel-size": null`,
		"unknown": `, "no-such-argument": 3`, "zero": `, "micro-batch-size": 0`, "huge": `, "num-experts": 1e12`,
		"no divisor": `, "pipeline-model-parallel-size": 1048573, "tensor-model-parallel-size": 1048571`,
		"negative":   `, "context-parallel-size": -2`, "a list": `, "hidden-size": [1, 2]`,
		"a tab\tand\nlines": `, "transformer-impl": "a\tb\nc"`}
	names := slices.Sorted(maps.Keys(changes))
	var file strings.Builder
	for _, name := range names {
		file.WriteString(strings.ReplaceAll(fmt.Sprintf(row, name, changes[name]), "\n\t\t", "") + "\n")
	}
	file.WriteString("\n{\"path\": \"cut off\", \"args\": {\"num\n{\"args\": {\"num-layers\": 2}}\n")
	results, err := planGolden(filestest.InNewFolder(t)("rows.jsonl", file.String()))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	compareMegatron(results, &out)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")[1:]
	names = append(names, fmt.Sprintf("line %d", len(names)+2), fmt.Sprintf("line %d", len(names)+3))
	if len(lines) != len(names) {
		t.Fatalf("%d lines of %d rows:\n%s", len(lines), len(names), out.String())
	}
	for i, line := range lines {
		cells := strings.Split(line, "\t")
		planned := slices.Contains([]string{"as it is", "in words", "null"}, names[i])
		if cells[0] != strings.Join(strings.Fields(names[i]), " ") || planned != (len(cells) == 5) ||
			!planned && len(cells) != 2 {
			t.Errorf("%s: %q", names[i], line)
		}
		if planned && (cells[1] != "5000000" || cells[3] != "7000000") {
			t.Errorf("%s: %q", names[i], line)
		}
	}
}
