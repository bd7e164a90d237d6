package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"plimsoll/binding"
	"plimsoll/host"
	"plimsoll/launch"
)

// RunSchema is the schema of the JSON document.
const RunSchema = "plimsoll.run/1"

// Run is the document of a job: its plan and, after the job has run, its result.
type Run struct {
	Schema   string        `json:"schema"`
	Version  string        `json:"version"`
	Host     RehearsedHost `json:"host"`
	Command  []string      `json:"command"`
	Launcher string        `json:"launcher"` // the launcher that assigned this process its rank; empty for none
	Plan     *PlannedRun   `json:"plan"`     // null where the job was not planned
	Ranks    []RunRank     `json:"ranks"`
	Notes    []string      `json:"notes"`
	// ExitCode and the ranks' proofs are null before the job has run.
	ExitCode *int `json:"exit_code"`
}

// RunRank is one rank.
type RunRank struct {
	Rank      int           `json:"rank"`
	Binding   binding.Rank  `json:"binding"`
	Variables []string      `json:"variables"` // NAME=VALUE, added to the environment
	Proof     *launch.Proof `json:"found"`
}

// NewRun makes the document of a job. The plan may be missing. The result is nil before the job has run.
func NewRun(version string, h *host.Host, command []string, planned *PlannedRun, plan *launch.Launch,
	result *launch.Result) *Run {
	d := &Run{Schema: RunSchema, Version: version, Host: newHost(h), Command: command, Plan: planned,
		Notes: append([]string{}, plan.Notes...)}
	if plan.Placement != nil {
		d.Launcher = plan.Placement.Launcher
	}
	for i, bound := range plan.Bound {
		rank := RunRank{Rank: plan.Ranks[i].Number, Binding: bound, Variables: plan.Variables[i]}
		rank.Binding.Rank = rank.Rank
		if result != nil {
			rank.Proof = &result.Proofs[i]
		}
		d.Ranks = append(d.Ranks, rank)
	}
	if result != nil {
		d.ExitCode = &result.ExitCode
	}
	return d
}

// WriteJSON writes the document.
func (d *Run) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}

// WriteText writes the commands that would be started.
func (d *Run) WriteText(w io.Writer) error {
	var out strings.Builder
	line := func(name, value string) { fmt.Fprintf(&out, "%-18s %s\n", name, value) }
	line("host", d.Host.String())
	line("command", strings.Join(d.Command, " "))
	if d.Launcher != "" {
		line("launcher", d.Launcher)
	}
	if d.Plan != nil {
		line("plan", d.Plan.File+": "+d.Plan.Text)
	}
	for _, r := range d.Ranks {
		line(fmt.Sprintf("rank %d", r.Rank), fmt.Sprintf("CPUs %s, memory policy %s", r.Binding.TrainerCPUs,
			r.Binding.MemoryPolicy))
		for _, variable := range r.Variables {
			line("", variable)
		}
		for _, reason := range slices.Compact(slices.Clone(r.Binding.Reasons)) {
			line("", "why: "+reason)
		}
	}
	for _, note := range d.Notes {
		line("note", note)
	}
	_, err := io.WriteString(w, out.String())
	return err
}
