package engine

import (
	"fmt"
	"slices"
)

// A step may leave sections alone, because they have no gradients: they keep their weights and moments, and the step is
// none of theirs. The optimizers of torch treat a parameter without a gradient so, and count the steps of each.
//
// The journal has two lists with the number of steps that have left each section alone. An update reads the one that
// the update before it has left, and writes the other before it begins. So whichever process finishes the update finds
// what it leaves alone, and an update that is given up changes nothing.

// lists are the numbers of steps that have left sections alone: after an even number of updates, and after an odd one.
type lists [2][]int64

// after returns the list after a number of updates.
func (l *lists) after(updates uint64) []int64 { return l[updates&1] }

// steps are the own steps of sections, and the constants that their updates take.
type steps struct {
	left lists
	rows []uint32 // by section: which of the constants it takes
}

// row says what constants are computed from, beside what is the same for all sections.
type row struct {
	group int
	left  int64
}

// rows are the constants that an update computes: one for all sections of a group that have had the same steps.
type rows struct {
	list   []row
	of     []uint32 // by section: its number in the list
	number map[row]uint32
	valid  bool // until a section is left alone, or the steps are set
}

// assign finds out which constants the next update needs, and which sections take them.
func (s *Shard) assign() {
	a := &s.assigned
	if a.valid {
		return
	}
	if a.number == nil {
		a.number, a.of = map[row]uint32{}, make([]uint32, len(s.sections))
	}
	clear(a.number)
	a.list = a.list[:0]
	for i, left := range s.left.after(s.begun.Load()) {
		of := row{s.sections[i].group, left}
		number, found := a.number[of]
		if !found {
			number = uint32(len(a.list))
			a.number[of] = number
			a.list = append(a.list, of)
		}
		a.of[i] = number
	}
	a.valid = true
}

// leave has the update that begins next leave sections alone.
func (s *Shard) leave(sections []int) {
	before, after := s.left.after(s.begun.Load()), s.left.after(s.begun.Load()+1)
	copy(after, before)
	for _, section := range sections {
		after[section] = before[section] + 1
	}
	s.assigned.valid = s.assigned.valid && len(sections) == 0
}

// isLeft reports whether the update that was begun last leaves a section alone.
func (s *Shard) isLeft(section int) bool {
	begun := s.begun.Load()
	return s.left.after(begun)[section] != s.left.after(begun - 1)[section]
}

// LeaveMissing has the step under way, which was begun before its gradients were there, leave sections alone that will
// get none. Gradients of them must not have arrived.
func (s *Shard) LeaveMissing(sections ...int) {
	begun := s.begun.Load()
	for _, section := range sections {
		s.left.after(begun)[section] = s.left.after(begun - 1)[section] + 1
		s.assigned.valid = false
		s.arrive(s.config.Section(section).Range)
	}
}

// OwnSteps returns how many steps each section has had.
func (s *Shard) OwnSteps() []int64 {
	steps := s.Steps()
	own := slices.Clone(s.left.after(s.finished.Load()))
	for i, left := range own {
		own[i] = steps - left
	}
	return own
}

// SetSteps sets the number of steps that the state has seen, and each section of it, for a state that was loaded. A
// step that another process has begun is forgotten.
func (s *Shard) SetSteps(n int64) {
	s.Wait()
	s.finished.Store(s.begun.Load())
	clear(s.left.after(s.begun.Load()))
	s.assigned.valid = false
	s.before.Store(n - int64(s.finished.Load()))
}

// SetOwnSteps is [Shard.SetSteps] for a state whose sections have had different numbers of steps: at most all.
func (s *Shard) SetOwnSteps(n int64, own []int64) error {
	if len(own) != len(s.sections) {
		return fmt.Errorf("the own steps of %d sections: the shard has %d", len(own), len(s.sections))
	}
	for i, of := range own {
		if of < 0 || of > n {
			return fmt.Errorf("section %d has had %d steps: expected 0 to %d", i, of, n)
		}
	}
	s.SetSteps(n)
	for i, of := range own {
		s.left.after(s.begun.Load())[i] = n - of
	}
	return nil
}
