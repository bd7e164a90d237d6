//go:build linux

package report

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/launch"
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
	Split    string        `json:"split"` // why the program has its share of the cores
	Notes    []string      `json:"notes"`
	// ExitCode and the ranks' placement is null before the job has run.
	ExitCode *int `json:"exit_code"`
}

// RunRank is one rank.
type RunRank struct {
	Rank      int                    `json:"rank"`
	Binding   binding.Rank           `json:"binding"`
	Variables []string               `json:"variables"` // NAME=VALUE, added to the environment
	Found     *launch.PlacementCheck `json:"found"`
}

// NewRun makes the document of a job. The plan may be missing. The result is nil before the job has run.
func NewRun(version string, h *host.Host, command []string, planned *PlannedRun, plan *launch.Launch,
	result *launch.Result) *Run {
	d := &Run{Schema: RunSchema, Version: version, Host: newHost(h), Command: command, Plan: planned, Split: plan.Split,
		Notes: append([]string{}, plan.Notes...)}
	if plan.Placement != nil {
		d.Launcher = plan.Placement.Launcher
	}
	for i, bound := range plan.Bound {
		rank := RunRank{Rank: plan.Ranks[i].Number, Binding: bound, Variables: plan.Variables[i]}
		rank.Binding.Rank = rank.Rank
		if result != nil {
			rank.Found = &result.PlacementChecks[i]
		}
		d.Ranks = append(d.Ranks, rank)
	}
	if result != nil {
		d.ExitCode = &result.ExitCode
	}
	return d
}

// Page shows the commands that would be started.
func (d *Run) Page() *Page {
	command := strings.Join(d.Command, " ")
	var facts Facts
	facts.add("host", "%s", d.Host)
	facts.add("command", "%s", command)
	if d.Launcher != "" {
		facts.add("launcher", "%s", d.Launcher)
	}
	if d.Plan != nil {
		facts.add("plan", "%s: %s", d.Plan.File, d.Plan.Text)
	}
	facts.add("cores", "%s", d.Split)
	for _, r := range d.Ranks {
		rank := Fact{fmt.Sprintf("rank %d", r.Rank),
			[]string{fmt.Sprintf("CPUs %s, memory policy %s", r.Binding.TrainerCPUs, r.Binding.MemoryPolicy)}}
		rank.Values = append(rank.Values, r.Variables...)
		for _, reason := range slices.Compact(slices.Clone(r.Binding.Reasons)) {
			rank.Values = append(rank.Values, "why: "+reason)
		}
		facts = append(facts, rank)
	}
	facts.addEach("note", slices.DeleteFunc(slices.Clone(d.Notes), func(note string) bool { return note == d.Split }))
	return &Page{Title: "Run of " + command, Sections: []Section{{facts}}, Document: d}
}
