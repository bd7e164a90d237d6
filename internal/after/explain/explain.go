package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// Explain says why a job has failed. It never fails itself: where the inputs do not tell, the explanation says so.
func Explain(in Inputs) *Explanation {
	s := newScene(&in)
	e := &Explanation{Schema: Schema, Version: in.Version, Files: s.files(), Victims: []Victim{},
		Evidence: []Evidence{},
		Holders:  []Holder{}, RuledOut: []RuledOut{}, Edits: []Edit{}, Collect: []Collect{}, Notes: []string{}}
	claims := s.judge()
	switch {
	case len(claims) > 0:
		s.conclude(e, claims)
	case (len(s.victims) > 0 || s.peersOnly() != nil) && !s.partedWell():
		s.concludeVictims(e)
	case len(s.unexplained()) > 0:
		s.concludeUnexplained(e, s.unexplained())
	case s.unended() != nil && !s.index.endedWell:
		s.concludeUnended(e)
	case s.hidden() != nil:
		s.concludeHidden(e, s.hidden())
	case s.stopped() != nil:
		s.concludeStopped(e, s.stopped())
	default:
		e.Cause = Cause{Resource: None, Text: s.nothingText()}
		e.Confidence = Likely
		if s.index.endedWell && len(s.recoveries)+len(s.LeftOut) == 0 &&
			!slices.ContainsFunc(s.Recordings, (*Recording).mayHideFailure) {
			e.Confidence = Certain
		}
		if s.Peak > 0 {
			e.Edits = append(e.Edits, s.plannedEdits(claim{resource: GPU}, nil)...)
		}
	}
	e.Notes = append(e.Notes, s.notes()...)
	return e
}

