package explain

import (
	"cmp"
	"slices"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// scene is everything that the inputs say, in one list, with the ends of the ranks in their order.
type scene struct {
	*Inputs
	findings []evidence.Finding
	// recoveries are errors after which the program went on. They are not among the findings.
	recoveries []evidence.Finding
	// signs are lines that speak of a failure, and that no finding explains.
	signs      []evidence.Finding
	index      index              // of the findings
	killWords  killWords          // of the words
	ranks      map[int]int        // by PID, as launchers name them
	labels     map[pidOf]string   // of processes by their numbers
	words      []evidence.Finding // of the kernel, its counters and batch systems
	kills      []evidence.Finding // of the kernel's OOM killer: those that concern the job
	levels     *levels            // nil without a recording
	witness    *death             // the first end of a rank that no other had caused; nil if nothing failed
	victims    []*death
	planNote   string    // of the plan that changes were weighed by
	shot       *Snapshot // of the GPU that ran out, or nil
	division   string    // what the plan says of the parts of a measured holder
	plan       *plan.Plan
	planError  error
	groupLimit ledger.Bytes // of the cgroup that ran out of memory
	triedPlan  bool
}

// newScene orders the inputs.
func newScene(in *Inputs) *scene {
	s := &scene{Inputs: in}
	for _, source := range in.Sources {
		findings := dated(source.Findings)
		for i := range findings {
			findings[i].Left = source.Lines - findings[i].Number
		}
		s.findings = append(s.findings, findings...)
		s.signs = append(s.signs, source.Signs...)
	}
	for _, r := range in.Recordings {
		s.findings = append(s.findings, r.findings()...)
		s.signs = append(s.signs, r.signs()...)
		if l := r.lastLevels(); l != nil {
			s.levels = l
		}
	}
	s.identifyProcesses()
	s.forgetTasks()
	s.index = newIndex(s)
	s.setRecoveriesAside()
	s.index = newIndex(s)
	s.findings = append(s.findings, s.countedKills()...)
	s.ranks = map[int]int{}
	for _, f := range s.findings {
		switch fact := f.Fact.(type) {
		case evidence.ProcessEnded:
			if fact.PID > 0 && fact.Rank != evidence.NoRank {
				s.ranks[fact.PID] = fact.Rank
			}
		case evidence.KernelKill, evidence.BatchKill, oomCounts:
			s.words = append(s.words, f)
		}
	}
	s.nameProcesses()
	s.killWords = wordsOfKills(s.words)
	s.order()
	s.kills = s.linkedKills()
	return s
}

// identifyProcesses tells the failed process from the others in every error of a GPU.
func (s *scene) identifyProcesses() {
	for i := range s.findings {
		if f, ok := s.findings[i].Fact.(evidence.GPUOutOfMemory); ok {
			s.findings[i].Fact = identified(f)
		}
	}
}

// rankStarters start the ranks of a node, so that a task of Slurm is a launcher and no rank.
var rankStarters = []string{"torchrun", "DeepSpeed"}

// forgetTasks takes the numbers of Slurm's tasks from the findings if the tasks are no ranks.
func (s *scene) forgetTasks() {
	if !slices.ContainsFunc(all[evidence.ProcessEnded](s.findings), func(f seen[evidence.ProcessEnded]) bool {
		return slices.Contains(rankStarters, f.fact.By)
	}) {
		return
	}
	for i := range s.findings {
		f := &s.findings[i]
		switch fact := f.Fact.(type) {
		case evidence.ProcessEnded:
			if fact.By == "Slurm" {
				fact.Rank, f.Rank = evidence.NoRank, evidence.NoRank
				f.Fact = fact
			}
		case evidence.BatchKill:
			if fact.By == "Slurm" {
				f.Rank = evidence.NoRank
			}
		}
	}
}

// dated returns the findings of a file. One without a time has the time of the last line before it that has one.
func dated(findings []evidence.Finding) []evidence.Finding {
	findings = slices.Clone(findings)
	var last time.Time
	for i := range findings {
		if findings[i].Time.IsZero() {
			findings[i].Time = last
		}
		last = findings[i].Time
	}
	return findings
}

// seen is a fact of one type with the line that says it.
type seen[F evidence.Fact] struct {
	evidence.Finding
	fact F
}

// all returns the facts of one type.
func all[F evidence.Fact](findings []evidence.Finding) []seen[F] {
	var found []seen[F]
	for _, f := range findings {
		if fact, ok := f.Fact.(F); ok {
			found = append(found, seen[F]{f, fact})
		}
	}
	return found
}

// before reports whether one finding is earlier than another, as far as their times and lines tell. Findings of
// different files without times keep the order of the files.
func before(a, b evidence.Finding) int {
	if !a.Time.IsZero() && !b.Time.IsZero() {
		if order := a.Time.Compare(b.Time); order != 0 {
			return order
		}
	}
	if a.File == b.File {
		return cmp.Compare(a.Number, b.Number)
	}
	return 0
}
