package reconcile

import (
	"cmp"
	"slices"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// sample is what a comparison reads of a sample. A recording of hours has a hundred thousand of them, and the records
// as they are read would take four times as much memory.
type sample struct {
	Time      time.Duration
	Processes []process
	Groups    []group
	GPUs      []samples.GPU
	Kills     int64 // by the OOM killer of the host
}

func (s sample) compareTime(t time.Duration) int { return cmp.Compare(s.Time, t) }

// process is what a comparison reads of a process in a sample.
type process struct {
	*owner
	*position
	Step                   int64
	Resident, Proportional samples.Kinds
	ProportionalAge        time.Duration
	Swap, PageTables, Peak ledger.Bytes
	Mappings               []samples.Mapping
}

// owner is what does not change while a process runs.
type owner struct {
	identity
	Rank int
	Role samples.Role
}

// position is where a process is in its training loop.
type position struct {
	Phase     ledger.PhaseName
	Iteration ledger.Iteration
}

// group is what a comparison reads of a cgroup.
type group struct {
	Name  string
	Limit ledger.Bytes
	Kills int64
}

// compactor makes records small before they are kept: values that repeat are kept once.
type compactor struct {
	names     map[string]string
	owners    map[owner]*owner
	positions map[position]*position
	groups    []group // of the last sample
	last      map[identity][]samples.Mapping
	// held are the last holdings of each list of a rank's marks. In steady steps they repeat.
	held map[heldList][]ledger.Holding
}

// heldList is one of the lists of a mark: those of a phase, at its end or its peak, on the host or on a GPU.
type heldList struct {
	rank   int
	phase  stage
	peak   bool
	device int // onHost for the host
}

const onHost = -1

func newCompactor() *compactor {
	return &compactor{names: map[string]string{}, owners: map[owner]*owner{}, positions: map[position]*position{},
		last: map[identity][]samples.Mapping{}, held: map[heldList][]ledger.Holding{}}
}

// sample returns what a comparison reads of a sample.
func (c *compactor) sample(record *samples.Record) sample {
	from := record.Sample
	s := sample{Time: record.Time, Kills: from.Node.Kills, Groups: c.groupsOf(from.Groups),
		GPUs: slices.Clone(from.GPUs), Processes: make([]process, len(from.Processes))}
	for i := range from.Processes {
		s.Processes[i] = c.process(&from.Processes[i])
	}
	return s
}

func (c *compactor) process(p *samples.Process) process {
	id := identity{p.PID, p.StartTime}
	small := process{
		owner:    once(c.owners, owner{id, p.Rank, p.Role}),
		position: once(c.positions, position{p.Phase, p.Iteration}),
		Step:     p.Step, Resident: p.Resident, Proportional: p.Proportional, ProportionalAge: p.ProportionalAge,
		Swap: p.Swap, PageTables: p.PageTables, Peak: p.Peak,
	}
	if p.Mappings != nil {
		if !slices.Equal(p.Mappings, c.last[id]) {
			c.last[id] = c.mappings(p.Mappings)
		}
		small.Mappings = c.last[id]
	}
	return small
}

// once returns the one copy of a value that is kept.
func once[T comparable](kept map[T]*T, value T) *T {
	if kept[value] == nil {
		kept[value] = &value
	}
	return kept[value]
}

func (c *compactor) groupsOf(list []samples.Group) []group {
	now := make([]group, len(list))
	for i := range list {
		now[i] = group{c.name(list[i].Name), list[i].Limit, list[i].Events.OOMKill}
	}
	if !slices.Equal(now, c.groups) {
		c.groups = now
	}
	return c.groups
}

func (c *compactor) mappings(list []samples.Mapping) []samples.Mapping {
	list = slices.Clone(list)
	for i := range list {
		list[i].Name, list[i].Part = c.name(list[i].Name), c.name(list[i].Part)
	}
	return list
}

// mark makes a mark small.
func (c *compactor) mark(m *samples.Mark) {
	m.Phase, m.Iteration = ledger.PhaseName(c.name(string(m.Phase))), ledger.Iteration(c.name(string(m.Iteration)))
	m.Source, m.Name = samples.MarkSource(c.name(string(m.Source))), c.name(m.Name)
	if m.Ended == nil {
		return
	}
	list := heldList{rank: m.Rank, phase: stage{m.Ended.Phase, m.Ended.Iteration}, device: onHost}
	m.Ended.Holdings = c.holdings(list, m.Ended.Holdings)
	list.peak = true
	m.Ended.PeakHoldings = c.holdings(list, m.Ended.PeakHoldings)
	list.peak = false
	m.Ended.GPUs = slices.Clone(m.Ended.GPUs)
	for i := range m.Ended.GPUs {
		g := &m.Ended.GPUs[i]
		list.device = g.Device
		g.Holdings = c.holdings(list, g.Holdings)
	}
}

func (c *compactor) holdings(of heldList, now []ledger.Holding) []ledger.Holding {
	if now == nil {
		return nil
	}
	if last := c.held[of]; last != nil && slices.EqualFunc(last, now, sameHolding) {
		return last
	}
	now = slices.Clone(now)
	for i := range now {
		now[i].Part, now[i].Why = c.name(now[i].Part), c.name(now[i].Why)
	}
	c.held[of] = now
	return now
}

// sameHolding compares what recordings have of a holding: only plans have a formula and an origin.
func sameHolding(a, b ledger.Holding) bool {
	return a.Component == b.Component && a.Part == b.Part && a.Bytes == b.Bytes && a.Why == b.Why
}

// name returns the one copy of a name that is kept.
func (c *compactor) name(s string) string {
	kept, known := c.names[s]
	if !known {
		kept = s
		c.names[s] = s
	}
	return kept
}
