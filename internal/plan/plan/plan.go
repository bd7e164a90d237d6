// Package plan predicts what every device of a training job holds in every
// phase, and whether the job fits.
package plan

import (
	"cmp"
	"errors"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/simulate"
	"plimsoll/internal/state/engine"
)

// Plan is the predicted memory of a job.
type Plan struct {
	Job *job.Job
	// Elements are those of all parameters, and Trained those that are trained.
	Elements, Trained int64
	Devices           []ledger.Device
	Verdict           Verdict
	// Spread says how far a run may be from the plan.
	Spread Spread
	// Estimate is the peak of a GPU with an estimate of activations. It is 0 if the
	// plan has them.
	Estimate ledger.Bytes
	// StateFormats lists the size of the optimizer state in Plimsoll's own formats, in
	// the memory of one node. It is nil for optimizers that the formats do not hold.
	StateFormats []StateFormat
	// Tier is what the disks of a node hold and move; nil where all states are in memory.
	Tier      *Tier
	offloaded []roads.Parameter // of a rank, if the job offloads states
	pinned    ledger.Bytes      // of a node, of a job of Megatron-LM
}

// Result says whether a job fits.
type Result string

// The results. A job fits if the upper end of its interval does, and does not fit if the lower end does not. A tight
// job may fit: its interval has the capacity within it.
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
	Rank      int // the first of those that have such a device
	Phase     ledger.PhaseName
	Iteration ledger.Iteration
	Needed    ledger.Bytes // what the job takes of a device that has just enough
	Least     ledger.Bytes // Needed without fragmentation in the allocator
	Capacity  ledger.Bytes
	// Stops is the first phase that lacks memory, where a run would stop; nil for a job whose plan fits.
	Stops *ledger.Phase
	// Lower and Upper are the ends of the device's interval. Source makes it widest.
	Lower, Upper ledger.Bytes
	Source       string
}

// Lacks returns what the device lacks by the plan, the middle of its interval; 0 for one that has enough.
func (v *Verdict) Lacks() ledger.Bytes { return max(0, v.Needed-v.Capacity) }

// Tier is where the optimizer service holds states that are not in memory.
type Tier struct {
	Disks int // of a node
	engine.TierBytes
}

// New plans a job. If the operations of the model are unknown, the plan is without
// activations, and only its estimate has them.
func New(j *job.Job) (*Plan, error) {
	p, err := withOperations(j)
	if err == nil {
		err = p.widenBySamples(j)
	}
	if err != nil || j.Model.Network.Opaque == nil {
		return p, err
	}
	with := *j
	with.Model = j.Model.EstimatesActivations()
	estimated, err := withOperations(&with)
	if err != nil {
		return nil, err
	}
	p.Estimate = estimated.Devices[0].Peak().PeakUsed
	Widen(&p.Devices[0], ledger.Source{Name: "activations", Above: p.Estimate - p.Devices[0].Peak().PeakUsed,
		Reason: "the operations of the model are unknown: every matrix may keep its input and result in fp32"})
	if p.Verdict.Result != DoesNotFit {
		p.Verdict.Result = Unknown
	}
	return p, nil
}

// Within plans a job on its GPU only. It returns no plan for one that needs more than the GPU has, which it finds out
// in a part of the time of New. Of a pipeline it plans the stages that may hold most.
func Within(j *job.Job) (*Plan, error) {
	simulated := simulate.RunHeaviest
	if j.Adapter != nil || j.Offload != nil {
		simulated = simulate.Run // such a plan counts what all stages train
	}
	p, err := newWithin(j, simulate.Limit{Capacity: j.GPU.Memory}, simulated)
	if errors.As(err, new(*allocator.OutOfMemory)) {
		return nil, nil
	}
	return p, err
}

// LastStage plans the last pipeline stage of a job of Megatron-LM only.
func LastStage(j *job.Job) (*Plan, error) { return limited(j, simulate.RunLast) }

// withOperations plans a job with the operations that its model has.
func withOperations(j *job.Job) (*Plan, error) { return limited(j, simulate.Run) }

// limited plans what a simulator runs of a job on its GPU, as PyTorch would: the allocator frees cached blocks before
// it runs out of memory. A GPU that is too small even so gets what it lacks then, and the plan goes on.
func limited(j *job.Job, simulated simulator) (*Plan, error) {
	return newWithin(j, simulate.Limit{Capacity: j.GPU.Memory, Grows: true}, simulated)
}

// simulator simulates a job on GPUs with a limit.
type simulator func(*job.Job, simulate.Limit) ([]simulate.RankClass, error)

