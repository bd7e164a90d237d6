package lever

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/plan/plan"
)

// Ladder is a way from a job that lacks memory to one that fits, the cheapest changes first.
type Ladder struct {
	Rungs []Rung `json:"rungs"`
	// All is every rung together.
	All *Change `json:"all"`
	// Host is what a host needs with all rungs, where its memory is not known and the rungs take some; otherwise 0.
	Host ledger.Bytes `json:"host_needs_bytes,omitempty"`
	// Machine is the smallest machine at hand that the changed job fits, where it does not fit that of the job.
	Machine *Larger `json:"machine,omitempty"`
}

// Fits reports whether the job fits with all rungs.
func (l *Ladder) Fits() bool { return l != nil && l.All != nil && l.All.Verdict == plan.Fits }

// Trains reports whether the rungs train otherwise.
func (l *Ladder) Trains() bool {
	return slices.ContainsFunc(l.Rungs, func(r Rung) bool { return r.Cost == Training })
}

// Rung is a change beside those of the rungs before it.
type Rung struct {
	Cost Cost `json:"cost"`
	// Edits and Flags say this rung alone.
	Edits []amend.Edit `json:"edits"`
	Flags []string     `json:"flags"`
	Code  []string     `json:"code"` // lines of a program that do the same; none where Edits of files say it all
	Why   string       `json:"why"`
	// Frees is what this rung takes from the peak beside the rungs before it. It may be 0 or less where another phase
	// is the fullest: Phase is the one in which the rung frees most, and There its bytes.
	Frees ledger.Bytes     `json:"frees_bytes"`
	Phase ledger.PhaseName `json:"phase"`
	There ledger.Bytes     `json:"frees_in_phase_bytes"`
	// Seconds are what a step takes longer, by the model of time; nil where that does not tell.
	Seconds *float64 `json:"slower_seconds"`
	// Verdict and Lacks are those of the job with this rung and all before it.
	Verdict plan.Result  `json:"verdict"`
	Lacks   ledger.Bytes `json:"lacks_bytes"`

	settings []amend.Setting
}

// Says says the rung: edits of files, and then flags.
func (r *Rung) Says() string {
	c := Change{Applied: Applied{Edits: r.Edits, Flags: r.Flags}}
	return c.String()
}

// climber looks for a ladder.
type climber struct {
	weigher
	files []string

	known map[string]*standing
}

func newClimber(q Question) *climber {
	c := &climber{weigher: weigher{Question: q, device: q.Need.Device()}, files: q.Plan.Job.Files,
		known: map[string]*standing{}}
	c.Phase = nil
	c.step, _ = q.Plan.Time(q.Machine)
	c.before, _ = q.Plan.Held(c.device, nil)
	return c
}

// standing is a job with some settings, planned.
type standing struct {
	settings []amend.Setting
	applied  *Applied
	plan     *plan.Plan
}

// Climb returns the ladder of a job that lacks memory. It takes changes that free memory in the order of their costs
// until the job fits, and then leaves out those that it fits without. It returns nil where no change helps.
func Climb(q Question) (*Ladder, error) {
	c := newClimber(q)
	list, err := c.even()
	if err != nil {
		return nil, err
	}
	if list == nil {
		if list, err = c.search(); err != nil || list == nil {
			return nil, err
		}
	}
	return c.ladder(list)
}

// even looks for changes with all sequences as long as the longest, where the lengths of the job vary: such a plan
// takes a hundredth of the time. It returns those that make the job fit with its own lengths, too; nil for none.
func (c *climber) even() ([]taken, error) {
	if c.Request.ShortestSequence == 0 {
		return nil, nil
	}
	q := c.Question
	q.Request.ShortestSequence = 0
	j, err := q.Request.Resolve()
	if err != nil {
		return nil, err
	}
	if q.Plan, err = plan.New(j); err != nil {
		return nil, err
	}
	list, err := newClimber(q).search()
	if err != nil || list == nil {
		return nil, err
	}
	s, err := c.stand(settingsOf(list))
	if err != nil || s == nil || s.lack() > 0 {
		return nil, err
	}
	return list, nil
}

