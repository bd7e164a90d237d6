//go:build linux

package cycle

import (
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/states"
)

// Road is a way to update the states of a rank that do not stay on its device, and what a step costs on it.
type Road struct {
	// Host is the memory of all ranks on this host. Window is the memory of a device for states during a step, and Rest
	// what it holds of it between two steps.
	Host, Window, Rest ledger.Bytes
	// Step is nil where the time is not known.
	Step *roads.Step
}

// States returns the road through the device in a mode, by the law, at the speeds of a link.
func (p *Placement) States(mode string, link roads.Link) (Road, error) {
	j := *p.Job
	j.Settings.Whole = mode == Whole
	other, err := NewPlacement(&j, p.Host)
	if err != nil {
		return Road{}, err
	}
	slots, temporary := other.Window()
	road := Road{Host: other.HostBytes(), Window: slots + temporary}
	if mode == Chunked {
		road.Rest = slots
	}
	if link.In == 0 || link.Out == 0 {
		return road, nil
	}
	road.Step = &roads.Step{}
	for _, r := range other.Ranks {
		s := j.law(r, other.work(r.Layout), link)
		road.Step.In, road.Step.Out = max(road.Step.In, s.In), max(road.Step.Out, s.Out)
		road.Step.Update, road.Step.Exposed = max(road.Step.Update, s.Update), max(road.Step.Exposed, s.Exposed)
	}
	return road, nil
}

// law returns a step of a rank. Steps take the chunks in ascending and in descending order in turns, so that the wait
// is the mean of two steps.
func (j *Job) law(r Rank, work []roads.Work, link roads.Link) (s roads.Step) {
	places, passes := states.NewLayout(r.Description.Chunks), roads.Job{Forward: j.Forward, Backward: j.Backward}
	var exposed time.Duration
	for steps := range int64(2) {
		s = r.Layout.Over(inOrder(places, work, steps), link, passes)
		exposed += s.Exposed / 2
	}
	s.Exposed = exposed
	return s
}

// CPU returns the road of the update by the CPU: with a step that was measured on this host, copies by the law at the
// speeds of a link, and what hides behind the passes of the trainer.
func (p *Placement) CPU(cpu *rehearse.Placement, step time.Duration, link roads.Link) (Road, error) {
	road := Road{Host: cpu.StateBytes()}
	if step == 0 || link.In == 0 || link.Out == 0 {
		return road, nil
	}
	ranks := ledger.Bytes(cpu.Ranks)
	each := ledger.Bytes(cpu.Held) / ranks
	work := roads.CPU{Traffic: cpu.StepBytes() / ranks, Gradients: each * ledger.Bytes(cpu.Format.Gradient.Size()),
		Parameters: each * ledger.Bytes(cpu.Format.Parameter.Size()), Mode: overlap.Forward}
	var err error
	if work.Layers, err = cpu.LawLayers(); err != nil {
		return road, err
	}
	rates := roads.Rates{Link: link, Host: float64(cpu.StepBytes()) / step.Seconds()}
	s := rates.CPU(work, roads.Job{Ranks: cpu.Ranks, Forward: p.Forward, Backward: p.Backward})
	road.Step = &s
	return road, nil
}

// UpdateTime returns the time of the device's update, of the rank with most.
func (p *Placement) UpdateTime() (most time.Duration) {
	for _, r := range p.Ranks {
		sum := time.Duration(0)
		for _, w := range p.work(r.Layout) {
			sum += w.Update
		}
		most = max(most, sum)
	}
	return most
}

// Moved returns the bytes that the copies of a step move to the device and back, of the rank with most.
func (p *Placement) Moved() (in, out ledger.Bytes) {
	for _, r := range p.Ranks {
		back := r.Layout.Gradients()
		for _, c := range r.Layout.Chunks {
			back += c.Region()
		}
		in, out = max(in, r.Layout.State()), max(out, back)
	}
	return in, out
}
