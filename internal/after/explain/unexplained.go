package explain

import (
	"fmt"
	"slices"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
)

// unexplained returns the lines that speak of a failure where nothing tells the cause, and nothing shows that the job
// ended well.
func (s *scene) unexplained() []evidence.Finding {
	if s.index.endedWell {
		return nil
	}
	var signs []evidence.Finding
	for _, f := range s.signs {
		sign, _ := f.Fact.(evidence.Sign)
		if !s.endsWellAfter(f) && !(sign.Faint && s.endedWellBefore(f)) {
			signs = append(signs, f)
		}
	}
	return signs
}

// endedWellBefore reports whether a trainer has said in the same file that its training ended well.
func (s *scene) endedWellBefore(at evidence.Finding) bool {
	return slices.ContainsFunc(s.findings, func(f evidence.Finding) bool {
		end, ok := f.Fact.(evidence.ProcessEnded)
		return ok && end.By == trainer && mannerOfProcess(end) == unended && f.File == at.File && f.Number <= at.Number
	})
}

// hangs are the words of a rank that has waited in vain.
var hangs = lazyregexp.New(`(?i)timeout|timed out|hang`)

// partedWell reports whether all that the files show are ranks that miss a peer after the training ended well, or that
// somebody interrupts then: ranks leave one after the other, and servers stay.
func (s *scene) partedWell() bool {
	for _, f := range s.findings {
		end, ended := f.Fact.(evidence.ProcessEnded)
		if mannerOf(f.Fact) == unended || ended && end.Signal == evidence.SIGINT && s.endedWellBefore(f) {
			continue
		}
		missed, ok := f.Fact.(evidence.CollectiveFailed)
		if !ok || hangs.MatchString(missed.What) || hangs.MatchString(f.Text) || !s.endedWellBefore(f) {
			return false
		}
	}
	return true
}

// endsWellAfter reports whether a file says behind a finding that the training or the process ended well. What comes
// after a trainer's closing line may be the failure of its process.
func (s *scene) endsWellAfter(sign evidence.Finding) bool {
	for _, f := range all[evidence.ProcessEnded](s.findings) {
		if f.File == sign.File && f.Number >= sign.Number && mannerOfProcess(f.fact) == unended {
			return true
		}
	}
	return false
}

// concludeUnexplained fills in an explanation in which lines speak of a failure that nothing explains.
func (s *scene) concludeUnexplained(e *Explanation, signs []evidence.Finding) {
	first := signs[0]
	text := "The job may have failed: a line speaks of a failure, and nothing here tells its cause"
	if sign, _ := first.Fact.(evidence.Sign); sign.Memory {
		text = "The job ran out of memory of some kind, and the line does not say of which"
		e.Collect = append(e.Collect, collectGPU, collectLimits)
	}
	e.Cause = Cause{Resource: Undetermined, Text: text}
	e.Confidence = Unknown
	for _, f := range signs[:min(len(signs), mostEvidence)] {
		e.Evidence = append(e.Evidence, Evidence{f.File, f.Number, f.Text, f.Fact.Says()})
	}
	e.Collect = append(e.Collect, collectRanks, collectKernel, collectRecording)
}

// hangUp is what an end by SIGHUP says.
var hangUp = fmt.Sprintf("was ended by SIGHUP (signal %d): its terminal or its session was closed, and no memory was "+
	"missing", evidence.SIGHUP)
