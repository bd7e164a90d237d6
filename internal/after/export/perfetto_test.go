package export

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
)

// fields reads a protobuf message: numbers and texts by field.
func fields(t *testing.T, text []byte) map[protowire.Number][]any {
	t.Helper()
	found := map[protowire.Number][]any{}
	for len(text) > 0 {
		number, kind, n := protowire.ConsumeTag(text)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		text = text[n:]
		var value any
		if kind == protowire.VarintType {
			value, n = protowire.ConsumeVarint(text)
		} else {
			value, n = protowire.ConsumeBytes(text)
		}
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		found[number], text = append(found[number], value), text[n:]
	}
	return found
}

// TestPerfetto reads the trace back by the numbers of Perfetto's fields: a counter in bytes, a slice that begins and
// ends, and an instant.
func TestPerfetto(t *testing.T) {
	planned := 5 * ledger.GiB
	source := &Source{
		Peaks: []reconcile.Peak{{Device: ledger.Host, Phase: ledger.Forward, Iteration: ledger.First,
			Planned: &planned}},
		Timeline: &reconcile.Timeline{
			Tracks: []reconcile.Track{{Kind: ledger.Host, Curves: []reconcile.Curve{{Title: "parameters",
				Points: []reconcile.Point{{Time: time.Second, Bytes: 3 * ledger.GiB}}}}}},
			Spans:    []reconcile.Span{{Phase: ledger.Forward, Iteration: ledger.First, From: 1, To: 2}},
			Instants: []reconcile.Instant{{Time: 7, Text: "killed"}},
		}}
	var trace bytes.Buffer
	if err := writePerfetto(&trace, source); err != nil {
		t.Fatal(err)
	}
	names, counters, kinds := map[string]uint64{}, map[uint64][]uint64{}, map[uint64]int{}
	for _, packet := range fields(t, trace.Bytes())[1] {
		p := fields(t, packet.([]byte))
		if p[10][0] != uint64(1) {
			t.Error("a packet has no sequence")
		}
		if d := p[60]; d != nil {
			track := fields(t, d[0].([]byte))
			names[string(track[2][0].([]byte))] = track[1][0].(uint64)
		}
		if e := p[11]; e != nil {
			event := fields(t, e[0].([]byte))
			kind, track := event[9][0].(uint64), event[11][0].(uint64)
			kinds[kind]++
			if kind == 4 {
				counters[track] = append(counters[track], event[30][0].(uint64),
					p[8][0].(uint64))
			}
		}
	}
	if got := counters[names["measured/parameters"]]; len(got) != 2 || got[0] != 3<<30 || got[1] != 1e9 {
		t.Errorf("parameters: %v", got)
	}
	if got := counters[names["planned/peak of the phase"]]; len(got) != 2 || got[0] != 5<<30 {
		t.Errorf("planned: %v", got)
	}
	if kinds[1] != 1 || kinds[2] != 1 || kinds[3] != 1 {
		t.Errorf("events: %v", kinds)
	}
}
