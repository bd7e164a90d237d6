// Package fit searches the recipes of a job for the fastest that fits: engine, offloading, recomputation, micro batch,
// accumulation and GPUs. Times are those of package steptime, and every recipe that it reports was planned.
package fit

import (
	"cmp"
	"errors"
	"maps"
	"math"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"plimsoll/fault"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/plan"
	"plimsoll/recipe"
	"plimsoll/steptime"
)

// Question is what is asked.
type Question struct {
	Request job.Request
	States  job.Offload // how states would rest on the host
	Machine steptime.Machine
	// Batch is the number of sequences of an optimizer step on all ranks; 0 is any. Accumulation follows from it.
	Batch int
	// FewerGPUs also tries half of the GPUs, a quarter and so on.
	FewerGPUs bool
	Tight     bool // recipes whose upper end does not fit count, too
}

// Recipe is a way to run the job, planned.
type Recipe struct {
	Name      string
	Overrides job.Overrides
	Config    string // of DeepSpeed, if the recipe needs a file that the user does not have
	Plan      *plan.Plan
	Step      *steptime.Step
}

// Peak returns what a GPU holds at most.
func (r *Recipe) Peak() ledger.Bytes { return r.Plan.Devices[0].Peak().PeakUsed }

// Speed returns the tokens a second of all GPUs.
func (r *Recipe) Speed() float64 { return float64(r.Step.Tokens) / r.Step.Total.Expected.Seconds() }

// Answer is what was found.
type Answer struct {
	Base       *job.Job
	Candidates int // recipes that the search decided on, planned or not
	Planned    int
	Fastest    *Recipe // nil if none fits
	// Front has, from the fastest on, each recipe that takes less memory than all faster ones.
	Front []*Recipe
	// LargestBatch and Longest are of the recipe with least memory: its largest micro batch, and its longest sequences
	// in a micro batch of one.
	LargestBatch, Longest *Recipe
	// Closest takes least memory, if none fits.
	Closest *Recipe
	Left    map[string]int // why variants were left out, and how many
}

// search is one run of a question.
type search struct {
	*Question
	in     *job.Inputs
	answer *Answer

	sync.Mutex
	known []*Recipe // that fit
}

// member is a micro batch of a variant.
type member struct {
	*group
	micro int
	job   *job.Job
	plan  *plan.Plan // nil before it is planned
	step  *steptime.Step
}

// group is the members of a variant, from the smallest micro batch on.
type group struct {
	variant
	members []*member
	fitting int // so many of them fit
}

// Search answers a question. Every error is a *fault.Input.
func Search(q Question) (*Answer, error) {
	if rest := (job.Offload{Master: q.States.Master}); !q.rests() && q.States != rest {
		return nil, fault.Inputf("flags say how states rest on the host, but --master does not say who has the " +
			"master weights").WithHint("add --master split or --master fp32, or leave the other flags out")
	}
	in, err := job.Read(q.Request)
	if err != nil {
		return nil, err
	}
	base, err := job.Decide(in, job.Overrides{})
	if err != nil {
		return nil, err
	}
	if base.GPU.Memory == 0 {
		return nil, fault.Inputf("a recipe fits a GPU, and none is given").WithHint("add --gpu, or --gpu-memory")
	}
	if q.Batch == 0 {
		if q.Batch, err = givenBatch(base); err != nil {
			return nil, err
		}
	}
	s := &search{Question: &q, in: in, answer: &Answer{Base: base, Left: map[string]int{}}}
	variants, err := q.variants(base)
	if err != nil {
		return nil, err
	}
	groups := s.decide(variants)
	if len(groups) == 0 {
		return nil, s.nothing()
	}
	if err := s.limits(groups); err != nil {
		return nil, err
	}
	return s.answer, s.choose(groups)
}

