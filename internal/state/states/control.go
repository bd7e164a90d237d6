package states

import (
	"errors"
	"fmt"
	"unsafe"

	"plimsoll/internal/state/checked"
)

// Control is the control arena: a head, two tables of scalars, and room for the hyperparameters of a step. Trainer and
// service write different fields of the head, and each word is written at once, with its checksum (package checked).
type Control struct {
	*head
	tables [2][]uint64
}

const (
	controlMagic = 0x32646c65686d6c70 // "plmheld2"
	controlKind  = controlMagic & (1<<56 - 1)
	headBytes    = 512
	scalarBytes  = 8
)

// Words of different writers are on cache lines of their own: a device may write one.
type head struct {
	magic  uint64
	chunks uint64
	_      [6]uint64
	// Position is written by the trainer, behind the region of each chunk.
	Position checked.Word
	_        [7]uint64
	// GradientsOf is the step whose gradients are held, written by the trainer before its first region.
	GradientsOf checked.Word
	// SettingsLength is the size of the hyperparameters of that step.
	SettingsLength checked.Word
	// SettingsSum is their checksum, which only trainers write and read.
	SettingsSum checked.Word
	_           [5]uint64
	// Read is the position that a save allows the trainer to have before it writes a region, or Unread.
	Read checked.Word
	_    [7]uint64
	// Wanted is the position at which the trainer waits for Read.
	Wanted checked.Word
	_      [7 + 24]uint64
}

// words calls yield for every number that changes, with its name.
func (h *head) words(yield func(name string, word *checked.Word) bool) {
	_ = yield("position", &h.Position) && yield("gradients_of", &h.GradientsOf) &&
		yield("bytes of the hyperparameters", &h.SettingsLength) &&
		yield("checksum of the hyperparameters", &h.SettingsSum) && yield("read", &h.Read) &&
		yield("wanted", &h.Wanted)
}

// NothingIsRead is the value of [Control] Read while nothing is being saved.
const NothingIsRead = checked.Most

// ControlBytes returns the size of the control arena.
func (d *Description) ControlBytes() int64 {
	return headBytes + 2*scalarBytes*int64(d.Scalars()) + d.SettingsBytes
}

// Scalars returns how many scalars a table has.
func (d *Description) Scalars() int {
	n := 0
	for _, c := range d.Chunks {
		n += len(c.Scalars)
	}
	return n
}

// NewControl writes the head of a new control arena.
func NewControl(memory []byte, d *Description) *Control {
	c := overlay(memory, d)
	c.chunks = uint64(len(d.Chunks))
	for _, word := range c.words {
		word.Store(0)
	}
	c.Read.Store(NothingIsRead)
	c.magic = controlMagic
	return c
}

// AttachControl takes the control arena over that an earlier service wrote.
func AttachControl(memory []byte, d *Description) (*Control, error) {
	c, err := OverlayControl(memory, d)
	if err == nil {
		c.Read.Store(NothingIsRead) // a save that was under way has failed
	}
	return c, err
}

// OverlayControl checks the head that a service wrote.
func OverlayControl(memory []byte, d *Description) (*Control, error) {
	c := overlay(memory, d)
	switch {
	case c.magic != controlMagic && c.magic&(1<<56-1) == controlKind:
		return nil, fmt.Errorf("the control arena has version %q and this release reads version %q: end the job with "+
			"the release that began it, or begin again from the last checkpoint", rune(c.magic>>56),
			rune(controlMagic>>56))
	case c.magic != controlMagic:
		return nil, errors.New("the control arena: this release did not write it, or its first 8 bytes have changed " +
			"in memory; begin again from the last checkpoint")
	case c.chunks != uint64(len(d.Chunks)):
		return nil, fmt.Errorf("the control arena is of %d chunks: expected %d", c.chunks, len(d.Chunks))
	}
	for _, word := range c.words {
		if damage := word.Check(); damage != nil {
			return nil, c.Named(damage)
		}
	}
	return c, nil
}

// Named returns the error about a damaged number.
func (c *Control) Named(d *checked.Damage) error {
	title := "a number"
	for name, word := range c.words {
		if unsafe.Pointer(word) == d.At {
			title = name
		}
	}
	return fmt.Errorf("the control arena: %s, at offset %d, is %#016x: memory has changed since it was written; begin "+
		"again from the last checkpoint", title, uintptr(d.At)-uintptr(unsafe.Pointer(c.head)), d.Found)
}

func overlay(memory []byte, d *Description) *Control {
	c := &Control{head: (*head)(unsafe.Pointer(unsafe.SliceData(memory)))}
	if n := d.Scalars(); n > 0 {
		tables := unsafe.Slice((*uint64)(unsafe.Pointer(&memory[headBytes])), 2*n)
		c.tables = [2][]uint64{tables[:n], tables[n:]}
	}
	return c
}

// Scalars returns the table of the state after so many steps: the bits of each number, from the lowest byte on.
func (c *Control) Scalars(steps int64) []uint64 { return c.tables[steps%2] }
