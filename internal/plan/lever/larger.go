package lever

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// Larger is a machine that a job fits. What is as it was is 0 or empty.
type Larger struct {
	GPU   string       `json:"gpu"`
	GPUs  int          `json:"gpus"` // of a node
	Nodes int          `json:"nodes"`
	Host  ledger.Bytes `json:"host_memory_bytes,omitempty"` // of a node, where that of the job is too small
}

// String says the machine.
func (l *Larger) String() string {
	text := fmt.Sprintf("%d x %s", l.GPUs, l.GPU)
	if l.Nodes > 1 {
		text = fmt.Sprintf("%d nodes of %s", l.Nodes, text)
	}
	if l.Host > 0 {
		text += fmt.Sprintf(" with %v of host memory", l.Host)
	}
	return text
}

// hostSizes are memories that hosts are sold with, in GiB.
var hostSizes = []ledger.Bytes{32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144}

// gpusOfNodes and mostNodes are the machines that are tried: nodes of up to 8 GPUs, and twice the nodes each time.
const (
	gpusOfNode = 8
	mostNodes  = 64
)

// larger returns the smallest machine that the changed job fits: the next larger GPU, or more of the same kind that
// share the model. It returns nil where none of them is enough.
func larger(s *standing) *Larger {
	j := s.plan.Job
	q := s.applied.amended()
	if j.Megatron != nil || j.Pipeline != nil || j.OnCPU {
		return nil
	}
	least := leastOf(s.plan)
	for _, m := range machines(j) {
		each := j.GPU.Memory
		if found, err := gpu.Find(m.GPU); err == nil {
			each = found.Memory
		}
		if each*ledger.Bytes(m.GPUs*m.Nodes) < least {
			continue
		}
		with := q
		with.GPU, with.GPUMemory, with.GPUs, with.Nodes, with.HostMemory = m.GPU, 0, m.GPUs, m.Nodes, 0
		if m.GPU == "" {
			with.GPU, with.GPUMemory = q.GPU, q.GPUMemory
			m.GPU = j.GPU.Name
		}
		if sharded := m.GPUs*m.Nodes > 1 && j.DeepSpeed == nil && j.FSDP == nil; sharded {
			with.FSDP, with.Offload = "2", job.Offload{}
		}
		if host, ok := fitsOn(with, j.HostMemory); ok {
			m.Host = host
			return &m
		}
	}
	return nil
}

// leastOf returns what all GPUs hold at least of a job, however they share it: the parameters at rest.
func leastOf(p *plan.Plan) ledger.Bytes {
	if d := p.Job.DeepSpeed; d != nil && d.OffloadParameters.Device != "none" ||
		p.Job.FSDP != nil && p.Job.FSDP.OffloadParameters {
		return 0
	}
	const quantized = 2 // parameters of a byte
	bytes := p.Elements * p.Job.ParameterType.Size()
	if p.Job.Quantization != nil {
		bytes = p.Elements / quantized
	}
	return ledger.Bytes(bytes)
}

// fitsOn reports whether a job fits its GPUs, and returns the memory of hosts that it needs, where those of the job are
// too small.
func fitsOn(q job.Request, hostMemory ledger.Bytes) (ledger.Bytes, bool) {
	j, err := q.Resolve()
	if err != nil {
		return 0, false
	}
	p, err := plan.New(j)
	if err != nil || p.Verdict.Result != plan.Fits {
		return 0, false
	}
	var upper ledger.Bytes
	for i := range p.Devices {
		if d := &p.Devices[i]; d.Kind == ledger.Host {
			upper = max(upper, d.Interval.Upper)
		}
	}
	if hostMemory == 0 || upper <= hostMemory {
		return 0, true
	}
	for _, size := range hostSizes {
		if upper <= size*ledger.GiB {
			return size * ledger.GiB, true
		}
	}
	return 0, false
}

// machines lists machines by what their GPUs hold together. The first is that of the job: its host may be all that it
// lacks. Of GPUs with as much memory the first in the list of GPUs counts.
func machines(j *job.Job) []Larger {
	list := []Larger{{GPUs: j.RanksPerNode, Nodes: j.Nodes}}
	memory := map[Larger]ledger.Bytes{}
	add := func(m Larger, each ledger.Bytes) {
		if _, known := memory[m]; !known {
			memory[m] = each * ledger.Bytes(m.GPUs*m.Nodes)
			list = append(list, m)
		}
	}
	for each := 2 * j.RanksPerNode; each <= gpusOfNode; each *= 2 {
		add(Larger{GPUs: each, Nodes: j.Nodes}, j.GPU.Memory)
	}
	for nodes := 2 * j.Nodes; nodes <= mostNodes; nodes *= 2 {
		add(Larger{GPUs: max(j.RanksPerNode, gpusOfNode), Nodes: nodes}, j.GPU.Memory)
	}
	var sizes []ledger.Bytes
	for _, name := range gpu.Names() {
		m, err := gpu.Find(name)
		isLarger := err == nil && m.Memory > j.GPU.Memory+j.GPU.Memory/20
		if isLarger && m.Capability > 0 && m.IsOffered() && !slices.Contains(sizes, m.Memory) {
			sizes = append(sizes, m.Memory)
			add(Larger{GPU: name, GPUs: j.RanksPerNode, Nodes: j.Nodes}, m.Memory)
			add(Larger{GPU: name, GPUs: max(j.RanksPerNode, gpusOfNode), Nodes: j.Nodes}, m.Memory)
		}
	}
	slices.SortStableFunc(list[1:], func(a, b Larger) int { return cmp.Compare(memory[a], memory[b]) })
	return list
}
