//go:build linux

package main

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"plimsoll/internal/base/torchtest"
)

// documentedExit lists the documented commands that fail on purpose, with their exit codes.
var documentedExit = map[string]int{
	"plimsoll rehearse --model llama-3.1-405b":                 exitDoesNotFit,
	"plimsoll plan examples/llama_factory.yaml --gpu RTX-4090": exitDoesNotFit,
	"plimsoll plan --model qwen2.5-7b --gpu A100-80GB --gpus 2 --deepspeed examples/zero2_offload.json " +
		"--seq-len 4096": exitDoesNotFit,
	"plimsoll plan --model llama-3-8b --deepspeed examples/zero2_pageable.json --gpus 8 --gpu A100-40GB " +
		"--seq-len 4096 --host-bandwidth 300 --host-memory 512GiB": exitDoesNotFit,
	"plimsoll explain examples/failures/train.log examples/failures/ds_config.json --model llama-3.1-8b --gpus 4 " +
		"--seq-len 1024": exitFailed,
	"plimsoll explain --long examples/failures/train.log examples/failures/ds_config.json --model llama-3.1-8b " +
		"--gpus 4 --seq-len 1024": exitFailed,
	"plimsoll explain examples/failures/killed.log examples/failures/memory.events": exitFailed,
	"plimsoll plan --gpu A100-40GB --gpus 8 --nodes 4 examples/megatron.sh":         exitDoesNotFit,
	"plimsoll plan --model qwen2.5-7b --gpu RTX-4090 --host-memory 128GiB --offload states --precision bf16 " +
		"--seq-len 1024": exitDoesNotFit,
	"plimsoll plan examples/slime.sh --gpu H100-80GB --host-memory 768GiB": exitDoesNotFit,
	"plimsoll plan examples/grpo.yaml --gpu 8xH100 --fsdp 2":               exitDoesNotFit,
	"plimsoll plan examples/verl.sh --gpu H100-80GB --host-memory 512GiB":  exitDoesNotFit,
	"plimsoll plan --model qwen2.5-7b --gpu 8xH100 --fsdp 2 --precision bf16 --seq-len 4096 " +
		"--rollout vllm:0.5,sleep=1 --host-memory 256GiB": exitDoesNotFit,
	"plimsoll explain examples/failures/killed.log":                                        exitFailed,
	"plimsoll explain examples/failures/killed.log examples/failures/dmesg.txt":            exitFailed,
	"plimsoll explain examples/snapshots/oom.pickle.gz --what-if expandable_segments:True": exitFailed,
}

// longDocumented are the beginnings of the documented commands that take a second of a CPU or more, most for their
// sizes. The tests with -short leave them out: the scripts run the same with small models.
var longDocumented = []string{
	"plimsoll bench ",
	"plimsoll rehearse --model examples/config.json --offload states --link-in",
	"plimsoll rehearse --model examples/config.json --offload states --offload-mode whole",
	"plimsoll rehearse --model examples/config.json --precision fp16",
	"plimsoll rehearse --model examples/config.json --steps 5",
	"plimsoll rehearse --model examples/config.json --tier",
	"plimsoll rehearse --model gpt2",
	"plimsoll rehearse --model llama-3.1-405b",
	"plimsoll rehearse --model qwen2.5-0.5b", // 7 GB and half a minute
	"plimsoll tune ",
}

// isLong is whether a documented command takes a second of a CPU or more.
func isLong(command string) bool {
	return slices.ContainsFunc(longDocumented, func(begin string) bool { return strings.HasPrefix(command, begin) })
}