// search returns the changes of the best way that it finds; nil where none helps.
func (c *climber) search() ([]taken, error) {
	start := &standing{plan: c.Plan}
	best, list, err := c.climb(start, climbed)
	if err != nil {
		return nil, err
	}
	if best.lack() > 0 || trains(list) { // what keeps more on the host may suffice in place of what keeps less there
		other, others, err := c.climb(start, hostFirst)
		if err != nil {
			return nil, err
		}
		if other.lack() == 0 {
			best, list = other, others
		}
	}
	if best.lack() > 0 && isBarred(list, start) { // what costs less may be in the way of what frees most
		other, others, err := c.climb(start, trainingFirst)
		if err != nil {
			return nil, err
		}
		if other.lack() < best.lack() {
			best, list = other, others
		}
	}
	if len(list) == 0 {
		return nil, nil
	}
	return c.prune(list, best)
}

// climbed are the levers of ladders, in their order. None of them changes the machine.
var climbed = func() (list []Lever) {
	for _, cost := range []Cost{Nothing, Time, Training} {
		for _, l := range slices.Concat(levers, onLadders) {
			if l.Cost == cost && l.For != Speed {
				list = append(list, l)
			}
		}
	}
	return list
}()

// hostFirst are those of the same training, with those that keep most on the host before the others.
var hostFirst = func() (list []Lever) {
	for _, cost := range []Cost{Nothing, Time} {
		from := len(list)
		for _, l := range climbed {
			if l.Cost == cost {
				list = append(list, l)
			}
		}
		if cost == Time {
			slices.Reverse(list[from:])
		}
	}
	return list
}()

// trains reports whether one of the changes trains otherwise.
func trains(list []taken) bool {
	return slices.ContainsFunc(list, func(t taken) bool { return t.lever.Cost == Training })
}

// trainingFirst are all, with those that train otherwise before the others.
var trainingFirst = func() []Lever {
	list := slices.Clone(climbed)
	slices.SortStableFunc(list, func(a, b Lever) int {
		return cmp.Compare(map[bool]int{true: 0, false: 1}[a.Cost == Training],
			map[bool]int{true: 0, false: 1}[b.Cost == Training])
	})
	return list
}()

// isBarred reports whether a change that would train otherwise was not taken, though the job itself allows it.
func isBarred(list []taken, start *standing) bool {
	return slices.ContainsFunc(climbed, func(l Lever) bool {
		return l.Cost == Training && len(l.Ways(start.plan.Job)) > 0 &&
			!slices.ContainsFunc(list, func(t taken) bool { return t.lever.Why == l.Why })
	})
}

// taken is a lever with the way that a ladder takes.
type taken struct {
	lever Lever
	way   []amend.Setting
}

// passes are how often all levers are tried: one may help only beside others.
const passes = 3

// climb takes what helps of the levers until the job fits. What shortens sequences comes when no other helps any more.
func (c *climber) climb(from *standing, list []Lever) (*standing, []taken, error) {
	isShorter := func(l Lever) bool { return l.Why == shortens }
	at, rungs := from, []taken(nil)
	for _, some := range [][]Lever{slices.DeleteFunc(slices.Clone(list), isShorter), list} {
		for range passes {
			before := len(rungs)
			var err error
			if at, rungs, err = c.pass(at, rungs, some); err != nil {
				return nil, nil, err
			}
			if len(rungs) == before || at.lack() == 0 {
				break
			}
		}
	}
	return at, rungs, nil
}

// pass tries all levers once.
func (c *climber) pass(at *standing, rungs []taken, list []Lever) (*standing, []taken, error) {
	for _, l := range list {
		if at.lack() == 0 {
			break
		}
		if !mayHelp(at, rungs, &l) {
			continue
		}
		next, way, err := c.best(at, l)
		if err != nil {
			return nil, nil, err
		}
		if next != nil && at.lack()-next.lack() >= max(1, min(c.Plan.Verdict.Capacity/200, at.lack()/2)) {
			at, rungs = next, append(rungs, taken{l, way})
		}
	}
	return at, rungs, nil
}

