//go:build linux

package watch

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/safe"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/probe"
)

// JobVariable names the job to its ranks, and to the optimizer service.
const JobVariable = "PLIMSOLL_JOB"

// Target is a running job that this process has not started.
type Target struct {
	Name             string   // of the job, or the PID
	Command          []string // of the first process
	WorkingDirectory string
	// Roots are its ranks, the processes above them, and the service. All other processes are below a root.
	Roots []probe.Root

	tops []probe.Identity // processes without a parent in the job
}

// Find finds a job by the PID of a process above all others, such as plimsoll run or torchrun, or by its name in
// PLIMSOLL_JOB. An error is a *fault.Input, but for those of /proc.
func Find(word string) (*Target, error) {
	running, err := probe.Processes()
	if err != nil {
		return nil, err
	}
	t := &Target{Name: word}
	if pid, err := strconv.Atoi(word); err == nil {
		at := slices.IndexFunc(running, func(p probe.Running) bool { return p.PID == pid })
		if at < 0 {
			return nil, fault.Inputf("no process %d is running", pid).
				WithHint("give the PID of plimsoll run or of the trainer, or the name of a job in " + JobVariable)
		}
		t.tops = append(t.tops, running[at].Identity)
	} else if t.tops = named(word, running); len(t.tops) == 0 {
		return nil, fault.Inputf("no process has %s=%s in its environment, as far as this user may see", JobVariable,
			safe.Line(word)).WithHint("give a PID")
	}
	t.Command = arguments(t.tops[0].PID)
	t.WorkingDirectory, _ = os.Readlink(procFile(t.tops[0].PID, "cwd")) // empty if this user may not see it
	t.Roots = t.find(running)
	return t, nil
}

// named returns the processes of a job that no other process of the job has started.
func named(job string, running []probe.Running) (tops []probe.Identity) {
	has := map[int]bool{}
	for _, p := range running {
		has[p.PID] = variable(p.PID, JobVariable) == job
	}
	for _, p := range running {
		if has[p.PID] && !has[p.Parent] {
			tops = append(tops, p.Identity)
		}
	}
	return tops
}

// find returns the roots among the processes that run.
func (t *Target) find(running []probe.Running) (roots []probe.Root) {
	children := map[int][]probe.Running{}
	for _, p := range running {
		children[p.Parent] = append(children[p.Parent], p)
	}
	ranks := 0
	var visit func(p probe.Identity, top bool, inherited string)
	visit = func(p probe.Identity, top bool, inherited string) {
		root := probe.Root{Identity: p, Rank: samples.NoRank, Role: roleOf(p.PID)}
		number := variable(p.PID, "RANK")
		rank, err := strconv.Atoi(number)
		switch {
		case root.Role != samples.Child: // plimsoll itself, whatever variables it has
			number = inherited
			roots = append(roots, root)
		case err == nil && rank >= 0 && number != inherited:
			root.Rank, root.Role = rank, samples.RankProcess
			roots = append(roots, root)
			ranks++
		case top:
			roots = append(roots, root)
		}
		for _, child := range children[p.PID] {
			visit(child.Identity, false, number)
		}
	}
	for _, top := range t.tops {
		visit(top, true, "")
	}
	if ranks == 0 && len(roots) > 0 && roots[0].Role == samples.Child { // a trainer that no launcher has started
		roots[0].Rank, roots[0].Role = 0, samples.RankProcess
	}
	return roots
}

// roleOf returns the role of a process of plimsoll, or samples.Child.
func roleOf(pid int) samples.Role {
	command := arguments(pid)
	if len(command) < 2 || filepath.Base(command[0]) != "plimsoll" {
		return samples.Child
	}
	switch command[1] {
	case "run", "keep-ranks", "watch":
		return samples.Keeper
	case "serve":
		return samples.Service
	}
	return samples.Child
}

// variable returns a variable from the environment that a process was started with, or "".
func variable(pid int, name string) string {
	text, _ := files.ReadKernel(procFile(pid, "environ"))
	for entry := range strings.SplitSeq(string(text), "\x00") {
		if value, found := strings.CutPrefix(entry, name+"="); found {
			return value
		}
	}
	return ""
}

// arguments returns the command line of a process.
func arguments(pid int) []string {
	text, _ := files.ReadKernel(procFile(pid, "cmdline"))
	return strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
}

func procFile(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// How often the ends of processes and new ranks are looked for.
const (
	endPeriod  = 100 * time.Millisecond
	findPeriod = 5 * time.Second
)

// Follow records the target until its processes have ended, or until the context is done. It writes the end.
func (r *Recorder) Follow(ctx context.Context, t *Target) error {
	for _, root := range t.Roots {
		r.Started(root)
	}
	found := time.Now()
	for {
		select {
		case <-ctx.Done():
			r.End(samples.End{Unknown: true, Detached: true})
			return ctx.Err()
		case <-time.After(endPeriod):
		}
		for _, root := range r.Running() {
			if !root.IsRunning() {
				r.Ended(samples.RankEnd{Rank: root.Rank, PID: root.PID, Unknown: true}, time.Now())
			}
		}
		if !slices.ContainsFunc(t.tops, probe.Identity.IsRunning) {
			r.End(samples.End{Unknown: true})
			return nil
		}
		if time.Since(found) < findPeriod {
			continue
		}
		found = time.Now()
		running, err := probe.Processes()
		if err != nil {
			continue // the samples say so, too
		}
		for _, root := range t.find(running) {
			if root.Role == samples.RankProcess && !slices.Contains(t.Roots, root) {
				t.Roots = append(t.Roots, root)
				r.Started(root)
			}
		}
	}
}