// TestDocumentedCommands runs every "$ plimsoll" command of README.md and docs. Where the docs show the output, too,
// every line of it must begin as a line of the real output does. Where the docs keep within 80 columns, so does the
// program. Numbers may differ from host to host, names may not.
func TestDocumentedCommands(t *testing.T) {
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string][]string{} // the outputs that documents show of a command
	for _, document := range append(documents, filepath.Join(root, "README.md")) {
		for _, command := range documentedCommands(t, document) {
			shown[command.line] = append(shown[command.line], command.output)
		}
	}
	if len(shown) == 0 {
		t.Error("no documented command was found")
	}
	for line, outputs := range shown {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			if testing.Short() && isLong(line) {
				t.Skip("takes too long for -short")
			}
			checkCommand(t, line, outputs)
		})
	}
	for _, begin := range longDocumented {
		isShown := func(line string) bool { return strings.HasPrefix(line, begin) }
		if !slices.ContainsFunc(slices.Collect(maps.Keys(shown)), isShown) {
			t.Errorf("no document has a command that begins with %q", begin)
		}
	}
}

// root is the folder of the repository, where documented commands run.
var root = filepath.Join("..", "..")

// documentedCommand is a command as a document shows it.
type documentedCommand struct{ line, output string }

// documentedCommands returns the commands of a document.
func documentedCommands(t *testing.T, document string) (commands []documentedCommand) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range regexp.MustCompile("(?s)```console\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		for _, part := range strings.Split(block[1], "$ ")[1:] {
			line, output, _ := strings.Cut(part, "\n")
			commands = append(commands, documentedCommand{line, output})
		}
	}
	return commands
}

// writtenInDocs are the files that documented commands write; the test puts them into a folder of its own.
var writtenInDocs = []string{
	"converted", "renamed", "universal", "fsdp", "optimizer.pt", "samples.jsonl", "factors.json", "run.html",
	"plan.html", "host.json", "tuned", "model-2.safetensors",
}

// foldersInDocs are the folders that documented commands need; the test makes others in their place.
var foldersInDocs = []string{"/mnt/nvme"}

// checkCommand runs a command, and compares its output with what documents show of it.
func checkCommand(t *testing.T, command string, shown []string) {
	arguments := strings.Fields(command)
	if arguments[0] != "plimsoll" {
		t.Fatalf("%s: expected a plimsoll command", command)
	}
	if at := slices.Index(arguments, "--"); at >= 0 && arguments[at+1] == "python" {
		arguments[at+1] = torchtest.Python(t)
	}
	for i, argument := range arguments {
		if slices.Contains(writtenInDocs, argument) {
			arguments[i] = filepath.Join(t.TempDir(), argument)
		}
		if slices.Contains(foldersInDocs, argument) {
			arguments[i] = t.TempDir()
		}
	}
	var stdout, stderr bytes.Buffer
	real := exec.Command(program(t), arguments[1:]...)
	real.Dir = root
	if widest(strings.Join(shown, "")) <= 80 {
		real.Env = append(os.Environ(), "COLUMNS=80")
	}
	real.Stdout, real.Stderr = &stdout, &stderr
	if err := real.Run(); real.ProcessState == nil {
		t.Fatal(err)
	}
	code := real.ProcessState.ExitCode()
	if want := documentedExit[command]; code != want {
		t.Fatalf("exit code %d, want %d\n%s%s", code, want, &stdout, &stderr)
	}
	text := stdout.String()
	if isScreen(strings.Fields(command)) && (strings.Count(text, "\n") > 24 || widest(text) > 80) {
		t.Errorf("the text is longer than a screen of 24 lines of 80 columns:\n%s", text)
	}
	words := map[string]bool{}
	for line := range strings.Lines(stdout.String()) {
		words[firstWord(line)] = true
	}
	for _, output := range shown {
		for line := range strings.Lines(output) {
			if word := firstWord(line); !words[word] {
				t.Errorf("no line of the output begins with %q any more; a document shows\n%s", word, line)
			}
		}
	}
}

// widest returns the columns of the longest line.
func widest(text string) (columns int) {
	for line := range strings.Lines(text) {
		columns = max(columns, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
	}
	return columns
}

// word is one without table borders and symbols.
var word = regexp.MustCompile(`[A-Za-z_]+`)

// firstWord returns the first word of a line.
func firstWord(line string) string { return word.FindString(line) }
