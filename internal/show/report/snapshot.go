package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/ledger"
)

// SnapshotSchema is the schema of the JSON document.
const SnapshotSchema = "plimsoll.snapshot/1"

// Snapshot is the document of a memory snapshot.
type Snapshot struct {
	Schema   string           `json:"schema"`
	Version  string           `json:"version"`
	File     string           `json:"file"`
	Settings string           `json:"settings"` // of PYTORCH_CUDA_ALLOC_CONF, as the file states them
	Devices  []SnapshotDevice `json:"devices"`
	Notes    []string         `json:"notes"`

	rows int // of holders in text
}

// SnapshotDevice is one GPU.
type SnapshotDevice struct {
	Device    int          `json:"device"`
	Segments  int          `json:"segments"`
	Reserved  ledger.Bytes `json:"reserved_bytes"` // at the dump, as the next two
	Allocated ledger.Bytes `json:"allocated_bytes"`
	Requested ledger.Bytes `json:"requested_bytes"`
	// Free is the reserved memory that the program does not hold, at the dump.
	Free    SnapshotFree    `json:"free"`
	Entries int             `json:"trace_entries"`
	Seconds float64         `json:"trace_seconds"`
	Start   SnapshotMoment  `json:"start"` // before the first entry
	Peak    SnapshotMoment  `json:"peak"`  // when the program held most
	Most    ledger.Bytes    `json:"peak_reserved_bytes"`
	At      SnapshotMoment  `json:"at"` // that the holders are of
	Failed  []SnapshotOOM   `json:"failed_allocations"`
	ByKind  []SnapshotOwner `json:"components"`
	ByPlace []SnapshotOwner `json:"holders"`
	Changes []SnapshotDiff  `json:"changes,omitempty"` // since the other snapshot
	Replays []Replayed      `json:"replays,omitempty"`
}

// SnapshotFree is memory that the allocator has reserved beyond the program's requests.
type SnapshotFree struct {
	Free     ledger.Bytes `json:"free_bytes"`
	Blocks   int          `json:"free_blocks"`
	Largest  ledger.Bytes `json:"largest_free_block_bytes"`
	Pending  ledger.Bytes `json:"pending_free_bytes"`
	Rounding ledger.Bytes `json:"rounding_bytes"`
	Unused   ledger.Bytes `json:"unused_segments_bytes"`
	Private  ledger.Bytes `json:"private_pools_bytes"`
}

// SnapshotMoment is a time of the trace.
type SnapshotMoment struct {
	Entry     int          `json:"entry"`
	Time      string       `json:"time,omitempty"`
	Requested ledger.Bytes `json:"requested_bytes"`
	Reserved  ledger.Bytes `json:"reserved_bytes"`
}

// SnapshotOwner is who held memory.
type SnapshotOwner struct {
	Component ledger.Component `json:"component"`
	Place     string           `json:"place,omitempty"`
	Bytes     ledger.Bytes     `json:"bytes"`
	Count     int              `json:"allocations"`
}

// SnapshotOOM is an allocation that failed.
type SnapshotOOM struct {
	SnapshotMoment
	Wanted    ledger.Bytes     `json:"wanted_bytes"`
	Free      ledger.Bytes     `json:"device_free_bytes"`
	Place     string           `json:"place"`
	Component ledger.Component `json:"component"`
	Why       string           `json:"why,omitempty"`
}

// SnapshotDiff is what a line of the source holds in two snapshots.
type SnapshotDiff struct {
	Component ledger.Component `json:"component"`
	Place     string           `json:"place"`
	Before    ledger.Bytes     `json:"before_bytes"`
	After     ledger.Bytes     `json:"after_bytes"`
}

// Replayed is what an allocator would have reserved for the same requests.
type Replayed struct {
	Name     string       `json:"name"`
	Settings string       `json:"settings"`
	Peak     ledger.Bytes `json:"peak_reserved_bytes"`
	// AtPeak and AtDump are null where the replay has ended before.
	AtPeak  *ledger.Bytes `json:"reserved_at_peak_bytes"`
	AtDump  *ledger.Bytes `json:"reserved_at_dump_bytes"`
	Outcome string        `json:"outcome,omitempty"`
}

// NewSnapshot makes the document of a file.
func NewSnapshot(version, file string, s *snapshot.Snapshot, rows int) *Snapshot {
	d := &Snapshot{Schema: SnapshotSchema, Version: version, File: file, Settings: s.Settings.Configuration,
		Devices: []SnapshotDevice{}, Notes: []string{}, rows: rows}
	for _, name := range slices.Sorted(maps.Keys(s.OtherActions)) {
		d.note("%d entries have the action %q, which Plimsoll does not know and leaves out", s.OtherActions[name], name)
	}
	return d
}