// files lists what was read.
func (s *scene) files() []File {
	list := []File{}
	for _, source := range s.Sources {
		kind := string(source.Kind)
		list = append(list, File{source.Name, cmp.Or(kind, "nothing known")})
	}
	for _, r := range s.Recordings {
		list = append(list, File{r.Name, "recording"})
	}
	for _, p := range s.Plans {
		list = append(list, File{p.File, "plan"})
	}
	for _, shot := range s.Snapshots {
		if f := (File{shot.File, "memory snapshot"}); !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	return append(list, s.Configurations...)
}

// conclude fills in the explanation of a failure. The first claim is the strongest.
func (s *scene) conclude(e *Explanation, claims []claim) {
	top := claims[0]
	e.Confidence = top.sure
	if s.contradicted(claims) {
		e.Confidence = Likely
	}
	e.Cause = Cause{Resource: top.resource, Detail: top.detail}
	if top.resource == CGroup {
		s.groupLimit = limitOf(top.at.Fact)
	}
	if rank := s.rankOfClaim(top); rank != evidence.NoRank {
		e.Cause.Rank = &rank
	} else if !s.afterKill(top) {
		if local := s.localRank(); local != evidence.NoRank {
			e.Cause.LocalRank = &local
		}
		e.Cause.Process = s.processName()
	}
	if phase := s.phaseAt(top.at); phase != "" {
		e.Cause.Phase = &phase
	}
	e.Cause.Text = s.sentence(top, e.Cause.Phase)
	e.Victims = append(e.Victims, s.victimTexts()...)
	e.Evidence = s.evidence(claims)
	e.Holders = append(e.Holders, s.holders(top, e.Cause.Phase)...)
	e.RuledOut = append(e.RuledOut, s.ruledOut(top)...)
	e.Edits = append(e.Edits, s.edits(top, e.Cause.Phase)...)
	e.Collect = append(e.Collect, s.collect(top, e)...)
	if remedy := remedyOf(top); remedy != "" {
		e.Notes = append(e.Notes, fmt.Sprintf("%s:%d: the message names a remedy: %q.", top.at.File, top.at.Number,
			remedy))
	}
}

// contradicted reports whether two facts that are certain speak for different resources, or the kernel's counters did
// not move although its log has a kill, or an exception leaves open whether it followed from a kill.
func (s *scene) contradicted(claims []claim) bool {
	top := claims[0]
	if top.sure != Certain {
		return false
	}
	if s.afterKill(top) {
		return true
	}
	for _, c := range claims[1:] {
		o, counts := c.at.Fact.(oomCounts)
		if c.sure == Certain && c.resource != top.resource || counts && o.compared && o.kills() == 0 {
			return true
		}
	}
	return false
}

// sentence says the cause in one sentence.
func (s *scene) sentence(top claim, phase *ledger.PhaseName) string {
	head, rest, more := strings.Cut(top.text, ": ")
	if phase != nil {
		head += phaseWords[*phase]
	}
	if more {
		head += ": " + rest
	}
	return s.who(top) + " " + head
}

// who names the process that ended first.
func (s *scene) who(top claim) string {
	if rank := s.rankOfClaim(top); rank != evidence.NoRank {
		return fmt.Sprintf("Rank %d", rank)
	}
	if k, ok := top.at.Fact.(evidence.KernelKill); ok && k.PID > 0 {
		return fmt.Sprintf("Process %d (%s)", k.PID, k.Name)
	}
	if local := s.localRank(); local != evidence.NoRank && !s.afterKill(top) {
		return fmt.Sprintf("Local rank %d of a node", local)
	}
	if !s.afterKill(top) && s.witness != nil && s.witness.process != "" {
		if host, ofHost := strings.CutSuffix(s.witness.process, evidence.HostMark); ofHost {
			return "A process on " + host
		}
		return "The process " + s.processName()
	}
	if _, counts := top.at.Fact.(oomCounts); counts && s.afterKill(top) {
		return "A process of the job"
	}
	return "The job"
}

// localRank returns the number on its node of the rank that ended first, as a launcher names it, or evidence.NoRank.
func (s *scene) localRank() int {
	if s.witness == nil || s.witness.process != "" {
		return evidence.NoRank
	}
	for _, end := range all[evidence.ProcessEnded](s.witness.says) {
		if end.fact.LocalRank != evidence.NoRank {
			return end.fact.LocalRank
		}
	}
	return evidence.NoRank
}

// labelFrame is what labels of processes have around the name.
const labelFrame = "[]()| \t:"

// processName returns the label of the process that ended first, or "" if it has none.
func (s *scene) processName() string {
	if s.witness == nil || strings.HasSuffix(s.witness.process, evidence.HostMark) {
		return ""
	}
	return strings.Trim(s.witness.process, labelFrame)
}

// rankOfClaim returns the rank that the claim is about. A rank that has raised an exception is not the process that the
// kernel killed.
func (s *scene) rankOfClaim(top claim) int {
	if s.afterKill(top) {
		return evidence.NoRank
	}
	return s.rank()
}

// afterKill reports whether the claim is that of a kill, and the first end that the files show is an exception.
func (s *scene) afterKill(top claim) bool {
	return s.witness != nil && s.witness.how == raised && mannerOf(top.at.Fact) != raised
}

var phaseWords = map[ledger.PhaseName]string{
	ledger.Load:       " while the model was loaded",
	ledger.Initialize: " while the job was initialized",
	ledger.Forward:    " in the forward pass",
	ledger.Backward:   " in the backward pass",
	ledger.Step:       " in the optimizer step",
	ledger.Evaluation: " in an evaluation",
	ledger.Checkpoint: " while a checkpoint was saved",
	ledger.WeightSync: " in the weight sync",
	ledger.Wake:       " while the rollout engine woke",
	ledger.Rollout:    " in the rollout",
	ledger.LogProbs:   " while log-probabilities were computed",

	ledger.CriticUpdate: " in the critic's update",
}

// mostEvidence is how many lines of evidence an explanation shows.
const mostEvidence = 8

// evidence returns the lines that the claims rest on, the decisive one first.
func (s *scene) evidence(claims []claim) []Evidence {
	list := []Evidence{}
	add := func(f evidence.Finding) {
		same := func(e Evidence) bool { return e.File == f.File && e.Line == f.Number && e.Text == f.Text }
		if len(list) < mostEvidence && f.Fact != nil && !slices.ContainsFunc(list, same) {
			list = append(list, Evidence{f.File, f.Number, f.Text, f.Fact.Says()})
		}
	}
	for _, c := range claims {
		add(c.at)
		if reason := s.reasonOf(c.at); reason != nil {
			add(*reason)
		}
	}
	for _, f := range all[evidence.TooManyProcesses](s.findings) {
		if f.fact.Group != "" && claims[0].resource == Processes {
			add(f.Finding)
		}
	}
	if p := s.pool(claims[0]); p != nil {
		add(p.Finding)
	}
	if f := s.fullHost(); f != nil && claims[0].resource == Host {
		add(*f)
	}
	if f := s.killBesideCrash(); f != nil {
		add(*f)
	}
	if s.witness != nil {
		for _, f := range s.witness.says[:min(len(s.witness.says), 4)] {
			add(f)
		}
	}
	for _, v := range s.victims[:min(len(s.victims), 2)] {
		add(v.says[0])
	}
	if f := s.peersOnly(); f != nil {
		add(*f)
	}
	return append(list, s.levelEvidence(claims[0])...)
}

// reasonOf returns the line before a kill of the kernel that says which memory was short, or nil.
func (s *scene) reasonOf(at evidence.Finding) *evidence.Finding {
	if _, kill := at.Fact.(evidence.KernelKill); !kill {
		return nil
	}
	for _, r := range slices.Backward(all[evidence.KernelReason](s.findings)) {
		if r.File == at.File && r.Number <= at.Number {
			return &r.Finding
		}
	}
	return nil
}

// levelEvidence returns what the last sample shows of the resource.
func (s *scene) levelEvidence(top claim) []Evidence {
	if s.levels == nil {
		return nil
	}
	var text string
	switch l := s.levels; top.resource {
	case SharedMemory:
		switch f := l.node.SharedFiles; {
		case f.Size > 0 && f.Used < f.Size/2: // what filled it came later
			text = fmt.Sprintf("/dev/shm had %v in all", f.Size)
		case f.Size > 0:
			text = fmt.Sprintf("/dev/shm had %v of %v in use", f.Used, f.Size)
		}
	case Host:
		text = fmt.Sprintf("the host had %v of %v available", l.node.Available, l.node.Memory)
	case NUMANode:
		if bound := s.boundNodes(); bound != nil {
			text = fmt.Sprintf("the memory policy binds rank %d to the NUMA nodes %v, and the host had %v available",
				s.rank(),
				bound, l.node.Available)
		}
		if n := l.exhaustedNode(); n != nil {
			text = fmt.Sprintf("NUMA node %d had %v of %v free, and the host %v available", n.Node, n.Free, n.Memory,
				l.node.Available)
		}
	case CGroup:
		for _, g := range l.groups {
			if g.Limit > 0 {
				text = fmt.Sprintf("%s held %v of its limit of %v", g.Name, g.Current, g.Limit)
				break
			}
		}
	case AddressSpace:
		for _, p := range l.of(s.rank()) {
			if p.AddressSpaceLimit > 0 {
				text = fmt.Sprintf("process %d had %v of address space, and its limit is %v", p.PID, p.Virtual,
					p.AddressSpaceLimit)
				break
			}
		}
	}
	if text == "" {
		return nil
	}
	at := s.levels.at
	return []Evidence{{at.File, at.Number, at.Text, "the last sample before the end: " + text}}
}

// victimTexts returns the ranks that the first one took along.
func (s *scene) victimTexts() []Victim {
	var list []Victim
	for _, v := range s.victims {
		list = append(list, Victim{v.rank, v.says[0].Fact.Says()})
	}
	slices.SortStableFunc(list, func(a, b Victim) int { return cmp.Compare(a.Rank, b.Rank) })
	return list
}

// peersOnly returns the first line that says that a peer was gone, or nil.
func (s *scene) peersOnly() *evidence.Finding {
	for i, f := range s.findings {
		if mannerOf(f.Fact) == taken {
			return &s.findings[i]
		}
	}
	return nil
}

// concludeVictims fills in an explanation in which every known rank was taken along by another.
func (s *scene) concludeVictims(e *Explanation) {
	e.Cause = Cause{Resource: Undetermined, Text: "The job failed, but the files show only ranks that ended because " +
		"another one did: the first to end is missing"}
	e.Confidence = Unknown
	if s.timedOut() {
		e.Cause.Text = "The job failed, as a collective timed out: a rank hung, was slower than the timeout, or " +
			"called another collective"
	}
	if s.interrupted() {
		e.Cause = Cause{Resource: NotMemory, Text: "The job was interrupted, by Ctrl-C or another SIGINT"}
		e.Confidence = Likely
	}
	e.Victims = append(e.Victims, s.victimTexts()...)
	if f := s.peersOnly(); f != nil {
		e.Evidence = append(e.Evidence, Evidence{f.File, f.Number, f.Text, f.Fact.Says()})
	}
	for _, v := range s.victims {
		if f := v.says[0]; len(e.Evidence) < mostEvidence && (len(e.Evidence) == 0 || f.Line != s.peersOnly().Line) {
			e.Evidence = append(e.Evidence, Evidence{f.File, f.Number, f.Text, f.Fact.Says()})
		}
	}
	if s.timedOut() {
		e.Collect = append(e.Collect, collectStacks)
	}
	e.Collect = append(e.Collect, collectRanks, collectKernel, collectRecording)
}

// timeout is what a collective says that has waited for too long.
var timeout = lazyregexp.New(`(?i)tim(?:ed|e|ing)[ -]?out`)

// timedOut reports whether collectives say that they have waited, and none that a peer is gone.
func (s *scene) timedOut() bool {
	waits := all[evidence.CollectiveFailed](s.findings)
	return len(waits) > 0 && !slices.ContainsFunc(waits, func(f seen[evidence.CollectiveFailed]) bool {
		return !timeout.MatchString(f.fact.What + f.Text)
	})
}

// interrupted reports whether somebody interrupted the job and nothing else was wrong with it.
func (s *scene) interrupted() bool {
	found := false
	for _, f := range s.findings {
		if mannerOf(f.Fact) != taken {
			continue
		}
		switch fact := f.Fact.(type) {
		case evidence.Exception:
			if fact.Type != "KeyboardInterrupt" {
				return false
			}
			found = true
		case evidence.ProcessEnded:
			if fact.Signal != evidence.SIGINT {
				return false
			}
			found = true
		default:
			return false
		}
	}
	return found
}

// nothingText says that nothing failed, as far as the files tell.
func (s *scene) nothingText() string {
	if len(s.Sources) == 0 && s.Peak > 0 {
		return s.summaryOfPeak()
	}
	if len(s.findings) == 0 && len(s.Sources) > 0 {
		return "No line of these files says anything of memory or of a failure"
	}
	return "These files show no failure"
}
