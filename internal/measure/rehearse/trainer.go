//go:build linux

package rehearse

import (
	"cmp"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/shard"
)

// PacedStep is a step with a paced trainer; with ZenFlow, the mean of an interval's steps. It begins and ends where
// nothing is left to update.
type PacedStep struct {
	Seconds        float64 `json:"seconds"`
	ExposedSeconds float64 `json:"exposed_seconds"`
	// WorkSeconds is how long the workers have worked, those of the slowest rank.
	WorkSeconds float64 `json:"work_seconds"`
	// PredictedSeconds is what the law says of UpdateSeconds and NormSeconds: how long the workers have worked to
	// update all parameters once, which ZenFlow does in an interval, without what it does for important columns.
	PredictedSeconds float64 `json:"predicted_exposed_seconds"`
	UpdateSeconds    float64 `json:"update_seconds"`
	NormSeconds      float64 `json:"norm_seconds"`
	// Clipped says that the step was begun without clipping, retracted and made again. Workers then update more.
	Clipped bool `json:"clipped,omitempty"`
}

// trainer is a trainer that computes nothing. Its passes wait for the host as a real trainer's do, and sleep as long as
// a real device would compute.
type trainer struct {
	*training
	pace      *Pace
	optimizer optim.Optimizer
	clip      float64
	layers    [][]pacedLayer // of each shard; their passes are the same
	recorders []*recorder    // of each shard, and of those of the important columns
	arrivals  []*arrivals    // of each shard

	processors int // of Go's runtime, before the trainer took its own

	number     int       // of this step
	clipped    bool      // whether it is
	decided    time.Time // when it was known whether it is
	began, now time.Time // of this step, in the trainer's own time
	exposed    time.Duration
	spans      []Span
}

// newTrainer returns the trainer of a placement whose shards are mapped.
func (p *Placement) newTrainer(t *training, recorders []*recorder) (*trainer, error) {
	paced := &trainer{training: t, pace: p.Pace, optimizer: p.Optimizer, clip: p.Clip, recorders: recorders}
	// The workers' threads keep all processors of Go's runtime. The trainer and the arrivals get some of their own.
	paced.processors = runtime.GOMAXPROCS(p.WorkerCount() + len(t.shards) + 2)
	parts, err := shard.ZeRO(p.Model.Elements(), p.WorldSize)
	if err != nil {
		return paced, err
	}
	layers := p.layers(p.Pace.Layers)
	for i, s := range t.shards {
		paced.layers = append(paced.layers, p.pacedLayers(layers, parts[i]))
		order := paced.updateOrder(i)
		paced.arrivals = append(paced.arrivals, newArrivals(s, len(order)))
		s.SetOrder(order)
	}
	return paced, nil
}

// updateOrder returns the parameters of a shard in the order in which somebody waits for them.
func (t *trainer) updateOrder(number int) []shard.Range {
	layers := inForward
	if t.pace.Mode == overlap.Async || t.pace.Mode == overlap.ZenFlow { // the next gradients wait for the memory
		layers = inBackward
	}
	var order []shard.Range
	for _, l := range layers(t.layers[number]) {
		order = append(order, t.layers[number][l].ranges...)
	}
	return order
}

// inForward returns the numbers of the layers in the order in which a forward pass needs them.
func inForward(layers []pacedLayer) []int {
	return sortedLayers(layers, func(a, b pacedLayer) int { return cmp.Compare(a.Needed, b.Needed) })
}

// inBackward returns the numbers of the layers in the order in which their gradients are final.
func inBackward(layers []pacedLayer) []int {
	return sortedLayers(layers, func(a, b pacedLayer) int { return cmp.Compare(a.Final, b.Final) })
}

func sortedLayers(layers []pacedLayer, compare func(a, b pacedLayer) int) []int {
	order := make([]int, len(layers))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return compare(layers[a], layers[b]) })
	return order
}

// step makes a step. It must run on a thread of its own. No step may be under way.
func (t *trainer) step() (PacedStep, error) {
	norm := t.norm() // of the last gradients: mode async begins with their update
	for _, r := range t.recorders {
		r.reset()
	}
	t.began, t.exposed, t.spans = time.Now(), 0, t.spans[:0]
	t.now = t.began
	t.clipped = t.pace.clips(t.number)
	t.number++
	if err := t.passes(norm); err != nil {
		return PacedStep{}, err
	}
	for _, s := range t.shards {
		s.Wait()
		s.ForgetArrived() // other gradients come next
	}
	steps := float64(t.pace.UpdateInterval)
	step := PacedStep{Seconds: t.now.Sub(t.began).Seconds() / steps, ExposedSeconds: t.exposed.Seconds() / steps,
		Clipped: t.clipped}
	for i := range t.shards { // every pass waits for the slowest rank
		law := t.law(i)
		step.WorkSeconds = max(step.WorkSeconds, t.work(i).Seconds()/steps)
		step.UpdateSeconds = max(step.UpdateSeconds, law.Update.Seconds())
		step.NormSeconds = max(step.NormSeconds, law.Norm.Seconds())
		step.PredictedSeconds = max(step.PredictedSeconds, t.predict(law).Seconds())
	}
	return step, nil
}

