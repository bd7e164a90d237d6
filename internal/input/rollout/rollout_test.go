package rollout_test

import (
	"math"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/rollout"
)

func TestParse(t *testing.T) {
	e, err := rollout.Parse("vllm:0.5,tp=2,sleep,kv=fp8,graphs=off,max-model-len=8192,backups=parameters+optimizer,"+
		"reference=host,sync=1GiB,log-probs=chunked,ray,object-store=10GiB,copies=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	want := rollout.Engine{Name: rollout.VLLM, Fraction: .5, Tensor: 2, Sleep: 1, CacheType: dtype.F8E4M3,
		Longest: 8192, Sequences: 256, BatchTokens: 8192, Backups: rollout.Backups{Parameters: true, Optimizer: true},
		HostReference: true, Sync: ledger.GiB, ChunkedLogProbs: true, RayThreshold: .95, ObjectStore: 10 * ledger.GiB,
		Copies: 1}
	if *e != want {
		t.Errorf("parsed\n%+v, want\n%+v", *e, want)
	}
	changed, err := rollout.Parse("fraction=0.3,sleep=2,sync=gathered,sync-parts=16", e)
	want.Fraction, want.Sleep, want.Sync, want.SyncParts = .3, 2, rollout.GatheredModel, 16
	if err != nil || *changed != want {
		t.Errorf("changed to %+v, %v", changed, err)
	}
	if e.Sleep != 1 {
		t.Error("a change of the engine of files changed that engine, too")
	}
}

// TestParseRefuses holds what is said of texts that are no engine.
func TestParseRefuses(t *testing.T) {
	for text, says := range map[string]string{
		"":                       `the rollout engine is "", expected vllm or sglang`,
		"tgi:0.5":                `"tgi", expected vllm or sglang`,
		"sleep=1":                `"sleep=1", expected vllm or sglang`,
		"sglang":                 "sglang has no fraction",
		"vllm:50":                `found "50", expected a number above 0, up to 1`,
		"vllm:0.5,sleeep=1":      `did you mean "sleep"?`,
		"vllm:0.5,sleep=3":       "expected 0 (no sleep)",
		"vllm:0.5,tp=0":          "expected a whole number from 1 on",
		"vllm:0.5,kv=int4":       "expected auto, bf16, fp16 or fp8",
		"vllm:0.5,backups=x":     "expected all, none",
		"vllm:0.5,sync=0":        "expected tensor, full",
		"vllm:0.5,ray=2":         "expected RAY_memory_usage_threshold",
		"vllm:0.5,graphs=maybe":  "expected on or off",
		"vllm:0.5,process=other": "expected own or shared",
	} {
		if _, err := rollout.Parse(text, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

func TestWith(t *testing.T) {
	for before, after := range map[string]string{
		"":                      "sleep=2",
		"vllm:0.5":              "vllm:0.5,sleep=2",
		"vllm:0.5,sleep=1,tp=2": "vllm:0.5,tp=2,sleep=2",
		"vllm:0.5,sleep":        "vllm:0.5,sleep=2",
	} {
		if got := rollout.With(before, "sleep=2"); got != after {
			t.Errorf("With(%q) = %q, want %q", before, got, after)
		}
	}
}

// TestShareRefuses holds what vLLM refuses when it starts.
func TestShareRefuses(t *testing.T) {
	m, err := model.Load("llama-3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	for text, says := range map[string]string{
		"vllm:0.15":                          "nothing is left for the cache",
		"sglang:0.15":                        "nothing is left for the cache",
		"vllm:0.25,max-model-len=131072":     "one sequence may have 131,072",
		"vllm:0.25,tp=8,max-model-len=65536": "",
	} {
		e, err := rollout.Parse(text, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = e.ShareOf(m, dtype.BF16, 80*ledger.GiB, 0)
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}

// TestHeadsOfACacheAreNotDivided holds a GPU's part of a cache at one head: eight GPUs cannot divide four heads.
func TestHeadsOfACacheAreNotDivided(t *testing.T) {
	m, err := model.Load("qwen2.5-7b") // 28 layers, 4 heads of keys and values with 128 numbers
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]int64{"vllm:0.9": 28 * 4 * 256 * 2, "vllm:0.9,tp=4": 28 * 256 * 2,
		"vllm:0.9,tp=8": 28 * 256 * 2, "vllm:0.9,kv=fp8": 28 * 4 * 256} {
		e, err := rollout.Parse(text, nil)
		if err != nil {
			t.Fatal(err)
		}
		s, err := e.ShareOf(m, dtype.BF16, 0, 0)
		if err != nil || s.TokenBytes != want {
			t.Errorf("%s: %d B for a token, %v, want %d", text, s.TokenBytes, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"vllm:0.5,sleep=1", "sglang:0.7,backups,ray=0.9,object-store", "sleep=2",
		"vllm:NaN"} {
		f.Add(text)
	}
	files := rollout.New(rollout.VLLM)
	f.Fuzz(func(t *testing.T, text string) {
		for _, of := range []*rollout.Engine{nil, &files} {
			e, err := rollout.Parse(text, of)
			if (e == nil) == (err == nil) {
				t.Fatalf("%q: %v, %v", text, e, err)
			}
			if err == nil && (!(e.Fraction > 0 && e.Fraction <= 1) || e.Tensor < 1 || e.Sleep < 0 || e.Sleep > 2) {
				t.Fatalf("%q: %+v", text, e)
			}
		}
	})
}

// TestUsualFraction holds the fraction that SGLang 0.5.9 picks by the GPU.
func TestUsualFraction(t *testing.T) {
	for _, tt := range []struct {
		memory ledger.Bytes
		tp     int64
		want   float64
	}{
		{81559 * ledger.MiB, 8, .818}, {81559 * ledger.MiB, 1, .836}, {143771 * ledger.MiB, 8, .897},
		{24564 * ledger.MiB, 1, .847}, {40960 * ledger.MiB, 4, .817}, {0, 1, 0},
	} {
		e := rollout.New(rollout.SGLang)
		e.Tensor = tt.tp
		if is := e.UsualFraction(tt.memory); math.Abs(is-tt.want) > .0011 {
			t.Errorf("%v, %d GPUs: %v, want %v", tt.memory, tt.tp, is, tt.want)
		}
	}
}
