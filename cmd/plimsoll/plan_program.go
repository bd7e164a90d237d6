//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/run/ghost"
	"plimsoll/internal/show/report"
)

// planSteps are the optimizer steps that a program makes: the second is like all later ones.
const planSteps = 2

// planProgram has a program plan itself.
func planProgram(c *cobra.Command, o planOptions) (*report.PlanDocument, error) {
	request, err := o.program.request(c, o.request)
	if err != nil {
		return nil, err
	}
	job, err := request.Play(interruptible(c))
	if err != nil {
		return nil, err
	}
	first := job.First
	p := report.PlannedProgram{Command: o.program.command, Torch: first.Torch, CUDA: first.CUDA, Ranks: first.Ranks,
		Played: job.Played(), Steps: first.Steps, Retries: first.Retries, Failed: job.Failed, Otherwise: []string{},
		Unmodelled: []string{}}
	if len(first.Replays) > 0 {
		for _, r := range append([]ghost.Replay{first.AsItWas}, first.Replays...) {
			p.WhatIf = append(p.WhatIf, report.ReplayedProgram(r))
		}
	}
	p.Otherwise = append(p.Otherwise, request.GPU.Notes(o.request.GPU)...)
	for _, note := range job.Notes {
		p.Otherwise = append(p.Otherwise, note.Text)
	}
	for _, u := range first.Unmodelled {
		p.Unmodelled = append(p.Unmodelled, fmt.Sprintf("%s (%s)", u.Name, ledger.Count(u.Calls)))
	}
	return report.NewProgramDocument(c.Root().Version, p, job.Devices(o.request.HostMemory)), nil
}

// planVaried has a program plan itself with several values of an argument.
func planVaried(c *cobra.Command, o planOptions) (*report.Varied, error) {
	v, err := ghost.ParseVariation(o.program.vary)
	if err != nil {
		return nil, err
	}
	request, err := o.program.request(c, o.request)
	if err != nil {
		return nil, err
	}
	progress := newProgress(os.Stderr, c.ErrOrStderr())
	played, err := request.Vary(interruptible(c), v, o.request.HostMemory, progress)
	if err != nil {
		return nil, err
	}
	runs := make([]report.VariedRun, len(played))
	for i, one := range played {
		runs[i] = report.VariedRun{Value: one.Value, Verdict: one.Verdict, Devices: one.Devices}
		if one.Err != nil {
			runs[i].Failed = one.Err.Error()
		}
	}
	return report.NewVaried(c.Root().Version, request.Command, v.Name, v.Range, runs), nil
}

// request says what to run, and on what.
func (p *programOptions) request(c *cobra.Command, q job.Request) (ghost.Request, error) {
	request := ghost.Request{Command: p.command, GPUs: max(1, q.GPUs), Nodes: max(1, q.Nodes), Steps: planSteps,
		Patience: p.patience, Output: &headed{to: c.ErrOrStderr(), head: outputHead}, WhatIf: p.whatIf,
		HostLimit: p.memory}
	for _, text := range p.whatIf {
		if _, err := snapshot.ParseSettings(text); err != nil {
			return request, &fault.Input{What: "--what-if", Err: err}
		}
	}
	if q.GPU != "" {
		found, err := gpu.Find(q.GPU)
		if err != nil {
			return request, err
		}
		request.GPU = found
	}
	if q.GPUMemory > 0 {
		request.GPU.Memory = q.GPUMemory
	}
	if p.data != "" {
		data, err := dataOf(p.data, q.Sequence)
		if err != nil {
			return request, err
		}
		request.Data = data
	}
	if p.snapshot != "" {
		request.Keep = func(from io.Reader) error {
			return writeFile("--snapshot", p.snapshot, func(to io.Writer) error {
				_, err := io.Copy(to, from)
				return err
			})
		}
	}
	return request, nil
}

// dataOf reads --data: synthetic, or synthetic:COLUMNS.
func dataOf(text string, tokens int) (*ghost.Data, error) {
	kind, columns, _ := strings.Cut(text, ":")
	if kind != "synthetic" {
		return nil, fault.Inputf("--data is %q, expected synthetic", text).
			WithHint("write --data synthetic, or --data synthetic:COLUMNS for rows of other columns than text")
	}
	if tokens == 0 {
		return nil, fault.Inputf("--data synthetic makes up rows, and nothing says how long they are").
			WithHint("give --seq-len, as in --data synthetic --seq-len 2048")
	}
	data := &ghost.Data{Tokens: tokens, Columns: []string{}}
	if columns != "" {
		data.Columns = strings.Split(columns, ",")
	}
	if slices.Contains(data.Columns, "") {
		return nil, fault.Inputf("--data is %q, expected names of columns between commas", text).
			WithHint("write --data synthetic:messages, for one")
	}
	return data, nil
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
