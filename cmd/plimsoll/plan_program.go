//go:build linux

package main

import (
	"context"
	"fmt"
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
		Steps: planSteps, Patience: o.patience, Output: c.ErrOrStderr()}
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
	record, failed, err := runOut(ctx, request)
	if err != nil {
		return nil, err
	}
	p := report.PlannedProgram{Command: command, Torch: record.Torch, CUDA: record.CUDA, Ranks: record.Ranks,
		Steps: record.Steps, Retries: record.Retries, Failed: failed, Otherwise: []string{}, Unmodelled: []string{}}
	for _, note := range record.Notes {
		p.Otherwise = append(p.Otherwise, note.Text)
	}
	for _, u := range record.Unmodelled {
		p.Unmodelled = append(p.Unmodelled, fmt.Sprintf("%s (%s)", u.Name, ledger.Count(u.Calls)))
	}
	return report.NewProgramDocument(c.Root().Version, p, []ledger.Device{record.GPU}), nil
}

// runOut runs a program. If it runs out of memory, it runs once more on GPUs that have enough: failed is how it failed,
// and the record says what it would have needed.
func runOut(ctx context.Context, request ghost.Request) (record *ghost.Record, failed string, err error) {
	record, err = request.Run(ctx)
	if err != nil || record.End.Kind != "failed" {
		return record, "", err
	}
	failed, capacity := record.End.Message, request.GPU.Memory
	request.GPU.Memory = 0
	enough, err := request.Run(ctx)
	if err != nil {
		return nil, "", err
	}
	enough.GPU.Capacity, enough.Retries = capacity, record.Retries
	return enough, failed, nil
}

// planPatience is how long a program may take if nobody says otherwise.
const planPatience = 10 * time.Minute
