package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host/hosttest"
	"plimsoll/internal/plan/origin/origintest"
)

// Bounds for the plans: the least number of expressed runs, and the quantiles of their absolute errors.
const (
	leastExpressed = 0.95
	mostMedian     = 0.025
	mostNinetieth  = 0.10
)

func TestPlansAgainstMeasurements(t *testing.T) {
	file := hosttest.Shared(t, "data/measurements-dev.jsonl")
	rows, err := readRows(file)
	if err != nil {
		t.Fatal(err)
	}
	megatronRuns, err := planGolden(file)
	if err != nil {
		t.Fatal(err)
	}
	results := compareAll(rows, t.TempDir())
	all := page{results: results, golden: megatronRuns, steps: predictedSteps(t)}
	if share := float64(len(compared(results))) / float64(len(results)); share < leastExpressed {
		t.Errorf("%.0f %% of %d rows are expressed, expected %.0f %%", 100*share, len(results), 100*leastExpressed)
	}
	if err := checkDocument("../../docs/accuracy.md", all); err != nil {
		t.Error(err)
	}
	for _, r := range results {
		if strings.Contains(r.reason, "/"+r.ID+"/") {
			t.Errorf("%s: the reason names a folder that is made anew in every run: %s", r.ID, r.reason)
		}
	}
	checkAddresses(t, results, megatronRuns)
	checkCoverage(t, "the main figure", coverageOf(results))
	sources := coverageBySource(results)
	for name := range sources { // no single source decides
		if share := sources.share(name); share < 0.85 || share > 0.96 {
			t.Errorf("without %s, %.1f %% of what each source measured is inside", name, 100*share)
		}
	}
	for _, r := range results {
		if r.falseFits > 0 {
			t.Errorf("%s: the plan fits, and the run did not", r.ID)
		}
	}
	s := statisticsOf(errorsOf(results, programs[0].estimate))
	if s.median > mostMedian || s.ninetieth > mostNinetieth {
		t.Errorf("the median of the absolute error is %.1f %% and the 90th percentile %.1f %%, "+
			"expected %.1f %% and %.1f %%",
			100*s.median, 100*s.ninetieth, 100*mostMedian, 100*mostNinetieth)
	}
}

// checkAddresses demands a formula and a source of every component of the plans.
func checkAddresses(t *testing.T, results []result, megatronRuns []goldenResult) {
	t.Helper()
	plans, components := 0, 0
	check := func(run string, devices []ledger.Device) {
		n, missing := origintest.Unaddressed(devices)
		plans, components = plans+1, components+n
		for _, m := range missing {
			t.Errorf("%s: %s", run, m)
		}
	}
	for _, r := range results {
		for _, c := range r.compared {
			if c.plan != nil {
				check(r.ID, c.plan.Devices)
			}
		}
	}
	for _, r := range megatronRuns {
		if r.unread == nil && r.plan.err == nil {
			check(r.Path, []ledger.Device{r.plan.device})
		}
	}
	t.Logf("%d components of %d plans", components, plans)
}

