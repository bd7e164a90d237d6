//go:build linux

package rehearse

import (
	"cmp"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/shard"
)

// Timeline is what the trainer and the workers did in a paced step, or in the steps of an interval.
type Timeline struct {
	Steps  int
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

// The activities of trainer and workers, and of the copies to a device and back.
const (
	InForward  Activity = "forward"
	InBackward Activity = "backward"
	Waiting    Activity = "wait"
	Summing    Activity = "norm"
	CopyingIn  Activity = "copy in"
	Updating   Activity = "update"
	CopyingOut Activity = "copy out"
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
	origin  time.Time // that stamps count from
	workers [][]stamp // each worker writes to its own
}

// stamp is one unit of work.
type stamp struct {
	work       engine.Work
	began, end time.Duration
}

// newRecorder makes room for a number of updates of a shard. For each, every gradient is read once and every chunk
// updated once. A worker may do twice its share.
func newRecorder(c engine.ShardConfig, updates int) *recorder {
	r := &recorder{origin: time.Now(), workers: make([][]stamp, len(c.CPUs))}
	most := units(c, updates)
	for i := range r.workers {
		r.workers[i] = make([]stamp, 0, min(most, 2*most/len(c.CPUs)+1))
	}
	return r
}

func units(c engine.ShardConfig, updates int) int { return 2 * c.Chunks * updates }

// stampBytes returns the memory of all stamps of a step.
func stampBytes(c engine.ShardConfig, updates int) ledger.Bytes {
	return ledger.Bytes(units(c, updates)) * ledger.Bytes(unsafe.Sizeof(stamp{}))
}

// observe is called by the workers. What has no room is left out.
func (r *recorder) observe(worker int, work engine.Work, began time.Time) {
	if own := &r.workers[worker]; len(*own) < cap(*own) {
		*own = append(*own, stamp{work, began.Sub(r.origin), time.Since(r.origin)})
	}
}

// busy returns how long the workers have worked, on average, on the norm and on the update, of what they have begun
// from an instant on.
func (r *recorder) busy(from time.Time) (norm, update time.Duration) {
	for _, stamps := range r.workers {
		for _, s := range stamps {
			switch {
			case r.origin.Add(s.began).Before(from):
			case s.work.Norm:
				norm += s.end - s.began
			default:
				update += s.end - s.began
			}
		}
	}
	workers := time.Duration(len(r.workers))
	return norm / workers, update / workers
}

func (r *recorder) reset() {
	for i := range r.workers {
		r.workers[i] = r.workers[i][:0]
	}
}

// addTo adds the work of a shard to the tracks of its workers. Without layers, it is of important columns.
func (r *recorder) addTo(t *Timeline, c engine.ShardConfig, layers []pacedLayer, began time.Time) {
	layerOf := func(at shard.Range) string {
		for _, l := range layers {
			for _, own := range l.ranges {
				if own.Intersect(at).Count > 0 {
					return l.Name
				}
			}
		}
		return "important columns"
	}
	offset := began.Sub(r.origin)
	for i, stamps := range r.workers {
		track := t.track(fmt.Sprintf("rank %d, CPU %d", c.Rank, c.CPUs[i]))
		for _, s := range stamps {
			activity := Updating
			if s.work.Norm {
				activity = Summing
			}
			track.Spans = append(track.Spans,
				Span{activity, layerOf(s.work.Elements), s.began - offset, s.end - offset})
		}
		slices.SortFunc(track.Spans, func(a, b Span) int { return cmp.Compare(a.From, b.From) })
	}
}

// track returns the track of a name. Shards of one rank have the same workers.
func (t *Timeline) track(name string) *Track {
	for i := range t.Tracks {
		if t.Tracks[i].Name == name {
			return &t.Tracks[i]
		}
	}
	t.Tracks = append(t.Tracks, Track{Name: name})
	return &t.Tracks[len(t.Tracks)-1]
}
