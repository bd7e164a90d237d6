package plan

import (
	"slices"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/steptime"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Roads are the ways on which the states of a job can be updated, side by side.
type Roads struct {
	Job *job.Job
	// Passes are the rank's times beside the update; 0 where they are not known.
	Passes   roads.Job
	Rates    roads.Rates
	Roads    []Road
	Megatron []roads.Design
	Missing  []string // without which nothing is said of time
	Best     *Road    // nil where times are missing, or no road fits

	parameters []roads.Parameter // of a rank
}

// Road is one way. Host memory is that of a node, everything else is of one GPU.
type Road struct {
	Name         string
	Host, Pinned ledger.Bytes // of the states, and of what the road needs beside them
	Freed        ledger.Bytes // on the GPU between two steps
	Window       ledger.Bytes // of states on the GPU during a step
	GPU          ledger.Bytes // peak of all that a GPU holds
	Verdict      Result       // of GPU and host
	Step         *roads.Step  // nil where the time is not known
}

// The names of roads. A CPU step can also run behind the passes: CPURoad, and the overlap.
const (
	CPURoad      = "CPU step"
	BackwardRoad = CPURoad + ", overlap " + string(overlap.Backward)
	DiskRoad     = "CPU step, disks" // with the states in files
	ChunkedRoad  = "states in chunks"
	WholeRoad    = "states whole"
	PrefetchRoad = "states whole, prefetch" // before the backward pass
	ResidentRoad = "states on the GPU"
)

// NewRoads compares the roads of a job. The offload says how its states would rest on the host.
func NewRoads(j *job.Job, offload *job.StateOffload, rates roads.Rates, passes roads.Job) (*Roads, error) {
	r := &Roads{Job: j, Rates: rates, Passes: passes}
	r.Passes.Ranks = j.RanksPerNode
	if r.Passes.Backward == 0 {
		r.Passes.Backward = 2 * r.Passes.Forward
	}
	if r.Passes.Forward == 0 && rates.FLOPS > 0 {
		r.Passes.Forward, r.Passes.Backward = passTimes(j, rates.FLOPS)
	}
	o := *offload
	o.Rest, o.Fraction = job.OnGPU, 1
	resident, err := r.planned(o) // it says what the parameters are
	if err != nil {
		return nil, err
	}
	r.findMissing(offload.Tier != nil)
	if err := r.addCPU(*offload); err != nil {
		return nil, err
	}
	o = *offload
	for _, name := range []string{ChunkedRoad, WholeRoad, PrefetchRoad} {
		if name == ChunkedRoad && j.Optimizer.IsTogether() {
			continue
		}
		o.Whole, o.Prefetch = name != ChunkedRoad, name == PrefetchRoad
		if err := r.addStates(name, o); err != nil {
			return nil, err
		}
	}
	o.Fraction = 1
	resident.Name, resident.Window = ResidentRoad, roads.NewLayout(r.parameters, o.Settings).State()
	r.take(resident, func() roads.Step { return roads.Resident(r.parameters, rates) })
	r.choose()
	configuration, err := allocator.ParseConfiguration(j.Allocator, j.Versions.Torch)
	if err != nil {
		return nil, err
	}
	r.Megatron = roads.Megatron(r.parameters, offload.ChunkBytes,
		allocator.NewPinned(configuration, j.Versions.Torch).Rounded)
	return r, nil
}

// findMissing lists the rates that are not known.
func (r *Roads) findMissing(onDisks bool) {
	multiplies := slices.ContainsFunc(r.parameters, func(p roads.Parameter) bool { return p.Operations > 0 })
	for _, rate := range []struct {
		known bool
		what  string
	}{
		{r.Rates.Link.In > 0 && r.Rates.Link.Out > 0, "the link to the GPU (--link-in, --link-out)"},
		{r.Rates.Host > 0, "the memory of the host (--host-bandwidth)"},
		{r.Rates.Device > 0, "the memory of the GPU (--gpu)"},
		{r.Rates.Disk > 0 || !onDisks, "the disks (--disk-bandwidth)"},
		{r.Passes.Forward > 0, "the passes of the trainer (--forward-ms, or --tflops)"},
		{r.Rates.FLOPS > 0 || !multiplies, "the products of Newton-Schulz (--tflops)"},
	} {
		if !rate.known {
			r.Missing = append(r.Missing, rate.what)
		}
	}
}

// choose sets the best road: the trainer waits least, and GPU and host do not lack memory.
func (r *Roads) choose() {
	for i := range r.Roads {
		road := &r.Roads[i]
		if road.Step != nil && road.Verdict != DoesNotFit &&
			(r.Best == nil || road.Step.Exposed < r.Best.Step.Exposed) {
			r.Best = road
		}
	}
}

// planned plans the job with its states at rest somewhere.
func (r *Roads) planned(o job.StateOffload) (Road, error) {
	j := *r.Job
	j.Offload = &o
	p, err := New(&j)
	if err != nil {
		return Road{}, err
	}
	r.parameters = p.offloaded
	return Road{GPU: p.Devices[0].Peak().PeakUsed, Verdict: p.Verdict.Result}, nil
}

// take adds a road, and its time where the rates are known.
func (r *Roads) take(road Road, step func() roads.Step) {
	if len(r.Missing) == 0 {
		s := step()
		road.Step = &s
	}
	r.Roads = append(r.Roads, road)
}

// addStates adds a road on which states rest on the host, and the GPU updates them.
func (r *Roads) addStates(name string, o job.StateOffload) error {
	road, err := r.planned(o)
	if err != nil {
		return err
	}
	layout := roads.NewLayout(r.parameters, o.Settings)
	road.Name = name
	road.Host = (layout.Arena() + layout.Gradients() + layout.Control()) * ledger.Bytes(r.Job.RanksPerNode)
	road.Pinned = road.Host // every arena
	road.Freed, road.Window = layout.Freed(o.Whole), layout.Window(o.Whole)
	r.take(road, func() roads.Step { return layout.Step(r.Rates, r.Passes) })
	return nil
}

// addCPU adds the update by the optimizer service: without overlap, and behind the passes. One rank alone updates
// behind the backward pass, as the client does. The service has no format for other optimizers than Adam. A rank has
// the parameters that it has on the other roads: under DistributedDataParallel all of them, without sharding="zero1".
func (r *Roads) addCPU(o job.StateOffload) error {
	var elements int64
	for i := range r.parameters {
		elements += r.parameters[i].Elements
	}
	if !kernelAdam(r.Job.Optimizer.Name) || elements == 0 {
		if o.Tier != nil {
			return fault.Inputf("--tier is about AdamW's states in the optimizer service, and this job trains with %s",
				r.Job.Optimizer.Name).WithHint("leave --tier out")
		}
		return nil
	}
	f := serviceFormat(r.parameters[0].Own/r.parameters[0].Elements, o.Moments)
	layout, err := shard.NewLayout(f, shard.DefaultChunk, shard.Uniform(f, elements))
	if err != nil {
		return nil // more than one shard can have
	}
	update := roads.CPU{Traffic: ledger.Bytes(f.TrafficBytes(elements)), Layers: steptime.Layers(r.Job),
		Gradients: ledger.Bytes(elements * f.Gradient.Size()), Parameters: ledger.Bytes(elements * f.Parameter.Size())}
	modes := []overlap.Mode{overlap.None, overlap.Forward}
	if r.Job.Clip == 0 && r.Job.World == 1 {
		modes = append(modes, overlap.Backward)
	}
	config := engine.ShardConfig{Layout: layout}
	tier := o.Tier
	o.Tier = nil
	if err := r.addService(CPURoad, o, config, update, modes); err != nil {
		return err
	}
	if err := r.addSpeculated(o, config, update, elements); err != nil || tier == nil {
		return err
	}
	if err := tier.Put(&config, r.Job.RanksPerNode); err != nil {
		return err
	}
	moved := config.TierBytes()
	update.Disk = moved.StepReads + moved.StepWrites
	return r.addService(DiskRoad, o, config, update, modes[:2]) // a tier has no steps behind the backward pass
}

// addSpeculated adds the update behind the backward pass of a job that clips: with a log that can take it back. Its
// time is that of a step that is not clipped. Nobody has measured it on Arm, which the hosts of NVLink-C2C have.
func (r *Roads) addSpeculated(o job.StateOffload, config engine.ShardConfig, update roads.CPU, elements int64) error {
	const fastestPCIe = 128 // GB/s in each direction, of PCIe 6
	if r.Job.Clip == 0 || r.Job.World > 1 || r.Job.GPU.Speed.Host > fastestPCIe {
		return nil
	}
	if config.Retracts = true; config.MayRetract() != nil {
		return nil
	}
	update.Traffic += ledger.Bytes(elements * overlap.SpeculatedBytes)
	update.Arithmetic = overlap.SpeculatedUpdate(elements, roads.AssumedCores)
	return r.addService(CPURoad, o, config, update, []overlap.Mode{overlap.Backward})
}

// addService adds roads on which the optimizer service holds a shard for each rank.
func (r *Roads) addService(name string, o job.StateOffload, config engine.ShardConfig, update roads.CPU,
	modes []overlap.Mode) error {
	o.Rest, o.Fraction = job.InService, 1
	var pinned ledger.Bytes
	for _, arena := range config.Arenas() {
		o.Service += arena.Size
		if arena.Component == ledger.Gradients || arena.Component == ledger.Parameters {
			pinned += arena.Size
		}
	}
	road, err := r.planned(o)
	if err != nil {
		return err
	}
	ranks := ledger.Bytes(r.Job.RanksPerNode)
	road.Host, road.Pinned = o.Service*ranks, pinned*ranks
	road.Freed = roads.NewLayout(r.parameters, roads.Settings{Fraction: 1}).State()
	for _, update.Mode = range modes {
		road.Name = name
		if update.Mode != overlap.None {
			road.Name += ", overlap " + string(update.Mode)
		}
		r.take(road, func() roads.Step { return r.Rates.CPU(update, r.Passes) })
	}
	return nil
}

// serviceFormat returns the format in which the service holds states for parameters of so many bytes: with split master
// weights for 16-bit parameters.
func serviceFormat(parameter int64, moments dtype.Type) kernel.Format {
	f := kernel.Format{Algorithm: kernel.Adam, State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16,
		Gradient: dtype.BF16}
	if moments == dtype.BF16 {
		f.Moments = kernel.MomentsBF16
	}
	if parameter == dtype.F32.Size() {
		f.State, f.Parameter, f.Gradient = kernel.FP32, dtype.F32, dtype.F32
	}
	return f
}

// passTimes returns the times of the passes of a micro batch at a number of operations a second. A token takes 2
// operations for each parameter that it is multiplied by, and twice as many in the backward pass. Recomputed
// activations take those of the forward pass once more.
func passTimes(j *job.Job, flops float64) (forward, backward time.Duration) {
	_, active := steptime.Active(j)
	tokens := float64(j.MicroBatch*j.Sequence) / float64(j.Parallel.Tensor*j.Parallel.Context)
	forward = time.Duration(2 * active * tokens / flops * 1e9)
	backward = 2 * forward
	if j.Recompute != nil && j.Recompute.Selective == 0 {
		backward += forward
	}
	return forward, backward
}
