package main

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"plimsoll/host/hosttest"
)

// TestMegatronAgainstGoldenValues bounds the errors of plans of Megatron-LM's functional tests.
func TestMegatronAgainstGoldenValues(t *testing.T) {
	var out bytes.Buffer
	covered, err := compareMegatron(hosttest.Shared(t, "data/megatron-golden-dev.jsonl"), &out)
	if err != nil {
		t.Fatal(err)
	}
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
