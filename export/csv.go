package export

import (
	"encoding/csv"
	"io"
	"strconv"

	"plimsoll/ledger"
)

// writeCSV writes a table: of a recording alone, every curve at every time; of a plan, with or without a recording,
// every component in every phase.
func writeCSV(w io.Writer, s *Source) error {
	rows := csv.NewWriter(w)
	if s.Planned {
		writeLines(rows, s.Lines)
	} else {
		writeCurves(rows, s)
	}
	rows.Flush()
	return rows.Error()
}

func writeLines(rows *csv.Writer, lines ledger.Comparison) {
	_ = rows.Write([]string{"device", "rank", "phase", "iteration", "component", "planned_bytes", "measured_bytes",
		"why"})
	for _, l := range lines {
		measured := ""
		if l.Measured != nil {
			measured = strconv.FormatInt(int64(*l.Measured), 10)
		}
		_ = rows.Write([]string{string(l.Device), rankLabel(l.Rank), string(l.Phase), string(l.Iteration),
			string(l.Component), strconv.FormatInt(int64(l.Planned), 10), measured, l.Why})
	}
}

func writeCurves(rows *csv.Writer, s *Source) {
	_ = rows.Write([]string{"time_seconds", "device", "rank", "component", "bytes"})
	for _, track := range s.Timeline.Tracks {
		for _, c := range track.Curves {
			for _, p := range c.Points {
				_ = rows.Write([]string{strconv.FormatFloat(p.Time.Seconds(), 'f', 3, 64), string(track.Kind),
					rankLabel(track.Rank), string(c.Component), strconv.FormatInt(int64(p.Bytes), 10)})
			}
		}
	}
}
