package rehearse

import (
	"fmt"
	"time"

	"plimsoll/engine"
	"plimsoll/shard"
)

// Timeline is what the trainer and the workers did in a paced step.
type Timeline struct {
	Tracks []Track // the trainer first
}

// Track is one actor of a timeline.
type Track struct {
	Name  string
	Spans []Span // in order; none begins before the last one has ended
}

// Span is one activity. Its times count from the beginning of the step.
type Span struct {
	Activity Activity
	Of       string // a layer; may be empty
	From, To time.Duration
}

// Activity is what somebody does.
type Activity string

// The activities of trainer and workers.
const (
	InForward  Activity = "forward"
	InBackward Activity = "backward"
	Waiting    Activity = "wait"
	Summing    Activity = "norm"
	Updating   Activity = "update"
)

// Length returns the time from the beginning of the step to the end of the last span.
func (t *Timeline) Length() time.Duration {
	length := time.Duration(0)
	for _, track := range t.Tracks {
		if n := len(track.Spans); n > 0 {
			length = max(length, track.Spans[n-1].To)
		}
	}
	return length
}

// recorder records the work of a shard's workers. It allocates nothing while they work.
type recorder struct {
	workers [][]stamp // each worker writes to its own
}

// stamp is one unit of work.
type stamp struct {
	work       engine.Work
	began, end time.Time
}

// newRecorder makes room for a step of a shard: every chunk is updated once, and every norm block is read once or, where
// its gradients arrived in two parts, twice. A worker may do all of it.
func newRecorder(c engine.ShardConfig) *recorder {
	r := &recorder{workers: make([][]stamp, len(c.CPUs))}
	for i := range r.workers {
		r.workers[i] = make([]stamp, 0, 3*c.Chunks+2)
	}
	return r
}

// observe is called by the workers. What has no room is left out.
func (r *recorder) observe(worker int, work engine.Work, began time.Time) {
	if own := &r.workers[worker]; len(*own) < cap(*own) {
		*own = append(*own, stamp{work, began, time.Now()})
	}
}

func (r *recorder) reset() {
	for i := range r.workers {
		r.workers[i] = r.workers[i][:0]
	}
}

// tracks returns a track for every worker of a shard.
func (r *recorder) tracks(c engine.ShardConfig, layers []pacedLayer, began time.Time) []Track {
	layerOf := func(at shard.Range) string {
		for _, l := range layers {
			for _, own := range l.ranges {
				if own.Intersect(at).Count > 0 {
					return l.Name
				}
			}
		}
		return "padding"
	}
	tracks := make([]Track, len(r.workers))
	for i, stamps := range r.workers {
		tracks[i].Name = fmt.Sprintf("rank %d, CPU %d", c.Rank, c.CPUs[i])
		for _, s := range stamps {
			activity := Updating
			if s.work.Norm {
				activity = Summing
			}
			tracks[i].Spans = append(tracks[i].Spans,
				Span{activity, layerOf(s.work.Elements), s.began.Sub(began), s.end.Sub(began)})
		}
	}
	return tracks
}
