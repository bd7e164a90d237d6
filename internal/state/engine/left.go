package engine

import (
	"fmt"

	"plimsoll/internal/state/checked"
)

// A step may leave sections alone, because they have no gradients: they keep their weights and moments, and the step is
// none of theirs. The optimizers of torch treat a parameter without a gradient so, and count the steps of each.
//
// The journal has two lists with the number of steps that each section has had. An update reads the one that the update
// before it has left, and writes the other before it begins. So whichever process finishes the update finds what it
// leaves alone, and an update that is given up counts for no section.

// lists are the numbers of steps that sections have had: after an even number of updates, and after an odd one.
type lists [2][]checked.Int

// after returns the list after a number of updates.
func (l *lists) after(updates uint64) []checked.Int { return l[updates&1] }

// ownSteps are the steps of sections, and the constants that their updates take.
type ownSteps struct {
	own  lists
	rows []checked.Word // by section: which of the constants it takes
}

// row says what constants are computed from, beside what is the same for all sections.
type row struct {
	group int
	had   int64 // steps
}

// rows are the constants that an update computes: one for all sections of a group that have had the same steps.
type rows struct {
	list   []row
	of     []uint32 // by section: its number in the list
	number map[row]uint32
}

// assign finds out which constants the next update needs, and which sections take them.
func (s *Shard) assign() {
	a := &s.assigned
	if a.number == nil {
		a.number, a.of = map[row]uint32{}, make([]uint32, len(s.sections))
	}
	clear(a.number)
	a.list = a.list[:0]
	own := s.own.after(s.begun.Load())
	for i := range own {
		of := row{s.sections[i].group, own[i].Load()}
		number, found := a.number[of]
		if !found {
			number = uint32(len(a.list))
			a.number[of] = number
			a.list = append(a.list, of)
		}
		a.of[i] = number
	}
}

// countSteps counts the update that begins next for all sections but those that it leaves alone.
func (s *Shard) countSteps(leftAlone []int) {
	before, after := s.own.after(s.begun.Load()), s.own.after(s.begun.Load()+1)
	for section := range before {
		after[section].Store(before[section].Load() + 1)
	}
	for _, section := range leftAlone {
		after[section].Store(before[section].Load())
	}
}

// isLeft reports whether the update that was begun last leaves a section alone.
func (s *Shard) isLeft(section int) bool {
	begun := s.begun.Load()
	return s.own.after(begun)[section].Load() == s.own.after(begun - 1)[section].Load()
}

// LeaveMissing has the step under way, which was begun before its gradients were there, leave sections alone that will
// get none. It refuses sections of which gradients have arrived.
func (s *Shard) LeaveMissing(sections ...int) error {
	begun := s.begun.Load()
	for _, section := range sections {
		if s.isLeft(section) {
			continue // it was said before
		}
		all := s.config.Section(section).Range
		if s.arrivals.hasSome(all) {
			return fmt.Errorf("section %d is to be left alone, but gradients of it have arrived", section)
		}
		own := &s.own.after(begun)[section]
		own.Store(own.Load() - 1)
		s.arrive(all)
	}
	return nil
}

// OwnSteps returns how many steps each section has had.
func (s *Shard) OwnSteps() []int64 {
	own := s.own.after(s.finished.Load())
	steps := make([]int64, len(own))
	for section := range own {
		steps[section] = own[section].Load()
	}
	return steps
}

// SetSteps sets the number of steps that the state has seen, all sections of it, for a state that was loaded. A step
// that another process has begun is forgotten.
func (s *Shard) SetSteps(n int64) {
	s.forgetBegun(n)
	own := s.own.after(s.finished.Load())
	for section := range own {
		own[section].Store(n)
	}
}

// SetOwnSteps sets how many steps sections have had, from the first of them on. The state has seen as many or more.
func (s *Shard) SetOwnSteps(first int, had []int64) error {
	if first < 0 || first > len(s.sections)-len(had) {
		return fmt.Errorf("the steps of %d sections from %d on: the shard has %d", len(had), first, len(s.sections))
	}
	for i, n := range had {
		if n < 0 {
			return fmt.Errorf("section %d has had %d steps: expected 0 or more", first+i, n)
		}
	}
	s.forgetBegun(s.Steps())
	own := s.own.after(s.finished.Load())[first:]
	for i, n := range had {
		own[i].Store(n)
	}
	return nil
}

// SetStepsOnly is [Shard.SetSteps] without the sections: they keep the numbers of [Shard.SetOwnSteps], of which none
// may be larger.
func (s *Shard) SetStepsOnly(n int64) error {
	for section, had := range s.OwnSteps() {
		if had > n {
			return fmt.Errorf("section %d has had %d steps: expected at most %d, as the state has seen", section, had,
				n)
		}
	}
	s.forgetBegun(n)
	return nil
}

// forgetBegun sets the number of steps, and forgets a step that another process has begun.
func (s *Shard) forgetBegun(n int64) {
	s.noted.lose()
	s.Wait()
	if s.isUnderway() {
		copyNumbers(s.own.after(s.begun.Load()), s.own.after(s.finished.Load()))
	}
	s.finished.Store(s.begun.Load())
	s.before.Store(n - int64(s.finished.Load()))
}

// copyNumbers copies a list over another.
func copyNumbers(to, from []checked.Int) {
	for i := range from {
		to[i].Store(from[i].Load())
	}
}