func (d *Snapshot) note(format string, values ...any) {
	d.Notes = append(d.Notes, fmt.Sprintf(format, values...))
}

// Add adds a device with its holders after an entry.
func (d *Snapshot) Add(from *snapshot.Device, entry int) *SnapshotDevice {
	free := from.Fragmentation()
	x := SnapshotDevice{Device: from.Number, Segments: len(from.Segments), Reserved: from.Reserved,
		Allocated: from.Allocated, Requested: from.Requested, Free: SnapshotFree(free), Entries: from.Entries(),
		Seconds: float64(from.Dump.Time-from.Start.Time) / 1e6, Start: newMoment(from.Start),
		Peak: newMoment(from.Peak), Most: from.PeakReserved, At: newMoment(from.At(entry)), Failed: []SnapshotOOM{}}
	for _, f := range from.Failures() {
		x.Failed = append(x.Failed, SnapshotOOM{newMoment(f.Moment), f.Wanted, f.Free, f.Place, f.Component, f.Why})
	}
	holders := from.Holders(entry)
	x.ByKind, x.ByPlace = newOwners(snapshot.ByComponent(holders)), newOwners(holders)
	if from.Start.Requested > 0 {
		d.note("device %d: the trace begins with %v allocated. The recording began later, or PyTorch has dropped "+
			"the first entries. Plimsoll takes this state from the blocks at the dump. Who asked for the blocks of it "+
			"that were freed later is unknown, and so is where they lay: replays place them anew",
			from.Number, from.Start.Requested)
	}
	if from.Contradictions > 0 {
		d.note("device %d: %d entries of the trace contradict the blocks at the dump",
			from.Number, from.Contradictions)
	}
	if free.Private > 0 {
		d.note("device %d: %v are reserved by private pools, such as those of CUDA "+
			"graphs; replays treat them as the default pool", from.Number, free.Private)
	}
	d.Devices = append(d.Devices, x)
	return &d.Devices[len(d.Devices)-1]
}

func newMoment(m snapshot.Moment) SnapshotMoment {
	x := SnapshotMoment{Entry: m.Entry, Requested: m.Requested, Reserved: m.Reserved}
	if m.Time != 0 {
		x.Time = time.UnixMicro(m.Time).UTC().Format(time.RFC3339Nano)
	}
	return x
}

func newOwners(holders []snapshot.Holder) []SnapshotOwner {
	owners := []SnapshotOwner{}
	for _, h := range holders {
		owners = append(owners, SnapshotOwner(h))
	}
	return owners
}

// Compare adds the changes since another snapshot.
func (x *SnapshotDevice) Compare(changes []snapshot.Change) {
	x.Changes = []SnapshotDiff{}
	for _, c := range changes {
		x.Changes = append(x.Changes, SnapshotDiff(c))
	}
}

// AddReplay adds a replay of the trace.
func (x *SnapshotDevice) AddReplay(name, settings string, r snapshot.Replay) {
	if len(x.Replays) == 0 {
		x.Replays = append(x.Replays, Replayed{Name: "recorded", Peak: x.Most, AtPeak: &x.Peak.Reserved,
			AtDump: &x.Reserved})
	}
	outcome := ""
	switch {
	case r.Failed != snapshot.NotFailed:
		outcome = fmt.Sprintf("out of memory at entry %d", r.Failed)
	case r.Served:
		outcome = "serves the request that failed"
	case len(x.Failed) > 0:
		outcome = "fails, too"
	}
	replayed := Replayed{Name: name, Settings: settings, Peak: r.PeakReserved, Outcome: outcome}
	if r.Failed == snapshot.NotFailed || r.Failed > x.Peak.Entry {
		replayed.AtPeak = &r.AtPeak
	}
	if r.Failed == snapshot.NotFailed {
		replayed.AtDump = &r.AtDump
	}
	x.Replays = append(x.Replays, replayed)
}

// NoteReplay says how far the replay under the recorded settings is off, as the others are then, too.
func (d *Snapshot) NoteReplay(x *SnapshotDevice, own snapshot.Replay) {
	switch {
	case len(x.Failed) > 0 && (own.Served || own.Failed != snapshot.NotFailed):
		d.note("device %d: the replay under the recorded settings does not fail where the "+
			"program did, so replays cannot tell whether other settings would have helped", x.Device)
	case own.PeakReserved != x.Most:
		d.note("device %d: the replay under the recorded settings reserves %s beside what "+
			"was recorded: compare the other replays with it", x.Device, (own.PeakReserved - x.Most).Signed())
	}
}

