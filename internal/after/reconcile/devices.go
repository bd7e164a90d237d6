package reconcile

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// detail is what is known of the memory of a device in a phase.
type detail struct {
	Source      Source       // where the peak comes from
	PageCache   ledger.Bytes // of mapped files, which the kernel takes back; not in the peak
	Unexplained ledger.Bytes // that no component accounts for
}

// place is a device in a phase.
type place struct {
	kind  ledger.Kind
	rank  int
	stage stage
}

// measurement is a recording as a ledger.
type measurement struct {
	devices []ledger.Device
	about   map[place]detail
	notes   []string
}

// add adds a phase to a device. The holdings are the peak.
func (m *measurement) add(d *ledger.Device, at stage, holdings []ledger.Holding, about detail) {
	p := ledger.Phase{Name: at.phase, Iteration: at.iteration}
	for _, h := range holdings {
		p.Hold(h)
		if h.Component.PartOf() == ledger.Unexplained {
			about.Unexplained += h.Bytes
		}
	}
	d.Phases = append(d.Phases, p)
	m.about[place{d.Kind, d.Rank, at}] = about
}

// measure makes a ledger of a recording: the node, then the host memory of each rank, then its GPU.
func (r *Recording) measure() *measurement {
	m := &measurement{about: map[place]detail{}}
	all := r.moments()
	node := ledger.Device{Kind: ledger.Host, Name: "node", Rank: ledger.WholeNode, Count: 1,
		Capacity: r.Start.Host.Memory}
	sums := &nodeSums{holdings: map[stage][]ledger.Holding{}, about: map[stage]detail{}}
	var hosts, gpus []ledger.Device
	for _, rank := range r.Ranks() {
		host := ledger.Device{Kind: ledger.Host, Name: "host", Rank: rank, Count: 1}
		peaks := r.peaks(all, rank)
		for i := range peaks {
			p := &peaks[i]
			about := detail{Source: p.source, PageCache: p.at.process.pageCache + p.at.children.pageCache}
			holdings := p.holdings()
			m.add(&host, p.stage, holdings, about)
			sums.add(p.stage, holdings, about)
		}
		hosts = append(hosts, host)
		if gpu := r.gpu(m, all, rank); len(gpu.Phases) > 0 {
			gpus = append(gpus, gpu)
		}
	}
	sums.addOthers(all)
	for _, at := range sums.order {
		m.add(&node, at, sums.holdings[at], sums.about[at])
	}
	m.devices = slices.Concat([]ledger.Device{node}, hosts, gpus)
	return m
}

// nodeSums adds up the peaks of all ranks of a node, phase by phase. Ranks go through their phases together.
type nodeSums struct {
	order    []stage
	holdings map[stage][]ledger.Holding
	about    map[stage]detail
}

func (n *nodeSums) add(at stage, holdings []ledger.Holding, about detail) {
	if !slices.Contains(n.order, at) {
		n.order = append(n.order, at)
		slices.SortStableFunc(n.order, compareStages)
	}
	for _, h := range holdings {
		n.holdings[at] = hold(n.holdings[at], h)
	}
	sum := n.about[at]
	sum.PageCache += about.PageCache
	if sum.Source != FromMarks {
		sum.Source = about.Source
	}
	n.about[at] = sum
}

// addOthers adds the service and plimsoll itself, where they hold most in a phase.
func (n *nodeSums) addOthers(all moments) {
	most := map[stage]*moment{}
	var last *moment
	for i := range all.of.Samples {
		last = all.at(i)
		for _, rank := range last.ranks {
			m := most[rank.stage]
			if m == nil || last.service.need()+last.keeper.need() > m.service.need()+m.keeper.need() {
				most[rank.stage] = last
			}
		}
	}
	for _, at := range n.order {
		m := most[at]
		if m == nil { // no sample was taken in the phase
			m = last
		}
		for _, h := range m.otherHoldings() {
			n.holdings[at] = hold(n.holdings[at], h)
		}
	}
}

// gpu returns the GPU memory of a rank: from torch's numbers where there are marks, else from the driver's.
func (r *Recording) gpu(m *measurement, all moments, rank int) ledger.Device {
	d := ledger.Device{Kind: ledger.GPU, Rank: rank, Count: 1}
	type found struct {
		holdings []ledger.Holding
		need     ledger.Bytes
		source   Source
	}
	best := map[stage]found{}
	keep := func(at stage, f found) {
		old, known := best[at]
		if !known || f.source == FromMarks && old.source == FromSamples || f.source == old.source && f.need > old.need {
			best[at] = f
		}
	}
	for i := range r.Samples {
		of := all.rank(i, rank)
		if of == nil {
			continue
		}
		if used := r.used(i, of.pids); used > 0 {
			holdings, need := gpuHoldings(nil, used)
			keep(of.stage, found{holdings, need, FromSamples})
		}
	}
	most := 0
	for _, record := range r.Marks {
		ended := record.Mark.Ended
		if record.Mark.Rank != rank || ended == nil || len(ended.GPUs) == 0 {
			continue
		}
		holdings, need := gpuHoldings(ended.GPUs, r.usedBefore(all, rank, record))
		keep(stage{ended.Phase, ended.Iteration}, found{holdings, need, FromMarks})
		d.Capacity = 0
		for _, g := range ended.GPUs {
			d.Capacity += g.Total
		}
		most = max(most, len(ended.GPUs))
	}
	if most > 1 {
		m.notes = append(m.notes, fmt.Sprintf("rank %d uses %d GPUs; their sum is shown", rank, most))
	}
	for at := range best {
		m.add(&d, at, best[at].holdings, detail{Source: best[at].source})
	}
	slices.SortFunc(d.Phases, func(a, b ledger.Phase) int {
		return compareStages(stage{a.Name, a.Iteration}, stage{b.Name, b.Iteration})
	})
	return d
}

// used returns what the driver counts for processes in a sample.
func (r *Recording) used(sample int, pids []int) ledger.Bytes {
	var sum ledger.Bytes
	for _, g := range r.Samples[sample].GPUs {
		for _, p := range g.Processes {
			if slices.Contains(pids, p.PID) {
				sum += max(p.Used, 0)
			}
		}
	}
	return sum
}

// usedBefore returns what the driver counted for a rank at the last sample before a mark.
func (r *Recording) usedBefore(all moments, rank int, mark samples.Record) ledger.Bytes {
	i, _ := slices.BinarySearchFunc(r.Samples, mark.Time, sample.compareTime)
	if i == 0 || !all.runs(i-1, rank) {
		return 0
	}
	return r.used(i-1, all.rank(i-1, rank).pids)
}
