package roads

import (
	"math"
	"time"

	"plimsoll/internal/base/ledger"
)

// Link is the connection between a GPU and the memory of its host, in bytes a second.
type Link struct {
	In, Out float64 // to the GPU and from the GPU, each alone
	// Together is the sum of both directions at the same time. 0 means that neither slows the other down.
	Together float64
}

// shared returns the link as one of several ranks has it whose copies all read or write the same host memory.
func (l Link) shared(host float64, ranks int) Link {
	if host == 0 {
		return l
	}
	each := host / float64(max(1, ranks))
	l.In, l.Out = min(l.In, each), min(l.Out, each)
	if l.Together == 0 || l.Together > each {
		l.Together = each
	}
	return l
}

// speeds returns the speed of each direction while both or one of them copies. Two copies share what the link moves
// fairly: a direction that needs less than half of it leaves the rest to the other.
func (l Link) speeds(in, out bool) (toGPU, fromGPU float64) {
	switch {
	case in && out && l.Together > 0 && l.Together < l.In+l.Out:
		half := l.Together / 2
		switch {
		case l.In < half:
			return l.In, l.Together - l.In
		case l.Out < half:
			return l.Together - l.Out, l.Out
		}
		return half, half
	case in && out:
		return l.In, l.Out
	case in:
		return l.In, 0
	}
	return 0, l.Out
}

// Work is the way of a chunk through the GPU.
type Work struct {
	In     ledger.Bytes // states and master weights, to the GPU
	Update time.Duration
	// Out is what leaves the slot: the same bytes. With recovery the gradients of all chunks leave before them, and of
	// each chunk its Own: the model's parameters.
	Out, Own, Gradients ledger.Bytes
}

// Passage is when the parts of a step are done, from its beginning on.
type Passage struct {
	Updated time.Duration // all is updated
	// Ready is when the trainer can go on. With recovery the parameters have to be on the host, before it uses them.
	Ready time.Duration
	Left  time.Duration // the last byte is on the host
}

// pieces is the number of pieces that a slot is filled in, behind the copy out of what was there before.
const pieces = 8

// slots is the number of chunks that are on the GPU at a time.
const slots = 2

// Chunked returns when a step in mode chunked is done. Three streams work on three chunks: one copies a chunk in, one
// updates the chunk before it, and one copies the chunk before that out. Gradients leave first: a region may be
// overwritten once all are on the host, and an update may change those of its chunk.
func Chunked(chunks []Work, link Link) Passage {
	var in, compute, out stream
	piece := ledger.Bytes(0)
	gradients := make([]*task, len(chunks))
	for i, c := range chunks {
		piece = max(piece, (c.In+pieces-1)/pieces)
		gradients[i] = out.add(float64(c.Gradients))
	}
	part := func(of ledger.Bytes, number int) float64 { // small chunks fill the first pieces of a slot
		return float64(min(piece, max(0, of-ledger.Bytes(number)*piece)))
	}
	var drained [slots][pieces]*task
	var updated, own *task
	for i, c := range chunks {
		slot := &drained[i%slots]
		var filled *task
		for n := range pieces {
			filled = in.add(part(c.In, n), slot[n])
		}
		updated = compute.add(c.Update.Seconds(), filled, gradients[i])
		own = out.add(float64(c.Own), updated)
		for n := range pieces {
			slot[n] = out.add(part(c.Out, n))
		}
	}
	left := run(link, in, compute, out)
	if len(chunks) == 0 {
		return Passage{}
	}
	p := Passage{Updated: seconds(updated.end), Ready: seconds(updated.end), Left: seconds(left)}
	if chunks[len(chunks)-1].Own > 0 {
		p.Ready = seconds(own.end)
	}
	return p
}

// task is what a stream does: it copies bytes, or computes for some seconds.
type task struct {
	left  float64 // bytes or seconds
	after []*task // of other streams; nil for one that is done
	end   float64 // +Inf before it is known
}

// stream is tasks that are done one after the other.
type stream []*task

// add adds a task, which begins when those before it and others are done.
func (s *stream) add(amount float64, after ...*task) *task {
	t := &task{left: amount, after: after, end: math.Inf(1)}
	*s = append(*s, t)
	return t
}

// head returns the task that the stream works on, or nil if it waits or has ended.
func (s *stream) head() *task {
	for len(*s) > 0 && !math.IsInf((*s)[0].end, 1) {
		*s = (*s)[1:]
	}
	if len(*s) == 0 {
		return nil
	}
	for _, t := range (*s)[0].after {
		if t != nil && math.IsInf(t.end, 1) {
			return nil
		}
	}
	return (*s)[0]
}

// takes returns how long a task still takes at a speed.
func (t *task) takes(speed float64) float64 {
	switch {
	case t == nil:
		return math.Inf(1)
	case t.left == 0:
		return 0
	}
	return t.left / speed
}

// run runs the streams, and returns when the last task is done. Every turn ends the task that takes least.
func run(link Link, in, compute, out stream) (now float64) {
	for {
		heads := [...]*task{in.head(), out.head(), compute.head()}
		toGPU, fromGPU := link.speeds(heads[0] != nil, heads[1] != nil)
		speeds := [...]float64{toGPU, fromGPU, 1}
		passed := math.Inf(1)
		for i, t := range heads {
			passed = min(passed, t.takes(speeds[i]))
		}
		if heads == [3]*task{} {
			return now
		}
		if !(passed < math.Inf(1)) { // a link that moves nothing
			return math.Inf(1)
		}
		now += passed
		for i, t := range heads {
			switch takes := t.takes(speeds[i]); {
			case takes == passed:
				t.left, t.end = 0, now
			case t != nil:
				t.left -= passed * speeds[i]
			}
		}
	}
}

// Whole returns when a step in mode whole is done. All states come to the GPU, one update changes them all, and they
// leave. Copies in began a time ago, ahead: where plimsoll.torch.StateOffload.prefetch was called.
func Whole(chunks []Work, link Link, ahead time.Duration) Passage {
	var in, out, own float64
	var update time.Duration
	for _, c := range chunks {
		in, out, own, update = in+float64(c.In), out+float64(c.Out), own+float64(c.Own), update+c.Update
	}
	updated := max(0, in/link.In-ahead.Seconds()) + update.Seconds()
	ready := updated + own/link.Out
	return Passage{seconds(updated), seconds(ready), seconds(ready + out/link.Out)}
}

// forever bounds times, so that a few of them can be added up: 73 years.
const forever = 1 << 61

// seconds returns a duration. It is no longer than forever, as at the speed of a link that moves nothing.
func seconds(s float64) time.Duration {
	if !(s < forever/1e9) {
		return forever
	}
	return time.Duration(math.Round(s * 1e9))
}
