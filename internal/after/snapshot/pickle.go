package snapshot

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"

	"plimsoll/internal/base/pickle"
)

// kind is the type of a value on the stack.
type kind uint8

const (
	none kind = iota
	boolean
	integer
	unsigned // an integer of 2^63 and above
	float
	text
	pair   // a tuple of two integers: the id of a pool
	opaque // a tuple, list or dictionary that no question needs; n is its length
	openList
	openDict
	empty      // a list without elements
	stackList  // a list of frames
	rowsList   // a list of records of one kind
	listOfRows // a list of such lists
	aFrame
	aRecord
	theRoot
)

var kindNames = [...]string{"None", "a boolean", "an integer", "an integer", "a float", "a text",
	"a pair", "another object",
	"a list", "a dictionary", "an empty list", "a list of frames", "a list of records", "a list of lists", "a frame",
	"a record", "a snapshot"}

func (k kind) String() string { return kindNames[k] }

// value is an object of the pickle. n is the number itself, or the object's number in the table of its kind.
type value struct {
	kind kind
	role role   // of aRecord and rowsList
	more uint32 // of aRecord: as many records that follow in their table
	n    uint64
}

// reference is a value in the memo.
type reference struct {
	kind kind
	role role
	n    uint32
}

// list is a list that may still grow. A list is settled when another object takes it up: then it changes no more.
type list struct {
	at       int // in the stack
	memo     int // number in the memo, or -1
	elements kind
	role     role
	length   uint64
	frames   []uint32
	first    uint32 // of rows
	rows     []uint32
}

// dict is a dictionary that may still grow.
type dict struct {
	at    int
	memo  int
	pairs []value
}

// deepest is how deep objects may contain each other, and how many may be unfinished at once.
const deepest = 4096

// decoder runs the part of pickle's machine that builds lists, dictionaries, texts and numbers. It has no instruction
// that names, calls or builds anything else, so a file cannot run anything.
type decoder struct {
	*input
	*budget
	*records
	at    int64 // offset of the instruction
	stack []value
	marks []int
	memo  table[reference]
	lists pool[list]
	dicts pool[dict]
}

// pool holds the unfinished lists and dictionaries, and uses them again.
type pool[T any] struct {
	all  []*T
	free []uint64
}

func (p *pool[T]) take() (*T, uint64) {
	if last := len(p.free) - 1; last >= 0 {
		n := p.free[last]
		p.free = p.free[:last]
		return p.all[n], n
	}
	p.all = append(p.all, new(T))
	return p.all[len(p.all)-1], uint64(len(p.all) - 1)
}

func (p *pool[T]) giveBack(n uint64) { p.free = append(p.free, n) }

func (d *decoder) fail(format string, values ...any) {
	panic(&refusal{d.at, fmt.Sprintf(format, values...), ""})
}

// run reads one pickle and what may follow it: zeros.
func (d *decoder) run() value {
	const hint = "a snapshot is written by torch.cuda.memory._dump_snapshot(path)"
	if !d.fill(2) || d.buffer[0] != pickle.OpProto {
		panic(&refusal{0, "this is no pickle of protocol 2 to 5", hint})
	}
	if version := d.take(2)[1]; version < 2 || version > 5 {
		panic(&refusal{1, fmt.Sprintf("a pickle of protocol %d, expected 2 to 5", version), hint})
	}
	for {
		d.at = d.offset()
		op := d.byte()
		if op == pickle.OpStop {
			break
		}
		d.step(op)
	}
	if len(d.stack) != 1 || len(d.marks) != 0 {
		d.fail("the pickle ends with %d objects, expected one", len(d.stack))
	}
	for d.fill(1) {
		d.at = d.offset()
		if b := d.byte(); b != 0 {
			d.fail("byte 0x%02x after the end of the pickle, expected nothing or zeros", b)
		}
	}
	if d.ended != io.EOF {
		d.fail("%v", d.ended)
	}
	return d.settled(0)
}

// refused names the instructions that would run something.
var refused = map[byte]string{
	'c': "GLOBAL", 0x93: "STACK_GLOBAL", 'R': "REDUCE", 'b': "BUILD", 'P': "PERSID", 'Q': "BINPERSID", 'i': "INST",
	'o': "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
}

// step runs one instruction.
func (d *decoder) step(op byte) {
	switch op {
	case pickle.OpLongBinGet:
		d.get(uint64(d.uint32()))
	case pickle.OpBinGet:
		d.get(uint64(d.byte()))
	case pickle.OpMemoize:
		d.put(uint64(d.memo.length))
	case pickle.OpBinPut:
		d.put(uint64(d.byte()))
	case pickle.OpLongBinPut:
		d.put(uint64(d.uint32()))
	case pickle.OpMark:
		d.mark()
	case pickle.OpSetItems:
		d.setItems(d.popMark())
	case pickle.OpSetItem:
		d.setItems(d.pop(2))
	case pickle.OpAppends:
		d.extend(d.popMark())
	case pickle.OpAppend:
		d.extend(d.pop(1))
	case pickle.OpEmptyDict:
		d.openDict()
	case pickle.OpEmptyList:
		d.openList()
	case pickle.OpFrame:
		d.uint64() // the length of the next part, for readers that fetch it at once
	case pickle.OpTuple, pickle.OpEmptyTuple, pickle.OpTuple1, pickle.OpTuple2, pickle.OpTuple3:
		d.tuple(op)
	default:
		d.scalar(op)
	}
}

