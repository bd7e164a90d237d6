package snapshot

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// role is what a dictionary describes, as its keys say.
type role uint8

const (
	noRole role = iota
	frameRole
	eventRole
	blockRole
	historyRole
	segmentRole
	annotationRole
	settingsRole
	rootRole
)

var roleNames = [...]string{"objects", "frames", "entries of a trace", "blocks", "records of a block's history",
	"segments", "annotations", "settings", "snapshots"}

// The keys that the reader knows, and the texts of actions and states. A text's number in the table of texts is its
// constant. The keys come first: there are fewer than 64, one for each bit of a mask.
const (
	keyAction uint32 = iota
	keyAddr
	keyAddress
	keyBlocks
	keyCategory
	keyConfiguration
	keyDevice
	keyDeviceFree
	keyDeviceTraces
	keyExpandableSegments
	keyAnnotations
	keyFilename
	keyForwardFrames
	keyFrames
	keyGarbage
	keyHistory
	keyLine
	keyMaxSplit
	keyName
	keyRealSize
	keyRequested
	keySegmentPool
	keySegmentType
	keySegments
	keySettings
	keySize
	keyStage
	keyState
	keyStream
	keyTime
	keyTotalSize
	keyCount
)

var keyNames = []string{
	"action", "addr", "address", "blocks", "category", "PYTORCH_CUDA_ALLOC_CONF", "device", "device_free",
	"device_traces", "expandable_segments", "external_annotations", "filename", "forward_frames", "frames",
	"garbage_collection_threshold", "history", "line", "max_split_size", "name",
	"real_size", "requested_size", "segment_pool_id", "segment_type", "segments", "allocator_settings",
	"size", "stage", "state", "stream", "time_us", "total_size",
}

// roles are told apart by the keys that a dictionary must have, in this order.
var roles = []struct {
	role role
	keys uint64
}{
	{eventRole, keys(keyAction)},
	{frameRole, keys(keyFilename, keyLine, keyName)},
	{segmentRole, keys(keyBlocks, keyTotalSize)},
	{blockRole, keys(keyState, keySize)},
	{historyRole, keys(keyAddr, keyRealSize)},
	{annotationRole, keys(keyTime, keyName)},
	{rootRole, keys(keySegments)},
	{settingsRole, keys(keyConfiguration)},
	{settingsRole, keys(keyExpandableSegments)},
}

func keys(of ...uint32) uint64 {
	var mask uint64
	for _, k := range of {
		mask |= 1 << k
	}
	return mask
}

// rows are consecutive rows of a table.
type rows struct{ first, last uint32 }

// records are the rows that the dictionaries of a file become.
type records struct {
	texts       *texts
	stacks      *stacks
	frames      numbered[Frame]
	streams     numbered[uint64]
	pools       numbered[Pool]
	events      table[Event]
	blocks      table[Block]
	history     table[historical]
	segments    table[Segment]
	annotations table[Annotation]
	ranges      table[rows]
	lists       table[[]uint32] // of numbers in ranges
	settings    table[Settings]
	roots       table[root]
	others      map[string]int
}

// historical is a record of a block's history, of PyTorch up to 2.0.
type historical struct {
	requested ledger.Bytes
	stack     uint32
}

type root struct {
	segments    rows
	traces      []uint32
	annotations rows
	settings    Settings
}

func newRecords() *records {
	r := &records{texts: newTexts(), stacks: newStacks(), others: map[string]int{}}
	r.pools.number(&budget{baseBudget}, Pool{})
	return r
}

// record makes a row of a dictionary. One that no question needs becomes opaque.
func (d *decoder) record(pairs []value) value {
	var mask uint64
	for i := 0; i < len(pairs); i += 2 {
		if k := pairs[i]; k.kind == text && k.n < uint64(keyCount) {
			if mask&(1<<k.n) != 0 {
				d.fail("a dictionary has the key %q twice", keyNames[k.n])
			}
			mask |= 1 << k.n
		}
	}
	for _, r := range roles {
		if mask&r.keys == r.keys {
			return d.recordOf(r.role, fields{d, pairs})
		}
	}
	return value{kind: opaque, n: uint64(len(pairs))}
}

func (d *decoder) recordOf(r role, f fields) value {
	v := value{kind: aRecord, role: r}
	switch r {
	case frameRole:
		return value{kind: aFrame, n: uint64(d.frames.number(d.budget, f.frame()))}
	case eventRole:
		v.n = uint64(d.events.add(d.budget, f.event()))
	case segmentRole:
		v.n = uint64(d.records.segments.add(d.budget, f.segment()))
	case blockRole:
		v.n = uint64(d.blocks.add(d.budget, f.block()))
	case historyRole:
		v.n = uint64(d.history.add(d.budget, f.historical()))
	case annotationRole:
		v.n = uint64(d.annotations.add(d.budget, f.annotation()))
	case settingsRole:
		v.n = uint64(d.settings.add(d.budget, f.settings()))
	case rootRole:
		return value{kind: theRoot, n: uint64(d.roots.add(d.budget, f.root()))}
	}
	return v
}

