package explain

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// phaseAt returns the phase in which a finding happened, or "" if unknown: the last one that the same program has
// named before. A library may print its error before the traceback that tells the phase.
func (s *scene) phaseAt(at evidence.Finding) ledger.PhaseName {
	if s.witness != nil {
		at = s.witness.says[0]
	}
	_, batch := at.Fact.(evidence.BatchKill)
	own := mannerOf(at.Fact) == lacked || mannerOf(at.Fact) == raised
	var same, other, next ledger.PhaseName
	for _, f := range s.findings {
		phase := phaseOf(f.Fact)
		if phase == "" || f.Rank != evidence.NoRank && s.rank() != evidence.NoRank && f.Rank != s.rank() {
			continue
		}
		switch {
		case f.File == at.File && f.Number <= at.Number:
			same = phase
		case f.File == at.File && (own || batch) && next == "" && f.Number <= at.Number+longestDelay:
			next = phase
		case f.File != at.File && !own && before(f, at) <= 0:
			other = phase
		}
	}
	return cmp.Or(same, other, next)
}

// longestDelay is the number of lines between the error of a library and a call in the traceback that follows.
const longestDelay = 20

// phaseOf returns the phase that a fact tells, or "".
func phaseOf(fact evidence.Fact) ledger.PhaseName {
	switch f := fact.(type) {
	case evidence.Progress:
		return f.Phase
	case evidence.MemoryUsage:
		for _, t := range tags {
			if t.expression.MatchString(f.Tag) {
				return t.phase
			}
		}
	}
	return ""
}

// tags are what DeepSpeed and users call the places at which they print memory, and the phase that begins there.
var tags = []struct {
	expression *lazyregexp.Regexp
	phase      ledger.PhaseName
}{
	{lazyregexp.New(`(?i)before forward`), ledger.Forward},
	{lazyregexp.New(`(?i)before backward|after forward`), ledger.Backward},
	{lazyregexp.New(`(?i)before.*step|after backward|in step before|unscale|adam_update`), ledger.Step},
	{lazyregexp.New(`(?i)initializ|creating fp(16|32) partitions|moving param group`), ledger.Initialize},
	{lazyregexp.New(`(?i)checkpoint|saving`), ledger.Checkpoint},
}

// loadsWeights reports whether the first process to end was loading weights, as far as its last lines tell.
func (s *scene) loadsWeights() bool {
	if s.witness == nil {
		return false
	}
	at := s.witness.says[0]
	var last *seen[evidence.Progress]
	for _, p := range all[evidence.Progress](s.findings) {
		if p.File == at.File && p.Number <= at.Number {
			last = &p
		}
	}
	return last != nil && last.fact.Phase == ledger.Load && at.Number-last.Number <= lastOutput &&
		!strings.Contains(last.Text, "100%")
}

// readsFiles reports whether the stack of the first process to end shows that it read a file.
func (s *scene) readsFiles() bool {
	return s.witness != nil && slices.ContainsFunc(all[evidence.BusError](s.witness.says),
		func(f seen[evidence.BusError]) bool { return f.fact.Reads != "" })
}
