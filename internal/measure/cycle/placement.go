//go:build linux

package cycle

import (
	"fmt"
	"path"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/states"
)

// Placement is a job on a host: the memory to map. Nothing is allocated yet.
type Placement struct {
	*Job
	Host  *host.Host
	Pages arena.Pages
	Ranks []Rank
	// Planned is the host memory of each rank, then the memory that belongs to no rank.
	Planned []ledger.Device
	// Parameters is the number of parameters whose states are on this host.
	Parameters int64
}

// Rank is the states of one rank.
type Rank struct {
	Number      int
	Parameters  int64
	Layout      *roads.Layout       // sizes
	Description *states.Description // of the same chunks, tensor by tensor
	CPUs        []int
}

// NewPlacement places a job on a host.
func NewPlacement(j *Job, h *host.Host) (*Placement, error) {
	p := &Placement{Job: j, Host: h}
	assigned, err := binding.Split(h, binding.Request{Ranks: j.Ranks, Reserve: j.Reserve})
	if err != nil {
		return nil, err
	}
	all := j.tensors()
	for i := range j.Job.Ranks {
		rank := j.layout(all, i)
		if rank.Parameters == 0 {
			return nil, fault.Inputf("rank %d of %d has no parameters: every tensor has fewer rows", i, j.WorldSize).
				WithHint("use fewer ranks")
		}
		rank.CPUs = assigned.Ranks[i].OptimizerCPUs.List()
		p.Ranks = append(p.Ranks, rank)
		p.Parameters += rank.Parameters
	}
	var arenas []arena.Plan
	for _, r := range p.Ranks {
		arenas = append(arenas, p.arenas(r)...)
	}
	p.Pages = engine.ChoosePages(h, arenas)
	var mapped ledger.Bytes
	for _, r := range p.Ranks {
		p.Planned = append(p.Planned, rehearse.PlanArenas(r.Number, p.arenas(r), p.Pages))
		for _, a := range p.arenas(r) {
			mapped += p.Pages.Round(a.Size)
		}
	}
	p.Planned = append(p.Planned, rehearse.PlanProgram(mapped, p.Pages))
	return p, nil
}

// arenas returns what a rank maps: the arenas of the optimizer service, and the stand-in for the device.
func (p *Placement) arenas(r Rank) []arena.Plan {
	window := r.Layout.Window(p.Settings.Whole)
	plans := append(r.Description.Arenas(), arena.Plan{Component: ledger.DeviceStandIn,
		Size: window + bufferOf(r.Layout),
		Why: fmt.Sprintf("%s B of the window, and the parameters or gradients of a chunk, as they are on the device",
			ledger.Count(int64(window)))})
	for i := range plans {
		plans[i].Name = path.Join(fmt.Sprint("rank", r.Number), string(plans[i].Component))
	}
	return plans
}

// bufferOf returns the size of the buffer that stands in for parameters and gradients on the device.
func bufferOf(l *roads.Layout) (most ledger.Bytes) {
	for _, c := range l.Chunks {
		most = max(most, c.Own)
		if l.Gradients() > 0 {
			most = max(most, c.Gradients)
		}
	}
	return most
}

// HostBytes returns what the states take on the host, before rounding to pages: without the stand-in for the device.
func (p *Placement) HostBytes() (sum ledger.Bytes) {
	for _, r := range p.Ranks {
		for _, a := range p.arenas(r) {
			if a.Component != ledger.DeviceStandIn {
				sum += a.Size
			}
		}
	}
	return sum
}

// Window returns the slots of a device, of the rank with most, and what an update holds beside them.
func (p *Placement) Window() (slots, temporary ledger.Bytes) {
	for _, r := range p.Ranks {
		slots = max(slots, r.Layout.Window(p.Settings.Whole))
		sum := ledger.Bytes(0)
		for _, c := range r.Layout.Chunks {
			sum += c.Temporary
			if !p.Settings.Whole {
				temporary = max(temporary, c.Temporary)
			}
		}
		if p.Settings.Whole {
			temporary = max(temporary, sum)
		}
	}
	return slots, temporary
}

// Verdict reports whether the plan fits, and if not, which changes would make it fit.
func (p *Placement) Verdict() rehearse.Verdict {
	var arenas []arena.Plan
	threads := 0
	for _, r := range p.Ranks {
		threads += len(r.CPUs) + actors
		arenas = append(arenas, p.arenas(r)...)
	}
	return rehearse.NewVerdict(p.Planned, p.Host, p.Pages, arenas, threads, p.wouldFit)
}

// wouldFit looks for smaller states, and for more hosts.
func (p *Placement) wouldFit(available ledger.Bytes) []string {
	found := []string{}
	needs := func(change func(*Job)) (ledger.Bytes, bool) {
		j, inner := *p.Job, *p.Job.Job
		j.Job = &inner
		change(&j)
		other, err := NewPlacement(&j, p.Host)
		if err != nil {
			return 0, false
		}
		needed := rehearse.Needed(other.Planned)
		return needed, needed <= available
	}
	for _, smaller := range []struct {
		flags  string
		change func(*Job)
	}{
		{"--offload-mode chunked", func(j *Job) { j.Settings.Whole = false }},
		{"--no-recovery", func(j *Job) { j.Settings.Recovery = false }},
		{"--moments bf16", func(j *Job) { j.Format.Moments = kernel.MomentsBF16 }},
	} {
		if needed, ok := needs(smaller.change); ok {
			found = append(found, fmt.Sprintf("%s: %v in all", smaller.flags, needed))
		}
	}
	const most = 4096
	for hosts := 2; hosts <= most && !p.Muon; hosts *= 2 {
		if needed, ok := needs(func(j *Job) { j.WorldSize = hosts * j.Ranks }); ok {
			found = append(found, fmt.Sprintf("--world-size %d: the job spread over %d hosts like this one, %v on each",
				hosts*p.Job.Ranks, hosts, needed))
			break
		}
	}
	return found
}

// work returns the way of the chunks of a rank through the device. A stated time of the update is that of all
// parameters of the rank. It is divided among the chunks as the law does.
func (p *Placement) work(l *roads.Layout) []roads.Work {
	work := l.Work(deviceRates)
	if p.Update == 0 {
		return work
	}
	law := time.Duration(0)
	for _, w := range work {
		law += w.Update
	}
	for i := range work {
		work[i].Update = time.Duration(float64(p.Update) * part(work[i].Update, law, len(work)))
	}
	return work
}

// deviceRates are those of an H100: 3.35 TB/s by its data sheet, and 400 TFLOP/s of matrix products in a training.
var deviceRates = roads.Rates{Device: 3.35e12, FLOPS: 400e12}