// appendTo adds an element to a list. A list of records holds consecutive rows of their table, so no record can be in
// two lists.
func (d *decoder) appendTo(l *list, v value) {
	if l.length == 0 {
		l.elements, l.role = v.kind, v.role
		if v.kind == empty {
			l.elements = rowsList
		}
		l.first = uint32(v.n)
	}
	l.length += 1 + uint64(v.more)
	same := l.elements == v.kind || l.elements == rowsList && v.kind == empty
	switch {
	case !same:
		l.elements = opaque
	case v.kind == aFrame:
		if len(l.frames) == cap(l.frames) {
			d.spend(int64(4 * cap(l.frames)))
		}
		l.frames = append(l.frames, uint32(v.n))
	case v.kind == aRecord && (v.role != l.role || v.n+uint64(v.more) != uint64(l.first)+l.length-1):
		d.fail("a list of %s has one from elsewhere: expected each of them once and in order", roleNames[l.role])
	case v.kind == rowsList:
		if l.role == noRole {
			l.role = v.role
		}
		if l.role != v.role {
			d.fail("a list has lists of %s and of %s", roleNames[l.role], roleNames[v.role])
		}
		d.spend(8)
		l.rows = append(l.rows, uint32(v.n))
	case v.kind == empty:
		d.spend(8)
		l.rows = append(l.rows, noRows)
	}
}

// noRows stands for an empty list in a list of lists.
const noRows = ^uint32(0)

// finishedList returns the value of a list that changes no more.
func (d *decoder) finishedList(l *list) value {
	switch {
	case l.length == 0:
		return value{kind: empty}
	case l.elements == aFrame:
		frames := slices.DeleteFunc(l.frames, d.isStage)
		if len(frames) == 0 {
			return value{kind: empty}
		}
		return value{kind: stackList, n: uint64(d.stacks.number(d.budget, frames))}
	case l.elements == aRecord:
		n := d.ranges.add(d.budget, rows{l.first, l.first + uint32(l.length)})
		return value{kind: rowsList, role: l.role, n: uint64(n)}
	case l.elements == rowsList:
		d.spend(int64(4 * len(l.rows)))
		n := d.records.lists.add(d.budget, slices.Clone(l.rows))
		return value{kind: listOfRows, role: l.role, n: uint64(n)}
	}
	return value{kind: opaque, n: l.length}
}

// stageFolder is the folder of the code that a planned program runs under. What it allocates, others have asked for.
const stageFolder = "/plimsoll_stage/"

// isStage reports whether a frame is of that code.
func (r *records) isStage(frame uint32) bool {
	return strings.Contains(r.texts.all[r.frames.all[frame].file], stageFolder)
}

// fields are the keys and values of one dictionary.
type fields struct {
	*decoder
	pairs []value
}

// each calls a function with every key that the reader knows, and its value.
func (f fields) each(set func(key uint32, v value)) {
	for i := 0; i < len(f.pairs); i += 2 {
		if k := f.pairs[i]; k.kind == text && k.n < uint64(keyCount) && f.pairs[i+1].kind != none {
			set(uint32(k.n), f.pairs[i+1])
		}
	}
}

func (f fields) wrong(key uint32, v value, expected string) {
	f.fail("%s: found %v, expected %s", keyNames[key], v.kind, expected)
}

// mostBytes is far above any size on a GPU, and sums of sizes cannot overflow.
const mostBytes = 1 << 50

func (f fields) size(key uint32, v value) ledger.Bytes {
	if n := int64(v.n); v.kind != integer || n < 0 || n > mostBytes {
		f.fail("%s: found %s, expected a size in bytes", keyNames[key], f.shown(v))
	}
	return ledger.Bytes(v.n)
}

// shown is a value in a message.
func (f fields) shown(v value) string {
	if v.kind == integer {
		return fmt.Sprint(int64(v.n))
	}
	return v.kind.String()
}

// number reads an address or a handle. C++ writes those from 2^63 on as negative numbers.
func (f fields) number(key uint32, v value) uint64 {
	if v.kind != integer && v.kind != unsigned {
		f.wrong(key, v, "an integer")
	}
	return v.n
}

func (f fields) small(key uint32, v value) int {
	if n := int64(v.n); v.kind != integer || n < -1 || n >= 1<<20 {
		f.fail("%s: found %s, expected a small integer", keyNames[key], f.shown(v))
	}
	return int(int64(v.n))
}

func (f fields) bool(key uint32, v value) bool {
	if v.kind != boolean {
		f.wrong(key, v, "True or False")
	}
	return v.n != 0
}

func (f fields) text(key uint32, v value) string {
	if v.kind != text {
		f.wrong(key, v, "a text")
	}
	return f.texts.all[v.n]
}

// pool reads a tuple of two integers.
func (f fields) pool(key uint32, v value) uint32 {
	if v.kind != pair {
		f.wrong(key, v, "a tuple of two integers")
	}
	return uint32(v.n)
}

// stack reads a list of frames.
func (f fields) stack(key uint32, v value) uint32 {
	switch v.kind {
	case stackList:
		return uint32(v.n)
	case empty:
		return emptyStack
	}
	f.wrong(key, v, "a list of frames")
	return noStack
}

// rows reads a list of records.
func (f fields) rows(key uint32, v value, of role) rows {
	switch {
	case v.kind == empty:
		return rows{}
	case v.kind != rowsList || v.role != of:
		f.wrong(key, v, "a list of "+roleNames[of])
	}
	return *f.ranges.at(uint32(v.n))
}
