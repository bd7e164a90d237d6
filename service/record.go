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
)

// record is what a service that comes after this one must know of a session: a
// head, the document, and hyperparameters. It is in pages that outlive the
// process; of its stores, those before some instant are there.
type record struct {
	*arena.Arena
	*recordHead
	groups [][hyperparameters]float64 // of the step that is prepared
}

// recordComponent ends the name of the arena of a record.
const recordComponent = string(ledger.SessionHeader)

const recordMagic = 0x346e6f6973736573 // "session4"

type recordHead struct {
	magic      uint64
	document   uint64 // bytes
	groupCount uint64
	pages      uint64 // of the arenas of the shard
	// attempts is how many services in a row have begun to restore the session and
	// have died in it.
	attempts atomic.Uint64
	// condition is that of the state.
	condition atomic.Uint64
	// preparedStep is the step whose hyperparameters are here, and whose gradients
	// are final; 0 is none.
	preparedStep atomic.Uint64
	// askedStep is the last step that was asked for, and factor what its gradients
	// are multiplied by, as binary64.
	askedStep, factor atomic.Uint64
}

// Conditions of a state.
const (
	stateIsWritten = iota // zeros, or what was there, but for what its client has written so far
	stateIsWhole          // as its client has said, or loaded
	stateIsInParts        // of a checkpoint, of which loading was broken off
	stateIsLoaded         // of a checkpoint, to which the states of other shards may not be loaded yet
)

const recordHeadSize = int(unsafe.Sizeof(recordHead{}))

// groupsBegin is where the hyperparameters are.
func groupsBegin(document int) int { return (recordHeadSize + document + 7) &^ 7 }

func sizeOfRecord(document, groups int) ledger.Bytes {
	return ledger.Bytes(groupsBegin(document) + groups*8*hyperparameters)
}

// newRecord makes the record of a session, with the text that its document was read
// from: whoever restores the session reads the same, and refuses it no more than
// open has.
func newRecord(d *Document, text []byte, pages arena.Pages) (*record, error) {
	a, err := arena.New(d.key().String()+"/"+recordComponent, sizeOfRecord(len(text), d.Groups), arena.BasePages)
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

// overlay finds the parts of a record that has a head.
func overlay(a *arena.Arena) *record {
	head := headOf(a.Bytes())
	r := &record{Arena: a, recordHead: head}
	if head.groupCount > 0 {
		r.groups = unsafe.Slice((*[hyperparameters]float64)(
			unsafe.Pointer(&a.Bytes()[groupsBegin(int(head.document))])), head.groupCount)
	}
	return r
}

// check says what is wrong with a head that was found.
func (h *recordHead) check() error {
	switch {
	case h.magic != recordMagic:
		return errors.New("it is none of this release")
	case checkLength(h.document) != nil:
		return checkLength(h.document)
	case h.groupCount > maximumGroups:
		return fmt.Errorf("it has %d parameter groups: expected at most %d", h.groupCount, maximumGroups)
	case h.pages > uint64(arena.HugetlbPages):
		return fmt.Errorf("there is no kind of pages %d", h.pages)
	}
	return nil
}

// readRecord reads the record that an earlier service has made. The file stays the
// caller's.
func readRecord(name string, file *os.File) (*record, *Document, error) {
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
	d, err := parseDocument(a.Bytes()[recordHeadSize : recordHeadSize+int(head.document)])
	if err == nil && d.Groups != int(head.groupCount) {
		err = fmt.Errorf("it has hyperparameters of %d groups, and its document %d", head.groupCount, d.Groups)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("the record %s cannot be read: %w", name, err), a.Close())
	}
	return overlay(a), d, nil
}

// kindOfPages is that of the arenas of the shard.
func (r *record) kindOfPages() arena.Pages { return arena.Pages(r.pages) }

// beginWrite takes down that the state is no longer whole: a client that dies
// from here on leaves a mixture.
func (r *record) beginWrite() {
	r.forgetPrepared()
	r.condition.CompareAndSwap(stateIsWhole, stateIsWritten)
}

func (r *record) initialized() bool { return r.condition.Load() == stateIsWhole }

// prepare takes down that the gradients of a step are final, and its
// hyperparameters.
func (r *record) prepare(step uint64, groups [][hyperparameters]float64) {
	r.preparedStep.Store(0)
	copy(r.groups, groups)
	r.preparedStep.Store(step)
}

// forgetPrepared is for whoever changes state or gradients.
func (r *record) forgetPrepared() { r.preparedStep.Store(0) }

// forgetSteps is for whoever puts another state in place of all of it.
func (r *record) forgetSteps() {
	r.forgetPrepared()
	r.askedStep.Store(0)
}

// ask takes down that a step was asked for.
func (r *record) ask(step uint64, factor float64) {
	r.askedStep.Store(0)
	r.factor.Store(math.Float64bits(factor))
	r.askedStep.Store(step)
}

// asked is the step that was asked for last, and its factor.
func (r *record) asked() (step uint64, factor float64) {
	return r.askedStep.Load(), math.Float64frombits(r.factor.Load())
}
