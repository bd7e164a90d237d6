//go:build linux

package main

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// commandBudget is a command line with what it may take of the processor and of memory. The real program runs it.
type commandBudget struct {
	command string
	seconds time.Duration // of the processor: other programs do not change it much
	memory  int64
	long    bool // left out of the short tests
}

const mebibyte = 1 << 20

var budgets = []commandBudget{
	{"models", 5 * time.Second, 500 * mebibyte, false},
	{"plan --model llama-3-70b --gpus 8 --nodes 8 --gpu H100-80GB --fsdp 2 --seq-len 4096", 5 * time.Second,
		300 * mebibyte, false},
	{"plan --model llama-3-8b --gpus 8 --gpu H100-80GB --seq-len 512 --precision bf16 --grad-accum 1000000",
		5 * time.Second, 300 * mebibyte, false},
	{"plan --model llama-3-8b --gpus 8 --gpu H100-80GB --seq-len 512 --pipeline-parallel 8 --grad-accum 8192",
		10 * time.Second, 500 * mebibyte, false},
	{"plan --model llama-3-8b --gpus 8 --gpu H100-80GB --seq-len 512 --pipeline-parallel 8 --grad-accum 1000000",
		5 * time.Second, 300 * mebibyte, false},
	{"roads --model llama-3-8b --gpu H100-80GB --seq-len 1024 --precision bf16", 10 * time.Second, 300 * mebibyte,
		false},
	{"rehearse --model llama-3-8b --ranks 2 --steps 0", 5 * time.Second, 300 * mebibyte, false},
	{"fit --model llama-3.2-1b --gpus 8 --gpu H100-80GB --seq-len 512 --precision bf16 --batch 1000000",
		60 * time.Second, 1024 * mebibyte, false},
	{"fit --model llama-3-8b --gpus 8 --gpu H100-80GB --seq-len 512 --precision bf16 --batch 1000000",
		120 * time.Second, 1024 * mebibyte, true},
}

// TestBudgets: no verb takes more of the processor or of memory than its budget, and none ends with an internal error.
func TestBudgets(t *testing.T) {
	needsItsOwnSpeed(t)
	plimsoll := program(t)
	for _, b := range budgets {
		t.Run(b.command, func(t *testing.T) {
			if b.long && testing.Short() {
				t.Skip("a search that takes a minute")
			}
			command := exec.Command(plimsoll, strings.Fields(b.command)...)
			out, err := command.CombinedOutput()
			code := command.ProcessState.ExitCode()
			if !slices.Contains([]int{exitDone, exitInput, exitDoesNotFit}, code) {
				t.Fatalf("exit code %d, %v\n%s", code, err, out)
			}
			var ended *exec.ExitError
			if err != nil && !errors.As(err, &ended) {
				t.Fatal(err)
			}
			took := command.ProcessState.UserTime() + command.ProcessState.SystemTime()
			held := command.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10
			t.Logf("%v of the processor, %d MiB", took, held/mebibyte)
			if took > b.seconds || held > b.memory {
				t.Errorf("more than %v and %d MiB", b.seconds, b.memory/mebibyte)
			}
		})
	}
}
