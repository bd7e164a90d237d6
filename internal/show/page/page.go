// Package page makes the planner for a browser: one HTML page that contains the program as WebAssembly, and a form.
//
// The page runs the program itself, with arguments and with files in memory. Therefore it answers what the program
// answers, byte by byte. Its Content-Security-Policy allows no connection.
package page

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/base64"
	"io"
	"strings"
	"text/template"

	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/show/report"
)

//go:embed page.html
var pageText string

//go:embed page.js
var script string

//go:embed worker.js
var worker string

// The template escapes what is not ours with html. Package html/template would escape the program, too.
var pageTemplate = template.Must(template.New("page").Parse(pageText))

// Program is what a page is made of.
type Program struct {
	Module  []byte // the program as WebAssembly
	Support string // wasm_exec.js of the Go release that built it
	Version string
}

// contents is what the template shows.
type contents struct {
	Policy, Version         string
	Program, Worker, Script string
	Fields                  []field
	Examples                []example
	Uses                    []use
}

// field is a flag of the program in the form. Its value is that of the question that the page opens with.
type field struct {
	Flag, Title, Value string
	Empty              string   // what an empty field says
	Choices            []string // all values
	Known              []string // values that the browser completes, where others are possible
	IsCount, Wide      bool
}

// example is a question to press. Fields that it does not name are empty.
type example struct{ Title, Model, GPU, GPUs, Host, Length, Precision, Flags string }

var examples = []example{
	{Title: "Qwen3 8B with QLoRA on an RTX 4090", Model: "qwen3-8b", GPU: "RTX-4090", Host: "64GiB", Length: "2048",
		Flags: "--qlora 16"},
	{Title: "all of Qwen2.5 3B on an RTX 4090", Model: "qwen2.5-3b", GPU: "RTX-4090", Host: "64GiB", Length: "1024"},
	{Title: "Llama 3 70B on 8 H100", Model: "llama-3-70b", GPU: "H100-80GB", GPUs: "8", Host: "1TiB", Length: "4096"},
}

// use is a way for the program to take a file.
type use struct{ Flag, Title string }

const byFiles = "as the files say"

func fields() []field {
	count := func(flag, title, value string) field {
		return field{Flag: flag, Title: title, Value: value, Empty: byFiles, IsCount: true}
	}
	choice := func(flag, title, value string, values []string) field {
		return field{Flag: flag, Title: title, Value: value, Choices: values, Empty: byFiles}
	}
	return []field{
		{Flag: "model", Title: "Model", Value: "llama-3.1-8b", Known: model.Catalog(), Empty: byFiles, Wide: true},
		{Flag: "gpu", Title: "GPU", Value: "H100-80GB", Known: gpu.Names(), Empty: "none", Wide: true},
		count("gpus", "GPUs of a node", "8"), count("nodes", "Nodes", ""),
		{Flag: "host-memory", Title: "Memory of a node", Empty: "such as 512GiB"},
		count("seq-len", "Tokens of a sequence", "4096"), count("micro-batch", "Micro batch", "1"),
		count("grad-accum", "Gradient accumulation", ""),
		choice("precision", "Precision", "bf16", job.Precisions),
		choice("zero", "DeepSpeed ZeRO", "3", job.ZeROStages),
		{Flag: "zero-offload", Title: "ZeRO offload", Empty: strings.Join(job.ZeROOffloads, ","), Wide: true},
		choice("fsdp", "FSDP", "", job.FSDPVersions), count("lora", "Rank of LoRA", ""),
		{Flag: "quantization", Title: "Quantization", Choices: job.Quantizations(), Empty: byFiles, Wide: true},
		choice("gradient-checkpointing", "Gradient checkpointing", "", job.Recomputes),
	}
}

var uses = []use{
	{"config", "recognized by its content"}, {"model", "the model (--model)"}, {"deepspeed", "DeepSpeed (--deepspeed)"},
	{"training-args", "TrainingArguments (--training-args)"}, {"accelerate", "accelerate (--accelerate)"},
	{"adapter", "PEFT's adapter (--adapter)"}, {"quantization", "quantization (--quantization)"},
	{"megatron", "Megatron-LM (--megatron)"}, {"", "named by another file"},
}

// Write writes the page.
func Write(w io.Writer, p Program) error {
	var packed bytes.Buffer
	compressor, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := compressor.Write(p.Module); err != nil {
		return err
	}
	if err := compressor.Close(); err != nil {
		return err
	}
	return pageTemplate.Execute(w, contents{
		Policy: policy(), Version: p.Version, Program: base64.StdEncoding.EncodeToString(packed.Bytes()),
		Worker: p.Support + worker, Script: script, Fields: fields(), Uses: uses,
		Examples: examples,
	})
}

// policy allows the scripts of the page and of reports, which are shown inside of it, and nothing to be loaded or sent.
func policy() string {
	hashes := append([]string{report.ScriptHash(script)}, report.ScriptHashes()...)
	return "default-src 'none'; connect-src 'none'; form-action 'none'; base-uri 'none'; img-src data:; " +
		"style-src 'unsafe-inline'; worker-src blob:; script-src 'wasm-unsafe-eval' '" +
		strings.Join(hashes, "' '") + "'"
}
