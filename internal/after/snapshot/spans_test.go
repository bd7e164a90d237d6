package snapshot

import (
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestSpans cuts a trace at the times of entries, and compares what the spans say with the state at each entry.
func TestSpans(t *testing.T) {
	d, totals := opened(t, small)
	n := d.Entries()
	for _, cuts := range [][]int{nil, {0}, {n / 2}, {n / 3, n / 3, 2 * n / 3}, {1, n - 1}} {
		var times []int64
		for _, at := range cuts {
			times = append(times, d.event(at).Time)
		}
		spans := d.Spans(times)
		if len(spans) != len(cuts)+1 {
			t.Fatalf("cut at %v: %d spans", cuts, len(spans))
		}
		first := 0
		for i, span := range spans {
			last := n
			if i < len(cuts) {
				last = cuts[i]
			}
			if expected := spanOf(d, first, last); span != expected {
				t.Errorf("cut at %v, span %d: %+v, expected %+v", cuts, i, span, expected)
			}
			first = last
		}
	}
	late := d.event(n-1).Time + 1
	spans := d.Spans([]int64{late, late + 1})
	if end := spans[2]; end.Requested != ledger.Bytes(totals.Allocated) || end.Reserved != end.EndReserved {
		t.Errorf("after the end: %+v, expected %+v", end, totals)
	}
}

// spanOf is the span of entries from first to before last, from the state at each.
func spanOf(d *Device, first, last int) Span {
	start := d.At(first - 1)
	span := Span{Peak: start.Entry, Requested: start.Requested, Reserved: start.Reserved}
	end := start
	for i := first; i < last; i++ {
		end = d.At(i)
		if end.Requested > span.Requested {
			span.Peak, span.Requested = i, end.Requested
		}
		span.Reserved = max(span.Reserved, end.Reserved)
	}
	span.EndRequested, span.EndReserved = end.Requested, end.Reserved
	return span
}
