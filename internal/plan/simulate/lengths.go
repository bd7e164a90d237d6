package simulate

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// What the allocator reserves depends on the order in which lengths come: a longer one finds no block that is large
// enough, and the smaller ones stay. So a job whose lengths vary is simulated in several orders.
const (
	orders      = 7  // of lengths, each with draws of its own
	variedSteps = 16 // optimizer steps of an order, behind the first
)

// lengths draws the lengths of micro batches, any between the shortest and the longest as likely as another.
type lengths struct {
	draws   *rand.Rand
	longest bool // the next micro batch has the longest sequences
}

// runOrders simulates the ranks in several orders of lengths, and returns the one whose GPU reserves the median.
func runOrders(j *job.Job, limit Limit) (RankClass, error) {
	if j.ShortestSequence == 0 || j.OnCPU {
		return runClass(j, limit, 0)
	}
	classes, failures := make([]RankClass, orders), make([]error, orders)
	var work sync.WaitGroup
	for i := range classes {
		work.Go(func() { classes[i], failures[i] = runClass(j, limit, uint64(i)) })
	}
	work.Wait()
	for _, err := range failures { // the same one in every run
		if err != nil {
			return RankClass{}, err
		}
	}
	slices.SortFunc(classes, func(a, b RankClass) int { return cmp.Compare(a.reserved(), b.reserved()) })
	median := classes[orders/2]
	beyond := classes[orders-1].reserved() - median.reserved()
	median.Beyond = &beyond
	return median, nil
}

// reserved returns the most that the allocator of a GPU has reserved.
func (c *RankClass) reserved() (most ledger.Bytes) {
	for _, p := range c.GPU.Phases {
		most = max(most, p.PeakReserved)
	}
	return most
}

// length returns the tokens of a sequence in the next micro batch, which is padded to its longest.
func (s *simulation) length(micro int, iteration ledger.Iteration) int64 {
	switch {
	case s.ShortestSequence > 0:
		return s.drawn()
	case s.UsualSequence > 0 && (micro > 0 || iteration != ledger.First):
		return s.UsualSequence
	}
	return s.Sequence
}

func (s *simulation) drawn() (tokens int64) {
	if s.lengths.longest {
		s.lengths.longest = false
		return s.Sequence
	}
	for range s.Sequences() {
		tokens = max(tokens, s.ShortestSequence+s.lengths.draws.Int64N(s.Sequence-s.ShortestSequence+1))
	}
	each := s.Parallel.Context // ranks that divide a sequence pad it
	return (tokens + each - 1) / each * each
}

// steady runs the step that stands for all but the first. Where lengths vary, it runs several: the longest sequences
// come in the middle, when the allocator has blocks for shorter ones.
func (s *simulation) steady() {
	if s.ShortestSequence == 0 {
		s.iterate(ledger.Steady)
		return
	}
	for step := range variedSteps {
		s.lengths.longest = step == variedSteps/2
		s.iterate(ledger.Steady)
	}
}
