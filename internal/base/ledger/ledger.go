// Package ledger is the account of bytes that every verb shares. A plan is a list
// of devices and the bytes that each holds, phase by phase. A measurement is the
// same. [Compare] puts the two side by side.
package ledger

import "slices"

// Kind is the kind of a device.
type Kind string

// The kinds of devices.
const (
	Host Kind = "host"
	GPU  Kind = "gpu"
)

// PhaseName is a part of a training job.
type PhaseName string

// The phases, in their order.
const (
	Load       PhaseName = "load"
	Initialize PhaseName = "initialize"
	Forward    PhaseName = "forward"
	Backward   PhaseName = "backward"
	Step       PhaseName = "step"
	Evaluation PhaseName = "evaluation" // passes without gradients, between two steps
	Checkpoint PhaseName = "checkpoint"
	// Resume is the beginning of a job that goes on from a checkpoint. It follows Initialize there.
	Resume PhaseName = "resume"
)

// The phases of an iteration in which an engine generates answers on the GPUs of the training. They precede Forward.
const (
	WeightSync PhaseName = "weight sync" // the engine's weights are there, and become those of the trainer
	Wake       PhaseName = "wake"        // the KV cache follows
	Rollout    PhaseName = "rollout"     // the engine generates
	LogProbs   PhaseName = "log-probs"   // passes over the answers without gradients
	// CriticUpdate are the passes and the step of a critic.
	CriticUpdate PhaseName = "critic update"
)

// Iteration tells the first optimizer step from the later ones.
type Iteration string

// The iterations. Phases outside of the training loop happen once.
const (
	Once   Iteration = ""
	First  Iteration = "first"
	Steady Iteration = "steady"
)

// WholeNode is the rank of bytes that belong to no single rank.
const WholeNode = -1

// Holding is the bytes of one component.
type Holding struct {
	Component Component `json:"component"`
	// Part is the dtype group of parameters that the bytes are for. It is empty if
	// a rank has one group only.
	Part  string `json:"part,omitempty"`
	Bytes Bytes  `json:"bytes"`
	// Why says in words what the bytes are for.
	Why string `json:"why"`
	// Formula evaluates to Bytes, and Origin is the source that makes the component. Plans have both.
	Formula Formula `json:"formula,omitempty"`
	Origin  *Origin `json:"origin,omitempty"`
}

// Phase is the memory of a device in a phase: bytes that the program requests, that
// are allocated in blocks, and that the allocator reserves.
type Phase struct {
	Name          PhaseName `json:"phase"`
	Iteration     Iteration `json:"iteration,omitempty"`
	PeakRequested Bytes     `json:"peak_requested_bytes"`
	PeakAllocated Bytes     `json:"peak_allocated_bytes"`
	PeakReserved  Bytes     `json:"peak_reserved_bytes"`
	// PeakUsed adds memory outside of the allocator: the CUDA context, NCCL.
	PeakUsed     Bytes `json:"peak_used_bytes"`
	EndRequested Bytes `json:"end_requested_bytes"`
	EndAllocated Bytes `json:"end_allocated_bytes"`
	EndReserved  Bytes `json:"end_reserved_bytes"`
	// Components are held at the peak of requested bytes.
	Components []Holding `json:"components"`
	End        []Holding `json:"-"`
	// PageCache are files that the program has mapped. The kernel takes their pages back when memory is short, so that
	// no other figure has them.
	PageCache *Holding `json:"page_cache,omitempty"`
}

// Hold adds a component to the phase, at its peak and at its end.
func (p *Phase) Hold(h Holding) {
	p.Components, p.End = append(p.Components, h), append(p.End, h)
	for _, sum := range []*Bytes{&p.PeakRequested, &p.PeakAllocated, &p.PeakReserved, &p.PeakUsed} {
		*sum += h.Bytes
	}
	for _, sum := range []*Bytes{&p.EndRequested, &p.EndAllocated, &p.EndReserved} {
		*sum += h.Bytes
	}
}

// Device is a GPU, or host memory: of a rank or of a whole node. Count devices
// are alike.
type Device struct {
	Kind     Kind   `json:"kind"`
	Name     string `json:"name"`
	Rank     int    `json:"rank"`
	Count    int    `json:"count"`
	Capacity Bytes  `json:"capacity_bytes"` // 0 if unknown
	// Outside is held outside of the allocator, from the first phase on.
	Outside []Holding `json:"outside_allocator"`
	Phases  []Phase   `json:"phases"`
	// Interval is where the peak in use is expected. It is zero in a measurement.
	Interval Interval `json:"interval,omitzero"`
	// NUMANodes divide a host's ranks. The list is empty if their number is
	// unknown.
	NUMANodes []NUMANode `json:"numa_nodes,omitempty"`
}

