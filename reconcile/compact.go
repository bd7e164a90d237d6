package reconcile

import (
	"slices"

	"plimsoll/ledger"
	"plimsoll/samples"
)

// compactor makes records small before they are kept. A recording of hours has a hundred thousand samples, and what
// encoding/json makes of one has twice the room that it needs, and every name anew.
type compactor struct {
	names map[string]string
	last  map[identity][]samples.Mapping
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
	return &compactor{names: map[string]string{}, last: map[identity][]samples.Mapping{},
		held: map[heldList][]ledger.Holding{}}
}

// sample makes a sample small, and drops what no comparison reads.
func (c *compactor) sample(s *samples.Sample) {
	s.Node.NUMANodes, s.Missed = nil, nil
	s.Processes, s.Groups, s.GPUs = slices.Clone(s.Processes), slices.Clone(s.Groups), slices.Clone(s.GPUs)
	for i := range s.Groups {
		s.Groups[i].Name = c.name(s.Groups[i].Name)
	}
	for i := range s.Processes {
		p := &s.Processes[i]
		p.Name, p.NUMANodes = c.name(p.Name), nil
		if p.Mappings == nil {
			continue
		}
		id := identityOf(p)
		if !slices.Equal(p.Mappings, c.last[id]) {
			c.last[id] = c.mappings(p.Mappings)
		}
		p.Mappings = c.last[id]
	}
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
