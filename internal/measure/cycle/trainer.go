//go:build linux

package cycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/states"
)

// trainer is a trainer that computes nothing: it waits for the states of all ranks, and sleeps for its passes.
type trainer struct {
	*Job
	ranks      []*pipeline
	processors int // of Go's runtime, before the actors took their own
	timeline   *rehearse.Timeline
}

// actors is the number of threads of a rank beside those that copy.
const actors = 3

// begin maps the arenas and starts the threads that copy. The caller closes what begin returns, even after an error.
func (p *Placement) begin() (*trainer, error) {
	t := &trainer{Job: p.Job}
	threads := 2 // the trainer, and one more
	for _, r := range p.Ranks {
		threads += actors + 2*len(r.CPUs)
	}
	t.processors = runtime.GOMAXPROCS(threads)
	for _, r := range p.Ranks {
		rank, err := p.newPipeline(r)
		t.ranks = append(t.ranks, rank)
		if err != nil {
			return t, err
		}
	}
	return t, nil
}

// newPipeline maps the memory of a rank, and gives half of its cores to each direction.
func (p *Placement) newPipeline(r Rank) (l *pipeline, err error) {
	count := len(r.Layout.Chunks)
	l = &pipeline{layout: r.Layout, description: r.Description, places: states.NewLayout(r.Description.Chunks),
		work: p.work(r.Layout), entered: newEvents(count * pieces), brought: newEvents(count),
		updated: newEvents(count), ready: newEvents(count), left: newEvents(count * pieces)}
	if l.memory, err = p.mapMemory(r); err != nil {
		return l, err
	}
	var in, out []int
	for i, cpu := range r.CPUs {
		if i%2 == 0 {
			in = append(in, cpu)
		} else {
			out = append(out, cpu)
		}
	}
	if len(out) == 0 {
		out = in
	}
	if l.in, err = newLink(p.Link.In, r.Number, in); err != nil {
		return l, err
	}
	l.out, err = newLink(p.Link.Out, r.Number, out)
	return l, err
}

// close gives threads and arenas back.
func (t *trainer) close() (err error) {
	for _, r := range t.ranks {
		r.in.close()
		r.out.close()
		err = errors.Join(err, r.memory.close())
	}
	runtime.GOMAXPROCS(t.processors)
	return err
}

// each calls body on the threads of all ranks, and waits for them.
func (t *trainer) each(body func(r *pipeline, worker, workers int)) {
	for _, r := range t.ranks {
		in := r.in.workers.Count()
		workers := in + r.out.workers.Count()
		r.in.workers.Start(func(worker int) { body(r, worker, workers) })
		r.out.workers.Start(func(worker int) { body(r, in+worker, workers) })
	}
	for _, r := range t.ranks {
		r.in.workers.Wait()
		r.out.workers.Wait()
	}
}

// fill touches all memory, and writes the states before the first step.
func (t *trainer) fill(ctx context.Context, progress activity.Progress) {
	total := ledger.Bytes(0)
	for _, r := range t.ranks {
		for _, a := range r.arenas {
			total += a.Mapped()
		}
	}
	progress.Begin("allocating memory", int64(total), activity.Bytes)
	t.each(func(r *pipeline, worker, workers int) {
		for _, a := range r.arenas {
			if ctx.Err() == nil {
				progress.Advance(int64(populate(a, worker, workers)))
			}
		}
	})
	progress.End()
	progress.Begin("writing states", int64(len(t.ranks)), activity.Counts)
	t.each(func(r *pipeline, worker, workers int) {
		for number := worker; number < len(r.layout.Chunks) && ctx.Err() == nil; number += workers {
			c, region := r.layout.Chunks[number], r.region(number, 0)
			statesOf(number).fill(region[:c.State], 0, 0)
			parametersOf(number).fill(region[c.State:], 0, 0)
		}
		if worker == 0 {
			pattern{}.fill(r.buffer, 0, 0)
			r.control = states.NewControl(r.memory.control, r.description)
			progress.Advance(1)
		}
	})
	progress.End()
}

