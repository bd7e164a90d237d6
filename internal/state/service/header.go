//go:build linux

package service

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
)

// sessionHeader is what a restarted service must know of a session. It holds fields, the
// document and hyperparameters, in pages that outlive the process.
// When a service dies, its stores up to some instant are in the header.
type sessionHeader struct {
	*arena.Arena
	*headerFields
	groups []protocol.Hyperparameters // of the prepared step, or of the one whose gradients arrive
	left   []byte                     // the parameters that the prepared step leaves alone, as in the request
	// kept is the memory of both. Where it lies was read once: a bit that flips in the fields must not move it.
	kept [][]byte
}

// headerComponent ends the name of the session header's arena.
const headerComponent = string(ledger.SessionHeader)

const (
	headerMagic = 0x376e6f6973736573 // "session7"
	headerKind  = headerMagic & (1<<56 - 1)
)

type headerFields struct {
	magic      uint64
	document   uint64 // bytes
	groupCount uint64
	leftBytes  uint64 // of the parameters that a prepared step leaves alone
	pages      uint64 // kind of pages of the shard's arenas
	options    uint64 // bit 0: the shard has sums of its chunks; from bit 8 on: the window of a tier, or 0
	// checksum is that of the document and the fields before it: a flipped bit in them could make this another
	// session, of another rank or job.
	checksum [sha256.Size]byte
	// attempts is how many services in a row have died while they restored the session.
	attempts checked.Word
	// condition is one of the conditions of a state, below.
	condition checked.Word
	// preparedStep is the step whose hyperparameters are here and whose gradients are final, or 0. groupsSum is the
	// checksum of those and of the parameters that it leaves alone. It is written before the number of a step that
	// needs them.
	preparedStep checked.Word
	groupsSum    checked.Sum
	// askedStep is the step that a client asked for last. gradScale is the factor of its gradients, as binary64, and
	// has a checksum as it takes a word itself. Both are written before askedStep.
	askedStep checked.Word
	gradScale atomic.Uint64
	scaleSum  checked.Sum
	// arrivingClient is the process that writes the gradients of a step that was begun before they were there.
	arrivingClient checked.Word
}

// words calls yield for every number that changes, with its name.
func (h *headerFields) words(yield func(name string, word *checked.Word) bool) {
	_ = yield("attempts to restore it", &h.attempts) && yield("condition of the state", &h.condition) &&
		yield("prepared step", &h.preparedStep) && yield("checksum of hyperparameters", &h.groupsSum.Word) &&
		yield("step asked for", &h.askedStep) && yield("checksum of the factor of gradients", &h.scaleSum.Word) &&
		yield("process whose gradients arrive", &h.arrivingClient)
}

// Conditions of a state.
const (
	stateIsWritten = iota // zeros or the state before, except for the client's writes so far
	stateIsWhole          // the client said so, or it was loaded
	stateIsInParts        // a load was broken off: some of it is the checkpoint's
	stateIsLoaded         // loaded, but other shards may not have loaded theirs yet
	stateIsTorn           // some of it has had the step that was asked for last
)

// Parts of the options.
const (
	hasSums    = 1
	lanesShift = 8
	keptShift  = 32
)

// window returns the window of a tier; none if all of the state is in memory.
func (h *headerFields) window() engine.Window {
	return engine.Window{Lanes: int(h.options>>lanesShift) & (1<<(keptShift-lanesShift) - 1),
		Kept: int(h.options >> keptShift)}
}

// optionsOf returns the options of a session.
func optionsOf(sums bool, window engine.Window) uint64 {
	options := uint64(window.Lanes)<<lanesShift | uint64(window.Kept)<<keptShift
	if sums {
		options |= hasSums
	}
	return options
}

const headerFieldsSize = int(unsafe.Sizeof(headerFields{}))

// groupsBegin returns where the hyperparameters begin.
func groupsBegin(document int) int { return (headerFieldsSize + document + 7) &^ 7 }

// leftBegins returns where the parameters begin that a prepared step leaves alone.
func leftBegins(document, groups int) int {
	return groupsBegin(document) + groups*int(unsafe.Sizeof(protocol.Hyperparameters{}))
}

// size returns the size of a header with these fields.
func (h *headerFields) size() ledger.Bytes {
	return ledger.Bytes(leftBegins(int(h.document), int(h.groupCount))) + ledger.Bytes(h.leftBytes)
}