// NUMANode is the part of a host's memory that is near to some of its cores.
type NUMANode struct {
	Node     int   `json:"node"`
	Ranks    int   `json:"ranks"`
	PeakUsed Bytes `json:"peak_used_bytes"`
	Capacity Bytes `json:"capacity_bytes"` // 0 if unknown
}

// HostMemory returns the host memory of a rank, or of the whole node, in the
// optimizer step. It holds nothing yet.
func HostMemory(rank int) Device {
	return Device{Kind: Host, Rank: rank, Phases: []Phase{{Name: Step}}}
}

// Peak returns the phase in which the device holds most.
func (d *Device) Peak() *Phase {
	var most *Phase
	for i := range d.Phases {
		p := &d.Phases[i]
		if most == nil || p.PeakUsed > most.PeakUsed ||
			p.PeakUsed == most.PeakUsed && p.PeakAllocated > most.PeakAllocated {
			most = p
		}
	}
	return most
}

// Line is a component of a device in a phase, planned and measured.
type Line struct {
	Device    Kind      `json:"device"`
	Rank      int       `json:"rank"`
	Phase     PhaseName `json:"phase"`
	Iteration Iteration `json:"iteration,omitempty"`
	Part      string    `json:"part,omitempty"`
	Component Component `json:"component"`
	Planned   Bytes     `json:"planned_bytes"`
	// Measured is nil if nothing was measured.
	Measured *Bytes `json:"measured_bytes"`
	Why      string `json:"why"`
}

// Comparison is a plan beside a measurement. Planned lines come first, in the
// order of the plan.
type Comparison []Line

// Compare puts the measured components of every phase beside the planned ones. If
// one side has only a component whose parts the other side has, Compare adds up the
// parts: exp_avg and exp_avg_sq against optimizer_states.
func Compare(planned, measured []Device) Comparison {
	var c comparing
	inPlan, inMeasurement := namesIn(planned), namesIn(measured)
	eachHolding(planned, func(at place, h Holding) {
		l := c.line(at, h.Component.sharedWith(inMeasurement[at]))
		l.Planned += h.Bytes
		l.addWhy(h.Why)
	})
	eachHolding(measured, func(at place, h Holding) {
		l := c.line(at, h.Component.sharedWith(inPlan[at]))
		if l.Measured == nil {
			l.Measured = new(Bytes)
		}
		*l.Measured += h.Bytes
		if !inPlan[at][l.Component] {
			l.addWhy(h.Why)
		}
	})
	return c.lines
}

// place is the device and the phase in which bytes are held.
type place struct {
	device    Kind
	rank      int
	phase     PhaseName
	iteration Iteration
	part      string
}

func eachHolding(devices []Device, f func(place, Holding)) {
	for _, d := range devices {
		for _, p := range d.Phases {
			for _, h := range slices.Concat(p.Components, d.Outside) {
				f(place{d.Kind, d.Rank, p.Name, p.Iteration, h.Part}, h)
			}
		}
	}
}

func namesIn(devices []Device) map[place]map[Component]bool {
	names := map[place]map[Component]bool{}
	eachHolding(devices, func(at place, h Holding) {
		if names[at] == nil {
			names[at] = map[Component]bool{}
		}
		names[at][h.Component] = true
	})
	return names
}

// comparing is a comparison under construction.
type comparing struct {
	lines Comparison
	index map[lineKey]int
}

type lineKey struct {
	place
	component Component
}

// line returns the line of a component. It appends one if there is none yet. The
// next call may move the line.
func (c *comparing) line(at place, component Component) *Line {
	key := lineKey{at, component}
	i, known := c.index[key]
	if !known {
		i = len(c.lines)
		if c.index == nil {
			c.index = map[lineKey]int{}
		}
		c.index[key] = i
		c.lines = append(c.lines, Line{
			Device: at.device, Rank: at.rank, Phase: at.phase, Iteration: at.iteration,
			Part: at.part, Component: component,
		})
	}
	return &c.lines[i]
}

func (l *Line) addWhy(why string) {
	switch {
	case l.Why == "":
		l.Why = why
	case why != "" && why != l.Why:
		l.Why += "; " + why
	}
}

// Planned returns the sum of the planned bytes of the lines that keep selects. A
// nil keep selects all.
func (c Comparison) Planned(keep func(Line) bool) Bytes {
	var sum Bytes
	for _, l := range c {
		if keep == nil || keep(l) {
			sum += l.Planned
		}
	}
	return sum
}

// Measured returns the sum of the measured bytes of the lines that keep selects.
// Lines without a measurement count as 0.
func (c Comparison) Measured(keep func(Line) bool) Bytes {
	var sum Bytes
	for _, l := range c {
		if l.Measured != nil && (keep == nil || keep(l)) {
			sum += *l.Measured
		}
	}
	return sum
}
