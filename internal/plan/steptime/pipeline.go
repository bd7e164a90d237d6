package steptime

import (
	"errors"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/plan/job"
)

// passTimes are the times of the passes of one micro batch through a chunk, with what they wait for. Weights is the
// part of backward that a divided backward pass takes for the weights.
type passTimes struct{ forward, backward, weights float64 }

// of returns the time of a pass. The first chunk has no input whose gradient somebody waits for: it runs both halves
// where it should run that of the weights (backward_one_chunk in torch/distributed/pipelining/stage.py).
func (t passTimes) of(p parallel.Pass, first bool) float64 {
	switch {
	case !p.Backward:
		return t.forward
	case p.Half == parallel.InputHalf && first:
		return 0
	case p.Half == parallel.InputHalf:
		return t.backward - t.weights
	case p.Half == parallel.WeightHalf && !first:
		return t.weights
	}
	return t.backward
}

// timetable is what a schedule needs: the passes of every stage in their order, the times of every stage's chunks, and
// how long a message takes behind every chunk on the way of a micro batch.
type timetable struct {
	passes   [][]parallel.Pass
	times    [][]passTimes
	messages []float64
	vee      bool // chunks go down the stages and come back
}

// place returns where a chunk of a stage is on the way of a micro batch.
func (t *timetable) place(stage, chunk int) int {
	if t.vee && chunk == 1 {
		return 2*len(t.passes) - 1 - stage
	}
	return chunk*len(t.passes) + stage
}

// errCircle is for passes that wait for each other.
var errCircle = errors.New("steptime: the passes of a pipeline wait for each other")

// ends runs the passes: every stage in its order, each pass as soon as that before it on the way of its micro batch has
// ended and its message has come. It returns when each stage ends its last pass.
func (t *timetable) ends(micros int) ([]float64, error) {
	stages, chunks := len(t.passes), len(t.times[0])
	behind := stages * chunks // chunks on the way of a micro batch
	const open = -1
	done := make([]float64, 2*behind*micros)
	for i := range done {
		done[i] = open
	}
	at := func(backward bool, chunk, micro int) *float64 {
		if backward {
			chunk += behind
		}
		return &done[chunk*micros+micro]
	}
	// ready returns when the input of a pass is there, or open.
	ready := func(p parallel.Pass, place int) float64 {
		switch {
		case !p.Backward && place == 0:
			return 0
		case p.Backward && place == behind-1:
			return *at(false, place, p.Micro)
		}
		from, message := place-1, 0.0
		if p.Backward {
			from, message = place+1, t.messages[place]
		} else {
			message = t.messages[from]
		}
		if end := *at(p.Backward, from, p.Micro); end != open {
			return end + message
		}
		return open
	}
	clock, next := make([]float64, stages), make([]int, stages)
	for moved := true; moved; {
		moved = false
		for s, list := range t.passes {
			for ; next[s] < len(list); next[s]++ {
				p := list[next[s]]
				place := t.place(s, p.Chunk)
				from := clock[s]
				if p.Half != parallel.WeightHalf { // the stage's own other half comes before
					from = ready(p, place)
				}
				if from == open {
					break
				}
				clock[s] = max(clock[s], from) + t.times[s][p.Chunk].of(p, place == 0)
				if p.Half != parallel.WeightHalf {
					*at(p.Backward, place, p.Micro) = clock[s]
				}
				moved = true
			}
		}
	}
	for s, list := range t.passes {
		if next[s] < len(list) {
			return nil, &fault.Internal{Err: errCircle}
		}
	}
	return clock, nil
}

// duty is what a stage does in a step: its times, what its last micro batch waits for, and its update.
type duty struct {
	parts
	last float64
}

// run returns the parts of a step. The optimizer steps when all stages are done, as the norm of the gradients is that
// of all of them.
func (t *timetable) run(micros int, duties []duty) (parts, error) {
	ends, err := t.ends(micros)
	if err != nil {
		return parts{}, err
	}
	var all parts
	var busiest, end, optimizer float64
	for s, d := range duties {
		d.communication += d.last
		if busy := d.forward + d.backward + d.communication; busy > busiest {
			busiest, all = busy, d.parts
		}
		end, optimizer = max(end, ends[s]+d.last), max(optimizer, d.optimizer)
	}
	all.pipeline, all.optimizer = max(0, end-busiest), optimizer
	return all, nil
}

// stages are the chunks of a pipeline of torch.distributed.pipelining, each as a job of its own.
type stages struct {
	job    *job.Job
	chunks [][]chunk
	passes [][]parallel.Pass
}

type chunk struct {
	job     *job.Job
	work    work
	trained float64
}

// newStages cuts a job. Trained parameters are in proportion to all.
func newStages(j *job.Job, trained float64) *stages {
	s := &stages{job: j}
	whole := float64(max(1, j.Model.Elements()))
	for stage := range j.Pipeline.Degree {
		var list []chunk
		for i := range j.Pipeline.Table[stage] {
			of := j.OfChunk(stage, i)
			share := float64(of.Model.Elements()) / whole
			list = append(list, chunk{job: of, work: workOf(of), trained: trained * share})
		}
		s.chunks = append(s.chunks, list)
		s.passes = append(s.passes, j.Pipeline.Passes(stage, j.Pipeline.Micros))
	}
	return s
}

// parts returns the parts of a step at an end of the interval.
func (s *stages) parts(r rates) (parts, error) {
	p, micros := s.job.Pipeline, float64(s.job.Pipeline.Micros)
	t := &timetable{passes: s.passes, messages: s.messages(&r), vee: p.IsV()}
	duties := make([]duty, len(s.chunks))
	for i, chunks := range s.chunks {
		d := &duties[i]
		var times []passTimes
		for _, c := range chunks {
			of := predictor{job: c.job, rates: r, trained: c.trained}
			of.predict(c.work)
			back := of.backward + of.added
			times = append(times, passTimes{of.forward + of.waits.forward, back + of.waits.backward, of.backward / 2})
			d.forward, d.backward = d.forward+of.forward*micros, d.backward+back*micros
			d.communication += (of.waits.forward + of.waits.backward) * micros
			d.last, d.optimizer = d.last+of.waits.last, d.optimizer+of.optimizer
		}
		t.times = append(t.times, times)
	}
	return t.run(p.Micros, duties)
}

// messages returns how long the hidden states of a micro batch take from each chunk to the next one on their way.
func (s *stages) messages(r *rates) []float64 {
	j := s.job
	bytes := float64(j.Sequences()*sequenceOf(j)*j.Model.Network.Hidden*j.ComputeType().Size()) /
		float64(j.Parallel.Context*j.Parallel.Tensor)
	list := r.messages(bytes, int(j.Pipeline.Degree), len(j.Pipeline.Table[0]), j.World, j.RanksPerNode)
	if p := int(j.Pipeline.Degree); j.Pipeline.IsV() {
		list[p-1] = 0 // both chunks are the last stage's
		for place := p; place < 2*p-1; place++ {
			list[place] = list[2*p-2-place] // the same ranks on the way back
		}
	}
	return list
}

// messages returns how long a message takes behind each chunk. Stages have neighbouring ranks, so some boundaries are
// between nodes.
func (r *rates) messages(bytes float64, stages, chunks, world, inNode int) []float64 {
	each := world / stages
	list := make([]float64, stages*chunks)
	for place := range list {
		from, to := place%stages, (place+1)%stages
		rate := r.peer
		for rank := range each {
			if (from*each+rank)/inNode != (to*each+rank)/inNode {
				rate = r.network
				break
			}
		}
		list[place] = bytes/rate + collectiveTime
	}
	return list
}
