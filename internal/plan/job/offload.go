package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/tier"
)

// Offload is the request for plimsoll.torch.StateOffload: the update runs on the GPU, and the states rest on the host.
type Offload struct {
	What     string       `json:",omitempty"` // "" or OffloadStates
	Mode     string       `json:",omitempty"` // one of OffloadModes
	Chunk    ledger.Bytes `json:",omitempty"`
	Fraction float64      `json:",omitempty"` // 0 is not given
	Master   string       `json:",omitempty"` // one of Masters
	Moments  string       `json:",omitempty"` // one of OffloadMoments
	// NoRecovery keeps neither gradients nor parameters on the host.
	NoRecovery bool `json:",omitempty"`
	// Tier is where the optimizer service holds the states, of a job that it updates.
	Tier Tier `json:",omitzero"`
	// Tenants is how many adapters have states in the service at a time; 0 and 1 are one.
	Tenants int `json:",omitempty"`
}

// OffloadStates is what can be offloaded beside what files say.
const OffloadStates = "states"

// The allowed values of an offload.
var (
	OffloadModes   = []string{"chunked", "whole"}
	Masters        = []string{"none", "fp32", "split"}
	OffloadMoments = []string{"fp32", "bf16"}
)

// StateOffload is plimsoll.torch.StateOffload with every setting decided.
type StateOffload struct {
	roads.Settings
	// Master is the type of master weights beside 16-bit parameters: Invalid for none, F32, or BF16 for the low halves
	// that complete bf16 parameters.
	Master  dtype.Type
	Moments dtype.Type // that states of the parameter's shape have on the host, if they are fp32 in the update
	// Rest is where the states are between two steps.
	Rest Rest
	// Service is what the optimizer service holds for a rank that it updates, and Format how it holds that; only with
	// InService. With a format the bytes follow from the parameters of the rank.
	Service ledger.Bytes
	Format  *kernel.Format
	Tier    *Tier // nil: the service has all states in memory
	Tenants int   // each with values and states of its own
}

// Rest is where states are between two steps, and with it where they are updated.
type Rest int

// The places. StateOffload is OnHost; the others are what package plan compares it with.
const (
	OnHost    Rest = iota // updated on the GPU
	OnGPU                 // updated there
	InService             // updated by the optimizer service, on the CPU
)

// offload sets what rests on the host.
func (r *resolver) offload() error {
	if name, format, _ := strings.Cut(r.Request.Optimizer, "/"); name == ServiceOptimizer {
		if err := r.inService(format); err != nil {
			return err
		}
		return r.job.refuseOffload()
	}
	o := r.Request.Offload
	s, err := o.decide(r.job)
	switch {
	case err != nil:
		return err
	case o == (Offload{}):
		return nil
	case o.Tier != (Tier{}):
		return fault.Inputf("--tier says where the optimizer service holds the states, and the optimizer is %s",
			r.job.OptimizerName()).WithHint("--optimizer " + ServiceOptimizer)
	case o.Tenants != 0:
		return fault.Inputf("--tenants counts states of the optimizer service, and the optimizer is %s",
			r.job.OptimizerName()).WithHint("--optimizer " + ServiceOptimizer)
	case o.What == "":
		return fault.Inputf("the flags say how states are offloaded, but not that they are").
			WithHint("add --offload states")
	}
	if o.Master == "" && s.Master != dtype.Invalid {
		r.assume("split master weights: --master was not given, and they are the default of plimsoll.torch.Muon")
	}
	if s.Recovery && s.Fraction < 1 {
		r.assume("no recovery: with --offload-fraction below 1 a part of the states is on the GPU alone")
	}
	r.job.Offload = s
	return nil
}

// Decide decides how the states of a job would be offloaded, whether they are or not.
func (o Offload) Decide(j *Job) (*StateOffload, error) {
	s, err := o.decide(j)
	if err != nil {
		return nil, err
	}
	s.Whole = s.Whole || j.Optimizer.IsTogether()
	with := *j
	with.Offload = s
	return s, with.refuseOffload()
}