// populate has the kernel give a worker's share of an arena its pages, and returns how many bytes these are.
func populate(a *arena.Arena, worker, workers int) ledger.Bytes {
	units := shard.Range{Count: int64((a.Mapped() + arena.PopulateUnit - 1) / arena.PopulateUnit)}
	own := units.Share(worker, workers)
	first := ledger.Bytes(own.First) * arena.PopulateUnit
	end := min(a.Mapped(), ledger.Bytes(own.End())*arena.PopulateUnit)
	if first >= end {
		return 0
	}
	a.Populate(first, end)
	return end - first
}

// step makes a step: the states go round, and the trainer goes on once they are updated. The step ends when nothing is
// under way.
func (t *trainer) step() (step Step, err error) {
	rehearse.OnThread(func() { step = t.cycle() })
	for _, r := range t.ranks {
		if err := r.check(); err != nil {
			return step, err
		}
	}
	return step, nil
}

func (t *trainer) cycle() Step {
	begin := time.Now()
	var waits []func()
	for _, r := range t.ranks {
		waits = append(waits, r.start(begin))
	}
	ready := begin
	for _, r := range t.ranks {
		ready = later(ready, r.ready.wait(len(r.layout.Chunks)-1))
	}
	spans := []rehearse.Span{{Activity: rehearse.Waiting, To: ready.Sub(begin)}}
	now := ready
	for _, pass := range []struct {
		activity rehearse.Activity
		takes    time.Duration
	}{{rehearse.InForward, t.Forward}, {rehearse.InBackward, t.Backward}} {
		end := now.Add(pass.takes)
		rehearse.SleepUntil(end)
		if pass.takes > 0 {
			spans = append(spans, rehearse.Span{Activity: pass.activity, From: now.Sub(begin), To: end.Sub(begin)})
		}
		now = end
	}
	left := begin
	for i, wait := range waits {
		wait()
		left = later(left, t.ranks[i].out.now)
	}
	if left.After(now) { // the next step would wait for its slots
		spans = append(spans, rehearse.Span{Activity: rehearse.Waiting, From: now.Sub(begin), To: left.Sub(begin)})
		now = left
	}
	t.draw(spans)
	return t.result(ready.Sub(begin), left.Sub(begin), now.Sub(begin))
}

// draw makes the timeline of the step.
func (t *trainer) draw(spans []rehearse.Span) {
	t.timeline = &rehearse.Timeline{Steps: 1, Tracks: []rehearse.Track{{Name: "trainer", Spans: spans}}}
	for i, r := range t.ranks {
		prefix := ""
		if len(t.ranks) > 1 {
			prefix = fmt.Sprintf("rank %d ", i)
		}
		for _, track := range []rehearse.Track{{Name: "copy in", Spans: r.copiedIn}, {Name: "update", Spans: r.updates},
			{Name: "copy out", Spans: r.copiedOut}} {
			track.Name, track.Spans = prefix+track.Name, slices.Clone(track.Spans)
			t.timeline.Tracks = append(t.timeline.Tracks, track)
		}
	}
}

// result returns what a step was, and what the law says of it.
func (t *trainer) result(ready, left, all time.Duration) Step {
	step := Step{Seconds: left.Seconds(), ReadySeconds: ready.Seconds(),
		ExposedSeconds: (all - t.Forward - t.Backward).Seconds()}
	for _, r := range t.ranks {
		law := r.law()
		step.InSeconds = max(step.InSeconds, r.in.busy.Seconds())
		step.UpdateSeconds = max(step.UpdateSeconds, r.updating.Seconds())
		step.OutSeconds = max(step.OutSeconds, r.out.busy.Seconds())
		step.PredictedSeconds = max(step.PredictedSeconds, law.Left.Seconds())
		step.PredictedReadySeconds = max(step.PredictedReadySeconds, law.Ready.Seconds())
	}
	return step
}

// checkAll reads every byte that the last step has left on the host.
func (t *trainer) checkAll() error {
	t.each(func(r *pipeline, worker, workers int) {
		for number := worker; number < len(r.layout.Chunks); number += workers {
			if err := r.checkChunk(number); err != nil {
				r.fail(fmt.Errorf("step %d on the host: chunk %d: %w", r.steps, number, err))
			}
		}
	})
	var err error
	for _, r := range t.ranks {
		err = cmp.Or(err, r.failure)
	}
	return err
}
