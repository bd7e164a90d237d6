package roads

import (
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/overlap"
)

// Rates are the speeds of a machine, in bytes or floating-point operations a second. 0 is unknown.
type Rates struct {
	Link   Link
	Host   float64 // bytes that the memory of a node moves for the optimizer, for all its ranks together
	Device float64 // bytes that the memory of a GPU moves
	Disk   float64 // bytes that the disks of a node read and write together
	FLOPS  float64 // operations of matrix products on a GPU
}

// Job is what a rank's step consists of beside its state.
type Job struct {
	Ranks int // of a node
	// Forward and Backward are the times of the passes of a step: of the last micro batch, behind which work can hide.
	Forward, Backward time.Duration
}

// update returns the time of the update of a chunk on the GPU. It is bound by the memory of the GPU, and with Muon by
// its matrix products, which do not read and write at the same time.
func (r Rates) update(c Chunk) time.Duration {
	t := float64(c.Traffic) / r.Device
	if c.Operations > 0 {
		t += c.Operations / r.FLOPS
	}
	return seconds(t)
}

// Work returns the way of every chunk through the GPU.
func (l *Layout) Work(r Rates) []Work {
	work := make([]Work, len(l.Chunks))
	for i, c := range l.Chunks {
		work[i] = Work{In: c.State, Out: c.State, Own: c.Own, Update: r.update(c)}
		if l.Gradients() > 0 {
			work[i].Gradients = c.Gradients
		}
	}
	return work
}

// Step is what a step costs on one road.
type Step struct {
	In, Out time.Duration // the copies alone, to the GPU and back
	Update  time.Duration // the update alone
	// Exposed is how long the trainer waits.
	Exposed time.Duration
}

// Step returns a step with the states on the host. The trainer waits until the last chunk is updated, and with recovery
// until its parameters are on the host. The next step waits until all has left, which both passes hide in most jobs.
func (l *Layout) Step(r Rates, j Job) Step {
	s := l.Over(l.Work(r), r.Link.shared(r.Host, j.Ranks), j)
	resident := r.update(l.ResidentWork)
	s.Update, s.Exposed = s.Update+resident, s.Exposed+resident
	return s
}

// Over returns a step over these chunks, in their order, without what stays on the GPU. The times of copies and updates
// are those of each without the others.
func (l *Layout) Over(work []Work, link Link, j Job) (s Step) {
	out := l.Gradients()
	for _, w := range work {
		s.Update += w.Update
		out += w.Out + w.Own
	}
	s.In, s.Out = seconds(float64(l.State())/link.In), seconds(float64(out)/link.Out)
	p := l.Passage(work, link, 0)
	leaves, passes := p.Left-p.Ready, j.Forward+j.Backward
	if l.Whole && l.Prefetch { // not before the copies out of the step before have ended
		p = l.Passage(work, link, min(j.Backward, max(0, passes-leaves)))
	}
	s.Exposed = p.Ready + max(0, leaves-passes)
	return s
}

// Passage returns when a step over these chunks is done. In mode whole copies in began a time ago, ahead.
func (l *Layout) Passage(work []Work, link Link, ahead time.Duration) Passage {
	if l.Whole {
		return Whole(work, link, ahead)
	}
	return Chunked(work, link)
}

// Resident returns a step with all states on the GPU.
func Resident(parameters []Parameter, r Rates) Step {
	var all Chunk
	for i := range parameters {
		all.add(&parameters[i], false)
	}
	update := r.update(all)
	return Step{Update: update, Exposed: update}
}

// CPU is the update of a rank by the optimizer service.
type CPU struct {
	// Traffic is what the update reads and writes in host memory. Gradients come from the GPU, and parameters go there.
	Traffic, Gradients, Parameters ledger.Bytes
	Mode                           overlap.Mode
	Layers                         []overlap.Layer
	// Arithmetic is the time that its cores compute, if that may be longer than memory takes.
	Arithmetic time.Duration
	// Disk is what the update reads from disks and writes there, of states that are in files.
	Disk ledger.Bytes
}

// CPU returns a step with an update by the CPU, by the law of package overlap. Parameters leave for the GPU while
// others are updated, so that the slower of the two counts. Gradients come during the backward pass; what a slow link
// has not brought by its end is waited for. Disks read and write chunks while others are updated, so they too count
// where they are slowest.
func (r Rates) CPU(c CPU, j Job) Step {
	each := r.Host / float64(max(1, j.Ranks))
	link := r.Link.shared(r.Host, j.Ranks)
	s := Step{In: seconds(float64(c.Parameters) / link.In), Out: seconds(float64(c.Gradients) / link.Out)}
	// The copies read and write host memory, too.
	s.Update = max(seconds(float64(c.Traffic+c.Gradients+c.Parameters)/each), c.Arithmetic)
	if c.Disk > 0 {
		s.Update = max(s.Update, seconds(float64(c.Disk)/(r.Disk/float64(max(1, j.Ranks)))))
	}
	step := overlap.Step{Mode: c.Mode, Layers: c.Layers, Forward: j.Forward, Backward: j.Backward,
		Update: max(s.Update, s.In)}
	s.Exposed = step.Exposed() + max(0, s.Out-j.Backward)
	return s
}