// CheckChoices refuses words that no flag of an offload knows.
func (o Offload) CheckChoices() error {
	for _, choice := range []struct {
		flag, value string
		known       []string
	}{
		{"offload", o.What, []string{OffloadStates}}, {"offload-mode", o.Mode, OffloadModes},
		{"master", o.Master, Masters}, {"offload-moments", o.Moments, OffloadMoments},
	} {
		if err := checkChoice(choice.flag, choice.value, choice.known); err != nil {
			return err
		}
	}
	return nil
}

// mostTenants is more than any host holds. The bytes of as many tenants are a number that programs can have.
const mostTenants = 1_000_000

func (o Offload) decide(j *Job) (*StateOffload, error) {
	s := &StateOffload{Moments: dtype.F32, Settings: roads.Settings{Whole: o.Mode == "whole",
		ChunkBytes: cmp.Or(o.Chunk, roads.DefaultChunk), Fraction: cmp.Or(o.Fraction, 1), Recovery: !o.NoRecovery}}
	if err := o.CheckChoices(); err != nil {
		return nil, err
	}
	if o.Chunk < 0 || !(s.Fraction > 0 && s.Fraction <= 1) {
		return nil, fault.Inputf("--offload-chunk is %v and --offload-fraction %v: expected a size, and a fraction "+
			"above 0 and up to 1", o.Chunk, s.Fraction)
	}
	switch {
	case o.Tenants < 0:
		return nil, fault.Inputf("--tenants is %d, expected 1 or more", o.Tenants)
	case o.Tenants > mostTenants:
		return nil, fault.Inputf("--tenants is %d, expected at most %d", o.Tenants, mostTenants)
	case o.Tenants > 1 && o.Tier.Disks > 0:
		return nil, fault.Inputf("--tenants is given, and --tier: tenants that leave the memory become " +
			"checkpoints").
			WithHint("leave --tier out, and count the tenants that are in memory")
	}
	s.Tenants = max(1, o.Tenants)
	switch t := o.Tier; {
	case t.Disks > 0:
		t.Memory = cmp.Or(t.Memory, tier.DefaultMemory)
		s.Tier = &t
	case t.Memory > 0:
		return nil, fault.Inputf("--memory is about the window of a tier, and there is no --tier").
			WithHint("add --tier /mnt/nvme")
	}
	switch o.Master {
	case "fp32":
		s.Master = dtype.F32
	case "split":
		s.Master = dtype.BF16
	case "":
		if j.Optimizer.IsMuon() && j.stored() == dtype.BF16 {
			s.Master = dtype.BF16
		}
	}
	if o.Moments == "bf16" {
		s.Moments = dtype.BF16
	}
	return s, nil
}

// stored returns the type of the trained parameters.
func (j *Job) stored() dtype.Type {
	if j.Adapter != nil {
		return j.AdapterType
	}
	return j.ParameterType
}

func checkChoice(flag, value string, known []string) error {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	hint := ""
	if flag == "offload" {
		hint = "for DeepSpeed's offload give --zero and --zero-offload; for FSDP's, --fsdp and --fsdp-offload"
	}
	return fault.Inputf("--%s is %q, expected %s", flag, value, fault.OneOf(known...)).WithHint(hint)
}

