package roads

import (
	"math"
	"time"

	"plimsoll/ledger"
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
	// Out is what leaves the slot: the same bytes. Own leaves before it: the model's parameters, with recovery.
	Out, Own ledger.Bytes
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

// Chunked returns when a step in mode chunked is done. Gradients leave first, on the stream of the copies out: a region
// may be overwritten once the gradients are on the host. Three streams work on three chunks: one copies a chunk in, one
// updates the chunk before it, and one copies the chunk before that out.
func Chunked(chunks []Work, gradients ledger.Bytes, link Link) Passage {
	p := pipeline{link: link, chunks: chunks, updated: make([]float64, len(chunks)), outgoing: float64(gradients),
		leaving: -1}
	for _, c := range chunks {
		p.piece = max(p.piece, (c.In+pieces-1)/pieces)
	}
	p.run()
	return Passage{seconds(p.last()), seconds(max(p.last(), p.ready)), seconds(p.now)}
}

// pipeline is a step in mode chunked, from event to event.
type pipeline struct {
	link   Link
	chunks []Work
	now    float64

	entered  int     // pieces that are on the GPU
	incoming float64 // bytes of the piece under way; 0 if there is none
	updated  []float64
	left     int     // pieces that have left
	leaving  int     // chunk that leaves; -1 are the gradients
	parts    int     // of that chunk that have left: the model's parameters, and then pieces of the slot
	outgoing float64 // bytes of the part under way; 0 if there is none
	ready    float64 // when the parameters of the last chunk have left

	piece ledger.Bytes // a part of a slot
}

// part returns the bytes of a piece of a chunk. Small chunks fill the first pieces of a slot.
func (p *pipeline) part(of ledger.Bytes, number int) float64 {
	return float64(min(p.piece, max(0, of-ledger.Bytes(number)*p.piece)))
}

// run follows the copies until the last byte has left.
func (p *pipeline) run() {
	for p.leaving < len(p.chunks) {
		wake := math.Inf(1)
		in, out := p.copiesIn(), p.copiesOut(&wake)
		if math.IsInf(wake, 1) && !in && !out { // a chunk of no bytes has left: the next one may come
			continue
		}
		toGPU, fromGPU := p.link.speeds(in, out)
		if in {
			wake = min(wake, p.now+p.incoming/toGPU)
		}
		if out {
			wake = min(wake, p.now+p.outgoing/fromGPU)
		}
		passed := wake - p.now
		p.now = wake
		if in {
			p.incoming = rest(p.incoming, passed*toGPU)
		}
		if out {
			p.outgoing = rest(p.outgoing, passed*fromGPU)
		}
		if in && p.incoming == 0 {
			p.enter()
		}
		if out && p.outgoing == 0 {
			p.leave()
		}
	}
}

// rest returns what is left of a piece. Less than a thousandth of a byte is what rounding leaves of nothing.
func rest(bytes, copied float64) float64 {
	if bytes-copied < 1e-3 {
		return 0
	}
	return bytes - copied
}

// copiesIn reports whether a piece is on its way to the GPU. A piece may begin when the same piece of the chunk that
// had the slot before has left.
func (p *pipeline) copiesIn() bool {
	for p.incoming == 0 && p.entered < pieces*len(p.chunks) {
		if before := p.entered - slots*pieces; before >= 0 && before >= p.left {
			return false
		}
		if p.incoming = p.part(p.chunks[p.entered/pieces].In, p.entered%pieces); p.incoming == 0 {
			p.enter()
		}
	}
	return p.incoming > 0
}

// enter notes that a piece is on the GPU. The last one of a chunk tells when the chunk is updated.
func (p *pipeline) enter() {
	p.entered++
	if p.entered%pieces != 0 {
		return
	}
	at := p.entered/pieces - 1
	begin := p.now
	if at > 0 {
		begin = max(begin, p.updated[at-1])
	}
	p.updated[at] = begin + p.chunks[at].Update.Seconds()
}

// copiesOut reports whether something is on its way to the host. If it waits for an update, wake becomes its end.
func (p *pipeline) copiesOut(wake *float64) bool {
	for p.outgoing == 0 && p.leaving < len(p.chunks) {
		if p.leaving >= 0 {
			if p.entered < pieces*(p.leaving+1) {
				return false
			}
			if done := p.updated[p.leaving]; done > p.now {
				*wake = min(*wake, done)
				return false
			}
			if p.outgoing = float64(p.chunks[p.leaving].Own); p.parts > 0 {
				p.outgoing = p.part(p.chunks[p.leaving].Out, p.parts-1)
			}
		}
		if p.outgoing == 0 {
			p.leave()
		}
	}
	return p.outgoing > 0
}

// leave notes that a piece is on the host, and goes on to the next one.
func (p *pipeline) leave() {
	switch {
	case p.leaving < 0:
		p.leaving = 0
		return
	case p.parts > 0:
		p.left++
	case p.chunks[p.leaving].Own > 0:
		p.ready = p.now
	}
	if p.parts++; p.parts > pieces {
		p.leaving, p.parts = p.leaving+1, 0
	}
}

// last returns when the last chunk is updated.
func (p *pipeline) last() float64 {
	if len(p.updated) == 0 {
		return 0
	}
	return p.updated[len(p.updated)-1]
}

// Whole returns when a step in mode whole is done. All states come to the GPU, one update changes them all, and they
// leave. Copies in began a time ago, ahead: where plimsoll.torch.StateOffload.prefetch was called.
func Whole(chunks []Work, gradients ledger.Bytes, link Link, ahead time.Duration) Passage {
	var in, out, own float64
	var update time.Duration
	for _, c := range chunks {
		in, out, own, update = in+float64(c.In), out+float64(c.Out), own+float64(c.Own), update+c.Update
	}
	// The gradients leave while states come, or while these are updated.
	toGPU, fromGPU := link.speeds(true, gradients > 0)
	entered := in / toGPU
	if gradients > 0 {
		entered = together(in, float64(gradients), toGPU, fromGPU, link)
	}
	entered = max(0, entered-ahead.Seconds())
	updated := entered + update.Seconds()
	ready := updated
	if sent := float64(gradients) / link.Out; gradients > 0 || own > 0 {
		ready = max(updated, sent) + own/link.Out
	}
	return Passage{seconds(updated), seconds(ready), seconds(ready + out/link.Out)}
}

// together returns when the bytes to the GPU are there, if bytes from it begin at the same time.
func together(in, out, toGPU, fromGPU float64, link Link) float64 {
	if meanwhile := out / fromGPU; meanwhile*toGPU < in {
		return meanwhile + (in-meanwhile*toGPU)/link.In
	}
	return in / toGPU
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }
