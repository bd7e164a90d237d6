package reconcile

import (
	"cmp"
	"math"
	"slices"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/measure/summary"
)

// Shape is how memory grows.
type Shape string

// The shapes.
const (
	// FirstStep is growth in the first step alone, when an optimizer makes its states.
	FirstStep Shape = "first_step"
	// Linear growth goes on until the end: a leak.
	Linear Shape = "linear"
	// Stairs are a leak in jumps, every few steps.
	Stairs Shape = "stairs"
	// Settled growth has come to an end: a cache that has filled up.
	Settled Shape = "settled"
)

// MemoryKind is the kind of memory that grows.
type MemoryKind string

// The kinds of memory.
const (
	Anonymous MemoryKind = "anonymous"
	Shared    MemoryKind = "shared_memory"
	File      MemoryKind = "file"
	Hugetlb   MemoryKind = "hugetlb"
	Resident  MemoryKind = "resident" // of any kind: from marks, where samples are too few
	Allocated MemoryKind = "gpu"      // by torch
	Driver    MemoryKind = "gpu_used" // as the driver counts
)

// Growth is memory that rises from step to step.
type Growth struct {
	Rank    int          `json:"rank"` // -1 for what belongs to no single rank
	Role    samples.Role `json:"role"`
	Kind    MemoryKind   `json:"kind"`
	Mapping string       `json:"mapping,omitempty"` // the name of the mapping that grows
	Shape   Shape        `json:"shape"`
	// BytesPerStep is 0 where the recording has no steps; BytesPerSecond is 0 where it has.
	BytesPerStep   ledger.Bytes `json:"bytes_per_step"`
	BytesPerSecond ledger.Bytes `json:"bytes_per_second"`
	// BytesPerParameter is BytesPerStep, or Total in the first step; 0 where the number of parameters is unknown.
	BytesPerParameter float64 `json:"bytes_per_parameter"`
	// Every is the number of steps from jump to jump of stairs, and Jump their height.
	Every int64        `json:"every_steps,omitempty"`
	Jump  ledger.Bytes `json:"jump_bytes,omitempty"`
	Total ledger.Bytes `json:"total_bytes"`
	// FromStep and ToStep are the steps between which the memory grows; FromTime and ToTime where there are no steps.
	FromStep int64         `json:"from_step"`
	ToStep   int64         `json:"to_step"`
	FromTime time.Duration `json:"from_time_ns,omitempty"`
	ToTime   time.Duration `json:"to_time_ns,omitempty"`
	// Phase is the phase in which the process grows; empty if unknown.
	Phase ledger.PhaseName `json:"phase,omitempty"`
	// Component is the component that holds as many bytes as a step adds, if one does: a copy of it is kept.
	Component ledger.Component `json:"as_many_as,omitempty"`
	// Appeared are the components that the client has counted after the first step and not before it.
	Appeared []ledger.Holding `json:"appeared,omitempty"`
}

// IsLeak reports whether the growth goes on. Page cache is no leak.
func (g *Growth) IsLeak() bool { return (g.Shape == Linear || g.Shape == Stairs) && g.Kind != File }

// line is what may grow.
type line struct {
	rank int
	role samples.Role
	kind MemoryKind
}

// series is the sizes of a line, in the order of time.
type series struct {
	line
	steps  []int64
	times  []time.Duration
	stages []*stage // those of one name are one, as a recording may have a million points
	sizes  []ledger.Bytes
}

func (s *series) add(step int64, at time.Duration, in *stage, size ledger.Bytes) {
	s.steps, s.times = append(s.steps, step), append(s.times, at)
	s.stages, s.sizes = append(s.stages, in), append(s.sizes, size)
}

// stepped reports whether the recording knows steps.
func (s *series) stepped() bool {
	return len(s.steps) > 0 && slices.Max(s.steps) > 1
}

