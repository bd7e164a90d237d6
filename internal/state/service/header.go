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
}

// headerComponent ends the name of the session header's arena.
const headerComponent = string(ledger.SessionHeader)

const headerMagic = 0x366e6f6973736573 // "session6"

type headerFields struct {
	magic      uint64
	document   uint64 // bytes
	groupCount uint64
	leftBytes  uint64 // of the parameters that a prepared step leaves alone
	pages      uint64 // kind of pages of the shard's arenas
	// checksum is that of the document and the fields before it: a flipped bit in them could make this another
	// session, of another rank or job.
	checksum [sha256.Size]byte
	// attempts is how many services in a row have died while they restored the session.
	attempts atomic.Uint64
	// condition is one of the conditions of a state, below.
	condition atomic.Uint64
	// preparedStep is the step whose hyperparameters are here and whose gradients are final, or 0.
	preparedStep atomic.Uint64
	// askedStep is the step that a client asked for last. gradScale is the factor of its gradients, as binary64.
	askedStep, gradScale atomic.Uint64
	// arrivingClient is the process that writes the gradients of a step that was begun before they were there.
	arrivingClient atomic.Uint64
}

// Conditions of a state.
const (
	stateIsWritten = iota // zeros or the state before, except for the client's writes so far
	stateIsWhole          // the client said so, or it was loaded
	stateIsInParts        // a load was broken off: some of it is the checkpoint's
	stateIsLoaded         // loaded, but other shards may not have loaded theirs yet
	stateIsTorn           // some of it has had the step that was asked for last
)

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
func newHeader(d protocol.AnyDocument, text []byte, pages arena.Pages) (*sessionHeader, error) {
	static := headerFields{document: uint64(len(text)), pages: uint64(pages)}
	static.groupCount, static.leftBytes = prepares(d)
	a, err := arena.New(keyOf(d).String()+"/"+headerComponent, static.size(), arena.BasePages)
	if err != nil {
		return nil, err
	}
	copy(a.Bytes()[headerFieldsSize:], text)
	fields := fieldsOf(a.Bytes())
	fields.document, fields.groupCount, fields.leftBytes = static.document, static.groupCount, static.leftBytes
	fields.pages = static.pages
	fields.checksum = fields.checksumWith(text)
	fields.magic = headerMagic
	return overlay(a), nil
}

// checksumWith returns the checksum of what never changes in a header with a document.
func (h *headerFields) checksumWith(document []byte) [sha256.Size]byte {
	sum := sha256.New()
	sum.Write(protocol.Encode(h.document, h.groupCount, h.leftBytes, h.pages))
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

// overlay returns the parts of a header whose head is written.
func overlay(a *arena.Arena) *sessionHeader {
	fields := fieldsOf(a.Bytes())
	r := &sessionHeader{Arena: a, headerFields: fields}
	if fields.groupCount > 0 {
		begin := unsafe.Pointer(&a.Bytes()[groupsBegin(int(fields.document))])
		r.groups = unsafe.Slice((*protocol.Hyperparameters)(begin), fields.groupCount)
	}
	r.left = a.Bytes()[leftBegins(int(fields.document), int(fields.groupCount)):fields.size()]
	return r
}

// check reports what is wrong with a head that an earlier service wrote.
func (h *headerFields) check() error {
	switch {
	case h.magic != headerMagic:
		return errors.New("this release did not write it")
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
func readHeader(name string, file *os.File) (*sessionHeader, protocol.AnyDocument, error) {
	bytes := make([]byte, headerFieldsSize)
	if _, err := file.ReadAt(bytes, 0); err != nil {
		return nil, nil, fmt.Errorf("the session header %s: %w", name, err)
	}
	fields := fieldsOf(bytes)
	if err := fields.check(); err != nil {
		return nil, nil, fmt.Errorf("the session header %s: %w", name, err)
	}
	a, err := arena.Attach(name, fields.size(), arena.BasePages, file)
	if err != nil {
		return nil, nil, err
	}
	text := a.Bytes()[headerFieldsSize : headerFieldsSize+int(fields.document)]
	if fields.checksum != fields.checksumWith(text) {
		return nil, nil, errors.Join(fmt.Errorf("the session header %s has changed in memory since a service wrote "+
			"it: its checksum is another", name), a.Close())
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
	return overlay(a), d, nil
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
	h.preparedStep.Store(b.Step)
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
	h.askedStep.Store(step)
}

// askArriving records that a client asked for a step, and writes its gradients while it is under way.
func (h *sessionHeader) askArriving(b protocol.StepBody, client int64) {
	h.forgetPrepared()
	copy(h.groups, b.Hyperparameters)
	h.arrivingClient.Store(uint64(client))
	h.ask(b.Step, b.GradScale)
}

// asked returns the step that a client asked for last, and the factor of its gradients.
func (h *sessionHeader) asked() (step uint64, gradScale float64) {
	return h.askedStep.Load(), math.Float64frombits(h.gradScale.Load())
}
