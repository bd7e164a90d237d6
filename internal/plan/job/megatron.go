package job

import (
	"fmt"
	"maps"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/forward"
)

// MegatronArguments are what a request says of a training with Megatron-LM.
type MegatronArguments struct {
	Megatron        string  `json:",omitempty"` // arguments as they are typed, or a file with them
	Vocabulary      int     `json:",omitempty"` // tokens, before padding
	ExpertImbalance float64 `json:",omitempty"` // tokens of the fullest rank of experts by the mean; 0 is 1
	// Arguments go before those of the file.
	Arguments []recipe.Argument `json:",omitempty"`
}

// onlyMegatron are the flags that say nothing without Megatron-LM's arguments.
var onlyMegatron = map[string]string{
	"expert-imbalance": "other plans divide tokens evenly among experts, and their interval has room for a fuller rank",
	"vocabulary":       "other models have their vocabulary in config.json",
}

// unused refuses what a plan of any other program would not read.
func (a MegatronArguments) unused() error {
	given := map[string]bool{"expert-imbalance": a.ExpertImbalance != 0, "vocabulary": a.Vocabulary != 0}
	for _, name := range slices.Sorted(maps.Keys(onlyMegatron)) {
		if given[name] {
			return fault.Inputf("--%s is given without --megatron", name).WithHint(onlyMegatron[name])
		}
	}
	return nil
}

// FindMegatron takes the arguments of Megatron-LM from among the configurations of unknown kind.
func (q *Request) FindMegatron() {
	isMegatron := func(path string) bool {
		flag, err := recipe.Detect(path, q.Texts)
		return err == nil && flag == recipe.MegatronFlag
	}
	if at := slices.IndexFunc(q.Configs, isMegatron); at >= 0 && q.Megatron == "" {
		q.Megatron, q.Configs = q.Configs[at], slices.Concat(q.Configs[:at], q.Configs[at+1:])
	}
}

// readMegatron reads the arguments of Megatron-LM, which say all of the job but its machine.
func (in *Inputs) readMegatron() (err error) {
	q := in.request
	if len(q.Configs) > 0 {
		return fault.Inputf("%s is given beside --megatron", q.Configs[0]).WithHint("leave one of the two out")
	}
	if q.ExpertImbalance != 0 && !(q.ExpertImbalance >= 1) {
		return fault.Inputf("--expert-imbalance is %v, expected 1 or more", q.ExpertImbalance)
	}
	if in.megatron, err = recipe.ReadMegatron(q.Megatron, q.Texts); err == nil && len(q.Arguments) > 0 {
		in.megatron, err = in.megatron.With(q.Arguments)
	}
	return err
}

// decideMegatron decides a job of Megatron-LM. Of the overrides it takes those of the machine.
func (in *Inputs) decideMegatron(o Overrides) (*Job, error) {
	if o != (Overrides{GPUs: o.GPUs, Nodes: o.Nodes, AnyMicroBatch: o.AnyMicroBatch}) {
		return nil, fault.Inputf("arguments of Megatron-LM say how the job is trained").WithHint("change an argument")
	}
	q := o.Request(in.request)
	torch, err := q.torchRelease()
	if err != nil {
		return nil, err
	}
	device, err := q.device()
	if err != nil {
		return nil, err
	}
	if err := asks(in.megatron.UnknownRanks, q); err != nil {
		return nil, err
	}
	m, err := megatron.Decide(in.megatron, megatron.Request{World: int64(q.GPUs) * int64(max(1, q.Nodes)),
		PerNode: int64(q.GPUs), Vocabulary: int64(q.Vocabulary), Imbalance: q.ExpertImbalance, GPU: device,
		Torch: torch})
	if err != nil {
		return nil, err
	}
	j := OfMegatron(m)
	j.HostMemory = q.HostMemory
	set := variables{}
	set.add(in.megatron.Environment)
	if err := seesNone(set[recipe.VisibleVariable]); err != nil {
		return nil, err
	}
	assume := func(format string, arguments ...any) {
		j.Assumptions = append(j.Assumptions, fmt.Sprintf(format, arguments...))
	}
	if j.Allocator, err = set.allocator(q.Allocator, torch, assume); err != nil {
		return nil, err
	}
	j.Assumptions = append(j.Assumptions, device.Notes(q.GPU)...)
	if said := in.environment.said["torch"]; said != "" {
		j.Assumptions = append(j.Assumptions, said)
	}
	if p := in.megatron.Policy; p != nil {
		j.LeftOut = slices.Concat(j.LeftOut, p.LeftOut)
		if p.Engine != nil {
			e := *p.Engine
			j.Rollout = &e
		}
	}
	if q.Rollout != "" {
		if j.Rollout, err = rollout.Parse(q.Rollout, j.Rollout); err != nil {
			return nil, err
		}
	}
	return j, j.settleRollout(assume)
}

// OfMegatron returns a decided job of Megatron-LM as a job.
func OfMegatron(m *megatron.Job) *Job {
	d, world, inNode := m.Degrees, int(m.Degrees.World()), int(m.RanksPerNode)
	j := &Job{Megatron: m, Model: m.Model(), Files: m.Megatron.Files, Assumptions: m.Assumptions,
		LeftOut:   m.LeftOut,
		Machine:   Machine{World: world, Nodes: (world + inNode - 1) / inNode, RanksPerNode: inNode, GPU: m.GPU},
		Batch:     Batch{MicroBatch: m.MicroBatch, Sequence: m.Sequence, Accumulation: m.Micros},
		Precision: Precision{ParameterType: m.ParameterType},
		Program:   Program{Versions: Versions{Torch: m.Torch}}}
	j.Attention = forward.AttentionKind(m.Attention)
	j.Parallel.Tensor, j.Parallel.Context, j.Parallel.Expert = d.Tensor, d.Context, d.Expert
	j.Parallel.Shard = d.Context // so that replicas are those of data parallelism
	return j
}