// scalar pushes a number, a text, a truth value or None.
func (d *decoder) scalar(op byte) {
	switch op {
	case pickle.OpBinInt:
		d.push(value{kind: integer, n: uint64(int64(int32(d.uint32())))})
	case pickle.OpBinInt1:
		d.push(value{kind: integer, n: uint64(d.byte())})
	case pickle.OpBinInt2:
		d.push(value{kind: integer, n: uint64(d.uint16())})
	case pickle.OpLong1:
		d.long(uint32(d.byte()))
	case pickle.OpLong4:
		d.long(d.uint32())
	case pickle.OpBinFloat:
		d.push(value{kind: float, n: binary.BigEndian.Uint64(d.take(8))})
	case pickle.OpNone:
		d.push(value{})
	case pickle.OpNewTrue, pickle.OpNewFalse:
		d.push(value{kind: boolean, n: uint64(pickle.OpNewFalse - op)})
	case pickle.OpShortBinUnicode, pickle.OpShortBinString:
		d.text(uint64(d.byte()))
	case pickle.OpBinUnicode, pickle.OpBinString:
		d.text(uint64(d.uint32()))
	case pickle.OpBinUnicode8:
		d.text(d.uint64())
	default:
		if name := refused[op]; name != "" {
			panic(&refusal{d.at, fmt.Sprintf("the instruction %s, which would run code", name),
				"a snapshot of PyTorch has none: do not open this file with Python"})
		}
		d.fail("the instruction 0x%02x, which no snapshot has", op)
	}
}

func (d *decoder) push(v value) {
	if len(d.stack) == cap(d.stack) {
		d.spend(int64(cap(d.stack)) * sizeOf[value]())
	}
	d.stack = append(d.stack, v)
}

func (d *decoder) mark() {
	if len(d.marks) == deepest {
		d.fail("objects are nested more than %d deep", deepest)
	}
	d.marks = append(d.marks, len(d.stack))
}

// popMark returns the values above the last mark. They are valid until the next push.
func (d *decoder) popMark() []value {
	last := len(d.marks) - 1
	if last < 0 {
		d.fail("an end without its MARK")
	}
	mark := d.marks[last]
	d.marks = d.marks[:last]
	return d.pop(len(d.stack) - mark)
}

// pop returns the last n values, settled.
func (d *decoder) pop(n int) []value {
	first := len(d.stack) - n
	if first < d.floor() {
		d.fail("the instruction needs more objects than there are")
	}
	for i := first; i < len(d.stack); i++ {
		d.settled(i)
	}
	values := d.stack[first:]
	d.stack = d.stack[:first]
	return values
}

// floor is the first place of the stack above the last mark.
func (d *decoder) floor() int {
	if len(d.marks) == 0 {
		return 0
	}
	return d.marks[len(d.marks)-1]
}

// top returns the last value.
func (d *decoder) top() *value {
	if len(d.stack) == d.floor() {
		d.fail("the instruction needs an object")
	}
	return &d.stack[len(d.stack)-1]
}

// long pushes an integer of any length that fits 64 bits. An address takes up to 9 bytes.
func (d *decoder) long(length uint32) {
	if length > 9 {
		d.fail("an integer of %d bytes, expected at most 9", length)
	}
	bytes := d.take(int(length))
	negative := length > 0 && bytes[length-1] >= 0x80
	var n uint64
	for i, b := range bytes {
		if i < 8 {
			n |= uint64(b) << (8 * i)
		}
	}
	switch {
	case length == 9 && bytes[8] == 0:
		d.push(value{kind: unsigned, n: n})
	case length == 9:
		d.fail("an integer that does not fit 64 bits")
	case negative && length < 8:
		d.push(value{kind: integer, n: n | math.MaxUint64<<(8*length)})
	default:
		d.push(value{kind: integer, n: n})
	}
}

func (d *decoder) text(length uint64) {
	if length > longestText {
		d.fail("a text of %d bytes, expected at most %d", length, longestText)
	}
	d.push(value{kind: text, n: uint64(d.texts.number(d.budget, d.take(int(length))))})
}

func (d *decoder) tuple(op byte) {
	var items []value
	switch op {
	case pickle.OpEmptyTuple:
	case pickle.OpTuple:
		items = d.popMark()
	default:
		items = d.pop(int(op-pickle.OpTuple1) + 1)
	}
	if len(items) == 2 && items[0].kind == integer && items[1].kind == integer {
		d.push(value{kind: pair, n: uint64(d.pools.number(d.budget, Pool{items[0].n, items[1].n}))})
		return
	}
	d.push(value{kind: opaque, n: uint64(len(items))})
}

