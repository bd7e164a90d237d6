// Package fit searches the recipes of a job for the fastest that fits: engine, degrees of parallelism, offloading,
// recomputation, micro batch, accumulation and GPUs. Times are those of package steptime, and every recipe that it
// reports was planned.
package fit

import (
	"cmp"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// Recipe is a way to run the job, planned.
type Recipe struct {
	Name string
	Size Size
	Plan *plan.Plan
	Step *steptime.Step

	Overrides job.Overrides
	Config    string // of DeepSpeed, if the recipe needs a file that the user does not have
	degrees   degrees
	megatron  *megatronJob // nil for other programs
}

// Size is how large the steps of a recipe are.
type Size struct {
	Ranks              int
	MicroBatch         int64
	Accumulation       int // micro batches of a step, also of a pipeline
	Sequence           int64
	Tensor, Pipeline   int64
	Context, DataRanks int64 // DataRanks have sequences of their own
}

// Peak returns what the fullest GPU holds at most.
func (r *Recipe) Peak() ledger.Bytes {
	most, _ := r.Plan.Held(ledger.GPU, nil)
	return most
}

// IsTimed reports whether the time of the recipe is predicted.
func (r *Recipe) IsTimed() bool { return r.megatron == nil }

// Speed returns the tokens a second of all GPUs.
func (r *Recipe) Speed() float64 { return float64(r.Step.Tokens) / r.Step.Total.Expected.Seconds() }

// Answer is what was found.
type Answer struct {
	Base       *job.Job
	Says       bool    // files of the user say settings
	Untimed    bool    // times are not predicted: recipes are in the order of what costs time
	Candidates int     // recipes that the search decided on, planned or not
	Planned    int     // recipes that were planned, each counted once, however often and with how many stages
	Fastest    *Recipe // nil if none fits
	// Front has, from the fastest on, each recipe that takes less memory than all faster ones.
	Front []*Recipe
	// LargestBatch and Longest are of the recipe with least memory: its largest micro batch, and its longest sequences
	// in a micro batch of one.
	LargestBatch, Longest *Recipe
	// Closest takes least memory, if none fits.
	Closest *Recipe
	// Asked is the job as it was asked, and Ladder what makes it fit; both only if no recipe fits.
	Asked  *plan.Plan
	Ladder *lever.Ladder
	// Assumed are rates of the machine that nobody knows.
	Assumed []string
	Left    map[string]int // why variants were left out, and how many
}

// decided is a job of a search with every setting decided.
type decided interface {
	// within returns no plan for a job that needs more than its GPUs have. Of a pipeline it plans the stages that may
	// hold most.
	within() (*plan.Plan, error)
	plan() (*plan.Plan, error)
	// time returns the time of a step. A plan of the same variant says what a rank holds of the states.
	time(of *plan.Plan, m steptime.Machine) (*steptime.Step, error)
	// timedByPlan reports whether the time needs a plan of the variant.
	timedByPlan() bool
	size() Size
}

// space is what a search looks through.
type space struct {
	variants []variant
	micros   []int
	anyMicro bool // micro batches between those of micros are possible, too
	// decide returns the job of a variant with a micro batch, or nil if the batch is no multiple of it.
	decide func(v *variant, micro int) (decided, error)
}

// search is one run of a question.
type search struct {
	space
	machine steptime.Machine
	tight   bool // recipes whose upper end does not fit count, too
	answer  *Answer

	sync.Mutex
	known []*Recipe // that fit
}

// member is a micro batch of a variant.
type member struct {
	*group
	micro int
	job   decided
	plan  *plan.Plan // nil before it is planned, and if it is large
	whole bool       // the plan has all stages of a pipeline
	large bool       // it needs more than its GPUs have
	step  *steptime.Step
}

// group is the members of a variant, from the smallest micro batch on.
type group struct {
	variant
	members []*member
	fitting int // so many of them fit
	// less is the group that differs in recomputing all blocks, and so takes less memory; nil without.
	less *group
}

// run searches a space.
func (s *search) run() error {
	groups := s.decideAll()
	if len(groups) == 0 {
		return nil
	}
	if err := s.limits(groups); err != nil {
		return err
	}
	return s.choose(groups)
}

// decideAll decides the members of every variant. Engines refuse some.
func (s *search) decideAll() []*group {
	all := make([]*group, len(s.variants))
	for i := range s.variants {
		all[i] = &group{variant: s.variants[i]}
	}
	_ = each(all, func(g *group) error {
		s.decideMembers(g)
		return nil
	})
	byName := map[string]*group{}
	var groups []*group
	for _, g := range all {
		byName[g.name] = g
		if len(g.members) > 0 {
			groups = append(groups, g)
		}
	}
	for _, g := range groups {
		if least := byName[g.leastName]; least != nil && least != g && len(least.members) > 0 {
			g.less = least
		}
	}
	return groups
}

func (s *search) decideMembers(g *group) {
	var refused error
	for _, micro := range s.micros {
		j, err := s.decide(&g.variant, micro)
		switch {
		case err != nil:
			refused = cmp.Or(refused, err)
		case j != nil:
			g.members = append(g.members, &member{group: g, micro: micro, job: j})
		}
	}
	s.Lock()
	defer s.Unlock()
	s.answer.Candidates += len(g.members)
	if len(g.members) == 0 && refused != nil {
		s.leave(refused)
	}
}

// leave counts a variant that is left out.
func (s *search) leave(why error) {
	what := why.Error()
	var bad *fault.Input
	if errors.As(why, &bad) {
		what = bad.What
	}
	s.answer.Left[what]++
}

// planned plans a member once.
func (s *search) planned(m *member) error {
	if m.plan != nil || m.large {
		return nil
	}
	p, err := m.job.within()
	if err != nil {
		return err
	}
	s.Lock()
	s.answer.Planned++
	s.Unlock()
	if m.plan = p; p == nil {
		m.large = true
		return nil
	}
	m.step, err = m.job.time(p, s.machine)
	return err
}

// settle plans all stages of a member that is to be reported.
func (s *search) settle(m *member) error {
	if err := s.planned(m); err != nil || m.plan == nil || m.whole || m.job.size().Pipeline == 1 {
		return err
	}
	return s.planWhole(m)
}

// planWhole plans a member whether it fits or not, with all stages of a pipeline.
func (s *search) planWhole(m *member) (err error) {
	if m.plan, err = m.job.plan(); err != nil {
		return err
	}
	m.whole = true
	m.step, err = m.job.time(m.plan, s.machine)
	return err
}

// settled returns the recipe of a member that fits, or another if a stage of it that was not planned does not.
func (s *search) settled(m *member, other *Recipe) (*Recipe, error) {
	if m == nil {
		return other, nil
	}
	if err := s.settle(m); err != nil || !s.fits(m) {
		return other, err
	}
	return m.recipe(), nil
}

// fits reports whether a planned member fits.
func (s *search) fits(m *member) bool {
	if m.plan == nil {
		return false
	}
	r := m.plan.Verdict.Result
	return r == plan.Fits || s.tight && r == plan.Tight
}

// limits finds how many members of each group fit. Times come before plans where they need none. Groups without a
// pipeline come first: their plans cost least, and recipes found there pass many pipelines over. Of both, groups that
// recompute all blocks come first: where these take too much memory for the answer, so do the others like them. Then
// groups are taken in the order of their fastest members, and one that cannot add to the answer is passed over.
func (s *search) limits(groups []*group) error {
	if err := each(groups, s.time); err != nil {
		return err
	}
	slices.SortStableFunc(groups, func(a, b *group) int { return cmp.Compare(b.fastest(), a.fastest()) })
	for _, pipelined := range []bool{false, true} {
		for _, least := range []bool{true, false} {
			next := slices.DeleteFunc(slices.Clone(groups), func(g *group) bool {
				return (g.degrees.pipeline > 1) != pipelined || (g.less == nil) != least
			})
			if err := each(next, s.limitOf); err != nil {
				return err
			}
		}
	}
	return nil
}

// limitOf plans what it must of a group.
func (s *search) limitOf(g *group) error {
	if g.less != nil && g.less.lacks() || s.beaten(g) {
		return nil
	}
	if err := s.smallest(g); err != nil || g.fitting == 0 || s.beaten(g) {
		return err
	}
	return s.limit(g)
}

// each calls body for all groups, in their order, on all cores.
func each(groups []*group, body func(*group) error) error {
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for _, g := range groups {
		work.Go(func() error { return body(g) })
	}
	return work.Wait()
}

// time sets the times of all members. Those that need a plan have that of the smallest member.
func (s *search) time(g *group) error {
	first := g.members[0]
	if first.job.timedByPlan() {
		if err := s.planned(first); err != nil || first.large {
			return err
		}
	}
	for _, m := range g.members {
		if m.step != nil {
			continue
		}
		var err error
		if m.step, err = m.job.time(first.plan, s.machine); err != nil {
			return err
		}
	}
	return nil
}

// smallest plans the smallest member.
func (s *search) smallest(g *group) error {
	if err := s.planned(g.members[0]); err != nil || !s.fits(g.members[0]) {
		return err
	}
	g.fitting = 1
	s.keep(g.members[0])
	return nil
}

// fastest returns the tokens a second of the group's fastest member, whether it fits or not.
func (g *group) fastest() (most float64) {
	for _, m := range g.members {
		if m.step != nil {
			most = max(most, m.recipe().Speed())
		}
	}
	return most
}

// keep remembers a recipe that fits.
func (s *search) keep(m *member) {
	s.Lock()
	s.known = append(s.known, m.recipe())
	s.Unlock()
}

// lacks reports whether it is known that no member fits.
func (g *group) lacks() bool {
	return (g.members[0].large || g.members[0].plan != nil) && g.fitting == 0
}

// atLeast returns what the smallest member takes at least, as far as that is known.
func (g *group) atLeast() ledger.Bytes {
	switch m := g.members[0]; {
	case m.plan != nil:
		return m.recipe().Peak()
	case g.less != nil && g.less.members[0].micro <= m.micro:
		return g.less.atLeast()
	}
	return 0
}

// beaten reports whether a recipe that fits is faster than all members and takes no more memory than the smallest.
// There are many ways to share a model: one is beaten, too, by a recipe of one and a half times its speed.
func (s *search) beaten(g *group) bool {
	fastest, least := g.fastest(), g.atLeast()
	shares := g.degrees.shares()
	s.Lock()
	defer s.Unlock()
	return slices.ContainsFunc(s.known, func(r *Recipe) bool {
		speed := r.Speed()
		return speed > fastest && r.Peak() <= least || shares && 2*speed > 3*fastest
	})
}

// limit finds how many members fit, of which the smallest does. More sequences take more memory, so it halves the rest
// each time.
func (s *search) limit(g *group) error {
	low, high := 1, len(g.members)
	for low < high {
		m := g.members[(low+high)/2]
		if err := s.planned(m); err != nil {
			return err
		}
		if s.fits(m) {
			low = (low+high)/2 + 1
			s.keep(m)
		} else {
			high = (low + high) / 2
		}
	}
	g.fitting = low
	return nil
}

// choose picks the recipes of the answer among the members that fit.
func (s *search) choose(groups []*group) error {
	fitting := timed(groups)
	least := ledger.Bytes(math.MaxInt64)
	for _, m := range fitting {
		if known := m.atLeast(); known >= least-least/100 {
			continue
		}
		if err := s.planned(m); err != nil {
			return err
		}
		if !s.fits(m) || m.recipe().Peak() >= least-least/100 {
			continue
		}
		if err := s.settle(m); err != nil {
			return err
		}
		if r := m.recipe(); s.fits(m) && r.Peak() < least-least/100 {
			least = r.Peak()
			s.answer.Front = append(s.answer.Front, r)
		}
	}
	if len(s.answer.Front) == 0 {
		return s.closest(groups)
	}
	s.answer.Fastest = s.answer.Front[0]
	return s.largest(groups)
}

// timed returns the members that fit, the fastest first. Of equally fast ones the smaller comes first.
func timed(groups []*group) []*member {
	var fitting []*member
	for _, g := range groups {
		fitting = append(fitting, g.members[:g.fitting]...)
	}
	slices.SortStableFunc(fitting, func(a, b *member) int {
		return cmp.Or(cmp.Compare(b.recipe().Speed(), a.recipe().Speed()), cmp.Compare(a.micro, b.micro))
	})
	return fitting
}

// atLeast returns what a member takes at least: what the largest planned micro batch below it takes.
func (m *member) atLeast() (bytes ledger.Bytes) {
	for _, other := range m.members {
		if other.micro <= m.micro && other.plan != nil {
			bytes = max(bytes, other.recipe().Peak())
		}
	}
	return bytes
}

func (m *member) recipe() *Recipe {
	r := &Recipe{Name: m.name, Size: m.job.size(), Plan: m.plan, Step: m.step, Config: m.config,
		degrees: m.degrees}
	r.megatron, _ = m.job.(*megatronJob)
	r.Overrides = m.overrides
	r.Overrides.MicroBatch, r.Overrides.Accumulation = m.micro, r.Size.Accumulation
	return r
}

// closest picks the smallest member that takes least memory of the device that lacks it, among variants that recompute
// most.
func (s *search) closest(groups []*group) error {
	var closest *member
	for _, g := range groups {
		m := g.members[0]
		if g.less != nil {
			continue
		}
		if m.plan == nil {
			if err := s.planWhole(m); err != nil {
				return err
			}
		}
		if closest == nil || lack(m.recipe()) < lack(closest.recipe()) {
			closest = m
		}
	}
	if err := s.settle(closest); err != nil {
		return err
	}
	s.answer.Closest = closest.recipe()
	return nil
}

func lack(r *Recipe) float64 {
	v := r.Plan.Verdict
	return float64(v.Needed) / float64(max(1, v.Capacity))
}

// largest finds the largest micro batch that the recipe with least memory takes: it halves the gap behind its limit.
func (s *search) largest(groups []*group) error {
	least := s.answer.Front[len(s.answer.Front)-1]
	at := slices.IndexFunc(groups, func(g *group) bool { return g.name == least.Name })
	g := groups[at]
	if err := s.limit(g); err != nil {
		return err
	}
	best := g.members[g.fitting-1]
	if err := s.planned(best); err != nil {
		return err
	}
	low, high := best.micro, best.micro
	if s.anyMicro && g.fitting < len(g.members) {
		high = g.members[g.fitting].micro
	}
	for low+1 < high {
		m := &member{group: g, micro: (low + high) / 2}
		var err error
		if m.job, err = s.decide(&m.variant, m.micro); err != nil {
			return err
		}
		s.answer.Candidates++
		if err := s.planned(m); err != nil {
			return err
		}
		if s.fits(m) {
			low, best = m.micro, m
		} else {
			high = m.micro
		}
	}
	var err error
	s.answer.LargestBatch, err = s.settled(best, least)
	return err
}