// givenBatch returns the sequences of an optimizer step if files of the user say them: another batch trains otherwise.
func givenBatch(base *job.Job) (int, error) {
	for _, file := range base.Files {
		s, err := recipe.LoadSettings(file, nil)
		if err != nil {
			return 0, err
		}
		if s != nil && (s.Gives(recipe.MicroBatch) || s.Gives(recipe.TrainBatch) || s.Gives(recipe.Accumulation)) {
			return int(base.MicroBatch) * base.Accumulation * ranksOf(base), nil
		}
	}
	return 0, nil
}

// ranksOf returns the ranks that have sequences of their own.
func ranksOf(j *job.Job) int { return j.World / int(j.Parallel.Tensor*j.Parallel.Context) }

// decide decides the members of every variant. Engines refuse some.
func (s *search) decide(variants []variant) []*group {
	var groups []*group
	for _, v := range variants {
		g := &group{variant: v}
		var refused error
		for _, micro := range s.micros() {
			j, err := s.decided(v, micro)
			if err != nil {
				refused = cmp.Or(refused, err)
				continue
			}
			if j != nil {
				g.members = append(g.members, &member{group: g, micro: micro, job: j})
			}
		}
		if len(g.members) > 0 {
			groups = append(groups, g)
		} else if refused != nil {
			s.leave(refused)
		}
		s.answer.Candidates += len(g.members)
	}
	return groups
}

