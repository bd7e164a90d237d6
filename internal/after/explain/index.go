package explain

import (
	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// trainer is who says that training ended well. Its process may fail afterwards.
const trainer = "the trainer"

// index has what the rules ask of all findings together. Files with a hundred thousand kills are read, so that no rule
// looks at all findings for each of them.
type index struct {
	kinds      map[string]evidence.Kind // of the files
	trainerLog bool                     // one of the files is a trainer's log
	endedWell  bool                     // a launcher says that the job ended with exit code 0
	// trainingEnded is set if the trainer says that training ended well. Its process may fail afterwards.
	trainingEnded bool
	completed     map[string]bool         // batch systems that know only ends with exit code 0
	limits        map[string]firstLimit   // of the cgroups; of no cgroup in particular under ""
	peaks         map[string]ledger.Bytes // of the cgroups
}

// firstLimit is the first limit that the findings have of a cgroup.
type firstLimit struct {
	bytes ledger.Bytes
	place int
}

func newIndex(s *scene) index {
	x := index{kinds: map[string]evidence.Kind{}, completed: map[string]bool{}, limits: map[string]firstLimit{},
		peaks: map[string]ledger.Bytes{}}
	for _, r := range s.Recordings {
		x.kinds[r.Name] = evidence.TrainerLog
	}
	for _, source := range s.Sources {
		x.kinds[source.Name] = source.Kind
		x.trainerLog = x.trainerLog || source.Kind == evidence.TrainerLog
	}
	for place, f := range s.findings {
		switch fact := f.Fact.(type) {
		case evidence.ProcessEnded:
			x.ended(fact)
		case evidence.Limit:
			if _, known := x.limits[fact.Group]; !known && fact.Name == "memory.max" && fact.Bytes.Known {
				x.limits[fact.Group] = firstLimit{fact.Bytes.Bytes, place}
			}
		case evidence.Counters:
			x.peak(fact)
		}
	}
	return x
}

func (x *index) ended(f evidence.ProcessEnded) {
	well := mannerOfProcess(f) == unended
	x.endedWell = x.endedWell || well && f.By != trainer
	x.trainingEnded = x.trainingEnded || well && f.By == trainer
	if only, known := x.completed[f.By]; known {
		well = well && only
	}
	x.completed[f.By] = well
}

func (x *index) peak(f evidence.Counters) {
	for _, name := range []string{"memory.peak", "memory.max_usage_in_bytes"} {
		if peak, ok := f.Values[name]; ok {
			x.peaks[f.Group] = max(x.peaks[f.Group], ledger.Bytes(peak))
		}
	}
}
