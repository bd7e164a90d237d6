package reconcile

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
)

// Plan is what a comparison needs of a plan.
type Plan struct {
	Devices []ledger.Device
	// RanksPerNode is 0 if unknown.
	RanksPerNode int
	// Parameters is the number of the model's parameters, 0 if unknown.
	Parameters int64
}

// Peak is the memory of a device in a phase, planned and measured.
type Peak struct {
	Device    ledger.Kind      `json:"device"`
	Rank      int              `json:"rank"` // -1 for the whole node
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration,omitempty"`
	// Planned and Measured are nil where one side does not have the phase.
	Planned  *ledger.Bytes `json:"planned_bytes"`
	Measured *ledger.Bytes `json:"measured_bytes"`
	// Source is where the measured peak comes from.
	Source Source `json:"source,omitempty"`
	// Unexplained is the part of Measured that no component accounts for.
	Unexplained ledger.Bytes `json:"unexplained_bytes"`
	// PageCache is of files that are mapped. The kernel takes it back, so it is not in Measured.
	PageCache ledger.Bytes `json:"page_cache_bytes"`
}

// Difference returns measured bytes beyond planned ones, and whether both are known.
func (p *Peak) Difference() (ledger.Bytes, bool) {
	if p.Planned == nil || p.Measured == nil {
		return 0, false
	}
	return *p.Measured - *p.Planned, true
}

// Share returns the difference as a share of the plan.
func (p *Peak) Share() (float64, bool) {
	difference, known := p.Difference()
	if !known || *p.Planned <= 0 {
		return 0, false
	}
	return float64(difference) / float64(*p.Planned), true
}

// Comparison is a recorded run, beside a plan if there is one.
type Comparison struct {
	Peaks  []Peak
	Lines  ledger.Comparison
	Growth []Growth
	// Measured is the recording as a ledger.
	Measured []ledger.Device
	Notes    []string
	ranks    int
}

// Compare puts a recording beside a plan. The plan may be nil.
func Compare(r *Recording, plan *Plan) *Comparison {
	m := r.measure()
	c := &Comparison{Measured: m.devices, ranks: len(r.Ranks()), Notes: append([]string{}, m.notes...)}
	if r.Cut {
		c.Notes = append(c.Notes, "the recording is cut: its last line has no end and is left out")
	}
	var planned []ledger.Device
	if plan != nil {
		planned = c.planned(r, plan, m)
	}
	if len(r.Samples) == 0 {
		c.Notes = append(c.Notes, "the recording has no samples: nothing was measured")
	}
	c.Lines = ledger.Compare(planned, m.devices)
	c.Peaks = peaksOf(planned, m)
	c.Growth = r.growth(plan)
	return c
}

// peaksOf returns the peaks of both sides: measured devices first, each with its phases in order.
func peaksOf(planned []ledger.Device, m *measurement) []Peak {
	var list []Peak
	index := map[place]int{}
	at := func(d *ledger.Device, p *ledger.Phase) *Peak {
		key := place{d.Kind, d.Rank, stage{p.Name, p.Iteration}}
		if _, known := index[key]; !known {
			index[key] = len(list)
			list = append(list, Peak{Device: d.Kind, Rank: d.Rank, Phase: p.Name, Iteration: p.Iteration})
		}
		return &list[index[key]]
	}
	each := func(devices []ledger.Device, f func(*Peak, *ledger.Device, *ledger.Phase)) {
		for i := range devices {
			for k := range devices[i].Phases {
				f(at(&devices[i], &devices[i].Phases[k]), &devices[i], &devices[i].Phases[k])
			}
		}
	}
	each(m.devices, func(peak *Peak, d *ledger.Device, p *ledger.Phase) {
		about := m.about[place{d.Kind, d.Rank, stage{p.Name, p.Iteration}}]
		used := p.PeakUsed
		peak.Measured, peak.Source = &used, about.Source
		peak.Unexplained, peak.PageCache = about.Unexplained, about.PageCache
	})
	each(planned, func(peak *Peak, _ *ledger.Device, p *ledger.Phase) {
		used := p.PeakUsed
		peak.Planned = &used
	})
	order := map[place]int{} // of devices
	for i, p := range list {
		device := place{p.Device, p.Rank, stage{}}
		if _, known := order[device]; !known {
			order[device] = i
		}
	}
	slices.SortStableFunc(list, func(a, b Peak) int {
		if of := order[place{a.Device, a.Rank, stage{}}] - order[place{b.Device, b.Rank, stage{}}]; of != 0 {
			return of
		}
		return compareStages(stage{a.Phase, a.Iteration}, stage{b.Phase, b.Iteration})
	})
	return list
}