// work returns how long the workers of a rank have worked in the last step.
func (t *trainer) work(rank int) (sum time.Duration) {
	for i := rank; i < len(t.recorders); i += len(t.shards) { // its shard, and that of its important columns
		norm, update := t.recorders[i].busy(time.Time{})
		sum += norm + update
	}
	return sum
}

// law returns the last step of a shard as the law sees it.
func (t *trainer) law(number int) overlap.Step {
	s := overlap.Step{Mode: t.pace.Mode, Forward: t.pace.Forward, Backward: t.pace.Backward,
		Important: t.pace.TopKRatio, Interval: t.pace.UpdateInterval}
	s.Norm, s.Update = t.recorders[number].busy(time.Time{})
	if t.clipped { // what it takes from the verdict on goes on behind the forward pass alone
		s.Mode = overlap.Forward
		_, s.Update = t.recorders[number].busy(t.decided)
	}
	for _, l := range t.layers[number] {
		s.Layers = append(s.Layers, l.Layer)
	}
	return s
}

// predict returns what the law says that the trainer has waited for in a step.
func (t *trainer) predict(law overlap.Step) time.Duration {
	if t.pace.Speculates && !t.clipped {
		law.Update += law.Norm // workers add it up between updates
	}
	return law.Exposed()
}

// clips reports whether a step of some number is one of those that are clipped.
func (p *Pace) clips(number int) bool {
	share := p.ClippedPercent / 100
	return math.Floor(float64(number+1)*share) > math.Floor(float64(number)*share)
}

// passes makes the passes of a step in the order of the mode. norm is that of the gradients before them.
func (t *trainer) passes(norm float64) error {
	switch t.pace.Mode {
	case overlap.Backward:
		if err := t.begin(norm, (*engine.Shard).BeginArriving); err != nil {
			return err
		}
		t.backward(false, true)
		if err := t.decide(); err != nil {
			return err
		}
		t.forward(true)
		return nil
	case overlap.Async, overlap.ZenFlow:
		if err := t.begin(norm, (*engine.Shard).BeginThen); err != nil {
			return err
		}
		for i := range t.pace.UpdateInterval {
			last := i == t.pace.UpdateInterval-1 // its gradients are final
			t.forward(false)
			t.backward(i == 0, last)
			if last {
				t.wait(Summing, "", func() { t.norm() })
			}
			if err := t.updateImportant(); err != nil {
				return err
			}
		}
		return nil
	}
	t.backward(false, true)
	t.wait(Summing, "", func() { norm = t.norm() })
	if err := t.begin(norm, (*engine.Shard).BeginThen); err != nil {
		return err
	}
	if t.pace.Mode == overlap.None {
		t.wait(Waiting, "", func() {
			for _, s := range t.shards {
				s.Wait()
			}
		})
	}
	t.forward(t.pace.Mode == overlap.Forward)
	return nil
}

// decide says whether the step is clipped that has begun, if it speculates.
func (t *trainer) decide() (err error) {
	if !t.pace.Speculates {
		return nil
	}
	t.wait(Summing, "", func() {
		factor := optim.GradScale(t.norm(), 1, t.clip)
		t.decided = time.Now()
		for _, s := range t.shards {
			err = errors.Join(err, s.Decide(engine.Verdict{GradScale: factor}))
		}
	})
	return err
}

// updateImportant updates the important columns, and waits for that: the next forward pass computes with them.
func (t *trainer) updateImportant() (err error) {
	if len(t.important) == 0 {
		return nil
	}
	t.wait(Waiting, "important columns", func() {
		sum := 0.0
		for _, s := range t.important {
			sum += s.SumSquares()
		}
		scale := optim.GradScale(math.Sqrt(sum), 1, t.clip)
		for _, s := range t.important {
			if err = s.Begin(s.Steps()+1, scale, []optim.Optimizer{t.optimizer}); err != nil {
				return
			}
		}
		for _, s := range t.important {
			s.Wait()
		}
	})
	return err
}

// unclipped is how many times larger gradients are than those of a clipped step, until it is known that it is one.
const unclipped = 1.25

// begin begins the update of all shards. The gradients are those of the step before, and so is their norm.
func (t *trainer) begin(norm float64,
	begin func(*engine.Shard, engine.Update, func()) error) error {
	update := engine.Update{Step: t.engine.Steps() + 1, GradScale: optim.GradScale(norm, 1, t.clip),
		Optimizers: []optim.Optimizer{t.optimizer}, Speculates: t.pace.Speculates}
	if t.clipped {
		update.GradScale *= unclipped
	}
	for _, s := range t.shards {
		if err := begin(s, update, nil); err != nil {
			return err
		}
	}
	return nil
}

// norm returns the norm of all gradients, once those that have arrived are added up.
func (t *trainer) norm() float64 {
	sum := 0.0
	for i, s := range t.shards {
		t.arrivals[i].pending.Wait()
		sum += s.SumSquares()
	}
	return math.Sqrt(sum)
}