// mayHelp reports whether a lever is worth a try: none of the rungs has it, and it frees what the job lacks.
func mayHelp(at *standing, rungs []taken, l *Lever) bool {
	isTaken := slices.ContainsFunc(rungs, func(t taken) bool { return t.lever.Why == l.Why })
	return !isTaken && (l.Cost == Training || at.lackOf(l.For.Device()) > 0)
}

// ways returns the ways of a lever for a job.
func (c *climber) ways(at *standing, l *Lever) [][]amend.Setting {
	if l.For == HostMemory { // it takes back what the files say, and no rung before it
		return l.Ways(c.Plan.Job)
	}
	return l.Ways(at.plan.Job)
}

// best returns the first way of a lever that makes the job fit, or the one that leaves it lacking least.
func (c *climber) best(at *standing, l Lever) (best *standing, way []amend.Setting, err error) {
	for _, settings := range c.ways(at, &l) {
		s, err := c.stand(with(at.settings, settings))
		if err != nil {
			return nil, nil, err
		}
		if s == nil || best != nil && s.lack() >= best.lack() {
			continue
		}
		if best, way = s, settings; s.lack() == 0 {
			break
		}
	}
	return best, way, nil
}

// with returns settings with others in their place or beside them. One without a value takes its setting back.
func with(settings, others []amend.Setting) []amend.Setting {
	list := slices.DeleteFunc(slices.Clone(settings), func(s amend.Setting) bool {
		return slices.ContainsFunc(others, func(o amend.Setting) bool { return o.Name == s.Name })
	})
	for _, o := range others {
		if o.To != nil {
			list = append(list, o)
		}
	}
	return list
}

// stand plans the job with settings. It returns nil for a job that is refused, and for texts that cannot be edited.
func (c *climber) stand(settings []amend.Setting) (*standing, error) {
	key := fmt.Sprint(settings)
	if s, ok := c.known[key]; ok {
		return s, nil
	}
	s := &standing{settings: settings}
	var err error
	if s.applied, err = Apply(c.Request, c.files, settings); err == nil && s.applied != nil {
		s.plan, err = s.applied.planned()
	}
	switch {
	case errors.As(err, new(*fault.Input)):
		s, err = nil, nil
	case s.applied == nil:
		s = nil
	}
	c.known[key] = s
	return s, err
}

// lackOf returns what the devices of a kind lack: by the upper ends of their intervals, and in each phase. So a change
// counts that helps a phase which is not the fullest.
func (s *standing) lackOf(kind ledger.Kind) (sum ledger.Bytes) {
	for i := range s.plan.Devices {
		d := &s.plan.Devices[i]
		if d.Kind != kind || d.Capacity == 0 || d.Interval.Upper <= d.Capacity {
			continue
		}
		sum += d.Interval.Upper - d.Capacity
		margin := d.Interval.Upper - d.Peak().PeakUsed
		for k := range d.Phases {
			p := &d.Phases[k]
			sum += max(0, p.PeakUsed-p.PeakReserved+p.PeakAllocated+margin-d.Capacity) / ledger.Bytes(len(d.Phases))
		}
	}
	return sum
}

// lack returns what all devices lack. It is 0 for a job that fits.
func (s *standing) lack() ledger.Bytes { return s.lackOf(ledger.GPU) + s.lackOf(ledger.Host) }

// prune leaves out changes that the job needs not, the costliest first, so that it lacks no more than with all. What
// one change has called for may go with it, so prune looks again until nothing can be left out.
func (c *climber) prune(list []taken, all *standing) ([]taken, error) {
	for before := len(list) + 1; len(list) < before; {
		before = len(list)
		for _, cost := range []Cost{Training, Time, Nothing} {
			for i := len(list) - 1; i >= 0 && len(list) > 1; i-- {
				if list[i].lever.Cost != cost {
					continue
				}
				without := slices.Delete(slices.Clone(list), i, i+1)
				s, err := c.stand(settingsOf(without))
				if err != nil {
					return nil, err
				}
				if s != nil && s.lack() <= all.lack() {
					list = without
				}
			}
		}
	}
	slices.SortStableFunc(list, func(a, b taken) int { return cmp.Compare(a.lever.Cost, b.lever.Cost) })
	return list, nil
}