// later returns the points after the first step. Without steps it returns those of the second half, as the first has
// the loading of the model. It leaves out the end, where the program frees its memory.
func (s *series) later() []point {
	if s.stepped() {
		return s.ofSteps()
	}
	var points []point
	for i := len(s.sizes) / 2; i < len(s.sizes)*19/20; i++ {
		points = append(points, point{s.times[i].Seconds(), float64(s.sizes[i])})
	}
	return points
}

// ofSteps returns the points after the first step and before the last one. A busy host may sample some steps in their
// later phases only, which hold more: their points are lowered by what these phases mostly hold above the lowest one.
func (s *series) ofSteps() []point {
	last := slices.Max(s.steps)
	within := func(step int64) bool { return step >= 2 && step < last }
	lows := map[int64]map[stage]float64{}
	for i, step := range s.steps {
		size := float64(s.sizes[i])
		if within(step) && s.stages[i].phase != "" {
			if lows[step] == nil {
				lows[step] = map[stage]float64{}
			}
			if low, seen := lows[step][*s.stages[i]]; !seen || size < low {
				lows[step][*s.stages[i]] = size
			}
		}
	}
	lowest := mostlyLowest(lows)
	above := aboveIt(lows, lowest)
	var points []point
	for i, step := range s.steps {
		if !within(step) {
			continue
		}
		p := point{float64(step), float64(s.sizes[i])}
		if _, seen := lows[step][lowest]; !seen {
			p.y -= above[*s.stages[i]]
		}
		points = append(points, p)
	}
	return points
}

// mostlyLowest returns the stage that most often holds the least where it was seen.
func mostlyLowest(lows map[int64]map[stage]float64) stage {
	seen, lowest := map[stage]int{}, map[stage]int{}
	for _, of := range lows {
		low := math.Inf(1)
		for _, size := range of {
			low = min(low, size)
		}
		for at, size := range of {
			seen[at]++
			if size == low && len(of) > 1 {
				lowest[at]++
			}
		}
	}
	most := stage{}
	for _, at := range stages {
		if seen[at] >= leastPoints && lowest[at]*max(seen[most], 1) > lowest[most]*seen[at] {
			most = at
		}
	}
	return most
}

// aboveIt returns by how much each stage lies above the lowest one, in the middle of the steps that have both.
func aboveIt(lows map[int64]map[stage]float64, lowest stage) map[stage]float64 {
	list := map[stage][]float64{}
	for _, of := range lows {
		if low, seen := of[lowest]; seen {
			for at, size := range of {
				list[at] = append(list[at], size-low)
			}
		}
	}
	above := map[stage]float64{}
	for at, differences := range list {
		above[at] = summary.Median(differences)
	}
	return above
}

// growth returns everything that grows: leaks first, the largest first.
func (r *Recording) growth(plan *Plan) []Growth {
	list := []Growth{}
	phases := r.phasesOfGrowth()
	counted := r.counted(plan)
	sampled, marked := map[int]*series{}, map[int]*series{} // anonymous memory of ranks, and what marks tell of it
	all := r.series()
	for _, s := range all {
		if s.kind == Resident {
			marked[s.rank] = s
		}
	}
	for _, s := range all {
		if s.kind == Anonymous && s.role == samples.RankProcess {
			sampled[s.rank] = s
		}
		for _, g := range s.growth(sampled[s.rank], marked[s.rank]) {
			if s == sampled[s.rank] {
				g.sharpen(marked[s.rank])
			}
			if plan != nil && plan.Parameters > 0 {
				bytes := g.BytesPerStep
				if g.Shape == FirstStep {
					bytes = g.Total
				}
				g.BytesPerParameter = float64(bytes) / float64(plan.Parameters)
			}
			g.Mapping = r.mappingThatGrows(s.line)
			if g.Role == samples.RankProcess {
				g.Component = counted[g.Rank].named(&g)
			}
			if g.Shape == FirstStep && g.Role == samples.RankProcess && g.Kind != Allocated {
				g.Appeared = r.appeared(g.Rank)
			}
			if g.Shape != FirstStep && g.Role == samples.RankProcess && g.Kind != Driver && g.Kind != Allocated {
				g.Phase = phases(g.Rank, g.FromStep)
			}
			list = append(list, g)
		}
	}
	slices.SortStableFunc(list, func(a, b Growth) int {
		if a.IsLeak() != b.IsLeak() {
			return map[bool]int{true: -1, false: 1}[a.IsLeak()]
		}
		return cmp.Compare(b.Total, a.Total)
	})
	return list
}

