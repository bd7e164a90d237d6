package rehearse

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/engine"
	"plimsoll/fault"
	"plimsoll/optim"
	"plimsoll/overlap"
	"plimsoll/shard"
)

// PacedStep is a step with a paced trainer. It begins and ends where nothing is left to update.
type PacedStep struct {
	Seconds        float64 `json:"seconds"`
	ExposedSeconds float64 `json:"exposed_seconds"`
	// PredictedSeconds is what the law says of UpdateSeconds and NormSeconds: those of a step without a trainer right
	// before this one.
	PredictedSeconds float64 `json:"predicted_exposed_seconds"`
	UpdateSeconds    float64 `json:"update_seconds"`
	NormSeconds      float64 `json:"norm_seconds"`
}

// trainer is a trainer that computes nothing. Its passes wait for the host as a real trainer's do, and sleep as long as
// a real device would compute.
type trainer struct {
	*training
	pace      *Pace
	optimizer optim.Optimizer
	clip      float64
	layers    [][]pacedLayer // of each shard; their passes are the same
	recorders []*recorder    // of each shard
	arrivals  []*arrivals    // of each shard

	began, now time.Time // of this step, in the trainer's own time
	exposed    time.Duration
	spans      []Span
}

// newTrainer returns the trainer of a placement whose shards are mapped.
func (p *Placement) newTrainer(t *training) (*trainer, error) {
	paced := &trainer{training: t, pace: p.Pace, optimizer: p.Optimizer, clip: p.Clip, recorders: p.recorders,
		layers: p.layers}
	for i, s := range t.shards {
		var order []shard.Range
		for _, l := range paced.updateOrder(i) {
			order = append(order, l.ranges...)
		}
		s.SetOrder(order)
		paced.arrivals = append(paced.arrivals, newArrivals(s, len(p.layers[i])))
	}
	return paced, nil
}

// updateOrder returns the layers of a shard in the order in which somebody waits for their update.
func (t *trainer) updateOrder(number int) []pacedLayer {
	layers := slices.Clone(t.layers[number])
	if t.pace.Mode == overlap.Async { // the next gradients wait
		slices.Reverse(layers)
	}
	return layers
}

// step makes one paced step. It must run on a thread of its own, and no step may be under way.
func (t *trainer) step(last Step) (PacedStep, error) {
	norm := t.norm() // of the last gradients: those that an update of mode async begins with
	for _, r := range t.recorders {
		r.reset()
	}
	t.began, t.exposed, t.spans = time.Now(), 0, t.spans[:0]
	t.now = t.began
	if err := t.passes(norm); err != nil {
		return PacedStep{}, &fault.Input{What: "paced step", Err: err}
	}
	predicted := time.Duration(0)
	for i := range t.shards { // all passes wait for the slowest rank
		predicted = max(predicted, t.predict(i, last).Exposed())
	}
	for _, s := range t.shards {
		s.Wait()
	}
	return PacedStep{
		Seconds: t.now.Sub(t.began).Seconds(), ExposedSeconds: t.exposed.Seconds(),
		PredictedSeconds: predicted.Seconds(), UpdateSeconds: last.UpdateSeconds, NormSeconds: last.NormSeconds,
	}, nil
}

// predict returns the step of a shard as the law sees it.
func (t *trainer) predict(number int, last Step) overlap.Step {
	s := overlap.Step{Mode: t.pace.Mode, Forward: t.pace.Forward, Backward: t.pace.Backward,
		Update: inSeconds(last.UpdateSeconds), Norm: inSeconds(last.NormSeconds)}
	for _, l := range t.layers[number] {
		s.Layers = append(s.Layers, l.Layer)
	}
	return s
}

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// passes makes the passes of a step in the order of the mode. norm is that of the gradients before them.
func (t *trainer) passes(norm float64) error {
	nobody := func(int) {}
	switch t.pace.Mode {
	case overlap.Backward:
		if err := t.begin(1, (*engine.Shard).BeginArriving); err != nil {
			return err
		}
		t.backward(nobody)
		t.forward(t.waitFor)
		return nil
	case overlap.Async:
		if err := t.begin(norm, engineBegin); err != nil {
			return err
		}
		t.forward(nobody)
		t.backward(t.waitFor) // for the memory of the gradients
		t.wait(Summing, "", func() { t.norm() })
		return nil
	}
	t.backward(nobody)
	t.wait(Summing, "", func() { norm = t.norm() })
	if err := t.begin(norm, (*engine.Shard).BeginThen); err != nil {
		return err
	}
	if t.pace.Mode == overlap.Forward {
		t.forward(t.waitFor)
		return nil
	}
	t.wait(Waiting, "", func() {
		for _, s := range t.shards {
			s.Wait()
		}
	})
	t.forward(nobody)
	return nil
}
