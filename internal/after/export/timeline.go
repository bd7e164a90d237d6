//go:build linux

package export

import (
	"bufio"
	"io"

	"plimsoll/internal/measure/rehearse"
)

// WriteTimeline writes a Perfetto trace of a rehearsed step, with a track for the trainer and for each worker.
func WriteTimeline(w io.Writer, timeline *rehearse.Timeline) error {
	t := &trace{to: bufio.NewWriter(w)}
	for _, track := range timeline.Tracks {
		id := t.track(0, track.Name, false)
		for _, s := range track.Spans {
			name := string(s.Activity)
			if s.Of != "" {
				name += " " + s.Of
			}
			t.event(s.From, id, sliceBegin, name, 0)
			t.event(s.To, id, sliceEnd, "", 0)
		}
	}
	if t.err != nil {
		return t.err
	}
	return t.to.Flush()
}
