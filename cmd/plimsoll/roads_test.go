//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/show/report"
)

// shownInDocs are the lines of the output that docs/roads.md shows.
var shownInDocs = regexp.MustCompile(`(?m)^(passes|road|CPU step|states (in|whole|on)|Plimsoll|Megatron|no verdict).*\n`)

// TestRoadsOfTheDocs: the tables of docs/roads.md are what the program says, to the last digit. With -update it writes
// them.
func TestRoadsOfTheDocs(t *testing.T) {
	page := filepath.Join("..", "..", "docs", "roads.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```console\n\\$ plimsoll (roads .*?)\n(.*?)```")
	blocks := block.FindAllStringSubmatch(string(text), -1)
	if len(blocks) < 5 {
		t.Fatalf("docs/roads.md has %d commands", len(blocks))
	}
	for _, block := range blocks {
		if strings.HasPrefix(block[1], "rehearse ") {
			continue // its times are of one host
		}
		out, stderr, code := runs(strings.Fields(block[1])...)
		if code != exitDone {
			t.Fatalf("%s: exit code %d\n%s", block[1], code, stderr)
		}
		want := strings.Join(shownInDocs.FindAllString(out, -1), "")
		if *goldentest.Update {
			text = bytes.Replace(text, []byte(block[0]), []byte("```console\n$ plimsoll "+block[1]+"\n"+want+"```"), 1)
		} else if block[2] != want {
			t.Errorf("%s: docs/roads.md shows\n%s\nbut the program says\n%s", block[1], block[2], want)
		}
	}
	if *goldentest.Update {
		if err := os.WriteFile(page, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRoadsAsDocument reads the JSON document: bytes and times of every road, and the rates that they come from.
func TestRoadsAsDocument(t *testing.T) {
	job := strings.Fields("roads --model llama-3.2-1b --precision bf16 --seq-len 1024 --master split --json")
	read := func(flags ...string) *report.Roads {
		out, stderr, code := runs(append(slices.Clone(job), flags...)...)
		d := &report.Roads{}
		if err := json.Unmarshal([]byte(out), d); code != exitDone || err != nil {
			t.Fatalf("%v: exit code %d, %v\n%s", flags, code, err, stderr)
		}
		return d
	}
	timeless := read("--host-profile", "none")
	if timeless.Schema != report.RoadsSchema || len(timeless.Missing) != 3 || timeless.Best != "" {
		t.Errorf("schema %s, missing %q, best %q", timeless.Schema, timeless.Missing, timeless.Best)
	}
	for _, r := range timeless.Roads {
		if r.Times != nil {
			t.Errorf("%s has times without rates", r.Name)
		}
	}
	published := read("--machine", "gh200")
	slow := read("--machine", "gh200", "--link-out", "136 Gbit/s")
	if slow.Rates.Out != 17e9 || slow.Rates.In != published.Rates.In || published.Rates.Out != 170e9 {
		t.Errorf("rates %+v and %+v", slow.Rates, published.Rates)
	}
	for i, r := range published.Roads {
		if r.Times == nil || r.Times.ExposedSeconds <= 0 {
			t.Fatalf("%s has no times", r.Name)
		}
		if was := slow.Roads[i].Times; r.Times.OutSeconds > 0 && was.OutSeconds < 9*r.Times.OutSeconds {
			t.Errorf("%s: copies out take %g s, and %g s at a tenth of the speed", r.Name, r.Times.OutSeconds,
				was.OutSeconds)
		}
	}
	if published.Best != "states on the GPU" || !strings.HasPrefix(published.Verdict, published.Best) {
		t.Errorf("best %q: %s", published.Best, published.Verdict)
	}
	stated := read("--forward-ms", "100", "--link-in", "50", "--link-out", "50", "--host-bandwidth", "100",
		"--gpu", "H100-80GB", "--host-profile", "none")
	assumed := read("--gpu", "RTX-4090", "--host-profile", "none")
	isStated := slices.ContainsFunc(assumed.Rates.Sources, func(s string) bool {
		return strings.Contains(s, "71 GB/s of host memory: assumed")
	})
	if len(assumed.Missing) != 0 || assumed.Rates.Host != 71e9 || assumed.Best == "" || !isStated {
		t.Errorf("missing %q, rates %+v, best %q", assumed.Missing, assumed.Rates, assumed.Best)
	}
	if stated.Rates.BackwardSeconds != 0.2 || stated.Rates.Device != 3350e9 || len(stated.Missing) != 0 {
		t.Errorf("rates %+v, missing %q", stated.Rates, stated.Missing)
	}
}

// TestRoadsRefuse: rates that are no speeds, and machines that nobody has published.
func TestRoadsRefuse(t *testing.T) {
	for flags, want := range map[string]string{
		"--link-in -1":            "--link-in is -1: expected a number from 0.001 to 1000000",
		"--link-out 0":            "--link-out is 0: expected",
		"--link-both 1e-12":       "--link-both is 1e-12: expected",
		"--tflops NaN":            "expected a number, in TFLOP/s without a unit",
		"--link-in 400gb/s":       "expected a number, in GB/s without a unit", // bits or bytes
		"--backward-ms 3":         "--backward-ms is given without --forward-ms",
		"--machine dgx":           `--machine is "dgx", expected rtx-4090, 8xh100 or gh200`,
		"--offload-fraction -0.5": "--offload-fraction -0.5: expected",
		"--cpu":                   "the job has no GPU that they could leave",
	} {
		arguments := append(strings.Fields("roads --model gpt2 --seq-len 64"), strings.Fields(flags)...)
		if _, stderr, code := runs(arguments...); code != exitInput || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d, %s", flags, code, stderr)
		}
	}
}

// TestRoadsCompareEqualThings: under DistributedDataParallel every rank has all states, on each road. FSDP2 divides
// them on each.
func TestRoadsCompareEqualThings(t *testing.T) {
	hosts := func(flags string) (bytes map[string]float64, d report.Roads) {
		out, stderr, code := runs(strings.Fields("roads --model llama-3.2-1b --gpu H100-80GB --precision bf16 " +
			"--seq-len 64 --master split --host-profile none --json " + flags)...)
		if err := json.Unmarshal([]byte(out), &d); code != exitDone || err != nil {
			t.Fatalf("exit code %d, %v\n%s", code, err, stderr)
		}
		bytes = map[string]float64{}
		for _, r := range d.Roads {
			bytes[r.Name] = float64(r.Host)
		}
		return bytes, d
	}
	one, _ := hosts("--gpus 1")
	all, d := hosts("--gpus 8")
	shards, _ := hosts("--gpus 8 --fsdp 2")
	for name, bytes := range all {
		if bytes != 8*one[name] || shards[name] > 1.2*one[name] {
			t.Errorf("%s: %g bytes for 1 GPU, %g for 8, %g for 8 with FSDP2", name, one[name], bytes, shards[name])
		}
	}
	if len(all) != len(shards) || len(one) != len(all)+1 { // a rank alone updates behind the backward pass, too
		t.Errorf("%d roads for 1 GPU, %d for 8, %d for 8 with FSDP2", len(one), len(all), len(shards))
	}
	if !strings.Contains(strings.Join(d.Assumptions, "; "), "every rank holds and updates all states") {
		t.Errorf("nothing says that ranks hold all states: %q", d.Assumptions)
	}
}
