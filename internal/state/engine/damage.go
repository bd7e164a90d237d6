package engine

import (
	"errors"
	"fmt"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checked"
)

// ErrDamaged says that memory has changed since the shard wrote it: a bit has flipped, or another program has written
// there. The state is not to be trusted any more, and no step of it is published.
var ErrDamaged = errors.New("memory has changed since it was written")

// remedy ends every error about damage.
const remedy = "this state cannot go on: begin again from the last checkpoint"

// Err returns what this process has found damaged, or nil. Any goroutine may call it. A step that finds damage stops:
// waits for it return, and it is never finished.
func (s *Shard) Err() error {
	if err := s.damage.Load(); err != nil {
		return *err
	}
	return nil
}

// fail records damage, and ends all waits. The first error stays.
func (s *Shard) fail(err error) {
	if s.damage.CompareAndSwap(nil, &err) {
		s.current.watchers.wake()
		s.tell()
	}
}

// tell calls the function that waits for the end of the update under way, once.
func (s *Shard) tell() {
	if s.current.untold.CompareAndSwap(true, false) {
		s.current.then()
	}
}

// Fail records damage that the caller has found, and returns its error.
func (s *Shard) Fail(d *checked.Damage) error {
	s.fail(s.named(d))
	return s.Err()
}

// catch records damage that the caller panics with. It is deferred. Other panics go on.
func (s *Shard) catch() {
	switch cause := recover().(type) {
	case nil:
	case *checked.Damage:
		s.fail(s.named(cause))
	default:
		panic(cause)
	}
}

// Guard calls a function that uses the shard, and returns the damage that it finds.
func (s *Shard) Guard(use func()) error {
	func() {
		defer s.catch()
		use()
	}()
	return s.Err()
}

// caught calls a function that uses the shard, and returns its error or the damage that it finds. It is for goroutines
// that nobody else guards.
func (s *Shard) caught(use func() error) (err error) {
	defer func() {
		if damage := (*checked.Damage)(nil); errors.As(err, &damage) {
			err = s.Fail(damage)
		}
	}()
	defer checked.Catch(&err)
	return use()
}

// named returns the error about a damaged number.
func (s *Shard) named(d *checked.Damage) error {
	journal := s.journal()
	if journal == nil {
		return fmt.Errorf("rank %d: %s: %w; %s", s.config.Rank, s.progress.nameOf(d), ErrDamaged, remedy)
	}
	offset := uintptr(d.At) - uintptr(unsafe.Pointer(unsafe.SliceData(journal.Bytes())))
	return fmt.Errorf("arena %s: %s, at offset %d, is %#016x: %w; %s", journal.Name(), s.progress.nameOf(d), offset,
		d.Found, ErrDamaged, remedy)
}

// journal returns the arena of the journal, or nil.
func (s *Shard) journal() interface {
	Name() string
	Bytes() []byte
} {
	if a := s.Arena(ledger.StepJournal); a != nil {
		return a
	}
	return nil
}

// nameOf names a damaged number.
func (p *progress) nameOf(d *checked.Damage) string {
	for at, word := range p.words {
		if unsafe.Pointer(word) == d.At {
			return at.String()
		}
	}
	return "a number"
}

// check returns the first damaged number.
func (p *progress) check() *checked.Damage {
	for _, word := range p.words {
		if d := word.Check(); d != nil {
			return d
		}
	}
	return nil
}

// checkUpdate returns damage of the constants of an update that is under way.
func (p *progress) checkUpdate() (err error) {
	if !p.isUnderway() {
		return nil
	}
	defer checked.Catch(&err)
	if scale := p.decided; p.phase() == redone && !scale.scaleSum.Holds(memoryOf(&scale.scale)) {
		return errors.New("the factor of gradients with which an update is made again has another checksum")
	}
	for section := range p.rows {
		row := p.rows[section].Load()
		if row >= uint64(len(p.constants)) {
			return fmt.Errorf("section %d has the constants %d of %d", section, row, len(p.constants))
		}
		p.constants[row].sum.Verify(memoryOf(&p.constants[row].Constants))
	}
	return nil
}
