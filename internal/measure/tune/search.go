//go:build linux

package tune

import (
	"cmp"
	"slices"
)

// Search looks for the split of a rank's cores that makes a step the shortest. It asks for few measurements: powers of
// two first, and then points between those nearest to the best split.
type Search struct {
	// Cores are those of a rank.
	Cores int
	// Update is the time of the optimizer's update, and Trainer that of forward and backward, each as a function of its
	// own cores.
	Update, Trainer *Curve
	// Step returns the time of a step.
	Step func(update, trainer float64) float64
	// Shares also considers that both use all cores, in turns.
	Shares bool
}

// Choice is a split.
type Choice struct {
	Optimizer, Trainer int // cores of a rank; where Shared, each is all cores
	Shared             bool
	Step               float64 // predicted, in the unit of Search.Step
}

// asGood is how much longer than the shortest a step may be, if its split leaves more cores to the trainer. Two splits
// that near each other cannot be told apart.
const asGood = 0.01

// Choose returns the best split: among those that are as good as the shortest step, the one that gives the optimizer
// the fewest cores.
func (s *Search) Choose() (Choice, error) {
	if err := s.begin(); err != nil {
		return Choice{}, err
	}
	for !s.Update.late() {
		measured, err := s.refine(s.best(s.separate()))
		if err == nil && !measured {
			measured, err = s.measure(s.fewest())
		}
		if err != nil {
			return Choice{}, err
		}
		if !measured {
			break
		}
	}
	if err := s.confirm(); err != nil {
		return Choice{}, err
	}
	return s.choice(s.fewest()), nil
}

// confirmations is how often the best splits are measured again, in turns: a host may be slower for some seconds.
const confirmations = 2

// confirm measures the best splits again.
func (s *Search) confirm() error {
	finalists := []int{s.fewest(), s.best(s.separate()), s.last()}
	slices.Sort(finalists)
	finalists = slices.Compact(finalists)
	if len(finalists) == 1 {
		return nil
	}
	for range confirmations {
		for _, cores := range finalists {
			if s.Update.late() {
				return nil
			}
			if err := cmp.Or(s.Trainer.again(s.trainerCores(cores)), s.Update.again(cores)); err != nil {
				return err
			}
		}
	}
	return nil
}

// refine measures a split, or else something beside it. It reports whether there was anything to measure.
func (s *Search) refine(split int) (bool, error) {
	if measured, err := s.measure(split); measured || err != nil {
		return measured, err
	}
	if middle := s.Update.between(split, s.separate()); middle > 0 {
		return s.Update.at(middle)
	}
	if middle := s.Trainer.between(s.trainerCores(split), s.Cores); middle > 0 {
		return s.Trainer.at(middle)
	}
	return false, nil
}

// begin measures the splits that all others are between.
func (s *Search) begin() error {
	ends := []int{s.separate(), 1}
	if s.sharing() {
		ends = []int{s.separate(), s.Cores}
		if _, err := s.Update.at(1); err != nil {
			return err
		}
	}
	for _, cores := range ends {
		if _, err := s.measure(cores); err != nil {
			return err
		}
	}
	for cores := 2; cores < s.separate() && !s.Update.late(); cores *= 2 {
		if _, err := s.Update.at(cores); err != nil {
			return err
		}
	}
	return nil
}

// separate returns the most cores that the optimizer can have while the trainer has one of its own.
func (s *Search) separate() int { return max(1, s.Cores-1) }

// sharing reports whether a split with Cores is considered.
func (s *Search) sharing() bool { return s.Shares && s.Cores > 1 }

// trainerCores returns the cores of the trainer where the optimizer has so many.
func (s *Search) trainerCores(optimizer int) int {
	if optimizer >= s.Cores {
		return s.Cores
	}
	return s.Cores - optimizer
}

// measure measures a split, and reports whether there was anything to measure.
func (s *Search) measure(cores int) (bool, error) {
	updated, err := s.Update.at(cores)
	if err != nil {
		return false, err
	}
	trained, err := s.Trainer.at(s.trainerCores(cores))
	return updated || trained, err
}

func (s *Search) predict(cores int) float64 {
	return s.Step(s.Update.Seconds(cores), s.Trainer.Seconds(s.trainerCores(cores)))
}

// last returns the split with the most cores of the optimizer.
func (s *Search) last() int {
	if s.sharing() {
		return s.Cores
	}
	return s.separate()
}

// best returns the split with the shortest predicted step, up to so many cores of the optimizer.
func (s *Search) best(upTo int) int {
	best := 1
	for cores := 2; cores <= upTo; cores++ {
		if s.predict(cores) < s.predict(best) {
			best = cores
		}
	}
	return best
}

// fewest returns the split with the fewest cores of the optimizer that is as good as the best.
func (s *Search) fewest() int {
	best := s.best(s.last())
	bound := (1 + asGood) * s.predict(best)
	for cores := 1; cores < best; cores++ {
		if s.predict(cores) <= bound {
			return cores
		}
	}
	return best
}

func (s *Search) choice(cores int) Choice {
	return Choice{Optimizer: cores, Trainer: s.trainerCores(cores), Shared: cores == s.Cores, Step: s.predict(cores)}
}
