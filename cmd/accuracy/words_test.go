package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
)

// plainRow is a run in the words of most sources. Tests change some of its words.
const plainRow = `{"id": "x", "software": "torch 2.7", "model": {"hf_id": "gpt2"}, "precision": "bf16",
	"optimizer": "AdamW", "micro_batch": 1, "seq_len": 256, "act_ckpt": "off", "attn": "SDPA", "gpu": "1x A100-80GB",
	"parallel": {"world": 1}, "confidence": "A", "measured": [{"quantity": "max_reserved", "point": "whole run",
	"value": 2, "unit": "GiB"}]}`

// rowWith returns the plain row with other values of some keys.
func rowWith(t *testing.T, changes string) row {
	t.Helper()
	var r row
	for _, text := range []string{plainRow, changes} {
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return r
}

// TestWordsOfSources expresses the same settings in the words of other sources. A part of the command line is expected,
// or of the reason why the words are not planned. Words that nobody knows are never planned as something else.
func TestWordsOfSources(t *testing.T) {
	for _, c := range []struct{ changes, expected string }{
		{`{"seq_len": "256..1K"}`, "--seq-len=1024"},
		{`{"seq_len": "128, 256 and 512"}`, "--seq-len=512"},
		{`{"seq_len": [128,512]}`, "--seq-len=512"},
		{`{"seq_len": "<=768 padded to longest"}`, "--seq-len=768"},
		{`{"micro_batch": "4 per GPU"}`, "--micro-batch=4"},
		{`{"precision": "bfloat16"}`, "--precision=bf16"},
		{`{"precision": "float16"}`, "--precision=fp16"},
		{`{"precision": "mixed precision (bf16)"}`, "--precision=amp-bf16"},
		{`{"precision": "fp16 AMP"}`, "--precision=amp-fp16"},
		{`{"precision": "TF32"}`, "--precision=fp32"},
		{`{"precision": "posit8"}`, `the precision "posit8" is not known`},
		{`{"optimizer": "Adam 8bit"}`, "--optimizer=adamw_bnb_8bit"},
		{`{"optimizer": "paged AdamW 8-bit"}`, "--optimizer=paged_adamw_8bit"},
		{`{"optimizer": "SGD momentum"}`, "--optimizer=sgd-momentum"},
		{`{"optimizer": "Lion"}`, "--optimizer=lion"},
		{`{"optimizer": "Muon"}`, "--optimizer=muon"},
		{`{"optimizer": "not stated"}`, "--model=gpt2"},
		{`{"optimizer": "Shampoo"}`, `the optimizer "Shampoo" is not known`},
		{`{"attn": "FA2"}`, `"flash" attention`},
		{`{"act_ckpt": true}`, "--gradient-checkpointing=full"},
		{`{"act_ckpt": false}`, "--gradient-checkpointing=none"},
		{`{"act_ckpt": "enabled"}`, "--gradient-checkpointing=full"},
		{`{"act_ckpt": "use_reentrant=False"}`, "--gradient-checkpointing=full"},
		{`{"act_ckpt": "gradient checkpointing (reentrant)"}`, "--gradient-checkpointing=reentrant"},
		{`{"act_ckpt": "some blocks"}`, "which activations are recomputed is not clear"},
		{`{"parallel": {"world": 2, "fsdp": "FULL_SHARD"}}`, "--fsdp=1"},
		{`{"parallel": {"world": 2, "fsdp": "fully_shard"}}`, "--fsdp=2"},
		{`{"parallel": "FSDP2 over 4 GPUs"}`, "--gpus=4"},
		{`{"parallel": {"world": 2, "fsdp": "SHARD_GRAD_OP"}}`, `FSDP's "SHARD_GRAD_OP" is not planned from words`},
		{`{"parallel": {"world": 2, "fsdp": "FULL_SHARD"}, "offload": "parameters to the CPU"}`, "--fsdp-offload"},
		{`{"peft": {"method": "LoRA", "r": 8, "targets": "attn.c_attn"}}`, "are not modules of gpt2"},
		{`{"peft": {"method": "LoRA", "r": 8, "targets": "attention only"}}`, "--adapter="},
		{`{"peft": "LoRA r=16 on all linear layers"}`, "--adapter="},
		{`{"peft": {"method": "QLoRA", "r": 8, "quant": "4bit"}}`, "--quantization="},
		{`{"peft": {"method": "prompt tuning"}}`, `the adapter "prompt tuning" is not planned`},
		{`{"model": "llama-7b"}`, "--model=llama-7b"},
		{`{"model": {"hf_id": "LLaMA 7B"}}`, "--model=llama-7b"},
		{`{"model": {"hf_id": "lmsys/vicuna-13b"}}`, "--model=llama-13b"},
		{`{"model": {"hf_id": "llama-7b", "total_params": 7000000000}}`, "--model=llama-7b"},
		{`{"model": {"hf_id": "codegen", "layers": 2, "hidden": 64, "heads": 2, "vocab": 100}}`,
			"not of an architecture that Plimsoll describes"},
	} {
		e, err := express(rowWith(t, c.changes), "whole run", t.TempDir())
		got := ""
		if err != nil {
			got = err.Error()
		} else if got = e.commandLine(); e.request.Attention == "flash" {
			got += ` "flash" attention`
		}
		if !strings.Contains(got, c.expected) {
			t.Errorf("%s: %s, expected %s", c.changes, got, c.expected)
		}
	}
}

// TestWordsOfPoints: a figure may be of another length than its row, and the length of a context is no CUDA context.
func TestWordsOfPoints(t *testing.T) {
	for point, length := range map[string]number{"8K": 8192, "16,384": 16384, "4k tokens": 4096, "128k context": 131072,
		"sequence length of 2048": 2048, "seq 1M": 1 << 20, "context window: 32K": 32768, "4 GPUs": 256} {
		if got := rowWith(t, `{}`).at(text(point)).Sequence; got != length {
			t.Errorf("%s: %d tokens, expected %d", point, got, length)
		}
	}
	for _, c := range []struct {
		figure string
		what   string // of the plan that it is compared with
		times  float64
	}{
		{`{"quantity": "max_reserved", "point": "1k context"}`, "peak reserved", 1},
		{`{"quantity": "nvidia_smi", "point": "CUDA context/kernels"}`, "CUDA context", 1},
		{`{"quantity": "peak_active", "point": "steady"}`, "peak allocated", 1},
		{`{"quantity": "torch.cuda.max_memory_reserved", "point": "whole run"}`, "peak reserved", 1},
		{`{"quantity": "peak_gpu_memory", "point": "whole run"}`, "peak in use", 1},
		{`{"quantity": "max_reserved", "point": "after model init"}`, "load", 1},
		{`{"quantity": "max_reserved", "point": "total across all GPUs"}`, "peak reserved", 2},
		{`{"quantity": "max_reserved", "point": "both runs, all 2 GPUs together"}`, "peak reserved", 2},
	} {
		var f figure
		if err := json.Unmarshal([]byte(c.figure), &f); err != nil {
			t.Fatal(err)
		}
		r := rowWith(t, `{"parallel": {"world": 2, "fsdp": "fsdp2"}}`)
		o := planPoint(r, f.Point, t.TempDir())
		if o.err != nil {
			t.Fatal(o.err)
		}
		got := o.figure(r, f)
		f.Point = strings.NewReplacer("total across all GPUs", "whole run", "all 2 GPUs together", "").Replace(f.Point)
		one := o.figure(r, f)
		if !strings.Contains(got.what, c.what) || got.value != c.times*one.value {
			t.Errorf("%s: %s, %.0f bytes, expected %g x %.0f of %s", c.figure, got.what, got.value, c.times, one.value,
				c.what)
		}
	}
}

// TestOneBadValue: a value that is no number leaves its own figure out, and says so where the row has no other.
func TestOneBadValue(t *testing.T) {
	bad := `{"quantity": "max_reserved", "point": "whole run", "value": "about twenty", "unit": "GiB"}`
	good := `{"quantity": "max_allocated", "point": "whole run", "value": "~1.5 GiB", "unit": "GiB"}`
	r := compare(rowWith(t, `{"measured": [`+bad+`, `+good+`]}`), t.TempDir())
	if len(r.compared) != 1 || r.compared[0].measured != 1.5*(1<<30) {
		t.Errorf("%d figures are compared, expected 1.5 GiB alone", len(r.compared))
	}
	r = compare(rowWith(t, `{"measured": [`+bad+`]}`), t.TempDir())
	if len(r.compared) > 0 || !strings.Contains(r.reason, "max_reserved, whole run, has no number") {
		t.Errorf("%d figures are compared; the reason is %q", len(r.compared), r.reason)
	}
}

// TestBadLines: a line that is no row, or has a value of another kind, is a row that is not planned. The others are.
func TestBadLines(t *testing.T) {
	file := filestest.InNewFolder(t)("rows.jsonl", "{\"id\": \"cut\n"+
		`{"id": "odd", "confidence": "B", "measured": {"max_reserved": 2}}`+"\n"+strings.ReplaceAll(plainRow, "\n", ""))
	rows, err := readRows(file)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range compareAll(rows, t.TempDir()) {
		got = append(got, fmt.Sprint(r.ID, " ", len(r.compared), " ", strings.Contains(r.reason, "rows.jsonl:")))
	}
	if want := []string{"x 1 false", "line 1 0 true", "odd 0 true"}; !slices.Equal(got, want) {
		t.Errorf("%q, expected %q", got, want)
	}
}

// TestArchitectures: a name says the architecture of sizes that no model of the catalog has.
func TestArchitectures(t *testing.T) {
	for name, expected := range map[string]string{
		"google/gemma-5b": "GemmaForCausalLM", "Gemma 2 5B": "Gemma2ForCausalLM", "phi-1_5": "PhiForCausalLM",
		"Phi-3 small": "Phi3ForCausalLM", "google-bert/bert-x": "BertForPreTraining", "roberta-x": "RobertaForMaskedLM",
		"a GPT of 10B": "GPT2LMHeadModel", "GPT-3 style": "GPT2LMHeadModel", "gpt-j-x": "GPTJForCausalLM",
		"codegen-x": "", "Qwen3-5B": "Qwen3ForCausalLM", "pythia-5b": "GPTNeoXForCausalLM", "a Transformer": "",
	} {
		if got, _ := architectureOf(name); got != expected {
			t.Errorf("%s: %q, expected %q", name, got, expected)
		}
	}
}