// Page shows the totals, who held them, and what other settings would have reserved.
func (d *Snapshot) Page() *Page {
	var facts Facts
	facts.add("snapshot", "%s", d.File)
	settings := d.Settings
	if settings == "" {
		settings = "PyTorch's standard settings"
	}
	facts.add("allocator", "%s", settings)
	p := &Page{Title: "Memory snapshot " + d.File, Sections: []Section{{facts}}, Document: d, Brief: d.brief}
	for i := range d.Devices {
		p.Sections = append(p.Sections, d.Devices[i].sections(d.rows)...)
	}
	if len(d.Notes) > 0 {
		var notes Facts
		notes.addEach("note", d.Notes)
		p.Sections = append(p.Sections, Section{notes})
	}
	return p
}

func (x *SnapshotDevice) sections(rows int) []Section {
	var facts Facts
	facts.add(fmt.Sprintf("device %d", x.Device), "%v reserved in %d segments, %v allocated, %v requested", x.Reserved,
		x.Segments, x.Allocated, x.Requested)
	facts.add("free", "%v in %d blocks, the largest %v; %v in unused segments", x.Free.Free, x.Free.Blocks,
		x.Free.Largest, x.Free.Unused)
	facts.add("rounding", "%v, and %v wait for a stream", x.Free.Rounding, x.Free.Pending)
	if x.Entries > 0 {
		facts.add("trace", "%s entries in %.3f s, from %v requested on", ledger.Count(int64(x.Entries)), x.Seconds,
			x.Start.Requested)
		facts.add("peak", "%v requested, %v reserved, after %s; at most %v reserved", x.Peak.Requested, x.Peak.Reserved,
			x.Peak, x.Most)
	}
	for _, f := range x.Failed {
		failed := Fact{"failed", []string{fmt.Sprintf("%v wanted with %v reserved and %v free on the device, after %s",
			f.Wanted, f.Reserved, f.Free, f.SnapshotMoment)}}
		failed.Values = append(failed.Values, "by "+f.Component.Title()+", "+f.Place)
		if f.Why != "" {
			failed.Values = append(failed.Values, "why: "+f.Why)
		}
		facts = append(facts, failed)
	}
	facts.add("holders", "%v requested, after %s", x.At.Requested, x.At)
	sections := []Section{{facts}, {x.components()}, {x.places(rows)}}
	if x.Changes != nil {
		sections = append(sections, Section{x.changes(rows)})
	}
	if x.Replays != nil {
		sections = append(sections, Section{x.replays()})
	}
	return sections
}

func (m SnapshotMoment) String() string {
	if m.Entry < 0 {
		return "no entry: the state before the trace"
	}
	if m.Time == "" {
		return fmt.Sprintf("entry %d", m.Entry)
	}
	return fmt.Sprintf("entry %d (%s)", m.Entry, m.Time)
}

func (x *SnapshotDevice) components() *Table {
	t := new(Table).with(Words, "component").with(Bytes, "bytes").with(Share, "share").with(Number, "allocations")
	t.Columns[2].Decimals = 1
	for _, o := range x.ByKind {
		t.add(o.Component.Title(), o.Bytes, share(o.Bytes, x.At.Requested), ledger.Count(int64(o.Count)))
	}
	return t
}

func share(part, all ledger.Bytes) float64 { return float64(part) / float64(max(all, 1)) }

func (x *SnapshotDevice) places(rows int) *Table {
	t := new(Table).with(Words, "place", "component").with(Bytes, "bytes").with(Number, "allocations")
	for i, o := range x.ByPlace {
		if i == rows {
			t.add(fmt.Sprintf("%d other lines", len(x.ByPlace)-rows), nil, sumOf(x.ByPlace[rows:]), nil)
			break
		}
		t.add(o.Place, o.Component.Title(), o.Bytes, ledger.Count(int64(o.Count)))
	}
	return t
}

func sumOf(owners []SnapshotOwner) (sum ledger.Bytes) {
	for _, o := range owners {
		sum += o.Bytes
	}
	return sum
}

func (x *SnapshotDevice) changes(rows int) *Table {
	t := new(Table).with(Words, "change of", "component").with(Bytes, "before", "after", "difference")
	for i, c := range x.Changes {
		if i == rows {
			t.add(fmt.Sprintf("%d other lines", len(x.Changes)-rows))
			break
		}
		t.add(c.Place, c.Component.Title(), c.Before, c.After, (c.After - c.Before).Signed())
	}
	return t
}

func (x *SnapshotDevice) replays() *Table {
	t := new(Table).with(Words, "allocator").with(Bytes, "most reserved", "at the peak", "at the dump").with(Words, "")
	for _, r := range x.Replays {
		name := strings.TrimSuffix(r.Name+": "+r.Settings, ": ")
		t.add(name, r.Peak, optional(r.AtPeak), optional(r.AtDump), r.Outcome)
	}
	return t
}

// optional is a cell that is empty for nil.
func optional(b *ledger.Bytes) any {
	if b == nil {
		return nil
	}
	return *b
}