func settingsOf(list []taken) (settings []amend.Setting) {
	for _, t := range list {
		settings = with(settings, t.way)
	}
	return settings
}

// ladder weighs each rung beside those before it.
func (c *climber) ladder(list []taken) (*Ladder, error) {
	l := &Ladder{}
	before, seconds := c.before, c.seconds(c.Plan)
	var settings []amend.Setting
	var whys []string
	last := &standing{plan: c.Plan}
	for i, t := range list {
		settings = with(settings, t.way)
		whys = append(whys, t.lever.Why)
		s, err := c.stand(settings)
		if err != nil {
			return nil, err
		}
		if s == nil { // a rung that the engine refuses without the next
			if i+1 < len(list) {
				list[i+1].way = with(t.way, list[i+1].way)
				list[i+1].lever.Why = t.lever.Why + "; " + list[i+1].lever.Why
				continue
			}
			return nil, nil
		}
		r, err := c.rung(t, s)
		if err != nil {
			return nil, err
		}
		after, _ := s.plan.Held(c.device, nil)
		r.Frees, before = before-after, after
		r.Phase, r.There = c.freed(last.plan, s.plan)
		if now := c.seconds(s.plan); now > 0 && seconds > 0 {
			slower := now - seconds
			r.Seconds, seconds = &slower, now
		}
		l.Rungs, last = append(l.Rungs, *r), s
	}
	l.All = c.changed(idea{why: strings.Join(whys, "; "), settings: last.settings}, last.applied, last.plan)
	was, _ := c.Plan.Held(ledger.Host, nil)
	if is, _ := last.plan.Held(ledger.Host, nil); last.plan.Job.HostMemory == 0 && is > was+was/10 {
		l.Host = is
	}
	if last.plan.Verdict.Result == plan.DoesNotFit || last.plan.Verdict.Lacks() > 0 {
		l.Machine = larger(last)
	}
	return l, nil
}

// freed returns the phase of the device in which a plan holds least beside another, and how much less.
func (c *climber) freed(before, after *plan.Plan) (phase ledger.PhaseName, most ledger.Bytes) {
	for i := range before.Devices {
		for k := range before.Devices[i].Phases {
			name := before.Devices[i].Phases[k].Name
			was, _ := before.Held(c.device, &name)
			is, _ := after.Held(c.device, &name)
			if phase == "" || was-is > most {
				phase, most = name, was-is
			}
		}
	}
	return phase, most
}

// seconds returns the time of a step that makes as many tokens as that of the job, or 0.
func (c *climber) seconds(p *plan.Plan) float64 {
	step, err := p.Time(c.Machine)
	if err != nil || c.step == nil {
		return 0
	}
	return secondsOf(step) * float64(c.step.Tokens)
}

// rung says a change by itself, as the user's files have it now.
func (c *climber) rung(t taken, s *standing) (*Rung, error) {
	alone, err := Apply(c.Request, c.files, with(nil, t.way))
	if err != nil {
		return nil, err
	}
	if alone == nil {
		alone = &Applied{Edits: []amend.Edit{}, Flags: []string{}}
	}
	lines := codeOf(t.way)
	if len(alone.Edits) > 0 && len(alone.Flags) == 0 { // the job's own files say all of it
		lines = []string{}
	}
	return &Rung{Cost: t.lever.Cost, Edits: alone.Edits, Flags: alone.Flags, Code: lines, Why: t.lever.Why,
		Verdict: s.plan.Verdict.Result, Lacks: s.plan.Verdict.Lacks(), settings: t.way}, nil
}
