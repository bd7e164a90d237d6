//go:build linux

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
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
	"plimsoll explain examples/failures/killed.log examples/failures/memory.events": exitFailed,
	"plimsoll plan --model qwen2.5-7b --gpu RTX-4090 --host-memory 128GiB --offload states --precision bf16 " +
		"--seq-len 1024": exitDoesNotFit,
	"plimsoll explain examples/failures/killed.log":                                       exitFailed,
	"plimsoll explain examples/failures/killed.log examples/failures/dmesg.txt":           exitFailed,
	"plimsoll explain snapshot/testdata/oom.pickle.gz --what-if expandable_segments:True": exitFailed,
}

// TestDocumentedCommands runs every "$ plimsoll" command of README.md and docs. Where the docs show the output, too,
// every line of it must begin as a line of the real output does. Where the docs keep within 80 columns, so does the
// program. Numbers may differ from host to host, names may not.
func TestDocumentedCommands(t *testing.T) {
	root := filepath.Join("..", "..")
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root)
	commands := 0
	for _, document := range append(documents, filepath.Join(root, "README.md")) {
		document, _ = filepath.Rel(root, document)
		for _, command := range documentedCommands(t, document) {
			commands++
			t.Run(document+": "+command.line, func(t *testing.T) { checkCommand(t, command.line, command.output) })
		}
	}
	if commands == 0 {
		t.Error("no documented command was found")
	}
}

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
	"converted", "universal", "fsdp", "optimizer.pt", "samples.jsonl", "factors.json", "run.html", "plan.html",
	"host.json", "tuned",
}

func checkCommand(t *testing.T, command, output string) {
	arguments := strings.Fields(command)
	if arguments[0] != "plimsoll" {
		t.Fatalf("%s: expected a plimsoll command", command)
	}
	if testing.Short() && strings.Contains(command, "qwen2.5-0.5b") {
		t.Skip("takes 7 GB and half a minute")
	}
	for i, argument := range arguments {
		if slices.Contains(writtenInDocs, argument) {
			arguments[i] = filepath.Join(t.TempDir(), argument)
		}
	}
	var stdout, stderr bytes.Buffer
	real := exec.Command(program(t), arguments[1:]...)
	if widest(output) <= 80 {
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
	words := map[string]bool{}
	for line := range strings.Lines(stdout.String()) {
		words[firstWord(line)] = true
	}
	for line := range strings.Lines(output) {
		if word := firstWord(line); !words[word] {
			t.Errorf("no line of the output begins with %q any more; the document shows\n%s", word, line)
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

// firstWord returns the first word of a line, without table borders and symbols.
func firstWord(line string) string {
	return regexp.MustCompile(`[A-Za-z_]+`).FindString(line)
}
