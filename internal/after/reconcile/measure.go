package reconcile

import (
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// Source is where a measured peak comes from.
type Source string

// The sources of peaks. A peak of samples may be too low: nothing is seen between two samples.
const (
	FromMarks   Source = "marks"
	FromSamples Source = "samples"
)

// moment is what the processes of one rank, and all others, hold at one time.
type moment struct {
	ranks   []*rankMoment // few, so that a map would take more memory than they do
	service held          // without the arenas, which belong to ranks
	keeper  held
}

// rankMoment is what a rank holds at one time.
type rankMoment struct {
	number   int // of the rank
	stage    stage
	process  held // the rank's own process
	children held
	arenas   []arena
	pids     []int
	// beyond is what the process has held between the sample before and this one, beyond what it holds in both: its
	// high-water mark has risen.
	beyond ledger.Bytes
}

// need returns the bytes of a rank.
func (m *rankMoment) need() ledger.Bytes {
	return m.process.need() + m.children.need() + sumOf(m.arenas)
}

func sumOf(arenas []arena) ledger.Bytes {
	var sum ledger.Bytes
	for _, a := range arenas {
		sum += a.bytes
	}
	return sum
}

// moments are the states at the samples of a recording. Each is made when it is asked for: all of them would take as
// much memory as the samples.
type moments struct {
	of *Recording
	// before has, for the processes of each sample, what earlier samples tell of them.
	before [][]earlier
}

// earlier is what earlier samples tell of a process.
type earlier struct {
	maps *maps // of the last reading of its mappings, or nil
	rose bool  // the high-water mark is higher than in the sample before, which is of the same stage
}

// moments returns the states at all samples.
func (r *Recording) moments() moments {
	all := moments{r, make([][]earlier, len(r.Samples))}
	last, known := map[identity]*process{}, map[identity]*maps{}
	processes := 0
	for i := range r.Samples {
		processes += len(r.Samples[i].Processes)
	}
	list := make([]earlier, processes)
	for i := range r.Samples {
		n := len(r.Samples[i].Processes)
		all.before[i], list = list[:n], list[n:]
		for k := range r.Samples[i].Processes {
			p := &r.Samples[i].Processes[k]
			if p.Mappings != nil {
				known[p.identity] = newMaps(p)
			}
			before := last[p.identity]
			all.before[i][k] = earlier{known[p.identity], before != nil && p.Peak > before.Peak &&
				p.Phase == before.Phase && p.Iteration == before.Iteration}
			last[p.identity] = p
		}
	}
	return all
}

// at returns the state at a sample.
func (a moments) at(sample int) *moment {
	return a.with(sample, func(*process, earlier) bool { return true })
}

// rank returns what a rank holds at a sample, or nil if the sample has nothing of it.
func (a moments) rank(sample, number int) *rankMoment {
	return a.with(sample, func(p *process, before earlier) bool {
		return p.Rank == number || before.maps != nil && len(before.maps.arenas) > 0
	}).find(number)
}

// with returns the state at a sample as far as some of its processes tell.
func (a moments) with(sample int, counts func(*process, earlier) bool) *moment {
	m := &moment{}
	for k := range a.of.Samples[sample].Processes {
		p, before := &a.of.Samples[sample].Processes[k], a.before[sample][k]
		if !counts(p, before) {
			continue
		}
		m.add(p, before.maps)
		if p.Role == samples.RankProcess && p.Rank >= 0 && before.rose {
			m.rank(p.Rank).beyond += max(p.Peak-p.Resident.Sum(), 0)
		}
	}
	return m
}

// runs reports whether a sample has a process of a rank.
func (a moments) runs(sample, rank int) bool {
	return slices.ContainsFunc(a.of.Samples[sample].Processes, func(p process) bool {
		return p.Rank == rank && p.Role != samples.Service && p.Role != samples.Keeper
	})
}

// add adds a process. Its arenas go to the ranks whose state they are.
func (m *moment) add(p *process, known *maps) {
	h := heldBy(p, known)
	if known != nil {
		for _, a := range known.arenas {
			if a.rank < 0 {
				continue
			}
			a.bytes = min(a.bytes, max(h.shared+h.hugetlb, 0)) // the reading may be older than the sample
			inShared := min(a.bytes, max(h.shared, 0))
			h.shared, h.hugetlb = h.shared-inShared, h.hugetlb-(a.bytes-inShared)
			m.rank(a.rank).arenas = append(m.rank(a.rank).arenas, a)
		}
	}
	switch {
	case p.Role == samples.Service:
		m.service = m.service.plus(h)
	case p.Rank < 0 || p.Role == samples.Keeper:
		m.keeper = m.keeper.plus(h)
	case p.Role == samples.Child:
		rank := m.rank(p.Rank)
		rank.children, rank.pids = rank.children.plus(h), append(rank.pids, p.PID)
	default:
		rank := m.rank(p.Rank)
		rank.process, rank.pids = rank.process.plus(h), append(rank.pids, p.PID)
		rank.stage = stage{p.Phase, p.Iteration}
	}
}

// rank returns the rank of a number, which it adds if there is none.
func (m *moment) rank(number int) *rankMoment {
	of := m.find(number)
	if of == nil {
		of = &rankMoment{number: number}
		m.ranks = append(m.ranks, of)
	}
	return of
}

// find returns the rank of a number, or nil.
func (m *moment) find(number int) *rankMoment {
	for _, of := range m.ranks {
		if of.number == number {
			return of
		}
	}
	return nil
}

// peak is the most that a rank has held in a stage.
type peak struct {
	stage  stage
	at     *rankMoment
	need   ledger.Bytes
	source Source
	// ended is of the highest peak for which tensors were counted; nil if none were.
	ended     *samples.Ended
	endedPeak ledger.Bytes
}

// peaks returns the peak of a rank in every stage, in the order of the job.
func (r *Recording) peaks(all moments, rank int) []peak {
	found := map[stage]*peak{}
	for i := range r.Samples {
		if !all.runs(i, rank) {
			continue
		}
		m := all.rank(i, rank)
		p := found[m.stage]
		if p == nil {
			p = &peak{stage: m.stage, source: FromSamples}
			found[m.stage] = p
		}
		if need := m.need() + m.beyond; p.at == nil || need > p.need {
			p.at, p.need = m, need
		}
	}
	for _, record := range r.Marks {
		if record.Mark.Rank != rank || record.Mark.Ended == nil {
			continue
		}
		ended := record.Mark.Ended
		near := r.near(all, rank, record)
		if near == nil {
			continue
		}
		at := stage{ended.Phase, ended.Iteration}
		found[at] = found[at].marked(near, ended)
	}
	var list []peak
	for _, p := range found {
		list = append(list, *p)
	}
	slices.SortFunc(list, func(a, b peak) int { return compareStages(a.stage, b.stage) })
	return list
}

// marked returns the peak with what a mark tells. The mark has the highest resident size of the rank's process; page
// tables, arenas and children are those of the sample near it.
func (p *peak) marked(near *rankMoment, ended *samples.Ended) *peak {
	if p == nil {
		p = &peak{stage: stage{ended.Phase, ended.Iteration}, at: near}
	}
	p.source = FromMarks
	if need := near.need() + ended.Peak - near.process.resident; need > p.need {
		p.need, p.at = need, near
	}
	if len(ended.Holdings) > 0 && (p.ended == nil || ended.Peak > p.endedPeak) {
		p.ended, p.endedPeak = ended, ended.Peak
	}
	return p
}

// near returns what the rank held at the last sample before a mark, or at the first one after it.
func (r *Recording) near(all moments, rank int, mark samples.Record) *rankMoment {
	after, _ := slices.BinarySearchFunc(r.Samples, mark.Time, sample.compareTime)
	for i := after - 1; i >= 0; i-- {
		if all.runs(i, rank) {
			return all.rank(i, rank)
		}
	}
	for i := after; i < len(r.Samples); i++ {
		if all.runs(i, rank) {
			return all.rank(i, rank)
		}
	}
	return nil
}
