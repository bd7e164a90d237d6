package reconcile

import (
	"math"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/measure/summary"
)

// lines collects series.
type lines struct {
	all    []*series
	index  map[line]*series
	stages map[stage]*stage
}

func (l *lines) of(key line) *series {
	if l.index[key] == nil {
		l.index[key] = &series{line: key}
		l.all = append(l.all, l.index[key])
	}
	return l.index[key]
}

// series returns everything whose growth is of interest. Of marks come last.
func (r *Recording) series() []*series {
	l := &lines{index: map[line]*series{}, stages: map[stage]*stage{}}
	for i := range r.Samples {
		r.addSample(l, i)
	}
	r.addMarks(l)
	return l.all
}

// where is how far a rank has come.
type where struct {
	step  int64
	stage stage
}

// steps returns how far every rank was. What belongs to no rank goes with the lowest one.
func (s *sample) steps() map[int]where {
	at := map[int]where{}
	lowest := math.MaxInt
	for i := range s.Processes {
		p := &s.Processes[i]
		if p.Role != samples.RankProcess || p.Rank < 0 {
			continue
		}
		at[p.Rank] = where{p.Step, stage{p.Phase, p.Iteration}}
		if p.Rank < lowest {
			lowest, at[samples.NoRank] = p.Rank, at[p.Rank]
		}
	}
	return at
}

// addSample adds the sizes of a sample: by kind of memory, summed over the processes of one role, and as the driver
// counts.
func (r *Recording) addSample(l *lines, i int) {
	record := &r.Samples[i]
	steps := record.steps()
	sums := map[line]ledger.Bytes{}
	pids := map[int][]int{}
	for k := range record.Processes {
		p := &record.Processes[k]
		if p.Role == samples.Keeper {
			continue
		}
		pids[p.Rank] = append(pids[p.Rank], p.PID)
		// What processes share has one part in each, which changes when another process comes. What grows is in one.
		sums[line{p.Rank, p.Role, Anonymous}] += p.Resident.Anonymous + p.Swap
		sums[line{p.Rank, p.Role, Shared}] += p.Resident.Shared
		sums[line{p.Rank, p.Role, File}] += p.Resident.File
		sums[line{p.Rank, p.Role, Hugetlb}] += p.Resident.Hugetlb
	}
	for rank, of := range pids {
		if used := r.used(i, of); used > 0 {
			sums[line{rank, samples.RankProcess, Driver}] = used
		}
	}
	keys := make([]line, 0, len(sums))
	for key := range sums {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, compareLines)
	for _, key := range keys {
		at := steps[key.rank]
		l.of(key).add(at.step, record.Time, once(l.stages, at.stage), sums[key])
	}
}

// addMarks adds what marks tell: torch's memory, and the resident size of any kind without what malloc keeps free.
func (r *Recording) addMarks(l *lines) {
	for i := range r.Marks {
		mark, at := r.Marks[i].Mark, r.Marks[i].Time
		if mark.Ended == nil {
			continue
		}
		in := once(l.stages, stage{mark.Ended.Phase, mark.Ended.Iteration})
		var allocated ledger.Bytes
		for _, g := range mark.Ended.GPUs {
			allocated += g.Allocated
		}
		if len(mark.Ended.GPUs) > 0 {
			l.of(line{mark.Rank, samples.RankProcess, Allocated}).add(mark.Ended.Step, at, in, allocated)
		}
		l.of(line{mark.Rank, samples.RankProcess, Resident}).add(mark.Ended.Step, at, in,
			mark.Ended.Resident-max(mark.Ended.FreeHeap, 0))
	}
}

func compareLines(a, b line) int {
	for _, order := range []int{a.rank - b.rank, strings.Compare(string(a.role), string(b.role)),
		strings.Compare(string(a.kind), string(b.kind))} {
		if order != 0 {
			return order
		}
	}
	return 0
}

// mappingThatGrows returns the name of the mapping that most of the growth of a line is in, or "" if there is none or
// the mappings were not read. It compares the first reading after the first step with the last one.
func (r *Recording) mappingThatGrows(l line) string {
	kind := map[MemoryKind]samples.MappingKind{Shared: samples.SharedMapping, File: samples.FileMapping,
		Hugetlb: samples.HugetlbMapping}[l.kind]
	if kind == "" {
		return ""
	}
	var readings []map[string]ledger.Bytes
	for i := range r.Samples {
		reading, taken := map[string]ledger.Bytes{}, false
		for k := range r.Samples[i].Processes {
			p := &r.Samples[i].Processes[k]
			if p.Rank != l.rank || p.Role != l.role || p.Mappings == nil {
				continue
			}
			taken = true
			for _, m := range p.Mappings {
				if m.Kind == kind && m.Name != "" {
					reading[m.Name] += m.Resident
				}
			}
		}
		if taken && r.Samples[i].steps()[l.rank].step != 1 {
			readings = append(readings, reading)
		}
	}
	if len(readings) == 0 {
		return ""
	}
	var sum, most ledger.Bytes
	largest := ""
	for name, bytes := range readings[len(readings)-1] {
		grown := bytes
		if len(readings) > 1 {
			grown -= readings[0][name]
		}
		sum += max(grown, 0)
		if grown > most || grown == most && name < largest {
			largest, most = name, grown
		}
	}
	if float64(most) < 0.8*float64(sum) {
		return ""
	}
	return largest
}