// planned returns the plan's devices as the recording has them: the node, each of its ranks, and the GPU of each.
func (c *Comparison) planned(r *Recording, plan *Plan, m *measurement) []ledger.Device {
	ranks := r.Ranks()
	phased := false
	for i := range m.devices {
		phased = phased || slices.ContainsFunc(m.devices[i].Phases, func(p ledger.Phase) bool { return p.Name != "" })
	}
	if !phased {
		c.Notes = append(c.Notes, "the recording has no phases: the plan's highest peak is compared with the run's")
	}
	if plan.RanksPerNode > 0 && len(ranks) > 0 && plan.RanksPerNode != len(ranks) {
		c.Notes = append(c.Notes, fmt.Sprintf("the plan has %d ranks on a node and the recording %d: the node is not "+
			"compared", plan.RanksPerNode, len(ranks)))
	}
	hasGPU := func(rank int) bool {
		return slices.ContainsFunc(m.devices, func(d ledger.Device) bool {
			return d.Kind == ledger.GPU && d.Rank == rank
		})
	}
	var nodes, hosts, gpus []ledger.Device
	first := 0 // rank of the GPUs that are alike
	for i := range plan.Devices {
		d := planned(&plan.Devices[i], phased)
		if d.Kind == ledger.GPU {
			for _, rank := range ranks {
				if rank >= first && rank < first+d.Count && hasGPU(rank) {
					gpus = append(gpus, ofRank(d, rank, 1))
				}
			}
			first += d.Count
			continue
		}
		if len(nodes) > 0 || len(ranks) == 0 {
			continue
		}
		perNode := max(plan.RanksPerNode, 0)
		if perNode == 0 {
			perNode = len(ranks)
		}
		if perNode == len(ranks) {
			nodes = append(nodes, ofRank(d, ledger.WholeNode, 1))
		}
		for _, rank := range ranks {
			hosts = append(hosts, ofRank(d, rank, ledger.Bytes(perNode)))
		}
	}
	if first > 0 && len(gpus) == 0 && len(ranks) > 0 {
		c.Notes = append(c.Notes, "the recording has no numbers of GPUs: they are not compared")
	}
	return slices.Concat(nodes, hosts, gpus)
}

// planned returns a planned device whose components add up to what it uses at its peak, in every phase or, if the
// phases are unknown, in the phase of its highest peak.
func planned(d *ledger.Device, phased bool) ledger.Device {
	full := *d
	full.Phases, full.Outside = nil, nil
	for i := range d.Phases {
		p := d.Phases[i]
		if !phased && &d.Phases[i] != d.Peak() {
			continue
		}
		if !phased {
			p.Name, p.Iteration = "", ledger.Once
		}
		p.Components = slices.Concat(p.Components, d.Outside)
		rest := p.PeakUsed
		for _, h := range p.Components {
			rest -= h.Bytes
		}
		if rest != 0 {
			p.Components = append(p.Components, ledger.Holding{Component: ledger.AllocatorReserve, Bytes: rest,
				Why: "reserved by the allocator beyond that: rounding, fragments, memory of earlier phases"})
		}
		full.Phases = append(full.Phases, p)
	}
	return full
}

// ofRank returns a copy of a device for a rank, with its part of the bytes.
func ofRank(d ledger.Device, rank int, parts ledger.Bytes) ledger.Device {
	d.Rank, d.Phases = rank, slices.Clone(d.Phases)
	for i := range d.Phases {
		p := &d.Phases[i]
		p.PeakUsed /= parts
		p.Components = slices.Clone(p.Components)
		for k := range p.Components {
			p.Components[k].Bytes /= parts
			if parts > 1 {
				p.Components[k].Formula = nil // it is that of all ranks
			}
		}
	}
	return d
}

// Farthest returns the peak whose measurement differs most from the plan. It is nil if nothing was compared. The node
// comes before its only rank.
func (c *Comparison) Farthest() *Peak {
	var farthest *Peak
	most := -1.0
	for i := range c.Peaks {
		p := &c.Peaks[i]
		if p.Device == ledger.Host && p.Rank >= 0 && c.ranks == 1 {
			continue
		}
		if share, known := p.Share(); known && max(share, -share) > most {
			farthest, most = p, max(share, -share)
		}
	}
	return farthest
}

// OnPaper returns a plan without a recording, with the host's memory as that of the node.
func OnPaper(plan *Plan) *Comparison {
	var devices []ledger.Device
	for i := range plan.Devices {
		d := planned(&plan.Devices[i], true)
		if d.Kind == ledger.Host {
			d.Rank = ledger.WholeNode
		}
		devices = append(devices, d)
	}
	return &Comparison{Lines: ledger.Compare(devices, nil), Peaks: peaksOf(devices, &measurement{})}
}
