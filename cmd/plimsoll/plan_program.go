//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/ghost"
	"plimsoll/gpu"
	"plimsoll/ledger"
	"plimsoll/report"
)

// planSteps are the optimizer steps that a program makes: the second is like all later ones.
const planSteps = 2

// planProgram has a program plan itself.
func planProgram(c *cobra.Command, o planOptions, command []string) (*report.PlanDocument, error) {
	request := ghost.Request{Command: command, GPUs: max(1, o.request.GPUs), Nodes: max(1, o.request.Nodes),
		Steps: planSteps, Patience: o.patience, Output: &headed{to: c.ErrOrStderr(), head: outputHead}}
	if o.request.GPU != "" {
		found, err := gpu.Find(o.request.GPU)
		if err != nil {
			return nil, err
		}
		request.GPU = found
	}
	if o.request.GPUMemory > 0 {
		request.GPU.Memory = o.request.GPUMemory
	}
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	job, err := request.Play(ctx)
	if err != nil {
		return nil, err
	}
	first := job.First
	p := report.PlannedProgram{Command: command, Torch: first.Torch, CUDA: first.CUDA, Ranks: first.Ranks,
		Played: job.Played(), Steps: first.Steps, Retries: first.Retries, Failed: job.Failed, Otherwise: []string{},
		Unmodelled: []string{}}
	for _, note := range job.Notes {
		p.Otherwise = append(p.Otherwise, note.Text)
	}
	for _, u := range first.Unmodelled {
		p.Unmodelled = append(p.Unmodelled, fmt.Sprintf("%s (%s)", u.Name, ledger.Count(u.Calls)))
	}
	return report.NewProgramDocument(c.Root().Version, p, job.Devices(o.request.HostMemory)), nil
}

// outputHead stands above what a program prints.
const outputHead = "plimsoll: the program's own output follows. The numbers of its training are not computed.\n"

// headed writes a head before the first output.
type headed struct {
	to   io.Writer
	head string
}

func (h *headed) Write(output []byte) (int, error) {
	head := h.head
	h.head = ""
	if _, err := io.WriteString(h.to, head); err != nil {
		return 0, err
	}
	return h.to.Write(output)
}

// planPatience is how long a program may take if nobody says otherwise.
const planPatience = 10 * time.Minute
