package plan

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// gpuOf returns the GPU of each rank of a class.
func gpuOf(j *job.Job, c simulate.RankClass) ledger.Device {
	d := ledger.Device{Kind: ledger.GPU, Name: j.GPU.Name, Rank: c.First, Count: c.Ranks, Capacity: j.GPU.Memory,
		Outside: c.GPU.Outside, Phases: c.GPU.Phases}
	addOutside(&d)
	return d
}

// nodeOf returns the memory of each node with ranks of a class: the sum over its
// ranks.
func nodeOf(j *job.Job, c simulate.RankClass) ledger.Device {
	ranks := ledger.Bytes(c.RanksPerNode)
	d := ledger.Device{Kind: ledger.Host, Name: "host", Count: c.Ranks / c.RanksPerNode, Capacity: j.HostMemory,
		Phases: c.Host.Phases}
	for _, held := range c.Host.Outside {
		held.Bytes, held.Why = held.Bytes*ranks, fmt.Sprintf("%d x %s", ranks, held.Why)
		held.Formula = held.Formula.Times(int64(ranks), "ranks of the node")
		d.Outside = append(d.Outside, held)
	}
	for i := range d.Phases {
		times(&d.Phases[i], ranks)
	}
	addOutside(&d)
	each := d.Peak().PeakUsed / ranks
	for i := range j.NUMANodes {
		ranks := c.RanksPerNode / j.NUMANodes
		if i < c.RanksPerNode%j.NUMANodes {
			ranks++
		}
		d.NUMANodes = append(d.NUMANodes, ledger.NUMANode{
			Node: i, Ranks: ranks, PeakUsed: each * ledger.Bytes(ranks),
			Capacity: j.HostMemory / ledger.Bytes(j.NUMANodes),
		})
	}
	return d
}

// times multiplies the sizes in a phase by a number of ranks.
func times(p *ledger.Phase, ranks ledger.Bytes) {
	for _, b := range []*ledger.Bytes{&p.PeakRequested, &p.PeakAllocated, &p.PeakReserved, &p.EndRequested,
		&p.EndAllocated, &p.EndReserved} {
		*b *= ranks
	}
	if p.PageCache != nil {
		p.PageCache.Bytes *= ranks
	}
	for _, list := range [][]ledger.Holding{p.Components, p.End} {
		for i := range list {
			list[i].Bytes *= ranks
			list[i].Formula = list[i].Formula.Times(int64(ranks), "ranks of the node")
		}
	}
}

// addOutside adds the memory outside the allocator to every peak.
func addOutside(d *ledger.Device) {
	var outside ledger.Bytes
	for _, c := range d.Outside {
		outside += c.Bytes
	}
	for i := range d.Phases {
		d.Phases[i].PeakUsed = d.Phases[i].PeakReserved + outside
	}
}
