package export

import (
	"encoding/csv"
	"io"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

// writeCSV writes a table: of a recording alone, every curve at every time; of a plan, with or without a recording,
// every component in every phase.
func writeCSV(w io.Writer, s *Source) error {
	rows := safeRows{csv.NewWriter(w)}
	if s.Planned {
		writeLines(rows, s.Lines)
	} else {
		writeCurves(rows, s)
	}
	rows.Flush()
	return rows.Error()
}

// safeRows writes rows whose cells a spreadsheet takes as text or numbers, never as formulas.
type safeRows struct{ *csv.Writer }

func (r safeRows) write(cells ...string) {
	for i, cell := range cells {
		cells[i] = safe.Line(cell)
		if _, err := strconv.ParseFloat(cell, 64); err != nil && strings.IndexAny(cell, "=+-@\t") == 0 {
			cells[i] = "'" + cells[i] // https://owasp.org/www-community/attacks/CSV_Injection
		}
	}
	_ = r.Writer.Write(cells) // the error of the last write is that of all
}

func writeLines(rows safeRows, lines ledger.Comparison) {
	rows.write("device", "rank", "phase", "iteration", "component", "planned_bytes", "measured_bytes", "why")
	for _, l := range lines {
		measured := ""
		if l.Measured != nil {
			measured = strconv.FormatInt(int64(*l.Measured), 10)
		}
		rows.write(string(l.Device), rankLabel(l.Rank), string(l.Phase), string(l.Iteration), string(l.Component),
			strconv.FormatInt(int64(l.Planned), 10), measured, l.Why)
	}
}

func writeCurves(rows safeRows, s *Source) {
	rows.write("time_seconds", "device", "rank", "component", "bytes")
	for _, track := range s.Timeline.Tracks {
		for _, c := range track.Curves {
			for _, p := range c.Points {
				rows.write(strconv.FormatFloat(p.Time.Seconds(), 'f', 3, 64), string(track.Kind),
					rankLabel(track.Rank), string(c.Component), strconv.FormatInt(int64(p.Bytes), 10))
			}
		}
	}
}
