package explain

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// unended returns the first recording that has no end, or nil.
func (s *scene) unended() *Recording {
	if i := slices.IndexFunc(s.Recordings, func(r *Recording) bool { return r.end == nil }); i >= 0 {
		return s.Recordings[i]
	}
	return nil
}

// lastOutput is how many lines may stand behind the last step of a program that was ended from outside.
const lastOutput = 5

// stopped returns the last step that a log shows, if it is not the last one of the training and almost nothing follows
// it. A program that SIGKILL ends writes no more, and neither does the pipe behind it.
func (s *scene) stopped() *seen[evidence.Progress] {
	if s.index.endedWell || len(s.index.completed) > 0 {
		return nil
	}
	last := map[string]seen[evidence.Progress]{}
	var files []string
	for _, p := range all[evidence.Progress](s.findings) {
		if p.fact.Step < 0 || p.fact.Epoch {
			continue
		}
		if _, known := last[p.File]; !known {
			files = append(files, p.File)
		}
		last[p.File] = p
	}
	for _, file := range files {
		p := last[file]
		if p.fact.Step > 0 && p.fact.Step < p.fact.Of && p.Left <= lastOutput {
			return &p
		}
	}
	return nil
}

// concludeStopped fills in an explanation in which a log stops between two steps.
func (s *scene) concludeStopped(e *Explanation, p *seen[evidence.Progress]) {
	e.Cause = Cause{Resource: None, Text: fmt.Sprintf("%s stops at step %s of %s, and shows neither a failure "+
		"nor an end: its program was killed, or it still runs", p.File, ledger.Count(p.fact.Step),
		ledger.Count(p.fact.Of))}
	if p.fact.Bar { // people copy lines out of a log; a bar is whole
		e.Cause.Resource = Undetermined
	}
	e.Confidence = Unknown
	e.Evidence = append(e.Evidence, Evidence{p.File, p.Number, p.Text, p.fact.Says()})
	e.Collect = append(e.Collect, collectKernel, collectCounters, collectRecording)
}

// hidden returns the first recording of a pipe whose exit code 0 hides how its programs ended, or nil.
func (s *scene) hidden() *Recording {
	if s.index.trainingEnded {
		return nil
	}
	if i := slices.IndexFunc(s.Recordings, (*Recording).isPipe); i >= 0 {
		return s.Recordings[i]
	}
	return nil
}

// concludeHidden fills in an explanation of a pipe that shows no failure.
func (s *scene) concludeHidden(e *Explanation, r *Recording) {
	e.Cause = Cause{Resource: Undetermined, Text: fmt.Sprintf("%s shows no failure and no good end: the command is a "+
		"pipe, whose exit code is that of its last program", r.Name)}
	e.Confidence = Unknown
	e.Collect = append(e.Collect, Collect{"set -o pipefail; COMMAND | tee log", "the exit code of the pipe is then " +
		"that of the program that failed"}, collectKernel)
}

// concludeUnended fills in an explanation in which nothing failed, but a recording stops in the middle of the job.
func (s *scene) concludeUnended(e *Explanation) {
	r := s.unended()
	e.Cause = Cause{Resource: Undetermined, Text: fmt.Sprintf("%s has no end and shows no failure: its recorder was "+
		"killed before the job ended, or the job still runs", r.Name)}
	e.Confidence = Unknown
	if s.levels != nil && s.levels.at.File == r.Name {
		e.Evidence = append(e.Evidence, Evidence{r.Name, s.levels.at.Number, s.levels.at.Text,
			s.lastReading()})
		for _, h := range s.recordedHolders(Host) {
			if h.Bytes > 0 && len(e.Holders) < mostHolders {
				e.Holders = append(e.Holders, h)
			}
		}
		slices.SortStableFunc(e.Holders, func(a, b Holder) int { return cmp.Compare(b.Bytes, a.Bytes) })
	}
	e.Collect = append(e.Collect, collectKernel)
}

// lastReading says what the last sample of a recording shows, and how fast memory grew.
func (s *scene) lastReading() string {
	l := s.levels
	text := fmt.Sprintf("the last sample: the host had %v of %v available", l.node.Available, l.node.Memory)
	for _, g := range l.groups {
		if g.Limit > 0 {
			text += fmt.Sprintf(", and %s held %v of its limit of %v", g.Name, g.Current, g.Limit)
			break
		}
	}
	if l.rise > 0 {
		text += fmt.Sprintf("; the memory of all ranks grew by %v a second", l.rise)
	}
	return text
}