// phasesOfGrowth returns a function that says in which phase a rank grows from a step on: where it adds more than it
// did before that step or, for growth from the start, where it adds most. Marks tell exactly.
func (r *Recording) phasesOfGrowth() func(rank int, from int64) ledger.PhaseName {
	type change struct {
		phase ledger.PhaseName
		step  int64
		bytes float64
	}
	changes := map[int][]change{}
	last := map[int]ledger.Bytes{}
	for i := range r.Marks {
		mark := r.Marks[i].Mark
		if mark.Ended == nil {
			continue
		}
		if before, known := last[mark.Rank]; known {
			changes[mark.Rank] = append(changes[mark.Rank],
				change{mark.Ended.Phase, mark.Ended.Step, float64(mark.Ended.Resident - before)})
		}
		last[mark.Rank] = mark.Ended.Resident
	}
	return func(rank int, from int64) ledger.PhaseName {
		before, after := map[ledger.PhaseName][]float64{}, map[ledger.PhaseName][]float64{}
		for _, c := range changes[rank] {
			if c.step > from {
				after[c.phase] = append(after[c.phase], c.bytes)
			} else if c.step >= 2 && from > 3 {
				before[c.phase] = append(before[c.phase], c.bytes)
			}
		}
		var found ledger.PhaseName
		most := 0.0
		for _, s := range stages {
			more := summary.Median(after[s.phase]) - summary.Median(before[s.phase])
			if more > most {
				found, most = s.phase, more
			}
		}
		return found
	}
}

// appeared returns the components that have grown from the first forward pass to a later one, as the client counts.
func (r *Recording) appeared(rank int) []ledger.Holding {
	var before, after []ledger.Holding
	for i := range r.Marks {
		m := r.Marks[i].Mark
		if m.Rank != rank || m.Ended == nil || m.Ended.Holdings == nil || m.Ended.Phase != ledger.Forward {
			continue
		}
		if m.Ended.Iteration == ledger.First {
			before = m.Ended.Holdings
		} else if after == nil {
			after = m.Ended.Holdings
		}
	}
	var list []ledger.Holding
	for _, h := range after {
		if before == nil {
			break
		}
		for _, old := range before {
			if old.Component == h.Component && old.Part == h.Part {
				h.Bytes -= old.Bytes
			}
		}
		if h.Bytes >= leastRise {
			list = append(list, h)
		}
	}
	return list
}

// sizes are the bytes of components.
type sizes map[ledger.Component]ledger.Bytes

// counted returns the components whose growth is recognized by its size, for each rank: as the client has counted them,
// or as the plan has them.
func (r *Recording) counted(plan *Plan) map[int]sizes {
	list := map[int]sizes{}
	ranks := r.Ranks()
	for _, rank := range ranks {
		list[rank] = sizes{}
		if plan == nil {
			continue
		}
		for i := range plan.Devices {
			d := &plan.Devices[i]
			parts := ledger.Bytes(1)
			if d.Kind == ledger.Host {
				parts = ledger.Bytes(max(plan.RanksPerNode, 1))
			}
			for _, p := range d.Phases {
				for _, h := range p.Components {
					list[rank][h.Component] = max(list[rank][h.Component], h.Bytes/parts)
				}
			}
		}
	}
	for i := range r.Marks {
		mark := r.Marks[i].Mark
		if mark.Ended == nil || list[mark.Rank] == nil {
			continue
		}
		for _, h := range slices.Concat(mark.Ended.Holdings, mark.Ended.PeakHoldings) {
			list[mark.Rank][h.Component] = h.Bytes
		}
		for _, g := range mark.Ended.GPUs {
			for _, h := range g.Holdings {
				list[mark.Rank][h.Component] = h.Bytes
			}
		}
	}
	return list
}

// kept are the components that a program may keep by mistake, or that appear in the first step.
var kept = []ledger.Component{ledger.Gradients, ledger.OptimizerStates, ledger.Parameters, ledger.LogitsAndLoss,
	ledger.Batch}

// named returns the component that has as many bytes as the growth of a step, or of the first step.
func (s sizes) named(g *Growth) ledger.Component {
	bytes := g.BytesPerStep
	if g.Kind == File || g.Kind == Shared || g.Kind == Driver { // the number of bytes would be chance
		return ""
	}
	switch g.Shape {
	case FirstStep:
		bytes = g.Total
	case Stairs:
		bytes = g.Jump
	}
	for _, c := range kept {
		if size := s[c]; size > 0 && math.Abs(float64(bytes-size)) <= 0.05*float64(size) {
			return c
		}
	}
	return ""
}