// newWithin plans a job on a GPU with a limit.
func newWithin(j *job.Job, limit simulate.Limit, simulated simulator) (*Plan, error) {
	classes, err := simulated(j, limit)
	if err != nil {
		return nil, err
	}
	var trained int64
	for _, c := range classes {
		trained += c.Trained
	}
	p := &Plan{Job: j, Elements: j.Model.Elements(), Trained: j.Model.Elements(),
		StateFormats: stateFormats(j, trained), offloaded: classes[0].Offloaded}
	if o := j.Offload; o != nil && o.Tier != nil && o.Format != nil {
		each, err := o.TierBytes(j, classes[0].Trained)
		if err != nil {
			return nil, err
		}
		p.Tier = &Tier{o.Tier.Disks, each.Times(j.RanksPerNode)}
	}
	if j.Adapter != nil {
		p.Trained = trained
	}
	if j.Megatron != nil && j.Megatron.Adapter != nil {
		p.Trained = j.Megatron.Trained()
	}
	if j.HostExperts != nil {
		p.Elements += j.HostExperts.Elements
	}
	p.Spread = spreadOf(j, classes[0])
	for _, c := range classes {
		if c.GPU != nil {
			p.Devices = append(p.Devices, gpuOf(j, c))
			spreadOf(j, c).setIntervals(p.Devices[len(p.Devices)-1:])
		}
	}
	gpus := len(p.Devices)
	if j.Pipeline != nil || j.Megatron != nil {
		classes = []simulate.RankClass{largestOnHost(classes, j.World)}
	}
	for _, c := range classes {
		p.pinned = c.Pinned * ledger.Bytes(c.RanksPerNode)
		p.Devices = append(p.Devices, nodeOf(j, c))
	}
	p.Spread.setIntervals(p.Devices[gpus:])
	p.widenByRelease(&p.Devices[gpus], classes[0])
	ShareMemory(j.GPU, j.RanksPerNode, p.Devices[:gpus], p.Devices[gpus:])
	setOrigins(p.Devices, originsOf(j, classes[0].Engine))
	p.judge()
	return p, nil
}

// largestOnHost returns the class that needs most host memory, as if all ranks were of it: a node may have ranks of
// several pipeline stages.
func largestOnHost(classes []simulate.RankClass, world int) simulate.RankClass {
	largest := slices.MaxFunc(classes, func(a, b simulate.RankClass) int {
		return cmp.Compare(peakOf(a.Host), peakOf(b.Host))
	})
	largest.First, largest.Ranks = 0, world
	return largest
}

// least returns what a phase needs at its peak without fragmentation.
func least(p *ledger.Phase) ledger.Bytes { return p.PeakUsed - p.PeakReserved + p.PeakAllocated }

// Held returns what the fullest device of a kind holds at its peak or in a phase, and whether there is one. In a phase
// the cache of PyTorch's allocator does not count: the allocator frees it before it runs out.
func (p *Plan) Held(kind ledger.Kind, phase *ledger.PhaseName) (most ledger.Bytes, ok bool) {
	for i := range p.Devices {
		d := &p.Devices[i]
		switch {
		case d.Kind != kind:
		case phase == nil:
			most, ok = max(most, d.Peak().PeakUsed), true
		default:
			for k := range d.Phases {
				if d.Phases[k].Name == *phase {
					most, ok = max(most, least(&d.Phases[k])), true
				}
			}
		}
	}
	return most, ok
}

// Lacks reports whether a device is too small for the plan, or may be.
func (p *Plan) Lacks() bool { return p.Verdict.Result == DoesNotFit || p.Verdict.Result == Tight }

// judge sets the verdict.
func (p *Plan) judge() { p.Verdict = Judge(p.Devices) }

// Judge returns the result of the device that is nearest to its limit.
func Judge(devices []ledger.Device) Verdict {
	verdict := Verdict{Result: Unknown}
	rank := map[Result]int{Unknown: 0, Fits: 1, Tight: 2, DoesNotFit: 3}
	var nearest float64
	for i := range devices {
		d := &devices[i]
		if d.Capacity == 0 {
			continue
		}
		phase := d.Peak()
		result := resultOf(d)
		filled := float64(d.Interval.Upper) / float64(d.Capacity)
		if r := rank[result] - rank[verdict.Result]; r > 0 || r == 0 && filled > nearest {
			nearest = filled
			verdict = Verdict{Result: result, Device: d.Kind, Rank: d.Rank, Phase: phase.Name,
				Iteration: phase.Iteration, Needed: phase.PeakUsed, Least: least(phase), Capacity: d.Capacity,
				Lower: d.Interval.Lower, Upper: d.Interval.Upper, Stops: stopsIn(d)}
			if source := d.Interval.Largest(); source != nil {
				verdict.Source = source.Name
			}
		}
	}
	return verdict
}

// resultOf compares the interval of a device with its capacity.
func resultOf(d *ledger.Device) Result {
	switch {
	case d.Interval.Lower > d.Capacity || d.Interval.Upper == 0 && d.Peak().PeakUsed > d.Capacity:
		return DoesNotFit
	case d.Interval.Upper > d.Capacity:
		return Tight
	}
	return Fits
}

// stopsIn returns the first phase that takes more than a device has, or nil.
func stopsIn(d *ledger.Device) *ledger.Phase {
	for i := range d.Phases {
		if d.Phases[i].PeakUsed > d.Capacity {
			return &d.Phases[i]
		}
	}
	return nil
}

func peakOf(m simulate.Memory) ledger.Bytes {
	var peak ledger.Bytes
	for _, p := range m.Phases {
		peak = max(peak, p.PeakReserved)
	}
	return peak
}
