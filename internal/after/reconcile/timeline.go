package reconcile

import (
	"fmt"
	"slices"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// Timeline is a recording as curves over time.
type Timeline struct {
	Tracks   []Track
	Spans    []Span
	Instants []Instant
	Limits   []Limit // of the host
}

// Track is a device of a rank, with curves that add up to what it holds.
type Track struct {
	Kind   ledger.Kind
	Rank   int // ledger.WholeNode for the service and plimsoll itself
	Curves []Curve
}

// Curve is the bytes of one use of memory.
type Curve struct {
	Component ledger.Component
	Title     string
	Points    []Point
}

// Point is the size at a time.
type Point struct {
	Time  time.Duration
	Bytes ledger.Bytes
}

// Span is a phase of a rank, from mark to mark or from sample to sample.
type Span struct {
	Rank      int
	Phase     ledger.PhaseName
	Iteration ledger.Iteration
	Step      int64
	From, To  time.Duration
}

// Instant is something that happened.
type Instant struct {
	Time time.Duration
	Rank int // samples.NoRank if it concerns all
	Text string
}

// Limit is a size that the job must not exceed.
type Limit struct {
	Name  string
	Bytes ledger.Bytes
}

// curveTitles are the components of a timeline, in the order in which they are stacked. Arenas stand below them.
var curveTitles = []struct {
	component ledger.Component
	title     string
	of        func(*rankMoment) ledger.Bytes
}{
	{ledger.PythonProcess, ledger.PythonProcess.Title(), func(m *rankMoment) ledger.Bytes { return m.process.program }},
	{ledger.PageTables, "page tables", func(m *rankMoment) ledger.Bytes { return m.process.pageTables }},
	{ledger.UnexplainedAnonymous, "anonymous memory", func(m *rankMoment) ledger.Bytes { return m.process.anonymous }},
	{ledger.UnexplainedShared, "shared memory", func(m *rankMoment) ledger.Bytes { return m.process.shared }},
	{ledger.UnexplainedHugetlb, "huge pages", func(m *rankMoment) ledger.Bytes { return m.process.hugetlb }},
	{ledger.ChildProcesses, "child processes", func(m *rankMoment) ledger.Bytes { return m.children.need() }},
}

// Timeline returns the recording as curves.
func (r *Recording) Timeline() *Timeline {
	t := &Timeline{}
	all := r.moments()
	ranks := r.Ranks()
	for _, rank := range ranks {
		t.addTrack(r.hostTrack(all, rank))
		t.addTrack(r.gpuTrack(all, rank))
		t.Spans = append(t.Spans, r.spans(rank)...)
	}
	t.addTrack(r.othersTrack(all))
	t.Instants = r.instants()
	if memory := r.Start.Host.Memory; memory > 0 {
		t.Limits = append(t.Limits, Limit{"memory of the host", memory})
	}
	if len(r.Samples) > 0 {
		for _, g := range r.Samples[len(r.Samples)-1].Groups {
			if g.Limit > 0 {
				t.Limits = append(t.Limits, Limit{"limit of cgroup " + g.Name, g.Limit})
			}
		}
	}
	return t
}

// addTrack adds a track with the curves that are not zero all the time.
func (t *Timeline) addTrack(track Track) {
	track.Curves = slices.DeleteFunc(track.Curves, func(c Curve) bool {
		return !slices.ContainsFunc(c.Points, func(p Point) bool { return p.Bytes != 0 })
	})
	if len(track.Curves) > 0 {
		t.Tracks = append(t.Tracks, track)
	}
}

// hostTrack has arenas, then what the client has counted at the last mark, then the rest by kind.
func (r *Recording) hostTrack(all moments, rank int) Track {
	track := Track{Kind: ledger.Host, Rank: rank}
	index := map[ledger.Component]int{}
	add := func(sample int, component ledger.Component, title string, bytes ledger.Bytes) {
		at, known := index[component]
		if !known {
			at = len(track.Curves)
			index[component] = at
			track.Curves = append(track.Curves, Curve{Component: component, Title: title})
		}
		c := &track.Curves[at]
		for len(c.Points) <= sample { // a component that comes late
			c.Points = append(c.Points, Point{Time: r.Samples[len(c.Points)].Time})
		}
		c.Points[sample].Bytes += max(bytes, 0)
	}
	next := 0
	var counted []ledger.Holding
	for i := range r.Samples {
		for ; next < len(r.Marks) && r.Marks[next].Time <= r.Samples[i].Time; next++ {
			if m := r.Marks[next].Mark; m.Rank == rank && m.Ended != nil && m.Ended.Holdings != nil {
				counted = m.Ended.Holdings
			}
		}
		m := all.rank(i, rank)
		if m == nil {
			m = &rankMoment{}
		}
		for _, a := range m.arenas {
			add(i, a.component, a.component.Title(), a.bytes)
		}
		rest := *m
		for _, h := range counted {
			bytes := h.Bytes - min(h.Bytes, m.inArenas(h.Component))
			if h.Component == ledger.PythonProcess {
				bytes = max(h.Bytes-m.process.programResident, 0)
			}
			bytes = min(bytes, max(rest.process.anonymous, 0))
			rest.process.anonymous -= bytes
			add(i, h.Component, h.Component.Title(), bytes)
		}
		for _, c := range curveTitles {
			add(i, c.component, c.title, c.of(&rest))
		}
	}
	for i := range track.Curves { // a component that ends early
		c := &track.Curves[i]
		for len(c.Points) < len(r.Samples) {
			c.Points = append(c.Points, Point{Time: r.Samples[len(c.Points)].Time})
		}
	}
	return track
}

// gpuTrack has what torch says at marks, or else what the driver says in samples.
func (r *Recording) gpuTrack(all moments, rank int) Track {
	allocated := Curve{Component: ledger.UnexplainedGPU, Title: "allocated by torch"}
	reserved := Curve{Component: ledger.AllocatorReserve, Title: ledger.AllocatorReserve.Title()}
	for _, record := range r.Marks {
		if record.Mark.Rank != rank || record.Mark.Ended == nil || len(record.Mark.Ended.GPUs) == 0 {
			continue
		}
		var inUse, taken ledger.Bytes
		for _, g := range record.Mark.Ended.GPUs {
			inUse, taken = inUse+g.PeakAllocated, taken+g.PeakReserved
		}
		allocated.Points = append(allocated.Points, Point{record.Time, inUse})
		reserved.Points = append(reserved.Points, Point{record.Time, taken - inUse})
	}
	if len(allocated.Points) > 0 {
		return Track{ledger.GPU, rank, []Curve{allocated, reserved}}
	}
	used := Curve{Component: ledger.UnexplainedGPU, Title: "used, as the driver counts"}
	for i := range r.Samples {
		if m := all.rank(i, rank); m != nil {
			used.Points = append(used.Points, Point{r.Samples[i].Time, r.used(i, m.pids)})
		}
	}
	return Track{ledger.GPU, rank, []Curve{used}}
}

// othersTrack has the service without its arenas, and plimsoll itself.
func (r *Recording) othersTrack(all moments) Track {
	service := Curve{Component: ledger.ServiceProcess, Title: "the optimizer service"}
	keeper := Curve{Component: ledger.Process, Title: "plimsoll"}
	for i := range r.Samples {
		m := all.at(i)
		service.Points = append(service.Points, Point{r.Samples[i].Time, m.service.need()})
		keeper.Points = append(keeper.Points, Point{r.Samples[i].Time, m.keeper.need()})
	}
	return Track{ledger.Host, ledger.WholeNode, []Curve{service, keeper}}
}

// spans returns the phases of a rank: by its marks, or by its samples if it has none.
func (r *Recording) spans(rank int) []Span {
	var list []Span
	add := func(at time.Duration, next Span) {
		if n := len(list); n > 0 {
			list[n-1].To = at
			last := list[n-1]
			if last.Phase == next.Phase && last.Iteration == next.Iteration && last.Step == next.Step {
				return
			}
		}
		next.Rank, next.From, next.To = rank, at, at
		list = append(list, next)
	}
	for _, record := range r.Marks {
		if m := record.Mark; m.Rank == rank {
			add(record.Time, Span{Phase: m.Phase, Iteration: m.Iteration, Step: m.Step})
		}
	}
	marked := len(list) > 0
	for i := range r.Samples {
		at, seen := r.Samples[i].steps()[rank]
		switch {
		case !seen:
		case !marked:
			add(r.Samples[i].Time, Span{Phase: at.stage.phase, Iteration: at.stage.iteration, Step: at.step})
		case r.Samples[i].Time > list[len(list)-1].To:
			list[len(list)-1].To = r.Samples[i].Time
		}
	}
	return slices.DeleteFunc(list, func(s Span) bool { return s.Phase == "" || s.To <= s.From })
}

// instants returns kills by the kernel, and the ends of ranks.
func (r *Recording) instants() []Instant {
	var list []Instant
	var host int64
	groups := map[string]int64{}
	for i, record := range r.Samples {
		if kills := record.Kills; i > 0 && kills > host {
			list = append(list, Instant{record.Time, samples.NoRank,
				"the OOM killer has killed a process on this host"})
		}
		host = record.Kills
		for _, g := range record.Groups {
			if before, known := groups[g.Name]; known && g.Kills > before {
				list = append(list, Instant{record.Time, samples.NoRank,
					fmt.Sprintf("the OOM killer has killed a process in cgroup %s", g.Name)})
			}
			groups[g.Name] = g.Kills
		}
	}
	if r.End != nil {
		for _, e := range r.End.End.Ranks {
			text := fmt.Sprintf("rank %d ends with exit code %d", e.Rank, e.ExitCode)
			if e.Signal != 0 {
				text = fmt.Sprintf("rank %d is ended by signal %d", e.Rank, e.Signal)
			}
			list = append(list, Instant{e.Time, e.Rank, text})
		}
	}
	return list
}
