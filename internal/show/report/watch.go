package report

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// WatchedSchema is the schema of the JSON document.
const WatchedSchema = "plimsoll.watch/1"

// Watched is the document of one sample of a running job.
type Watched struct {
	Schema  string          `json:"schema"`
	Version string          `json:"version"`
	Job     string          `json:"job"`
	Command []string        `json:"command"`
	Sample  *samples.Sample `json:"sample"`
	// Headroom is what the job may still take before it reaches the nearest limit.
	Headroom Headroom `json:"headroom"`
}

// Headroom is memory that may still be taken, and the limit that ends it.
type Headroom struct {
	Bytes ledger.Bytes `json:"bytes"`
	Limit string       `json:"limit"`
}

// NewWatched makes the document of a sample.
func NewWatched(start samples.Start, s *samples.Sample) *Watched {
	w := &Watched{Schema: WatchedSchema, Version: start.Version, Job: start.Job, Command: start.Command, Sample: s,
		Headroom: Headroom{s.Node.Available, "the memory of the host"}}
	for _, group := range s.Groups {
		if free, limited := group.Headroom(); limited && free < w.Headroom.Bytes {
			w.Headroom = Headroom{free, "the limit of " + group.Name}
		}
	}
	return w
}

// Page shows the limits and the processes.
func (w *Watched) Page() *Page {
	return &Page{Title: "Memory of job " + w.Job, Sections: []Section{{w.facts()}, {w.processes()}},
		Verdict:  fmt.Sprintf("HEADROOM: %v until %s is reached", w.Headroom.Bytes, w.Headroom.Limit),
		Document: w}
}

func (w *Watched) facts() Facts {
	var facts Facts
	s := w.Sample
	facts.add("job", "%s", w.Job)
	facts.add("command", "%s", strings.Join(w.Command, " "))
	facts.add("host", "%v of %v available", s.Node.Available, s.Node.Memory)
	if shm := s.Node.SharedFiles; shm.Size > 0 {
		facts.add("/dev/shm", "%v of %v used", shm.Used, shm.Size)
	}
	for _, group := range s.Groups {
		if free, limited := group.Headroom(); limited {
			facts.add(group.Name, "%v of %v used, of which %v is page cache; %v left", group.Current, group.Limit,
				max(0, group.File-group.Shared), free)
		}
	}
	for _, gpu := range s.GPUs {
		facts.add(fmt.Sprintf("GPU %d", gpu.Index), "%v of %v used", gpu.Used, gpu.Total)
	}
	for _, p := range s.Processes {
		if p.AddressSpaceLimit >= 0 {
			facts.add(fmt.Sprintf("process %d", p.PID), "%v of %v address space used (RLIMIT_AS)", p.Virtual,
				p.AddressSpaceLimit)
		}
	}
	facts.addEach("missing", s.Missed)
	return facts
}

func (w *Watched) processes() *Table {
	t := new(Table).with(Words, "rank").with(Number, "PID").with(Words, "process", "phase").
		with(Bytes, "resident", "anonymous", "shared", "locked")
	t.Style = Plain
	for _, p := range w.Sample.Processes {
		rank := string(p.Role)
		switch {
		case p.Rank != samples.NoRank && p.Role == samples.Child:
			rank = fmt.Sprintf("%d child", p.Rank)
		case p.Rank != samples.NoRank:
			rank = fmt.Sprint(p.Rank)
		}
		t.add(rank, p.PID, p.Name, string(p.Phase), p.Resident.Sum(), p.Resident.Anonymous, p.Resident.Shared,
			p.Locked+p.Pinned)
	}
	return t
}