// growth returns how a line grows. Marks tell the resident size, which is of any kind. So they count for later growth
// where samples are too few to tell its kind, and always for the first step, whose phases are short.
func (s *series) growth(sampled, marked *series) []Growth {
	rising := s.rising()
	var aStep ledger.Bytes // of a leak, which the first step has, too
	for _, g := range rising {
		if g.FromStep <= 3 {
			aStep = g.BytesPerStep
		}
	}
	if s == marked && sampled != nil && len(floors(sampled.later())) >= leastPoints {
		rising = nil
	}
	if s == sampled && marked != nil && marked.hasFirst() {
		return rising
	}
	return append(rising, s.first(aStep)...)
}

// sharpen takes the size of a leak from marks, if they tell of the same one. Marks are read at the same places of every
// step, and know what malloc keeps free.
func (g *Growth) sharpen(marked *series) {
	if marked == nil || g.Shape != Linear {
		return
	}
	for _, m := range marked.rising() {
		if m.Shape == Linear && math.Abs(float64(m.BytesPerStep-g.BytesPerStep)) < 0.2*float64(g.BytesPerStep) {
			g.BytesPerStep = m.BytesPerStep
		}
	}
}

// hasFirst reports whether the line was seen in the same phase of the first step and of a later one.
func (s *series) hasFirst() bool {
	_, _, known := s.firstStep()
	return known
}

// rising returns the growth after the first step.
func (s *series) rising() []Growth {
	found := findRamp(floors(s.later()))
	if found == nil {
		return nil
	}
	g := Growth{Rank: s.rank, Role: s.role, Kind: s.kind, Shape: Linear,
		Total: ledger.Bytes(found.rise())}
	switch {
	case !found.toEnd:
		g.Shape = Settled
	case found.every > 0:
		g.Shape = Stairs
	}
	if !s.stepped() {
		g.BytesPerSecond = ledger.Bytes(math.Round(found.slope))
		g.FromTime, g.ToTime = inSeconds(found.from), inSeconds(found.to)
		return []Growth{g}
	}
	g.BytesPerStep = ledger.Bytes(math.Round(found.slope))
	g.FromStep, g.ToStep = int64(found.from), int64(found.to)
	if g.Shape == Stairs {
		g.Every, g.Jump = int64(math.Round(found.every)), ledger.Bytes(found.jump)
	}
	return []Growth{g}
}

func inSeconds(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// first returns the growth in the first step, beyond that of every step.
func (s *series) first(aStep ledger.Bytes) []Growth {
	before, after, known := s.firstStep()
	grown := after - before - aStep
	if s.kind == Driver || s.kind == File || !known || grown < leastRise || float64(grown) < 0.01*float64(before) {
		return nil
	}
	return []Growth{{Rank: s.rank, Role: s.role, Kind: s.kind, Shape: FirstStep, Total: grown, FromStep: 1, ToStep: 1,
		Phase: ledger.Step}}
}

// firstStep returns the least sizes of the first forward pass and of later ones, which have the same activations, or
// else those of the backward passes.
func (s *series) firstStep() (before, after ledger.Bytes, known bool) {
	least := func(in stage) (least ledger.Bytes, known bool) {
		for i := range s.sizes {
			if *s.stages[i] == in && (!known || s.sizes[i] < least) {
				least, known = s.sizes[i], true
			}
		}
		return least, known
	}
	for _, phase := range []ledger.PhaseName{ledger.Forward, ledger.Backward} {
		before, first := least(stage{phase, ledger.First})
		after, steady := least(stage{phase, ledger.Steady})
		if first && steady {
			return before, after, true
		}
	}
	return 0, 0, false
}
