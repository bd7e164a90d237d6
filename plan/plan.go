// Package plan predicts what every device of a training job holds in every
// phase, and why. It replays the job's allocations and frees in their order,
// without the bytes.
package plan

import (
	"errors"
	"fmt"
	"slices"

	"plimsoll/allocator"
	"plimsoll/fault"
	"plimsoll/ledger"
)

// Plan is the predicted memory of a job.
type Plan struct {
	Job     *Job
	Trained int64 // elements of trainable parameters
	Devices []ledger.Device
	Verdict Verdict
	// Hosted lists the size of the optimizer state in Plimsoll's own formats, in
	// the memory of one node. It is nil for optimizers that the formats do not hold.
	Hosted []Hosted
}

// Result says whether a job fits.
type Result string

// The results. A tight job fits only if the allocator loses nothing to
// fragmentation, or it leaves less than a twentieth of the capacity free.
const (
	Fits       Result = "fits"
	Tight      Result = "tight"
	DoesNotFit Result = "does not fit"
	Unknown    Result = "unknown" // no capacity was given
)

// Verdict is the result for the device that is nearest to its limit.
type Verdict struct {
	Result    Result
	Device    ledger.Kind
	Phase     ledger.PhaseName
	Iteration ledger.Iteration
	Needed    ledger.Bytes
	Least     ledger.Bytes // Needed without fragmentation in the allocator
	Capacity  ledger.Bytes
}

// New plans a job.
func New(j *Job) (*Plan, error) {
	// At the GPU's capacity the allocator frees cached blocks before it runs out
	// of memory. If the job still does not fit, the plan shows what it needs
	// without a limit.
	if j.GPU.Memory > 0 && !j.OnCPU {
		p, err := newWithin(j, j.GPU.Memory)
		var full *allocator.OutOfMemory
		if !errors.As(err, &full) {
			return p, err
		}
	}
	return newWithin(j, 0)
}

// newWithin plans a job on a GPU of a capacity; 0 is no limit.
func newWithin(j *Job, capacity ledger.Bytes) (*Plan, error) {
	cache, err := j.allocator(capacity)
	if err != nil {
		return nil, err
	}
	host := newTrace(&heap{Glibc: allocator.NewGlibc()})
	gpu := host
	if !j.OnCPU {
		gpu = newTrace(cache)
	}
	s := newSimulation(j, gpu, host)
	s.run()
	for _, t := range []*trace{gpu, host} {
		if err := t.failure(capacity); err != nil {
			return nil, err
		}
	}
	p := &Plan{Job: j, Trained: j.Model.Elements()}
	if j.Adapter != nil {
		p.Trained = s.trainedElements()
	}
	if !j.OnCPU {
		p.Devices = append(p.Devices, s.device())
	}
	p.Devices = append(p.Devices, s.node())
	p.Hosted = s.hosted()
	p.judge()
	return p, nil
}

// failure returns the error of an allocation that failed, or nil. Without a
// limit only sizes fail that PyTorch refuses on every GPU.
func (t *trace) failure(capacity ledger.Bytes) error {
	var full *allocator.OutOfMemory
	switch {
	case t.failed == nil:
		return nil
	case !errors.As(t.failed, &full):
		return &fault.Internal{Err: fmt.Errorf("the plan's own trace is inconsistent: %w", t.failed)}
	case capacity > 0:
		return t.failed
	}
	return &fault.Input{What: fmt.Sprintf("the job holds more than %v on a GPU: %v are allocated, and %v more "+
		"are wanted",
		full.Free+full.Reserved, full.Allocated, full.Requested),
		Hint: "give a smaller --seq-len or --micro-batch"}
}

// device returns the GPU of a rank.
func (s *simulation) device() ledger.Device {
	d := ledger.Device{Kind: ledger.GPU, Name: s.GPU.Name, Count: s.World, Capacity: s.GPU.Memory, Outside: s.outside(),
		Phases: s.gpu.phases}
	finish(&d, s.reasonsOf(ledger.GPU))
	return d
}

// node returns the memory of a node, which is the sum over its ranks.
func (s *simulation) node() ledger.Device {
	d := ledger.Device{Kind: ledger.Host, Name: "host", Count: s.Nodes, Capacity: s.HostMemory, Phases: s.host.phases,
		Outside: []ledger.Holding{s.process()}}
	for i := range d.Phases {
		times(&d.Phases[i], ledger.Bytes(s.RanksPerNode))
	}
	finish(&d, s.reasonsOf(ledger.Host))
	each := d.Peak().PeakUsed / ledger.Bytes(s.RanksPerNode)
	for i := range s.NUMANodes {
		ranks := s.RanksPerNode / s.NUMANodes
		if i < s.RanksPerNode%s.NUMANodes {
			ranks++
		}
		d.NUMANodes = append(d.NUMANodes, ledger.NUMANode{
			Node: i, Ranks: ranks, PeakUsed: each * ledger.Bytes(ranks),
			Capacity: s.HostMemory / ledger.Bytes(s.NUMANodes),
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
	for _, list := range [][]ledger.Holding{p.Components, p.End} {
		for i := range list {
			list[i].Bytes *= ranks
		}
	}
}

// finish adds the memory outside the allocator to every peak, and the reasons.
func finish(d *ledger.Device, reasons map[ledger.Component]string) {
	var outside ledger.Bytes
	for _, c := range d.Outside {
		outside += c.Bytes
	}
	for i := range d.Phases {
		p := &d.Phases[i]
		p.PeakUsed = p.PeakReserved + outside
		for _, list := range [][]ledger.Holding{p.Components, p.End} {
			for k := range list {
				list[k].Why = reasons[list[k].Component]
			}
		}
	}
}

// least returns what a phase needs at its peak without fragmentation.
func least(p *ledger.Phase) ledger.Bytes { return p.PeakUsed - p.PeakReserved + p.PeakAllocated }

// judge sets the verdict: the result of the device that is nearest to its limit.
func (p *Plan) judge() {
	p.Verdict = Verdict{Result: Unknown}
	rank := map[Result]int{Unknown: 0, Fits: 1, Tight: 2, DoesNotFit: 3}
	var nearest float64
	for i := range p.Devices {
		d := &p.Devices[i]
		if d.Capacity == 0 {
			continue
		}
		phase := d.Peak()
		result := Fits
		switch {
		case slices.ContainsFunc(d.Phases, func(phase ledger.Phase) bool { return least(&phase) > d.Capacity }):
			result = DoesNotFit
		case phase.PeakUsed > d.Capacity/20*19:
			result = Tight
		}
		filled := float64(phase.PeakUsed) / float64(d.Capacity)
		if r := rank[result] - rank[p.Verdict.Result]; r > 0 || r == 0 && filled > nearest {
			nearest = filled
			p.Verdict = Verdict{result, d.Kind, phase.Name, phase.Iteration, phase.PeakUsed, least(phase), d.Capacity}
		}
	}
}