// TestStaleDocument: a report that is not that of the results is found.
func TestStaleDocument(t *testing.T) {
	file := filepath.Join(t.TempDir(), "accuracy.md")
	for _, stale := range []string{"", "x"} {
		if err := os.WriteFile(file, append(documentOf(page{}), stale...), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := checkDocument(file, page{}); (err != nil) != (stale != "") {
			t.Errorf("with %q behind the report: %v", stale, err)
		}
	}
}

// checkCoverage demands that the intervals that 90 % of runs should be in hold for 85 to 95 %.
func checkCoverage(t *testing.T, what string, c coverage) {
	t.Logf("%s inside of its interval: %v", what, c)
	if share := c.share(); !(share >= 0.85 && share <= 0.95) {
		t.Errorf("%s is inside of its interval in %v", what, c)
	}
}

// TestFalseFits: a run that ran out of memory, or held more than the GPU has, is no run that fits.
func TestFalseFits(t *testing.T) {
	r := row{ID: "x", GPU: "1x A100-40GB", Model: sizes{Name: "gpt2"}, Precision: "bf16", MicroBatch: 1, Sequence: 128}
	for _, c := range []struct {
		figure
		falseFits int
	}{
		{figure{"max_allocated", "whole run", 39, "GiB"}, 0}, {figure{"max_allocated", "whole run", 40, "GiB"}, 1},
		{figure{"max_allocated", "OOM in backward", 30, "GiB"}, 1},
	} {
		r.Measured = []figure{c.figure}
		if got := compare(r, t.TempDir()); got.verdict != "fits" || got.falseFits != c.falseFits {
			t.Errorf("%+v: %q, %d false fits", c.figure, got.verdict, got.falseFits)
		}
	}
}

// TestKernels compares modules by themselves with what liger-kernel publishes (benchmark/data, on an A100).
func TestKernels(t *testing.T) {
	swiglu := row{Precision: "bf16", MicroBatch: 4, GPU: "A100-80GB",
		Model: sizes{Hidden: 4096, Inner: 11008, Note: "one LlamaMLP fwd+bwd, batch 4"}}
	head := row{Precision: "bf16", GPU: "A100-80GB", Model: sizes{Hidden: 4096, Vocabulary: 128256,
		Note: "lm_head + CE"}}
	norm := row{Precision: "bf16", GPU: "A100-80GB", Model: sizes{Note: "one RMSNorm fwd+bwd, M=2048 rows"}}
	loss := row{Precision: "fp32 logits", MicroBatch: 8, Sequence: 2048, Model: sizes{Note: "in-place CE of Liger"}}
	for _, c := range []struct {
		row    row
		point  string
		mib    float64
		within float64
	}{
		{swiglu, "HF, T=1024", 1294.25, 0.0001},
		{swiglu, "HF, T=8192", 6372.25, 0.0001},
		{swiglu, "Liger, T=8192", 4474.25, 0.02},
		{head, "full, BT=4096", 6092.28, 0.0001},
		{head, "full, BT=32768", 27582.5, 0.0001},
		{norm, "HF LlamaRMSNorm, H=8192", 640.1, 0.06},
		{loss, "full, V=131072", 8192.33, 0.0001},
	} {
		o := planPoint(c.row, c.point, t.TempDir())
		if o.err != nil {
			t.Fatal(o.err)
		}
		if planned := o.peak / (1 << 20); math.Abs(planned/c.mib-1) > c.within {
			t.Errorf("%s of %s: %.2f MiB planned, %.2f measured", c.point, c.row.Model.Note, planned, c.mib)
		}
	}
}

func TestUnits(t *testing.T) {
	for unit, bytes := range map[string]float64{
		"bytes":                      2,
		"GiB":                        2 << 30,
		"GiB (printed GB)":           2 << 30,
		"GB (GiB by torchtitan log)": 2 << 30,
		"GB (=GiB: 6.738e9*2/2^30)":  2 << 30,
		"printed GB":                 2 << 30,
		"GB (1e9; torch.cuda.max_memory_allocated/1e9)": 2e9,
		"GB":                2e9,
		"G":                 2e9,
		"MB (rounded)":      2e6,
		"MiB (rss/1024**2)": 2 << 20,
		"gigabytes":         2e9,
		"GiB/GPU":           2 << 30,
		"TB":                2e12,
		"KiB":               2 << 10,
		"B":                 2,
		"% of 80 GB":        1.6e9,
	} {
		if got, ok := (figure{Value: 2, Unit: unit}).bytes(); !ok || got != bytes {
			t.Errorf("2 %s are %.0f bytes, expected %.0f", unit, got, bytes)
		}
	}
	for _, unit := range []string{"bytes/param", "percent", ""} {
		if got, ok := (figure{Value: 2, Unit: unit}).bytes(); ok {
			t.Errorf("2 %q are %.0f bytes, expected none", unit, got)
		}
	}
}

func TestVersions(t *testing.T) {
	for _, test := range []struct{ software, torch, transformers string }{
		{"litgpt 8641822 (2023-10-20), PyTorch 2.1.0+cu121, bitsandbytes 0.41.1", "2.1.0", "4.34.0"},
		{"transformers ~4.16-4.18, torch ~1.10, CUDA 11.2 (Jan 2022)", "1.10", "4.16"},
		{"torchtitan @775a486-era, torch nightly 2025-06", "2.8.0", "4.57.0"},
		{"HF Trainer (Dec 2025/Jan 2026; transformers 4.5x, Kubeflow)", "2.9.0", "4.50"},
		{"torchtitan PR 778 branch (Jan 2025)", "2.7.0", "4.50.0"},
		{"Liger", "", ""},
	} {
		s := text(test.software)
		if torch, transformers := s.version("torch|pytorch", torchReleases),
			s.version("transformers", transformersReleases); torch != test.torch || transformers != test.transformers {
			t.Errorf("%s: torch %q and transformers %q, expected %q and %q", s, torch, transformers, test.torch,
				test.transformers)
		}
	}
}

func TestGPUs(t *testing.T) {
	for name, expected := range map[string]string{
		"2x RTX 3090 (same on 2x 4090)":                "RTX-3090",
		"RTX 3090 / A100 (unspecified for this table)": "RTX-3090",
		"1x A100-SXM4-40GB":                            "A100-40GB",
		"NVIDIA L40S":                                  "L40S",
		"H100 96GB HBM2e SXM":                          "H100-96GB",
		"8x H100":                                      "H100-80GB",
		"4 GPUs (unnamed)":                             "",
		"4x L40S (1 per host, 256 GB RAM)":             "L40S",
		"1x V100-SXM2-16GB":                            "V100-16GB",
		"4x 15 GB (T4)":                                "T4",
		"8x H100 (95 GiB)":                             "H100-80GB",
	} {
		if got := text(name).gpu(); got != expected {
			t.Errorf("%s: %q, expected %q", name, got, expected)
		}
	}
}

func TestQuantile(t *testing.T) {
	values := []float64{5, 1, 4, math.NaN(), 2, 3}
	for share, expected := range map[float64]float64{0: 1, 0.5: 3, 0.9: 5, 1: 5} {
		if got := quantile(values, share); got != expected {
			t.Errorf("the %g quantile is %g, expected %g", share, got, expected)
		}
	}
}
