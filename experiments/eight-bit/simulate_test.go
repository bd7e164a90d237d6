package main

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func find(t *testing.T, name string) contestant {
	for _, c := range contestants {
		if c.name == name {
			return c
		}
	}
	t.Fatalf("no code is called %q", name)
	return contestant{}
}

// TestDrift runs six time constants of the second moment, with several seeds.
func TestDrift(t *testing.T) {
	for seed := range uint64(3) {
		for _, s := range scenarios {
			t.Run(fmt.Sprintf("%s, seed %d", s.name, seed), func(t *testing.T) { drift(t, s, usualSeed+seed) })
		}
	}
}

func drift(t *testing.T, s scenario, seed uint64) {
	codes := []contestant{find(t, "chosen"), find(t, "3 digits, power of two, nearest")}
	results := simulate(s, codes, 1, 6000, 0.999, seed)
	chosen, naive := results[0], results[1]
	if chosen.vMean < 0.9 || chosen.vMean > 1.1 || chosen.vDrift < 0.9 || chosen.vDrift > 1.1 || chosen.vSpread > 0.4 {
		t.Errorf("v is %.3f ± %.3f of the true v, and drifts by %.3f", chosen.vMean, chosen.vSpread, chosen.vDrift)
	}
	if chosen.uSlope < 0.95 || chosen.uSlope > 1.05 || chosen.uError > 0.2 || chosen.mError > 0.06 ||
		chosen.idle > 1e-3 {
		t.Errorf("updates %.3f, error %.3f; first moments' error %.3f; idle updates %.3g", chosen.uSlope, chosen.uError,
			chosen.mError, chosen.idle)
	}
	if naive.vMean > 0.6 && naive.vMean < 1.6 && naive.uError < 0.3 {
		t.Errorf("three digits, rounded to nearest, do not drift: v %.3f, error of the update %.3f", naive.vMean,
			naive.uError)
	}
}

// TestFlashExplodes: its roots become 0 where first moments do not.
func TestFlashExplodes(t *testing.T) {
	results := simulate(scenario{name: "4 decades", decades: 4, rarest: 1}, []contestant{find(t, "FlashOptim, nearest"),
		find(t, "chosen")}, 1, 2000, 0.999, usualSeed)
	if flash, chosen := results[0], results[1]; flash.uWorst < 1000 || chosen.uWorst > 1 {
		t.Errorf("updates are up to %.3g off, expected above 1000; ours %.3g, expected below 1", flash.uWorst,
			chosen.uWorst)
	}
}

// TestHalf compares with fp16 numbers.
func TestHalf(t *testing.T) {
	for _, x := range []float32{0x1p-24, 0x1p-14, 1, 1.5, 0x1.ffcp3, 0} {
		if half(x) != x {
			t.Errorf("%g is rounded to %g", x, half(x))
		}
	}
	if half(1+0x1p-12) != 1 || half(0x1p-26) != 0 || half(1+0x1.8p-10) != 1+0x1p-9 {
		t.Error("numbers are not rounded to nearest even")
	}
}

// TestDynamicMaps compares the tables with numbers of bitsandbytes' create_dynamic_map.
func TestDynamicMaps(t *testing.T) {
	signed, unsigned := dynamicTables()
	if len(signed) != 256 || len(unsigned) != 256 {
		t.Fatalf("%d and %d numbers, expected 256", len(signed), len(unsigned))
	}
	for _, c := range []struct {
		table []float32
		index int
		want  float32
	}{
		{signed, 0, -0.99296875}, {signed, 127, 0}, {signed, 128, 5.5e-7}, {signed, 254, 0.99296875}, {signed, 255, 1},
		{unsigned, 0, 0}, {unsigned, 1, 3.25e-7}, {unsigned, 2, 7.75e-7}, {unsigned, 254, 0.996484375},
		{unsigned, 255, 1},
	} {
		if got := c.table[c.index]; magnitude(got-c.want) > 1e-6*magnitude(c.want) {
			t.Errorf("number %d is %g, expected %g", c.index, got, c.want)
		}
	}
}

func TestCommand(t *testing.T) {
	folder := t.TempDir()
	var out bytes.Buffer
	if err := run([]string{"-steps", "500", "-blocks", "1", "-output", folder}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(out.String(), "| chosen |"); lines != 2 {
		t.Errorf("%d lines for the chosen code, expected one for each beta2:\n%s", lines, &out)
	}
	file, err := os.Open(filepath.Join(folder, "results.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	table, err := csv.NewReader(file).ReadAll()
	if err != nil || len(table) != 1+2*len(scenarios)*len(contestants) {
		t.Errorf("results.csv has %d lines, %v", len(table), err)
	}
	plot, err := os.ReadFile(filepath.Join(folder, "drift.svg"))
	if err != nil || bytes.Count(plot, []byte("<polyline")) != len(plottedScenarios)*len(plottedCodes) {
		t.Errorf("drift.svg has %d lines, %v", bytes.Count(plot, []byte("<polyline")), err)
	}
	if err := run([]string{"-steps", "1"}, &out, io.Discard); err == nil {
		t.Error("one step was accepted")
	}
}
