package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/input/gpu"
)

// release is a version and the month in which it came out.
type release struct{ month, version string }

var torchReleases = []release{
	{"2021-10", "1.10.0"}, {"2022-03", "1.11.0"}, {"2022-06", "1.12.0"}, {"2022-10", "1.13.0"}, {"2023-03", "2.0.0"},
	{"2023-10", "2.1.0"}, {"2024-01", "2.2.0"}, {"2024-04", "2.3.0"}, {"2024-07", "2.4.0"}, {"2024-10", "2.5.0"},
	{"2025-01", "2.6.0"}, {"2025-04", "2.7.0"},
	{"2025-08", "2.8.0"}, {"2025-10", "2.9.0"}, {"2026-01", "2.10.0"},
}

var transformersReleases = []release{
	{"2022-01", "4.16.0"}, {"2022-12", "4.25.0"}, {"2023-04", "4.28.0"}, {"2023-06", "4.30.0"}, {"2023-10", "4.34.0"},
	{"2023-12", "4.36.0"},
	{"2024-03", "4.39.0"}, {"2024-08", "4.44.0"}, {"2024-10", "4.46.0"}, {"2025-03", "4.50.0"}, {"2025-10", "4.57.0"},
}

// version returns the version of a program that the text names, or the newest at the date that the text names. It is
// empty where the text has neither.
func (t text) version(program string, releases []release) string {
	if v := t.find(`\b(?:` + program + `) ~?v?(\d+\.\d+x?(?:\.\d+)?)`); v != "" {
		return strings.Replace(v, "x", "0", 1)
	}
	at, ok := t.date()
	if !ok {
		return ""
	}
	i := slices.IndexFunc(releases, func(r release) bool { return r.month > at })
	if i < 0 {
		i = len(releases)
	}
	// torchtitan runs on nightly builds of the next release. A release that is about to come out does not count: its
	// branch was cut before.
	if t.has("nightly|torchtitan") {
		after, _ := time.Parse("2006-01", at)
		soon := after.AddDate(0, 2, 0).Format("2006-01")
		if i = slices.IndexFunc(releases, func(r release) bool { return r.month >= soon }) + 1; i == 0 {
			i = len(releases)
		}
	}
	if i == 0 {
		return ""
	}
	return releases[i-1].version
}

var (
	isoDate   = regexp.MustCompile(`\b(20\d\d-\d\d)`)
	monthYear = regexp.MustCompile(`\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*(?:/[A-Z][a-z]+)? (20\d\d)`)
	onlyYear  = regexp.MustCompile(`\b(20\d\d)\b`)
)

// date returns the month that a text names, as 2023-06. A year alone gives its middle.
func (t text) date() (string, bool) {
	s := string(t)
	if m := isoDate.FindStringSubmatch(s); m != nil {
		return m[1], true
	}
	if m := monthYear.FindStringSubmatch(s); m != nil {
		month, err := time.Parse("Jan 2006", m[1]+" "+m[2])
		return month.Format("2006-01"), err == nil
	}
	if m := onlyYear.FindStringSubmatch(s); m != nil {
		return fmt.Sprintf("%s-06", m[1]), true
	}
	return "", false
}

// gpu returns the kind of GPU that the text names, in the form of plimsoll plan. The first GPU counts whose every
// part is in the text, or else the first whose family is. Text in brackets counts only where nothing else names a
// GPU.
func (t text) gpu() string {
	outside, _, bracketed := cut(t, "(")
	named := ""
	for _, name := range gpu.Names() {
		family, size, _ := strings.Cut(name, "-")
		if !outside.has(`\b` + family + `\b`) {
			continue
		}
		if size == "" || outside.has(`\b`+strings.TrimSuffix(size, "GB")+`(\s*GB)?\b`) {
			return name
		}
		if named == "" {
			named = name
		}
	}
	if named == "" && bracketed {
		return text(strings.ReplaceAll(string(t), "(", " ")).gpu()
	}
	return named
}

// trainer holds the defaults of a training program, for rows that do not give them.
type trainer struct {
	pattern      string  // matches the software or the source
	ranks        int     // of a run on several GPUs; 0 for as many as the source says
	batch        int     // samples between two optimizer steps; 0 for one micro batch of every rank
	shared       bool    // the ranks share batch; otherwise each has so many samples
	longestFirst bool    // the first micro batch has the longest sample, and the others have any
	dropout      float64 // of LoRA
	bitsAndBytes string  // version
	allocator    string  // PYTORCH_CUDA_ALLOC_CONF
	transformers bool    // uses the Trainer of transformers, or one made of it
}

// trainers are programs whose defaults matter; the first match counts.
var trainers = []trainer{
	// litgpt: devices and global_batch_size of the files in config_hub/finetune, pyproject.toml
	{pattern: "config_hub.*gemma-2b/full", ranks: 4, batch: 16, shared: true, bitsAndBytes: "0.42.0"},
	{pattern: `config_hub.*llama-(2-7b|3-8b|3\.1-8b)/full`, ranks: 4, batch: 64, shared: true, bitsAndBytes: "0.42.0"},
	{pattern: `config_hub.*llama-3\.2-[13]b/full`, ranks: 1, batch: 64, shared: true, bitsAndBytes: "0.42.0"},
	{pattern: "config_hub.*tiny-llama/full", ranks: 1, batch: 32, shared: true, bitsAndBytes: "0.42.0"},
	{pattern: "config_hub.*(phi-2|stablelm-base-alpha-3b)/full", ranks: 2, batch: 8, shared: true,
		bitsAndBytes: "0.42.0"},
	{pattern: "config_hub.*gemma.*lora", batch: 6, shared: true, dropout: 0.1, bitsAndBytes: "0.42.0"},
	{pattern: "config_hub", batch: 8, shared: true, dropout: 0.05, bitsAndBytes: "0.42.0"},
	// finetune/lora.py of 2023: batch_size, lora_dropout, get_batch
	{pattern: "litgpt", batch: 128, longestFirst: true, dropout: 0.05},
	// run_train.sh, run_llama_train.sh
	{pattern: "torchtitan", allocator: "expandable_segments:True"},
	// examples/sft: run_peft_*.sh, with SFTTrainer
	{pattern: "peft/blob/main/docs/source/accelerate", dropout: 0.1, transformers: true},
	{pattern: "^transformers|Trainer", transformers: true},
	{pattern: "fsdp_qlora", dropout: 0.1}, // train.py: lora_dropout
}

func (e *expression) trainer() trainer {
	for _, t := range trainers {
		if e.Software.has(t.pattern) || text(e.Source).has(t.pattern) {
			return t
		}
	}
	return trainer{}
}