// nothing says why there is no recipe to search.
func (s *search) nothing() error {
	if len(s.answer.Left) == 0 {
		return fault.Inputf("no micro batch that is tried makes a batch of %d sequences on %d ranks", s.Batch,
			ranksOf(s.answer.Base)).WithHint("give --batch a multiple of the ranks, and of --micro-batch")
	}
	why := slices.MaxFunc(slices.Sorted(maps.Keys(s.answer.Left)), func(a, b string) int {
		return cmp.Compare(s.answer.Left[a], s.answer.Left[b])
	})
	return fault.Inputf("there is no recipe to compare: %s", why).WithHint("plimsoll plan says more of one job")
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

// micros returns the micro batches to try.
func (s *search) micros() []int {
	if s.Request.MicroBatch > 0 {
		return []int{s.Request.MicroBatch}
	}
	return microBatches
}

// decided returns the job of a variant with a micro batch, or nil if the batch is no multiple of it.
func (s *search) decided(v variant, micro int) (*job.Job, error) {
	o := v.overrides
	o.MicroBatch, o.Accumulation = micro, max(1, s.answer.Base.Accumulation)
	if s.Batch > 0 {
		ranks := o.GPUs * o.Nodes / int(s.answer.Base.Parallel.Tensor*s.answer.Base.Parallel.Context)
		if s.Batch%(micro*ranks) != 0 {
			return nil, nil
		}
		o.Accumulation = s.Batch / (micro * ranks)
	}
	j, err := job.Decide(s.in, o)
	if err != nil {
		return nil, err
	}
	return j, steptime.Refusal(j, s.Machine)
}

// planned plans a member once.
func (s *search) planned(m *member) error {
	if m.plan != nil {
		return nil
	}
	p, err := plan.New(m.job)
	if err != nil {
		return err
	}
	s.Lock()
	s.answer.Planned++
	s.Unlock()
	m.plan = p
	m.step, err = p.Time(s.Machine)
	return err
}

// fits reports whether a planned member fits.
func (s *search) fits(m *member) bool {
	r := m.plan.Verdict.Result
	return r == plan.Fits || s.Tight && r == plan.Tight
}

// limits finds how many members of each group fit. First it plans the smallest members, and with them knows the times
// of all. Groups are then taken in the order of their fastest members. One that cannot add to the answer is left at its
// smallest member: a faster recipe takes no more memory than that one.
func (s *search) limits(groups []*group) error {
	if err := each(groups, func(g *group) error { return s.smallest(g) }); err != nil {
		return err
	}
	order := slices.Clone(groups)
	slices.SortStableFunc(order, func(a, b *group) int { return cmp.Compare(b.fastest(), a.fastest()) })
	return each(order, func(g *group) error {
		if g.fitting == 0 || s.beaten(g) {
			return nil
		}
		return s.limit(g)
	})
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

// smallest plans the smallest member. If it fits, it sets the times of all members.
func (s *search) smallest(g *group) error {
	if err := s.planned(g.members[0]); err != nil || !s.fits(g.members[0]) {
		return err
	}
	g.fitting = 1
	for _, m := range g.members[1:] {
		var err error
		if m.step, err = g.members[0].plan.TimeOf(m.job, s.Machine); err != nil {
			return err
		}
	}
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

// beaten reports whether a recipe that fits is faster than all members and takes no more memory than the smallest.
func (s *search) beaten(g *group) bool {
	fastest, least := g.fastest(), g.members[0].recipe().Peak()
	s.Lock()
	defer s.Unlock()
	return slices.ContainsFunc(s.known, func(r *Recipe) bool { return r.Speed() > fastest && r.Peak() <= least })
}

// limit finds how many members fit. More sequences take more memory, so it halves the rest each time.
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
		if r := m.recipe(); s.fits(m) && r.Peak() < least-least/100 {
			least = r.Peak()
			s.answer.Front = append(s.answer.Front, r)
		}
	}
	if len(s.answer.Front) == 0 {
		s.closest(groups)
		return nil
	}
	s.answer.Fastest = s.answer.Front[0]
	if err := s.largest(groups); err != nil {
		return err
	}
	return s.longest()
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
	o := m.overrides
	o.MicroBatch, o.Accumulation = m.micro, m.job.Accumulation
	return &Recipe{Name: m.name, Overrides: o, Config: m.config, Plan: m.plan, Step: m.step}
}

// closest picks the member that takes least memory of the device that lacks it.
func (s *search) closest(groups []*group) {
	for _, g := range groups {
		for _, m := range g.members {
			if m.plan == nil {
				continue
			}
			r := m.recipe()
			if best := s.answer.Closest; best == nil || lack(r) < lack(best) {
				s.answer.Closest = r
			}
		}
	}
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
	if s.Request.MicroBatch == 0 && s.Batch == 0 && g.fitting < len(g.members) {
		high = g.members[g.fitting].micro
	}
	for low+1 < high {
		m := &member{group: g, micro: (low + high) / 2}
		var err error
		if m.job, err = s.decided(m.variant, m.micro); err != nil {
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
	s.answer.LargestBatch = best.recipe()
	return nil
}

// sequenceStep is the step of the search for the longest sequence.
const sequenceStep = 256

// longest finds the longest sequence that the recipe with least memory takes, with a micro batch of one sequence.
func (s *search) longest() error {
	least := s.answer.Front[len(s.answer.Front)-1]
	try := func(steps int) (*Recipe, error) {
		o := least.Overrides
		o.MicroBatch, o.Sequence = 1, steps*sequenceStep
		j, err := job.Decide(s.in, o)
		if err != nil {
			return nil, nil // longer than the model's positions
		}
		m := &member{group: &group{variant: variant{name: least.Name, overrides: o, config: least.Config}}, micro: 1,
			job: j}
		s.answer.Candidates++
		if err := s.planned(m); err != nil || !s.fits(m) {
			return nil, err
		}
		return m.recipe(), nil
	}
	low, high := int(s.answer.Base.Sequence)/sequenceStep, 0
	for step := max(1, low); high == 0; step *= 2 {
		r, err := try(step)
		switch {
		case err != nil:
			return err
		case r == nil || step > 1<<16:
			high = step
		default:
			low, s.answer.Longest = step, r
		}
	}
	for low+max(1, low/64) < high {
		middle := (low + high) / 2
		r, err := try(middle)
		switch {
		case err != nil:
			return err
		case r == nil:
			high = middle
		default:
			low, s.answer.Longest = middle, r
		}
	}
	return nil
}