func (d *decoder) openList() {
	l, n := d.lists.take()
	d.push(value{kind: openList, n: n})
	*l = list{at: len(d.stack) - 1, memo: -1, frames: l.frames[:0], rows: l.rows[:0]}
	d.limitOpen()
}

// join makes one value of the records after a mark, as soon as the next one begins. The pickler in C++ ends a list when
// all of its elements are on the stack, and these may be millions.
func (d *decoder) join() {
	floor := d.floor()
	if len(d.marks) == 0 || len(d.stack) != floor+2 {
		return
	}
	run, next := &d.stack[floor], d.stack[floor+1]
	if run.kind == aRecord && next.kind == aRecord && run.role == next.role && next.n == run.n+uint64(run.more)+1 {
		run.more++
		d.stack = d.stack[:floor+1]
	}
}

func (d *decoder) openDict() {
	d.join()
	x, n := d.dicts.take()
	d.push(value{kind: openDict, n: n})
	*x = dict{at: len(d.stack) - 1, memo: -1, pairs: x.pairs[:0]}
	d.limitOpen()
}

func (d *decoder) limitOpen() {
	if max(len(d.lists.all)-len(d.lists.free), len(d.dicts.all)-len(d.dicts.free)) > deepest {
		d.fail("more than %d lists or dictionaries are unfinished", deepest)
	}
}

// put gives the last value the next number of the memo. Picklers use the numbers one after the other.
func (d *decoder) put(n uint64) {
	if n != uint64(d.memo.length) {
		d.fail("number %d of the memo, expected %d: picklers use one after the other", n, d.memo.length)
	}
	v := *d.top()
	switch v.kind {
	case none, boolean, integer, unsigned, float:
		d.fail("the memo gets %v, which no pickler puts there", v.kind)
	case openList:
		d.name(&d.lists.all[v.n].memo)
	case openDict:
		d.name(&d.dicts.all[v.n].memo)
	}
	d.memo.add(d.budget, reference{v.kind, v.role, uint32(v.n)})
}

func (d *decoder) name(memo *int) {
	if *memo >= 0 {
		d.fail("the memo gets one object twice")
	}
	*memo = d.memo.length
}

// get pushes a value of the memo. It settles a list or dictionary that has been read. One that contains this place is
// not complete.
func (d *decoder) get(n uint64) {
	if n >= uint64(d.memo.length) {
		d.fail("number %d of the memo, which has %d", n, d.memo.length)
	}
	r := d.memo.at(uint32(n))
	at := -1
	switch r.kind {
	case openList:
		at = d.lists.all[r.n].at
	case openDict:
		at = d.dicts.all[r.n].at
	}
	if at >= 0 {
		for _, mark := range d.marks {
			if mark-1 == at {
				d.fail("an object that contains itself")
			}
		}
		d.settled(at)
	}
	d.push(value{kind: r.kind, role: r.role, n: uint64(r.n)})
}

// settled finishes the object at a place of the stack, and returns its value.
func (d *decoder) settled(at int) value {
	v := &d.stack[at]
	memo := -1
	switch v.kind {
	case openList:
		l := d.lists.all[v.n]
		d.lists.giveBack(v.n)
		memo, *v = l.memo, d.finishedList(l)
	case openDict:
		x := d.dicts.all[v.n]
		d.dicts.giveBack(v.n)
		memo, *v = x.memo, d.record(x.pairs)
	default:
		return *v
	}
	if memo >= 0 {
		*d.memo.at(uint32(memo)) = reference{v.kind, v.role, uint32(v.n)}
	}
	return *v
}

// setItems puts keys and values into the dictionary below them.
func (d *decoder) setItems(pairs []value) {
	if len(pairs)%2 != 0 {
		d.fail("a key without its value")
	}
	into := d.top()
	switch into.kind {
	case openDict:
	case opaque:
		into.n += uint64(len(pairs))
		return
	default:
		d.fail("keys and values for %v, expected a dictionary that has not been used", into.kind)
	}
	x := d.dicts.all[into.n]
	d.spend(int64(max(0, len(x.pairs)+len(pairs)-cap(x.pairs))) * sizeOf[value]())
	x.pairs = append(x.pairs, pairs...)
	if len(pairs) > 2 {
		d.settled(len(d.stack) - 1) // one SETITEMS makes the whole dictionary
	}
}

// extend puts elements into the list below them.
func (d *decoder) extend(elements []value) {
	into := d.top()
	if into.kind != openList {
		d.fail("elements for %v, expected a list that has not been used", into.kind)
	}
	l := d.lists.all[into.n]
	for _, v := range elements {
		d.appendTo(l, v)
	}
}