// forward makes a forward pass. It may wait for every layer before it computes it.
func (t *trainer) forward(waits bool) {
	order, begin := inForward(t.layers[0]), t.now
	layers := t.layers[0]
	exposed := t.exposed
	for i, l := range order {
		if waits {
			t.wait(Waiting, layers[l].Name, func() { t.waitForLayer(l) })
		}
		end := 1.0
		if i+1 < len(order) {
			end = layers[order[i+1]].Needed
		}
		t.compute(InForward, layers[l].Name, begin.Add(share(end, t.pace.Forward)+t.exposed-exposed))
	}
}

// backward makes a backward pass. It may wait for the memory of every layer's gradients. The gradients may then be
// final, or those of other steps be added to them.
func (t *trainer) backward(waits, final bool) {
	begin, layers := t.now, t.layers[0]
	exposed := t.exposed
	for _, l := range inBackward(layers) {
		t.compute(InBackward, layers[l].Name,
			begin.Add(share(layers[l].Final, t.pace.Backward)+t.exposed-exposed))
		if waits {
			t.wait(Waiting, layers[l].Name, func() { t.waitForLayer(l) })
		}
		for number, a := range t.arrivals {
			if final {
				a.arrived(t.layers[number][l].ranges)
			}
		}
	}
}

func share(part float64, of time.Duration) time.Duration { return time.Duration(part * float64(of)) }

// waitForLayer waits until a layer is updated on all ranks, as the gathering of its parameters would.
func (t *trainer) waitForLayer(number int) {
	for i, s := range t.shards {
		for _, r := range t.layers[i][number].ranges {
			s.WaitRange(r)
		}
	}
}

// noticed is the shortest wait. Calls that wait for nothing return earlier.
const noticed = 50 * time.Microsecond

// wait has the trainer wait until a function returns.
func (t *trainer) wait(activity Activity, of string, until func()) {
	begin := time.Now()
	until()
	end := time.Now()
	from := t.now
	if end.Sub(begin) < noticed {
		t.now = t.now.Add(end.Sub(begin))
	} else {
		t.now = end
		t.spans = append(t.spans, Span{activity, of, from.Sub(t.began), end.Sub(t.began)})
	}
	t.exposed += t.now.Sub(from)
}

// compute takes the time of a computation until an instant. The thread wakes up a little later than that. The next
// computation still begins at the instant, so that delays do not add up.
func (t *trainer) compute(activity Activity, of string, until time.Time) {
	if !until.After(t.now) {
		return
	}
	SleepUntil(until)
	t.spans = append(t.spans, Span{activity, of, t.now.Sub(t.began), until.Sub(t.began)})
	t.now = until
}

// run makes a step on a thread of the trainer's own.
func (t *trainer) run() (step PacedStep, err error) {
	OnThread(func() { step, err = t.step() })
	return step, err
}

// timeline returns what the last step was.
func (t *trainer) timeline() *Timeline {
	line := &Timeline{Steps: t.pace.UpdateInterval, Tracks: []Track{{"trainer", slices.Clone(t.spans)}}}
	for i, s := range t.all() {
		var layers []pacedLayer
		if i < len(t.layers) {
			layers = t.layers[i]
		}
		t.recorders[i].addTo(line, s.Config(), layers, t.began)
	}
	return line
}

// close ends the goroutines of the trainer.
func (t *trainer) close() {
	runtime.GOMAXPROCS(t.processors)
	for _, a := range t.arrivals {
		a.close()
	}
}

// arrivals tell a shard of gradients while the trainer computes on, as copies from a device do.
type arrivals struct {
	ranges  chan shard.Range
	pending sync.WaitGroup
}

// newArrivals returns the arrivals of a shard, of up to a number of ranges in a pass.
func newArrivals(s *engine.Shard, most int) *arrivals {
	a := &arrivals{ranges: make(chan shard.Range, most)}
	go func() {
		for r := range a.ranges {
			piled := []shard.Range{r} // and what has piled up behind an update
			for len(a.ranges) > 0 {
				piled = append(piled, <-a.ranges)
			}
			for _, r := range joined(piled) {
				s.GradientsArrived(r)
			}
			a.pending.Add(-len(piled))
		}
	}()
	return a
}

// joined returns the same elements in as few ranges as there can be.
func joined(ranges []shard.Range) []shard.Range {
	var all []shard.Range
	slices.SortFunc(ranges, func(a, b shard.Range) int { return cmp.Compare(a.First, b.First) })
	for _, r := range ranges {
		if n := len(all) - 1; n >= 0 && all[n].End() == r.First {
			all[n].Count += r.Count
			continue
		}
		all = append(all, r)
	}
	return all
}

func (a *arrivals) arrived(ranges []shard.Range) {
	for _, r := range ranges {
		a.pending.Add(1)
		a.ranges <- r
	}
}

func (a *arrivals) close() { close(a.ranges) }
