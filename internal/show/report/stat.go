//go:build linux

package report

import (
	"fmt"
	"path"
	"strings"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/service/protocol"
)

// Stat is the document of an optimizer service's state.
type Stat struct{ *protocol.Overview }

// Page shows the sessions, then the bytes.
func (s Stat) Page() *Page {
	var facts Facts
	facts.add("service", "process %d, up %v, %s kernels", s.Process,
		time.Duration(s.Seconds*float64(time.Second)).Round(time.Second), s.Kernel)
	facts.add("restarts", "%d", s.Restarts)
	facts.add("requests", "%s, of which %s were refused", ledger.Count(s.Requests), ledger.Count(s.Refused))
	facts.add("queue", "%s in progress, including this one; %v not read yet", ledger.Count(s.Unanswered),
		s.QueuedBytes)
	for _, x := range s.SetAside {
		facts.add("set aside", "%s", s.setAside(x))
	}
	if len(s.Sessions) > 0 {
		facts.add("job", "%s", s.Job)
	}
	for _, x := range s.Sessions {
		if x.MissesGradients {
			facts.add("waiting", "rank%d/%s: step %d waits for gradients", x.Rank, x.Part, x.Step+1)
		}
	}
	for _, x := range s.Sessions {
		if x.Folder != "" {
			facts.add("files", "rank%d/%s: in %s (%s)", x.Rank, x.Part, x.Folder, x.FileSystem)
		}
		if t := x.Tier; t != nil {
			facts.add("tier", "rank%d/%s: %v in %s, a window of %v; a step writes %v; %v written since %v ago", x.Rank,
				x.Part, t.Bytes, strings.Join(t.Folders, ", "), t.Window, t.StepWrites, ledger.Bytes(t.Written),
				time.Duration(s.Seconds*float64(time.Second)).Round(time.Second))
		}
	}
	p := &Page{Title: "Optimizer service", Sections: []Section{{facts}}, Document: s.Overview}
	switch {
	case len(s.Sessions) > 0:
		p.Sections = append(p.Sections, Section{s.sessions()}, Section{s.bytes()})
		p.Verdict = s.verdict()
	case len(s.SetAside) > 0:
		p.Verdict = "SET ASIDE: no session is open; \"plimsoll restore NAME\" tries again, and with --discard frees " +
			"the memory"
	default:
		p.Verdict = "NO STATE: no session is open"
	}
	return p
}

// setAside describes a session that could not be restored.
func (s Stat) setAside(x protocol.SetAside) string {
	whose := ""
	if x.Job != "" {
		whose = fmt.Sprintf(" (job %s, rank%d/%s)", x.Job, x.Rank, x.Part)
	}
	return fmt.Sprintf("session %s%s, %v: %s", x.Name, whose, x.Bytes, x.Reason)
}

func (s Stat) sessions() *Table {
	t := new(Table).with(Number, "rank").with(Words, "part", "optimizer", "state").
		with(Number, "parameters", "step", "last step", "moved", "client", "checkpoint")
	for _, x := range s.Sessions {
		client, saved := "none", "none"
		if x.Client != 0 {
			client = fmt.Sprint(x.Client)
		}
		switch {
		case x.Saving:
			saved = "being written"
		case x.SavedStep > 0:
			saved = fmt.Sprintf("step %d", x.SavedStep)
		}
		last, moved := "", ""
		if x.LastStepSeconds > 0 {
			last = time.Duration(x.LastStepSeconds * float64(time.Second)).Round(10 * time.Microsecond).String()
			moved = fmt.Sprintf("%.1f GB/s", x.Bandwidth()/1e9)
		}
		optimizer, state, elements := x.Optimizer, x.State+", "+x.Moments+" moments", any(ledger.Count(x.Elements))
		if x.Holds != "" {
			optimizer, state, elements = "the trainer's", x.Holds, nil
		}
		t.add(x.Rank, x.Part, optimizer, state, elements, x.Step, last, moved, client, saved)
	}
	return t
}

func (s Stat) bytes() *Table {
	t := new(Table).with(Words, "rank", "component").with(Bytes, "planned", "resident")
	for _, e := range s.Ledger {
		var rank, planned, resident any = e.Rank, e.Planned, nil
		if e.Rank == ledger.WholeNode {
			rank, planned = "all", nil
		}
		if e.Measured != nil {
			resident = *e.Measured
		}
		t.add(rank, path.Join(e.Part, e.Component.Title()), planned, resident)
	}
	t.Footer = []any{nil, "all", s.Ledger.Planned(nil), s.Ledger.Measured(nil)}
	return t
}

// verdict returns the bytes of state per parameter, and of states that trainers update.
func (s Stat) verdict() string {
	var elements int64
	var state, held, measured ledger.Bytes
	ofStates := map[string]bool{}
	for _, x := range s.Sessions {
		if x.Holds != "" {
			held += x.StateBytes
			ofStates[path.Join(fmt.Sprint(x.Rank), x.Part)] = true
			continue
		}
		elements += x.Elements
		state += x.StateBytes
	}
	measured = s.Ledger.Measured(func(e ledger.Line) bool {
		return e.Rank != ledger.WholeNode && !ofStates[path.Join(fmt.Sprint(e.Rank), e.Part)]
	})
	var parts []string
	if elements > 0 {
		parts = append(parts, fmt.Sprintf("%s parameters, %.3f bytes each planned, %.3f resident",
			ledger.Count(elements), float64(state)/float64(elements),
			float64(measured)/float64(elements)))
	}
	if len(ofStates) > 0 {
		parts = append(parts, fmt.Sprintf("%v of states that trainers update", held))
	}
	return "HELD: " + strings.Join(parts, "; ")
}
