package report

import (
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"

	"plimsoll/ledger"
	"plimsoll/service/protocol"
)

// Stat is the document of an optimizer service's state.
type Stat struct{ *protocol.Overview }

// WriteJSON writes the document.
func (s Stat) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(s.Overview)
}

// WriteText writes the document for people: the sessions, then the bytes.
func (s Stat) WriteText(w io.Writer) error {
	var out strings.Builder
	line := func(name, value string) { fmt.Fprintf(&out, "%-18s %s\n", name, value) }
	line("service", fmt.Sprintf("process %d, up %v, %s kernels", s.Process,
		time.Duration(s.Seconds*float64(time.Second)).Round(time.Second), s.Kernel))
	line("restarts", fmt.Sprint(s.Restarts))
	line("requests", fmt.Sprintf("%s, of which %s were refused", ledger.Count(s.Requests), ledger.Count(s.Refused)))
	line("queue", fmt.Sprintf("%s being handled, this one included; %v not read yet", ledger.Count(s.Unanswered),
		s.QueuedBytes))
	for _, x := range s.SetAside {
		line("set aside", s.setAside(x))
	}
	if len(s.Sessions) == 0 && len(s.SetAside) > 0 {
		out.WriteString("\nSET ASIDE: no session is open; plimsoll restore NAME tries again, and with " +
			"--discard gives the memory back\n")
		_, err := io.WriteString(w, out.String())
		return err
	}
	if len(s.Sessions) == 0 {
		out.WriteString("\nNO STATE: no session is open\n")
		_, err := io.WriteString(w, out.String())
		return err
	}
	line("job", s.Job)
	fmt.Fprintf(&out, "\n%s\n\n%s\n\n%s\n", s.sessions(), s.bytes(), s.verdict())
	_, err := io.WriteString(w, out.String())
	return err
}

// setAside describes a session that could not be restored.
func (s Stat) setAside(x protocol.SetAside) string {
	whose := ""
	if x.Job != "" {
		whose = fmt.Sprintf(" (job %s, rank%d/%s)", x.Job, x.Rank, x.Part)
	}
	return fmt.Sprintf("session %s%s, %v: %s", x.Name, whose, x.Bytes, x.Reason)
}

func (s Stat) sessions() string {
	t := newTable(4, "rank", "part", "optimizer", "state", "parameters", "step", "last step", "moved", "client",
		"checkpoint")
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
		t.AppendRow(table.Row{x.Rank, x.Part, x.Optimizer, x.State + ", " + x.Moments + " moments",
			ledger.Count(x.Elements), x.Step, last, moved, client, saved})
	}
	return t.Render()
}

func (s Stat) bytes() string {
	t := newTable(2, "rank", "component", "planned", "resident")
	for _, e := range s.Ledger {
		rank, planned, resident := fmt.Sprint(e.Rank), e.Planned.String(), ""
		if e.Rank == ledger.WholeNode {
			rank, planned = "all", ""
		}
		if e.Measured != nil {
			resident = e.Measured.String()
		}
		t.AppendRow(table.Row{rank, path.Join(e.Part, e.Component.Title()), planned, resident})
	}
	t.AppendFooter(table.Row{"", "all", s.Ledger.Planned(nil), s.Ledger.Measured(nil)})
	return t.Render()
}

// verdict returns the bytes of state per parameter.
func (s Stat) verdict() string {
	var elements int64
	var state ledger.Bytes
	for _, x := range s.Sessions {
		elements += x.Elements
		state += x.StateBytes
	}
	resident := s.Ledger.Measured(func(e ledger.Line) bool { return e.Rank != ledger.WholeNode })
	return fmt.Sprintf("HELD: %s parameters, %.3f bytes each planned, %.3f resident",
		ledger.Count(elements), float64(state)/float64(elements), float64(resident)/float64(elements))
}
