package job

import (
	"fmt"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/recipe"
)

// ranks sets the number of ranks and the devices that they run on.
func (r *resolver) ranks() error {
	j := r.job
	j.Nodes, j.RanksPerNode = max(r.Nodes, 1), r.GPUs
	if f := r.Inputs.framework; f != nil && f.PerNode > 0 && r.GPUs == 0 {
		j.RanksPerNode = f.PerNode
	}
	if f := r.Inputs.framework; f != nil && f.Nodes > 0 && r.Nodes == 0 {
		j.Nodes = f.Nodes
	}
	if l := r.launch; l != nil {
		if r.Nodes == 0 && l.Machines > 0 {
			j.Nodes = l.Machines
		}
		switch {
		case r.GPUs > 0:
		case l.Processes > 0:
			j.RanksPerNode = max(1, l.Processes/j.Nodes)
		case len(l.GPUs) > 0 && l.Engine != "none":
			j.RanksPerNode = len(l.GPUs)
		}
	}
	if err := r.launched(); err != nil {
		return err
	}
	if r.GPUs < 0 || r.Nodes < 0 {
		return fault.Inputf("--gpus %d and --nodes %d: counts cannot be negative", r.GPUs, r.Nodes)
	}
	if r.GPUMemory < 0 || r.HostMemory < 0 {
		return fault.Inputf("--gpu-memory %v and --host-memory %v: sizes cannot be negative", r.GPUMemory, r.HostMemory)
	}
	j.OnCPU = r.CPU || r.training != nil && r.training.OnCPU || r.launch != nil && r.launch.OnCPU
	if l := r.launch; l != nil && l.OnCPU && (r.GPU != "" || r.GPUMemory > 0) {
		return fault.File(l.File).Inputf("distributed_type or use_cpu says that the CPU trains, but a GPU is given").
			WithHint("leave --gpu out, or set distributed_type to MULTI_GPU and use_cpu to false")
	}
	if j.OnCPU && (r.GPUs > 0 && r.CPU || r.GPU != "" || r.GPUMemory > 0 || j.DeepSpeed != nil || j.FSDP != nil ||
		r.Request.FSDP != "") {
		return fault.Inputf("plimsoll plans training on the CPU only without GPUs, DeepSpeed and FSDP").
			WithHint("leave --cpu out")
	}
	if j.RanksPerNode == 0 {
		j.RanksPerNode = 1
		if !j.OnCPU {
			r.assume("one GPU: %s", r.whyOne())
		}
	}
	if j.Nodes > maxRanks || j.RanksPerNode > maxRanks || j.Nodes*j.RanksPerNode > maxRanks {
		return fault.Inputf("%d nodes of %d GPUs are more than %d ranks", j.Nodes, j.RanksPerNode, maxRanks)
	}
	j.World = j.Nodes * j.RanksPerNode
	var err error
	if j.GPU, err = r.device(); err != nil {
		return err
	}
	for _, said := range j.GPU.Notes(r.GPU) {
		r.assume("%s", said)
	}
	if r.GPU == "" && r.GPUMemory == 0 && !j.OnCPU {
		r.assume("the GPU's memory is unknown: for a verdict on it give --gpu or --gpu-memory")
	}
	if r.NUMANodes < 0 || r.NUMANodes > 1024 {
		return fault.Inputf("--numa-nodes is %d, expected a number from 1 to 1024", r.NUMANodes)
	}
	j.HostMemory, j.NUMANodes = r.HostMemory, r.NUMANodes
	if s := r.Inputs.script; s != nil && j.HostMemory == 0 && s.Launch.HostMemory > 0 {
		j.HostMemory = s.Launch.HostMemory
		r.assume("%v of host memory: %v: %s says so", j.HostMemory, s.Launch.MemoryPlace, s.Launch.MemoryName)
	}
	return nil
}

const maxRanks = 1 << 20

// launched sets the ranks that a script says. It asks for ranks that the script leaves to its launcher.
func (r *resolver) launched() error {
	if r.Inputs.script == nil {
		return nil
	}
	l := r.Inputs.script.Launch
	r.note(l.Notes)
	if l.Nodes != nil && r.Nodes == 0 {
		r.job.Nodes = l.Nodes.Is
		r.assume("%d nodes: %v: %s says so", l.Nodes.Is, l.Nodes.Place, l.Nodes.Name)
	}
	if l.PerNode != nil && r.GPUs == 0 {
		r.job.RanksPerNode = l.PerNode.Is
		r.assume("%d GPUs of a node: %v: %s says so", l.PerNode.Is, l.PerNode.Place, l.PerNode.Name)
	}
	if err := asks(l.Unknown, r.Request); err != nil {
		return err
	}
	shards := r.Inputs.deepSpeed != nil || r.Inputs.fsdp != nil // which is for several GPUs
	if l.EveryDevice && (l.Several || shards) && r.GPUs == 0 && r.job.RanksPerNode == 0 && !r.CPU {
		return l.Place.Inputf("%s starts a rank on every GPU of a node, and the script does not say how many "+
			"there are", l.By).WithHint("give --gpus with the GPUs of a node, such as --gpus 8")
	}
	return nil
}

// asks asks for numbers of ranks or nodes that a script leaves to where it runs and no flag gives.
func asks(unknown []recipe.Count, q Request) error {
	for _, u := range unknown {
		flag, given := "--gpus", q.GPUs > 0
		if recipe.CountsNodes(u.Name) {
			flag, given = "--nodes", q.Nodes > 0
		}
		if !given {
			return u.Place.Inputf("the script does not say the value of %s", u.Name).
				WithHint(fmt.Sprintf("give %s with the number that it has where the job runs", flag))
		}
	}
	return nil
}

// whyOne says why a job has one GPU.
func (r *resolver) whyOne() string {
	if s := r.Inputs.script; s != nil && s.Launch.EveryDevice {
		return fmt.Sprintf("%v: %s starts a rank on every GPU that it sees, and the script does not say how many: "+
			"give --gpus", s.Launch.Place, s.Launch.By)
	}
	return "--gpus was not given"
}

// device returns the GPU of a request. One that is not known needs its memory.
func (q Request) device() (gpu.Model, error) {
	g := gpu.Model{Name: "GPU"}
	if q.GPU != "" {
		var err error
		if g, err = gpu.Find(q.GPU); err != nil && q.GPUMemory == 0 {
			return g, err
		} else if err != nil {
			g = gpu.Model{Name: q.GPU}
		}
	}
	if q.GPUMemory > 0 {
		g.Memory = q.GPUMemory
	}
	return g, nil
}