// newHeader makes the header of a session. It holds the original text of the document:
// a restoring service parses the same text, and so refuses it only if open would have.
func newHeader(d protocol.AnyDocument, text []byte, place arena.Place, pages arena.Pages, options uint64) (
	*sessionHeader, error,
) {
	static := headerFields{document: uint64(len(text)), pages: uint64(pages), options: options}
	static.groupCount, static.leftBytes = prepares(d)
	a, err := place.New(keyOf(d).String()+"/"+headerComponent, static.size(), arena.BasePages)
	if err != nil {
		return nil, err
	}
	copy(a.Bytes()[headerFieldsSize:], text)
	fields := fieldsOf(a.Bytes())
	fields.document, fields.groupCount, fields.leftBytes = static.document, static.groupCount, static.leftBytes
	fields.pages, fields.options = static.pages, static.options
	fields.checksum = static.checksumWith(text)
	for _, word := range fields.words {
		word.Store(0)
	}
	fields.magic = headerMagic
	return overlay(a, &static), nil
}

// checksumWith returns the checksum of what never changes in a header with a document.
func (h *headerFields) checksumWith(document []byte) [sha256.Size]byte {
	sum := sha256.New()
	sum.Write(protocol.Encode(h.document, h.groupCount, h.leftBytes, h.pages, h.options))
	sum.Write(document)
	return [sha256.Size]byte(sum.Sum(nil))
}

// prepares returns how many parameter groups a prepared step has, and how many bytes name the parameters that it leaves
// alone.
func prepares(d protocol.AnyDocument) (groups, leftBytes uint64) {
	if shard, ok := d.(*protocol.Document); ok {
		return uint64(shard.Groups), uint64(bytesOfBits(len(shard.Parameters)))
	}
	return 0, 0
}

func fieldsOf(bytes []byte) *headerFields {
	return (*headerFields)(unsafe.Pointer(unsafe.SliceData(bytes)))
}

// overlay returns the parts of a header whose head is written. fields is a copy that no flipped bit can change.
func overlay(a *arena.Arena, fields *headerFields) *sessionHeader {
	r := &sessionHeader{Arena: a, headerFields: fieldsOf(a.Bytes())}
	if fields.groupCount > 0 {
		begin := unsafe.Pointer(&a.Bytes()[groupsBegin(int(fields.document))])
		r.groups = unsafe.Slice((*protocol.Hyperparameters)(begin), fields.groupCount)
	}
	groups, left := groupsBegin(int(fields.document)), leftBegins(int(fields.document), int(fields.groupCount))
	r.left = a.Bytes()[left:fields.size()]
	r.kept = [][]byte{a.Bytes()[groups:left], r.left}
	return r
}

// check reports what is wrong with a head that an earlier service wrote.
func (h *headerFields) check() error {
	switch {
	case h.magic != headerMagic && h.magic&(1<<56-1) == headerKind:
		return fmt.Errorf("it has version %q and this release reads version %q: end the job with the release that "+
			"began it, or begin again from the last checkpoint", rune(h.magic>>56), rune(headerMagic>>56))
	case h.magic != headerMagic:
		return errors.New("this release did not write it, or its first 8 bytes have changed in memory; begin again " +
			"from the last checkpoint")
	case protocol.CheckDocumentLength(h.document) != nil:
		return protocol.CheckDocumentLength(h.document)
	case h.groupCount > protocol.MaximumGroups:
		return fmt.Errorf("it has %d parameter groups: expected at most %d", h.groupCount, protocol.MaximumGroups)
	case h.leftBytes > protocol.MaximumDocument:
		return fmt.Errorf("%d bytes name parameters that a step leaves alone: expected at most %d", h.leftBytes,
			protocol.MaximumDocument)
	case h.pages > uint64(arena.HugetlbPages):
		return fmt.Errorf("unknown kind of pages %d", h.pages)
	}
	return nil
}

