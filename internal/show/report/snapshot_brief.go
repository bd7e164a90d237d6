package report

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
)

// fewDetails is the detail from which on a brief page of a snapshot has every device. Below it has one.
const fewDetails = 6

// briefName is how long the name of a file is on a brief page, and the place of a failure, in bytes.
const briefName = 60

// brief shows what failed and who held the memory, or the answer to what was asked: what has changed, or what other
// settings would have reserved.
func (d *Snapshot) brief(detail int) *Page {
	var facts Facts
	facts.add("snapshot", "%s", shortened(d.File, briefName))
	page := &Page{Sections: []Section{{facts}}}
	devices := d.byInterest()
	rows := detail
	if detail < fewDetails {
		devices, rows = devices[:min(len(devices), 1)], 2*detail
	}
	for _, x := range devices {
		page.Sections = append(page.Sections, x.brief(min(rows, d.rows)))
	}
	rest := "--long shows fragments, the trace and every line of the source"
	if others := len(d.Devices) - len(devices); others > 0 {
		rest = fmt.Sprintf("--long shows %s more, and every line of the source", counted(others, "device"))
	} else if len(d.Notes) > 0 {
		rest = "--long has " + counted(len(d.Notes), "note") + " on what the file lacks, fragments and the trace"
	}
	page.Sections = append(page.Sections, Section{next("%s", rest)})
	return page
}

// byInterest returns the devices: first those where an allocation failed, then those that held most.
func (d *Snapshot) byInterest() []*SnapshotDevice {
	var list []*SnapshotDevice
	for i := range d.Devices {
		list = append(list, &d.Devices[i])
	}
	slices.SortStableFunc(list, func(a, b *SnapshotDevice) int {
		failed := cmp.Compare(min(len(b.Failed), 1), min(len(a.Failed), 1))
		return cmp.Or(failed, cmp.Compare(b.At.Requested, a.At.Requested))
	})
	return list
}

// brief is a device on a brief page, with a table of so many rows.
func (x *SnapshotDevice) brief(rows int) Section {
	var facts Facts
	name := fmt.Sprintf("device %d", x.Device)
	if len(x.Failed) == 0 {
		facts.add(name, "%v reserved, %v of it free; at most %v were reserved", x.Reserved, x.Free.Free, x.Most)
	}
	for _, f := range x.Failed[:min(len(x.Failed), 1)] {
		facts.add(name, "%v wanted with %v reserved and %v free on the device", f.Wanted, f.Reserved, f.Free)
		facts.add("asked by", "%s, %s", f.Component.Title(), shortened(f.Place, briefName))
		if f.Why != "" {
			facts.add("why", "%s", shortened(f.Why, shortItem))
		}
	}
	facts.add("holders", "%v requested, after entry %d", x.At.Requested, x.At.Entry)
	switch {
	case x.Replays != nil:
		return Section{facts, plain(x.replays())}
	case x.Changes != nil:
		return Section{facts, x.briefChanges(rows)}
	}
	return Section{facts, x.briefPlaces(rows)}
}

// briefPlaces is who held the memory: lines of the source, the largest first, and the rest as one.
func (x *SnapshotDevice) briefPlaces(rows int) *Table {
	t := (&Table{Style: Plain}).with(Bytes, "bytes").with(Share, "share").with(Words, "component", "place")
	for _, o := range x.ByPlace[:min(len(x.ByPlace), rows)] {
		t.add(o.Bytes, share(o.Bytes, x.At.Requested), o.Component.Title(), shortened(o.Place, briefName))
	}
	if others := x.ByPlace[min(len(x.ByPlace), rows):]; len(others) > 0 {
		t.add(sumOf(others), share(sumOf(others), x.At.Requested), "", counted(len(others), "other line"))
	}
	return t
}

// briefChanges is what has changed most since the other snapshot.
func (x *SnapshotDevice) briefChanges(rows int) *Table {
	t := (&Table{Style: Plain}).with(Bytes, "before", "after").with(Words, "component", "change of")
	for _, c := range x.Changes[:min(len(x.Changes), rows)] {
		t.add(c.Before, c.After, c.Component.Title(), shortened(c.Place, briefName))
	}
	var before, after ledger.Bytes
	others := x.Changes[min(len(x.Changes), rows):]
	for _, c := range others {
		before, after = before+c.Before, after+c.After
	}
	if len(others) > 0 {
		t.add(before, after, "", counted(len(others), "other line"))
	}
	return t
}

func plain(t *Table) *Table {
	t.Style = Plain
	return t
}
