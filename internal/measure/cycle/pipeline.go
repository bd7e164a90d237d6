//go:build linux

package cycle

import (
	"fmt"
	"sync"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/states"
)

// pipeline is the memory of a rank, and three actors that move its states: one copies chunks to the device, one updates
// them, and one copies them back. They work on three chunks at a time.
type pipeline struct {
	*memory
	layout      *roads.Layout
	places      *states.Layout
	description *states.Description
	control     *states.Control
	work        []roads.Work

	in, out                *link
	entered, updated, left *events // pieces, chunks, pieces
	brought, ready         *events // chunks whose gradients are on the host, and whose parameters may be changed
	updating               time.Duration
	copiedIn, copiedOut    []rehearse.Span
	updates                []rehearse.Span

	steps int64     // that are finished
	begin time.Time // of the step under way

	lock    sync.Mutex
	failure error // the first; guarded by lock
}

// pieces is the number of pieces that a chunk is copied in. A piece goes to a slot once its place there is free.
const pieces = 8

// piece returns where a piece of some bytes begins and ends in a slot. It begins at a stamp. Small chunks fill the
// first pieces of their slot.
func (p *pipeline) piece(bytes, number int) (begin, end int) {
	const all = pieces * stampEvery
	size := (int(p.layout.Slot()) + all - 1) / all * stampEvery
	return min(number*size, bytes), min((number+1)*size, bytes)
}

// start begins a step. The actors have ended when the function that it returns does.
func (p *pipeline) start(begin time.Time) (wait func()) {
	p.begin, p.updating = begin, 0
	p.in.reset(begin)
	p.out.reset(begin)
	p.copiedIn, p.copiedOut, p.updates = p.copiedIn[:0], p.copiedOut[:0], p.updates[:0]
	for _, e := range []*events{p.entered, p.brought, p.updated, p.ready, p.left} {
		e.reset()
	}
	var actors sync.WaitGroup
	for _, act := range []func(){p.copyIn, p.update, p.copyOut} {
		actors.Go(func() { rehearse.OnThread(act) })
	}
	return func() {
		actors.Wait()
		p.steps++
	}
}

// chunk returns the chunk that comes n-th in this step, and its bytes of states.
func (p *pipeline) chunk(n int) (number, bytes int) {
	number = p.places.Next(states.Moment{Steps: p.steps, Committed: n})
	return number, int(p.layout.Chunks[number].State)
}

// region returns the region of a chunk after so many steps.
func (p *pipeline) region(chunk int, steps int64) []byte {
	at := p.places.Offset(chunk, steps)
	return p.states[at : at+int64(p.layout.Chunks[chunk].Region())]
}

// gradientsOf returns the gradients of a chunk on the host, which are empty where none are held.
func (p *pipeline) gradientsOf(chunk int) []byte {
	if p.layout.Gradients() == 0 {
		return nil
	}
	at := p.gradientsAt[chunk]
	return p.gradients[at : at+p.layout.Chunks[chunk].Gradients]
}

// slot returns the place in the window for the chunk that comes n-th.
func (p *pipeline) slot(n int) []byte {
	number, bytes := p.chunk(n)
	if p.layout.Whole {
		return p.window[p.windowAt[number]:][:bytes]
	}
	return p.window[n%slots*int(p.layout.Slot()):][:bytes]
}

// slots is the number of chunks in the window at a time.
const slots = 2

// copyIn copies all chunks to the window.
func (p *pipeline) copyIn() {
	for n := range p.layout.Chunks {
		number, bytes := p.chunk(n)
		slot, region := p.slot(n), p.region(number, p.steps)
		var first time.Time
		for i := range pieces {
			begin, end := p.piece(bytes, i)
			if end > begin {
				sent := p.in.transfer(slot[begin:end], region[begin:end], p.freed(n, i))
				if i == 0 {
					first = sent
				}
			}
			p.entered.happened(p.in.now)
		}
		p.copiedIn = append(p.copiedIn, p.span(rehearse.CopyingIn, number, first, p.in.now))
	}
}

// freed returns when the place of a piece in its slot was free, for the chunk that comes n-th.
func (p *pipeline) freed(n, piece int) time.Time {
	if p.layout.Whole || n < slots {
		return p.begin
	}
	return p.left.wait((n-slots)*pieces + piece)
}

// update updates the chunks in the window: it counts a step in every stamp, and takes the time that a device would.
func (p *pipeline) update() {
	count, now := len(p.layout.Chunks), p.begin
	for n := 0; n < count; {
		end := n + 1
		if p.layout.Whole {
			end = count
		}
		now = later(now, p.entered.wait(end*pieces-1))
		if p.layout.Gradients() > 0 { // the update may change them
			now = later(now, p.brought.wait(end-1))
		}
		began, due := now, now
		for i := n; i < end; i++ {
			number, _ := p.chunk(i)
			p.stamp(number, p.slot(i))
			due = due.Add(p.work[number].Update)
		}
		rehearse.SleepUntil(due)
		now = later(due, time.Now().Add(-patience))
		p.updating += now.Sub(began)
		number, _ := p.chunk(n)
		p.updates = append(p.updates, p.span(rehearse.Updating, number, began, now))
		for ; n < end; n++ {
			p.updated.happened(now)
		}
	}
}

// stamp checks a chunk in its slot and stamps it with the new step.
func (p *pipeline) stamp(number int, slot []byte) {
	if err := statesOf(number).check(slot, p.steps); err != nil {
		p.fail(fmt.Errorf("step %d: chunk %d as it came to the window: %w", p.steps+1, number, err))
	}
	statesOf(number).put(slot, 0, p.steps+1)
}