// refuseOffload refuses jobs whose states plimsoll.torch.StateOffload cannot hold.
func (j *Job) refuseOffload() error {
	o := j.Offload
	if o == nil {
		return nil
	}
	stored := j.stored()
	flag, wrapper := "--offload states", "StateOffload wraps one of torch"
	if o.Rest == InService {
		flag, wrapper = "--optimizer "+ServiceOptimizer, "plimsoll.torch.AdamW is one of the trainer"
	}
	return refuse(
		contradiction{j.OnCPU, "the states are to rest on the host, but the job has no GPU that they could leave",
			"leave " + flag + " or --cpu out"},
		contradiction{j.DeepSpeed != nil, "DeepSpeed makes the optimizer of its engine itself, but " + wrapper,
			"leave " + flag + " out for DeepSpeed's own offload, or shard by --fsdp 2 instead"},
		contradiction{j.FSDP != nil && j.FSDP.OffloadParameters, "FSDP has its shards on the host and updates them " +
			"there: no states are on the GPU", "leave --fsdp-offload or " + flag + " out"},
		contradiction{j.Optimizer.Managed, fmt.Sprintf("%s keeps its states in CUDA's managed memory, which "+
			"the driver moves", j.Optimizer.Name), "use the optimizer without paging"},
		contradiction{j.StepsInBackward, "the optimizer steps in the backward pass",
			"remove optimizer_in_bwd, or leave --offload states out"},
		contradiction{j.Optimizer.needsFull(), fmt.Sprintf("StateOffload was not tried with %s", j.Optimizer.Name),
			"leave --offload states out"},
		contradiction{j.Optimizer.StepsInBackward(), "LOMO has no state", "leave --offload states out"},
		contradiction{!o.Whole && o.Rest == OnHost && j.Optimizer.IsTogether(), fmt.Sprintf("%s updates a parameter "+
			"by what it finds in others, so its states cannot come in chunks", j.Optimizer.Name),
			"give --offload-mode whole"},
		contradiction{o.Master == dtype.BF16 && stored != dtype.BF16, fmt.Sprintf("split master weights complete bf16 "+
			"parameters, but the parameters are %v", stored), "give --master none, or --precision bf16"},
		contradiction{o.Master == dtype.F32 && stored == dtype.F32, "fp32 parameters need no master weights",
			"give --master none"},
	)
}

// States returns what the law of package roads needs to know of a rank's parameters.
func (o *StateOffload) States(j *Job, parameters []*autograd.Parameter) []roads.Parameter {
	list := make([]roads.Parameter, len(parameters))
	for i, p := range parameters {
		own := p.Elements * p.DType.Size()
		r := roads.Parameter{Elements: p.Elements, Own: own, Gradient: own}
		updated := *p
		if o.Master != dtype.Invalid { // the optimizer sees the parameters in fp32
			updated.DType = dtype.F32
			r.Master = p.Elements * o.Master.Size()
			r.Temporary = o.proxies() * roads.Allocated(p.Elements*dtype.F32.Size())
		}
		for _, state := range j.Optimizer.States(p) {
			r.Staying += state.Bytes
		}
		for _, state := range j.Optimizer.States(&updated) {
			bytes := state.Bytes
			if o.Moments == dtype.BF16 && bytes == p.Elements*dtype.F32.Size() {
				bytes /= 2
				r.Temporary += roads.Allocated(state.Bytes)
			}
			r.States = append(r.States, bytes)
		}
		if j.Optimizer.orthogonalizes(p) {
			stack := max(1, p.Matrices)
			r.Operations = roads.NewtonSchulz(stack, p.Rows, p.Elements/(stack*p.Rows))
		}
		switch {
		case j.Optimizer.CountsOnGPU(p):
			r.States = append(r.States, dtype.F32.Size())
		case j.Optimizer.Counts(p):
			r.Scalars = 1
		}
		list[i] = r
	}
	return list
}

// proxies returns how many fp32 tensors of the parameter's shape an update with master weights makes for a moment: the
// gradient, and the parameter that two halves make.
func (o *StateOffload) proxies() int64 {
	if o.Master == dtype.BF16 {
		return 2
	}
	return 1
}

// Name describes the offload.
func (o *StateOffload) Name() string {
	if o.Rest == InService {
		name := "plimsoll.torch.AdamW, states on the host in the format " + o.formatName()
		if o.Tier != nil {
			name += ", in files on " + ledger.Plural(o.Tier.Disks, "disk")
		}
		if o.Tenants > 1 {
			name += fmt.Sprintf(", of %d tenants", o.Tenants)
		}
		return name
	}
	text := fmt.Sprintf("states on the host, in chunks of %v", o.ChunkBytes)
	if o.Whole {
		text = "states on the host, whole in the step"
	}
	if o.Fraction < 1 {
		text += fmt.Sprintf(", %.0f %% of them", 100*o.Fraction)
	}
	switch o.Master {
	case dtype.F32:
		text += ", fp32 master weights"
	case dtype.BF16:
		text += ", split master weights"
	}
	if o.Moments == dtype.BF16 {
		text += ", bf16 moments"
	}
	if !o.Recovery {
		text += ", without recovery"
	}
	return text
}
