//go:build linux

package export

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/measure/rehearse"
)

// TestTimeline reads the trace of a step back: a track for each actor, and slices with the names of the layers.
func TestTimeline(t *testing.T) {
	var trace bytes.Buffer
	err := WriteTimeline(&trace, &rehearse.Timeline{Tracks: []rehearse.Track{
		{Name: "trainer", Spans: []rehearse.Span{{Activity: rehearse.InForward, Of: "block 1", From: 10, To: 30}}},
		{Name: "rank 0, CPU 4", Spans: []rehearse.Span{
			{Activity: rehearse.Summing, From: time.Second, To: time.Minute}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	names := map[uint64]string{}
	var got []string
	for _, packet := range fields(t, trace.Bytes())[tracePacket] {
		p := fields(t, packet.([]byte))
		if d := p[packetDescriptor]; d != nil {
			track := fields(t, d[0].([]byte))
			names[track[descriptorID][0].(uint64)] = string(track[descriptorName][0].([]byte))
		}
		if e := p[packetTrackEvent]; e != nil {
			event := fields(t, e[0].([]byte))
			text := fmt.Sprint(names[event[eventTrack][0].(uint64)], " ", event[eventType][0], " at ",
				p[packetTimestamp][0])
			if name := event[eventName]; name != nil {
				text += " " + string(name[0].([]byte))
			}
			got = append(got, text)
		}
	}
	want := []string{"trainer 1 at 10 forward block 1", "trainer 2 at 30", "rank 0, CPU 4 1 at 1000000000 norm",
		"rank 0, CPU 4 2 at 60000000000"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
