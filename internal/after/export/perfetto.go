package export

import (
	"bufio"
	"io"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

// The numbers of the fields, from perfetto's protos/perfetto/trace: trace.proto, trace_packet.proto,
// track_event/track_descriptor.proto, track_event/counter_descriptor.proto and track_event/track_event.proto.
const (
	tracePacket = 1

	packetTimestamp  = 8
	packetSequence   = 10
	packetTrackEvent = 11
	packetFlags      = 13
	packetDescriptor = 60

	descriptorID      = 1
	descriptorName    = 2
	descriptorParent  = 5
	descriptorCounter = 8
	counterUnit       = 3
	unitSizeBytes     = 3

	eventType         = 9
	eventTrack        = 11
	eventName         = 23
	eventCounterValue = 30

	sliceBegin = 1
	sliceEnd   = 2
	instant    = 3
	counter    = 4
)

// incrementalStateCleared is the flag of the first packet of a sequence.
const incrementalStateCleared = 1

// trace writes a Perfetto trace.
type trace struct {
	to     *bufio.Writer
	err    error
	tracks uint64 // that were described
}

// message is a protobuf message under construction.
type message []byte

func (m *message) number(field protowire.Number, value uint64) {
	*m = protowire.AppendVarint(protowire.AppendTag(*m, field, protowire.VarintType), value)
}

func (m *message) text(field protowire.Number, value string) {
	*m = protowire.AppendString(protowire.AppendTag(*m, field, protowire.BytesType), safe.Line(value))
}

func (m *message) message(field protowire.Number, value message) {
	*m = protowire.AppendBytes(protowire.AppendTag(*m, field, protowire.BytesType), value)
}

// packet writes a packet.
func (t *trace) packet(packet message) {
	packet.number(packetSequence, 1)
	var m message
	m.message(tracePacket, packet)
	if t.err == nil {
		_, t.err = t.to.Write(m)
	}
}

// track describes a track below another one, 0 for none. A counter has bytes.
func (t *trace) track(parent uint64, name string, isCounter bool) uint64 {
	t.tracks++
	var descriptor, packet message
	descriptor.number(descriptorID, t.tracks)
	descriptor.text(descriptorName, name)
	if parent != 0 {
		descriptor.number(descriptorParent, parent)
	}
	if isCounter {
		var c message
		c.number(counterUnit, unitSizeBytes)
		descriptor.message(descriptorCounter, c)
	}
	if t.tracks == 1 {
		packet.number(packetFlags, incrementalStateCleared)
	}
	packet.message(packetDescriptor, descriptor)
	t.packet(packet)
	return t.tracks
}

func (t *trace) event(at time.Duration, track, kind uint64, name string, value ledger.Bytes) {
	var event, packet message
	event.number(eventType, kind)
	event.number(eventTrack, track)
	if name != "" {
		event.text(eventName, name)
	}
	if kind == counter {
		event.number(eventCounterValue, uint64(value))
	}
	packet.number(packetTimestamp, uint64(max(at, 0)))
	packet.message(packetTrackEvent, event)
	t.packet(packet)
}

// writePerfetto writes a trace for ui.perfetto.dev: a track of phases for each rank, a counter for each use of memory,
// planned peaks as counters of their own, and what the kernel has killed.
func writePerfetto(w io.Writer, s *Source) error {
	t := &trace{to: bufio.NewWriter(w)}
	t.addSpans(s)
	for _, track := range s.Timeline.Tracks {
		parent := t.track(0, device(track.Kind, track.Rank), false)
		for _, c := range track.Curves {
			id := t.track(parent, "measured/"+c.Title, true)
			for _, p := range c.Points {
				t.event(p.Time, id, counter, "", p.Bytes)
			}
		}
		t.addPlanned(parent, s, track.Kind, track.Rank)
	}
	if len(s.Timeline.Instants) > 0 {
		id := t.track(0, "what happened", false)
		for _, i := range s.Timeline.Instants {
			t.event(i.Time, id, instant, i.Text, 0)
		}
	}
	if t.err != nil {
		return t.err
	}
	return t.to.Flush()
}

// addSpans adds the phases of each rank.
func (t *trace) addSpans(s *Source) {
	ids := map[int]uint64{}
	for _, span := range s.Timeline.Spans {
		if ids[span.Rank] == 0 {
			ids[span.Rank] = t.track(0, "phases of "+device(ledger.Host, span.Rank), false)
		}
		t.event(span.From, ids[span.Rank], sliceBegin, phaseOf(span.Phase, span.Iteration), 0)
		t.event(span.To, ids[span.Rank], sliceEnd, "", 0)
	}
}

// addPlanned adds the planned peak of every phase of a device.
func (t *trace) addPlanned(parent uint64, s *Source, kind ledger.Kind, rank int) {
	planned := map[string]ledger.Bytes{}
	for _, p := range s.Peaks {
		if p.Device == kind && p.Rank == rank && p.Planned != nil {
			planned[phaseOf(p.Phase, p.Iteration)] = *p.Planned
		}
	}
	if len(planned) == 0 {
		return
	}
	id := t.track(parent, "planned/peak of the phase", true)
	for _, span := range s.Timeline.Spans {
		if bytes, known := planned[phaseOf(span.Phase, span.Iteration)]; known && span.Rank == rank {
			t.event(span.From, id, counter, "", bytes)
		}
	}
}
