package job

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
)

// Overrides are the settings in which a variant of a job differs from its request and its files. A zero value changes
// nothing.
type Overrides struct {
	GPUs, Nodes                        int
	Sequence, MicroBatch, Accumulation int
	AnyMicroBatch                      bool   // a search tries several, so none is assumed
	Recompute                          string // one of Recomputes
	FSDP                               string // one of FSDPVersions, or NoFSDP for a request without
	FSDPOffload                        bool
	States                             *Offload // how states are offloaded
	Optimizer                          string   // of the names of a request
	Tier                               Tier     // where the optimizer service holds states, with one of its optimizers

	TensorParallel, ContextParallel, PipelineParallel int
	PipelineSchedule                                  string

	// DeepSpeed is a configuration in place of that of the files. It says the precision.
	DeepSpeed *deepspeed.Config

	// These are for jobs with a DeepSpeed configuration. A device is "none", "cpu"
	// or "nvme".
	ZeROStage                           *int
	OffloadOptimizer, OffloadParameters string
	OverlapReduction                    *bool
}

// NoFSDP leaves FSDP out.
const NoFSDP = "none"

// Request returns a request with the overrides as its flags, for all that flags say.
func (o Overrides) Request(q Request) Request {
	q.GPUs, q.Nodes = cmp.Or(o.GPUs, q.GPUs), cmp.Or(o.Nodes, q.Nodes)
	q.Sequence, q.MicroBatch = cmp.Or(o.Sequence, q.Sequence), cmp.Or(o.MicroBatch, q.MicroBatch)
	q.Accumulation, q.Recompute = cmp.Or(o.Accumulation, q.Accumulation), cmp.Or(o.Recompute, q.Recompute)
	switch o.FSDP {
	case "":
	case NoFSDP:
		q.FSDP = ""
	default:
		q.FSDP = o.FSDP
	}
	q.OffloadParameters = q.OffloadParameters || o.FSDPOffload
	if o.States != nil {
		q.Offload = *o.States
	}
	if o.DeepSpeed != nil {
		q.Precision = ""
	}
	q.Optimizer, q.Offload.Tier = cmp.Or(o.Optimizer, q.Optimizer), cmp.Or(o.Tier, q.Offload.Tier)
	q.TensorParallel = cmp.Or(o.TensorParallel, q.TensorParallel)
	q.ContextParallel = cmp.Or(o.ContextParallel, q.ContextParallel)
	if o.PipelineParallel > 1 {
		q.PipelineParallel, q.PipelineSchedule = o.PipelineParallel, o.PipelineSchedule
	}
	return q
}

// deepSpeed returns the configuration that the file of d would give with the
// overridden values.
func (o Overrides) deepSpeed(d *deepspeed.Config) (*deepspeed.Config, error) {
	values := map[string]any{}
	if o.DeepSpeed != nil {
		d = o.DeepSpeed
	}
	if o.OverlapReduction != nil {
		values["zero_optimization.overlap_comm"] = *o.OverlapReduction
	}
	if o.ZeROStage != nil {
		values["zero_optimization.stage"] = *o.ZeROStage
	}
	if o.OffloadOptimizer != "" {
		values["zero_optimization.offload_optimizer.device"] = o.OffloadOptimizer
	}
	if o.OffloadParameters != "" {
		values["zero_optimization.offload_param.device"] = o.OffloadParameters
	}
	switch {
	case len(values) == 0:
		return d, nil
	case d == nil:
		return nil, fault.Inputf("the flags change ZeRO's stage or offloading, but the job has no DeepSpeed " +
			"configuration").WithHint("add --deepspeed with a file")
	}
	return d.With(values)
}

// Decide decides what a request leaves open. Every error is a *fault.Input. It
// reads no file and changes nothing in the inputs.
func Decide(in *Inputs, o Overrides) (*Job, error) {
	if in.megatron != nil {
		return in.decideMegatron(o)
	}
	deepSpeed, err := o.deepSpeed(in.deepSpeed)
	if err != nil {
		return nil, err
	}
	r := &resolver{Request: o.Request(in.request), Inputs: in, anyMicroBatch: o.AnyMicroBatch,
		job: &Job{Model: in.model, Reference: in.reference, Files: in.files,
			Sharding: Sharding{DeepSpeed: deepSpeed, FSDP: in.fsdp},
			Program:  Program{Allocator: in.request.Allocator}}}
	for _, step := range []func() error{r.framework, r.engine, r.versions, r.hostExperts, r.variables, r.ranks,
		r.single, r.learn, r.batch, r.images, r.freezeParts, r.precision, r.freeze, r.quantization, r.adapter,
		r.optimizer, r.attention, r.recompute, r.loss, r.pipeline, r.parallel, r.sharding, r.unplannedTargets,
		r.answers, r.offload, r.rollout, r.evaluation, r.saving, r.contradictions, r.unplanned} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	r.job.Kernels.GPU = r.job.kernelsOf()
	r.job.Settle()
	if err := r.companions(); err != nil {
		return nil, err
	}
	r.job.Assumptions = r.assumed
	return r.job, nil
}

// resolver decides a job. Its methods decide one setting after the other.
type resolver struct {
	Request
	*Inputs
	job           *Job
	assumed       []string
	anyMicroBatch bool
}

func (r *resolver) assume(format string, arguments ...any) {
	r.assumed = append(r.assumed, fmt.Sprintf(format, arguments...))
}

func (r *resolver) note(notes []recipe.Note) {
	for _, n := range notes {
		r.assume("%v", n)
	}
}

// engine notes what the files say besides their values, and refuses two engines.
func (r *resolver) engine() error {
	if r.training != nil {
		r.note(r.training.Notes)
	}
	if r.launch != nil {
		r.note(r.launch.Notes)
	}
	if d := r.job.DeepSpeed; d != nil {
		if len(d.Unplanned) > 0 {
			return d.Unplanned[0].Where.Inputf("%s, which is not planned yet", d.Unplanned[0].What).
				WithHint("remove it, and expect the job's memory to differ from the plan")
		}
		r.note(d.Notes)
	}
	if r.job.DeepSpeed != nil && (r.job.FSDP != nil || r.Request.FSDP != "") {
		return fault.Inputf("DeepSpeed and FSDP are both configured: only one of them can shard the model").
			WithHint("leave one of them out")
	}
	return nil
}
