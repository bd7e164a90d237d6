//go:build linux

package launch

import (
	"encoding/json"
	"errors"
	"io"
	"sync"
	"syscall"
	"time"

	"plimsoll/internal/base/samples"
)

// The keeper tells the guard what happens to the ranks, and the guard records it. Should the kernel kill the keeper,
// the guard knows all that the keeper has known.

// message is what the keeper sends to the guard. Exactly one of its fields is set.
type message struct {
	Heeds   bool // the keeper handles signals: the first message
	Started *startedProcess
	Printed *printedText
	Ended   *endedRank
	Answer  *answer // the last message
}

// startedProcess is a process that the keeper has started.
type startedProcess struct {
	PID, Rank int // the rank is samples.NoRank for the optimizer service
}

// printedText is what a rank has printed.
type printedText struct {
	Rank    int
	Stream  string
	Skipped int64 // bytes that are left out, of both streams, since the last text
	Text    []byte
}

// endedRank is the end of a rank.
type endedRank struct {
	samples.RankEnd
	At time.Time
}

// relayPeriod is the longest time between what a rank prints and its way to the guard.
const relayPeriod = 200 * time.Millisecond

// longestText is how much of what a rank prints goes to the guard in a relayPeriod: the end of it.
const longestText = 64 << 10

// relay sends messages to the guard. It never keeps the ranks waiting: a guard that reads slowly, or is stopped, gets
// less of what they print.
type relay struct {
	to      *json.Encoder
	service func() int // the PID of the optimizer service, or 0

	lock   sync.Mutex
	texts  map[int]*rankTexts // by rank
	events []message
	wake   chan struct{} // there are events
	ended  chan struct{} // closed when no more messages follow
	done   chan struct{} // closed when all messages are sent
}

// rankTexts is what a rank has printed since the last message.
type rankTexts struct {
	texts  []*printedText // in order; no two after each other are of one stream
	length int            // of all texts
}

func newRelay(to io.Writer, service func() int) *relay {
	r := &relay{to: json.NewEncoder(to), service: service, texts: map[int]*rankTexts{}, wake: make(chan struct{}, 1),
		ended: make(chan struct{}), done: make(chan struct{})}
	go r.run()
	return r
}

// printed takes what a rank has printed.
func (r *relay) printed(rank int, stream string, text []byte) {
	r.lock.Lock()
	defer r.lock.Unlock()
	t := r.texts[rank]
	if t == nil {
		t = &rankTexts{}
		r.texts[rank] = t
	}
	if n := len(t.texts); n == 0 || t.texts[n-1].Stream != stream {
		t.texts = append(t.texts, &printedText{Rank: rank, Stream: stream})
	}
	last := t.texts[len(t.texts)-1]
	last.Text = append(last.Text, text...)
	for t.length += len(text); t.length > longestText; {
		first := t.texts[0]
		excess := min(t.length-longestText, len(first.Text))
		first.Text, first.Skipped = first.Text[excess:], first.Skipped+int64(excess)
		t.length -= excess
		if len(first.Text) == 0 && len(t.texts) > 1 {
			t.texts[1].Skipped += first.Skipped
			t.texts = t.texts[1:]
		}
	}
}

// tap returns a writer for what a rank prints to one stream. It never fails.
func (r *relay) tap(rank int, stream string) io.Writer { return tap{r, rank, stream} }

type tap struct {
	relay  *relay
	rank   int
	stream string
}

func (t tap) Write(text []byte) (int, error) {
	t.relay.printed(t.rank, t.stream, text)
	return len(text), nil
}

// tell sends an event at once.
func (r *relay) tell(event message) {
	r.lock.Lock()
	defer r.lock.Unlock()
	r.events = append(r.events, event)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// started tells of a rank that has been started.
func (r *relay) started(p *process) {
	r.tell(message{Started: &startedProcess{p.command.Process.Pid, p.rank.Number}})
}

// rankEnded tells of the end of a rank.
func (r *relay) rankEnded(e end) {
	p := e.process
	known := samples.RankEnd{Rank: p.rank.Number, PID: p.command.Process.Pid, ExitCode: e.code, Signal: int(e.signal),
		Asked: !p.askedAt.IsZero() && p.askedAt.Before(e.at), Attempt: p.attempt}
	r.tell(message{Ended: &endedRank{known, e.at}})
}

// close sends what is left, and returns when that is done.
func (r *relay) close() {
	close(r.ended)
	<-r.done
}

func (r *relay) run() {
	defer close(r.done)
	tick := time.NewTicker(relayPeriod)
	defer tick.Stop()
	service := 0
	for ended := false; !ended; {
		select {
		case <-r.ended:
			ended = true
		case <-r.wake:
		case <-tick.C:
		}
		if pid := r.service(); pid != service && pid != 0 {
			service = pid
			r.tell(message{Started: &startedProcess{pid, samples.NoRank}})
		}
		if err := r.send(); err != nil {
			return // the guard was killed
		}
	}
}

// send sends all that has gathered.
func (r *relay) send() error {
	r.lock.Lock()
	texts, events := r.texts, r.events
	r.texts, r.events = map[int]*rankTexts{}, nil
	r.lock.Unlock()
	for _, rank := range texts {
		for _, t := range rank.texts {
			if err := r.to.Encode(message{Printed: t}); err != nil {
				return err
			}
		}
	}
	for _, event := range events {
		if err := r.to.Encode(event); err != nil {
			return err
		}
	}
	return nil
}

// answer sends the last message. It does not matter if the guard was killed.
func (r *relay) answer(a answer) error {
	r.close()
	err := r.to.Encode(message{Answer: &a})
	if errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return err
}
