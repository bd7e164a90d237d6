package snapshot

import (
	"sort"
	"strconv"
	"time"

	"plimsoll/internal/base/fault"
)

// Entry returns the entry that a text names: peak, oom, dump, the number of an entry, a time since the first entry such
// as 1.5s, a time before the last one such as -200ms, or a date.
func (d *Device) Entry(text string) (int, error) {
	last := d.Entries() - 1
	switch text {
	case "dump":
		return last, nil
	case "peak":
		return d.Peak.Entry, nil
	case "oom":
		for i := last; i >= 0; i-- {
			if d.event(i).Action == OOM {
				return i, nil
			}
		}
		return 0, fault.Inputf("no allocation of device %d has failed in this trace", d.Number)
	}
	if n, err := strconv.Atoi(text); err == nil {
		if n < 0 || n > last {
			return 0, fault.Inputf("entry %d, and the trace has %d, numbered from 0", n, last+1)
		}
		return n, nil
	}
	var at int64
	if duration, err := time.ParseDuration(text); err == nil {
		if last < 0 || d.event(last).Time == 0 {
			return 0, fault.Inputf("the entries of device %d have no times", d.Number).
				WithHint("name peak, oom, dump or the number of an entry")
		}
		at = d.event(0).Time + duration.Microseconds()
		if text[0] == '-' {
			at = d.event(last).Time + duration.Microseconds()
		}
	} else if date, err := time.Parse(time.RFC3339Nano, text); err == nil {
		at = date.UnixMicro()
	} else {
		return 0, fault.Inputf("%q is no time: expected peak, oom, dump, the number of an entry, a time since "+
			"the first entry such as 1.5s, one before the last such as -200ms, or a date such as "+
			"2026-01-31T12:00:00Z", text)
	}
	next := sort.Search(last+1, func(i int) bool { return d.event(i).Time > at })
	if next == 0 || next > last && at > d.event(last).Time {
		return 0, fault.Inputf("%s is outside of the trace, which runs from %s to %s", text, shownTime(d.event(0).Time),
			shownTime(d.event(last).Time))
	}
	return next - 1, nil
}

func shownTime(microseconds int64) string {
	return time.UnixMicro(microseconds).UTC().Format(time.RFC3339Nano)
}
