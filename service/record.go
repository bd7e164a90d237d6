package service

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"plimsoll/arena"
	"plimsoll/ledger"
	"plimsoll/service/protocol"
)

// record is the session header: what a restarted service must know of a session. It
// holds a head, the document and hyperparameters, in pages that outlive the process.
// When a service dies, its stores up to some instant are in the header.
type record struct {
	*arena.Arena
	*recordHead
	groups []protocol.Hyperparameters // of the prepared step
}

// recordComponent ends the name of the session header's arena.
const recordComponent = string(ledger.SessionHeader)

const recordMagic = 0x346e6f6973736573 // "session4"

type recordHead struct {
	magic      uint64
	document   uint64 // bytes
	groupCount uint64
	pages      uint64 // kind of pages of the shard's arenas
	// attempts is how many services in a row have died while they restored the session.
	attempts atomic.Uint64
	// condition is one of the conditions of a state, below.
	condition atomic.Uint64
	// preparedStep is the step whose hyperparameters are here and whose gradients are
	// final; 0 for none.
	preparedStep atomic.Uint64
	// askedStep is the step that a client asked for last. gradScale is what it
	// multiplies its gradients by, as binary64.
	askedStep, gradScale atomic.Uint64
}

// Conditions of a state.
const (
	stateIsWritten = iota // zeros or the state before, except for the client's writes so far
	stateIsWhole          // the client said so, or it was loaded
	stateIsInParts        // a load was broken off: some of it is the checkpoint's
	stateIsLoaded         // loaded, but other shards may not have loaded theirs yet
)

const recordHeadSize = int(unsafe.Sizeof(recordHead{}))

// groupsBegin returns where the hyperparameters begin.
func groupsBegin(document int) int { return (recordHeadSize + document + 7) &^ 7 }

func sizeOfRecord(document, groups int) ledger.Bytes {
	return ledger.Bytes(groupsBegin(document) + groups*int(unsafe.Sizeof(protocol.Hyperparameters{})))
}

// newRecord makes the header of a session. It holds the original text of the document:
// a restoring service parses the same text, and so refuses it only if open would have.
func newRecord(d *protocol.Document, text []byte, pages arena.Pages) (*record, error) {
	a, err := arena.New(keyOf(d).String()+"/"+recordComponent, sizeOfRecord(len(text), d.Groups), arena.BasePages)
	if err != nil {
		return nil, err
	}
	copy(a.Bytes()[recordHeadSize:], text)
	head := headOf(a.Bytes())
	head.document, head.groupCount, head.pages = uint64(len(text)), uint64(d.Groups), uint64(pages)
	head.magic = recordMagic
	return overlay(a), nil
}

func headOf(bytes []byte) *recordHead { return (*recordHead)(unsafe.Pointer(unsafe.SliceData(bytes))) }

// overlay returns the parts of a header whose head is written.
func overlay(a *arena.Arena) *record {
	head := headOf(a.Bytes())
	r := &record{Arena: a, recordHead: head}
	if head.groupCount > 0 {
		r.groups = unsafe.Slice(
			(*protocol.Hyperparameters)(unsafe.Pointer(&a.Bytes()[groupsBegin(int(head.document))])), head.groupCount)
	}
	return r
}

// check reports what is wrong with a head that an earlier service wrote.
func (h *recordHead) check() error {
	switch {
	case h.magic != recordMagic:
		return errors.New("it is none of this release")
	case protocol.CheckDocumentLength(h.document) != nil:
		return protocol.CheckDocumentLength(h.document)
	case h.groupCount > protocol.MaximumGroups:
		return fmt.Errorf("it has %d parameter groups: expected at most %d", h.groupCount, protocol.MaximumGroups)
	case h.pages > uint64(arena.HugetlbPages):
		return fmt.Errorf("there is no kind of pages %d", h.pages)
	}
	return nil
}

// readRecord reads the header that an earlier service made. The caller keeps the file.
func readRecord(name string, file *os.File) (*record, *protocol.Document, error) {
	bytes := make([]byte, recordHeadSize)
	if _, err := file.ReadAt(bytes, 0); err != nil {
		return nil, nil, fmt.Errorf("the record %s: %w", name, err)
	}
	head := headOf(bytes)
	if err := head.check(); err != nil {
		return nil, nil, fmt.Errorf("the record %s: %w", name, err)
	}
	a, err := arena.Attach(name, sizeOfRecord(int(head.document), int(head.groupCount)), arena.BasePages, file)
	if err != nil {
		return nil, nil, err
	}
	d, err := protocol.ParseDocument(a.Bytes()[recordHeadSize : recordHeadSize+int(head.document)])
	if err == nil && d.Groups != int(head.groupCount) {
		err = fmt.Errorf("it has hyperparameters of %d groups, and its document %d", head.groupCount, d.Groups)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("the record %s cannot be read: %w", name, err), a.Close())
	}
	return overlay(a), d, nil
}

// kindOfPages returns the kind of pages of the shard's arenas.
func (r *record) kindOfPages() arena.Pages { return arena.Pages(r.pages) }

// beginWrite records that the state is no longer whole. If the client dies from here
// on, the state is a mixture.
func (r *record) beginWrite() {
	r.forgetPrepared()
	r.condition.CompareAndSwap(stateIsWhole, stateIsWritten)
}

func (r *record) initialized() bool { return r.condition.Load() == stateIsWhole }

// prepare records the first phase of the two-phase commit of a step: its gradients are
// final, and these are its hyperparameters. The step's number goes in last, so that a
// torn write is not taken for a prepared step.
func (r *record) prepare(step uint64, groups []protocol.Hyperparameters) {
	r.preparedStep.Store(0)
	copy(r.groups, groups)
	r.preparedStep.Store(step)
}

// forgetPrepared discards the prepared step. Every change of state or gradients calls
// it.
func (r *record) forgetPrepared() { r.preparedStep.Store(0) }

// forgetSteps discards the prepared and the asked step. Every replacement of the whole
// state calls it.
func (r *record) forgetSteps() {
	r.forgetPrepared()
	r.askedStep.Store(0)
}

// ask records that a client asked for a step.
func (r *record) ask(step uint64, gradScale float64) {
	r.askedStep.Store(0)
	r.gradScale.Store(math.Float64bits(gradScale))
	r.askedStep.Store(step)
}

// asked returns the step that was asked for last, and what its gradients were multiplied by.
func (r *record) asked() (step uint64, gradScale float64) {
	return r.askedStep.Load(), math.Float64frombits(r.gradScale.Load())
}