// readHeader reads the header that an earlier service made. The caller keeps the file.
func readHeader(name string, place arena.Place, file *os.File) (*sessionHeader, protocol.AnyDocument, error) {
	bytes := make([]byte, headerFieldsSize)
	if _, err := file.ReadAt(bytes, 0); err != nil {
		return nil, nil, fmt.Errorf("the session header %s: %w", name, err)
	}
	fields := fieldsOf(bytes)
	if err := fields.check(); err != nil {
		return nil, nil, fmt.Errorf("the session header %s: %w", name, err)
	}
	a, err := place.Attach(name, fields.size(), arena.BasePages, file)
	if err != nil {
		return nil, nil, fmt.Errorf("the session header %s says that it is larger than its file, or smaller: %w; "+
			"begin again from the last checkpoint", name, err)
	}
	text := a.Bytes()[headerFieldsSize : headerFieldsSize+int(fields.document)]
	if fields.checksum != fields.checksumWith(text) {
		return nil, nil, errors.Join(fmt.Errorf("the session header %s has changed in memory since a service wrote "+
			"it: its checksum is another; begin again from the last checkpoint", name), a.Close())
	}
	for _, word := range fieldsOf(a.Bytes()).words {
		if damage := word.Check(); damage != nil {
			return nil, nil, errors.Join(overlay(a, fields).named(damage), a.Close())
		}
	}
	d, err := protocol.ReadDocument(text)
	if err == nil {
		if groups, left := prepares(d); groups != fields.groupCount || left != fields.leftBytes {
			err = fmt.Errorf("it is for %d parameter groups and %d bytes of parameters, but its document has %d and %d",
				fields.groupCount, fields.leftBytes, groups, left)
		}
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("the session header %s cannot be read: %w", name, err), a.Close())
	}
	return overlay(a, fields), d, nil
}

// named returns the error about a damaged number of the header, or nil if it is not there.
func (h *sessionHeader) named(d *checked.Damage) error {
	for name, word := range h.words {
		if unsafe.Pointer(word) == d.At {
			offset := uintptr(d.At) - uintptr(unsafe.Pointer(unsafe.SliceData(h.Bytes())))
			return fmt.Errorf("the session header %s: %s, at offset %d, is %#016x: %w; begin again from the last "+
				"checkpoint", h.Name(), name, offset, d.Found, engine.ErrDamaged)
		}
	}
	return nil
}

// kindOfPages returns the kind of pages of the shard's arenas.
func (h *sessionHeader) kindOfPages() arena.Pages { return arena.Pages(h.pages) }

// beginWrite records that the state is incomplete. If the client dies from here on, the state is a mixture.
func (h *sessionHeader) beginWrite() {
	h.forgetPrepared()
	h.condition.CompareAndSwap(stateIsWhole, stateIsWritten)
}

// loaded records that a checkpoint was loaded, alone or as one of several.
func (h *sessionHeader) loaded(several bool) {
	if several {
		h.condition.Store(stateIsLoaded)
	} else {
		h.condition.Store(stateIsWhole)
	}
}

func (h *sessionHeader) initialized() bool { return h.condition.Load() == stateIsWhole }

// prepare records the first phase of the two-phase commit of a step: its gradients are final, and these are its
// hyperparameters and the parameters that it leaves alone. It writes the step's number last, so that a torn write does
// not look like a prepared step.
func (h *sessionHeader) prepare(b protocol.StepBody) {
	h.preparedStep.Store(0)
	copy(h.groups, b.Hyperparameters)
	clear(h.left)
	copy(h.left, b.LeftAlone)
	h.groupsSum.Write(h.kept...)
	h.preparedStep.Store(b.Step)
}

// prepared returns what a prepared step is made with.
func (h *sessionHeader) prepared() (groups []protocol.Hyperparameters, leftAlone []byte) {
	h.groupsSum.Verify(h.kept...)
	return h.groups, h.left
}

// forgetPrepared discards the prepared step. Every change of state or gradients calls
// it.
func (h *sessionHeader) forgetPrepared() { h.preparedStep.Store(0) }

// forgetSteps discards the prepared and the asked step. Every replacement of the full state calls it.
func (h *sessionHeader) forgetSteps() {
	h.forgetPrepared()
	h.askedStep.Store(0)
}

// ask records that a client asked for a step.
func (h *sessionHeader) ask(step uint64, gradScale float64) {
	h.askedStep.Store(0)
	h.gradScale.Store(math.Float64bits(gradScale))
	h.scaleSum.Write(protocol.Encode(h.gradScale.Load()))
	h.askedStep.Store(step)
}

// askArriving records that a client asked for a step, and writes its gradients while it is under way.
func (h *sessionHeader) askArriving(b protocol.StepBody, client int64) {
	h.forgetPrepared()
	copy(h.groups, b.Hyperparameters)
	h.groupsSum.Write(h.kept...)
	h.arrivingClient.Store(uint64(client))
	h.ask(b.Step, b.GradScale)
}

// asked returns the step that a client asked for last, and the factor of its gradients.
func (h *sessionHeader) asked() (step uint64, gradScale float64) {
	if step = h.askedStep.Load(); step == 0 {
		return 0, 0
	}
	h.scaleSum.Verify(protocol.Encode(h.gradScale.Load()))
	return step, math.Float64frombits(h.gradScale.Load())
}