// copyOut copies the gradients to the host, and then all chunks, the parameters of each before its states. Each chunk
// is committed. The trainer goes on once the last parameters are on the host: it may change them.
func (p *pipeline) copyOut() {
	if p.layout.Gradients() > 0 {
		p.copyGradients()
	}
	for n := range p.layout.Chunks {
		number, bytes := p.chunk(n)
		ready := p.updated.wait(n)
		slot, region := p.slot(n), p.region(number, p.steps+1)
		first, goOn := later(p.out.now, ready), ready
		if own := region[bytes:]; len(own) > 0 {
			parameters := p.buffer[:len(own)]
			parametersOf(number).put(parameters, 0, p.steps+1)
			p.out.transfer(own, parameters, ready)
			goOn = p.out.now
		}
		p.ready.happened(goOn)
		for i := range pieces {
			begin, end := p.piece(bytes, i)
			if end > begin {
				p.out.transfer(region[begin:end], slot[begin:end], ready)
				erase(slot[begin:end])
			}
			p.left.happened(p.out.now)
		}
		p.control.Position.Store(p.places.Position(states.Moment{Steps: p.steps, Committed: n + 1}))
		p.copiedOut = append(p.copiedOut, p.span(rehearse.CopyingOut, number, first, p.out.now))
	}
}

// copyGradients copies the gradients of all chunks. No region may be overwritten before they are on the host.
func (p *pipeline) copyGradients() {
	for n := range p.layout.Chunks {
		number, _ := p.chunk(n)
		gradients := p.buffer[:p.layout.Chunks[number].Gradients]
		gradientsOf(number).put(gradients, 0, p.steps+1)
		p.out.transfer(p.gradientsOf(number), gradients, p.begin)
		p.brought.happened(p.out.now)
	}
	p.control.GradientsOf.Store(uint64(p.steps + 1))
	p.copiedOut = append(p.copiedOut, rehearse.Span{Activity: rehearse.CopyingOut, Of: "gradients",
		To: p.out.now.Sub(p.begin)})
}

func (p *pipeline) span(activity rehearse.Activity, chunk int, from, to time.Time) rehearse.Span {
	return rehearse.Span{Activity: activity, Of: fmt.Sprint("chunk ", chunk), From: from.Sub(p.begin),
		To: to.Sub(p.begin)}
}

func (p *pipeline) fail(err error) {
	p.lock.Lock()
	defer p.lock.Unlock()
	if p.failure == nil {
		p.failure = err
	}
}

// check compares the last step with the plan: every byte was moved once, and arrived.
func (p *pipeline) check() error {
	var in, out ledger.Bytes
	for _, c := range p.layout.Chunks {
		in, out = in+c.State, out+c.Region()
	}
	out += p.layout.Gradients()
	switch {
	case p.failure != nil:
		return p.failure
	case p.control.Position.Load() != p.places.Position(states.Moment{Steps: p.steps}):
		return fmt.Errorf("step %d: the position is %d", p.steps, p.control.Position.Load())
	case p.in.moved.Load() != int64(in) || p.out.moved.Load() != int64(out):
		return fmt.Errorf("step %d: %s were copied to the window and %s back: expected %s and %s", p.steps,
			ledger.Bytes(p.in.moved.Load()).Exact(), ledger.Bytes(p.out.moved.Load()).Exact(), in.Exact(), out.Exact())
	}
	for number := range p.layout.Chunks {
		if err := gradientsOf(number).check(p.gradientsOf(number), p.steps); err != nil {
			return fmt.Errorf("step %d: gradients of chunk %d: %w", p.steps, number, err)
		}
	}
	return nil
}

// checkChunk reads every byte of a chunk on the host.
func (p *pipeline) checkChunk(number int) error {
	c, region := p.layout.Chunks[number], p.region(number, p.steps)
	if err := statesOf(number).checkAll(region[:c.State], p.steps); err != nil {
		return fmt.Errorf("states: %w", err)
	}
	if err := parametersOf(number).checkAll(region[c.State:], p.steps); err != nil {
		return fmt.Errorf("parameters: %w", err)
	}
	if err := gradientsOf(number).checkAll(p.gradientsOf(number), p.steps); err != nil {
		return fmt.Errorf("gradients: %w", err)
	}
	return nil
}

// law returns what the law says of a step whose actors are as busy as they were in the last one. The step has the order
// of the last one.
func (p *pipeline) law() roads.Passage {
	link := roads.Link{In: p.in.speed(), Out: p.out.speed()}
	work, planned := inOrder(p.places, p.work, p.steps-1), time.Duration(0)
	for _, w := range work {
		planned += w.Update
	}
	for i := range work { // an update may have taken longer than planned
		work[i].Update = time.Duration(float64(p.updating) * part(work[i].Update, planned, len(work)))
	}
	return p.layout.Passage(work, link, 0)
}

// inOrder returns chunks in the order in which the step after so many steps takes them.
func inOrder(places *states.Layout, work []roads.Work, steps int64) []roads.Work {
	ordered := make([]roads.Work, len(work))
	for n := range work {
		ordered[n] = work[places.Next(states.Moment{Steps: steps, Committed: n})]
	}
	return ordered
}

// part returns the share that one of several numbers is of their sum.
func part(one, sum time.Duration, count int) float64 {
	if sum == 0 {
		return 1 / float64(count)
	}
	return float64(one) / float64(sum)
}
