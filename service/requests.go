package service

import (
	"encoding/binary"
	"fmt"
	"os"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/ledger"
)

// maximumDocument is the largest size of a document of open: some hundred thousand
// parameters.
const maximumDocument = 256 << 20

// A request is a packet with the files that came with it.
type request struct {
	packet
	files []*os.File
}

// A reply is the result of a request, with the files that go with it.
type reply struct {
	result    []byte
	files     []*os.File
	temporary bool // the service closes the files once they are sent
}

type handler func(*connection, request) (reply, error)

// A requestKind says what requests of one kind need, and what carries them out.
type requestKind struct {
	files  int // number of files that come with a request
	traits traits
	handle handler
}

// traits are properties of a kind of requests.
type traits uint

const (
	inSession traits = 1 << iota // needs the session that open made
	afterStep                    // waits for the step under way
	afterSum                     // out of order while an accumulation is half done
	onDisk                       // waits for a file system: a service that ends has more patience
	last                         // the service closes the connection after the answer
)

func (k requestKind) is(some traits) bool { return k.traits&some != 0 }

// requests has a row for each kind of requests. The decoder in a row reads the body.
var requests = [kinds]requestKind{
	Open:       {1, 0, (*connection).openSession},
	Window:     {1, inSession, (*connection).setWindow},
	Write:      {0, inSession | afterStep | afterSum, change(decode[transfer], (*session).write)},
	Read:       {0, inSession | afterStep, change(decode[transfer], (*session).read)},
	SetStep:    {0, inSession | afterStep, change(decode[setStep], (*session).setStep)},
	Ready:      {0, inSession | afterStep | afterSum, change(decode[stretch], (*session).ready)},
	Norm:       {0, inSession | afterStep | afterSum, ask(noBody, (*session).norm)},
	Accumulate: {0, inSession | afterStep, change(decode[accumulation], (*session).accumulate)},
	Clear:      {0, inSession | afterStep, change(noBody, (*session).clear)},
	Step:       {0, inSession | afterStep | afterSum, (*connection).step},
	Wait:       {0, inSession, ask(decode[waitBody], (*session).wait)},
	Save:       {0, inSession | afterStep | onDisk, ask(decodeText[saveBody], (*session).save)},
	Saved:      {0, inSession | onDisk, (*connection).saved},
	Commit:     {0, inSession | onDisk, ask(decodeText[commitBody], (*session).commit)},
	Load:       {0, inSession | afterStep, (*connection).load},
	Stat:       {0, 0, (*connection).stat},
	Close:      {0, inSession | last, (*connection).close},
	Prepare:    {0, inSession | afterStep | afterSum, change(decodeStep, (*session).prepare)},
	Restore:    {0, 0, (*connection).restore},
}

// handle carries out a request.
func (c *connection) handle(r request) (reply, error) {
	kind := requests[r.kind]
	switch {
	case len(r.files) != kind.files:
		return reply{}, fail(Malformed, "%v with %d file descriptors: expected %d", r.kind, len(r.files), kind.files)
	case kind.is(inSession) && c.session == nil:
		return reply{}, fail(OutOfOrder, "%v: there is no session; open one first", r.kind)
	}
	if kind.is(afterStep) {
		c.session.settle()
	}
	if kind.is(afterSum) {
		if err := c.session.notHalfAdded(r.kind); err != nil {
			return reply{}, err
		}
	}
	return kind.handle(c, r)
}

// change returns the handler of a request that has no result.
func change[T any](decode func(Kind, []byte) (T, error), do func(*session, T) error) handler {
	return ask(decode, func(s *session, body T) ([]byte, error) { return nil, do(s, body) })
}

// ask returns the handler of a request that has a result.
func ask[T any](decode func(Kind, []byte) (T, error), do func(*session, T) ([]byte, error)) handler {
	return func(c *connection, r request) (reply, error) {
		body, err := decode(r.kind, r.body)
		if err != nil {
			return reply{}, err
		}
		result, err := do(c.session, body)
		return reply{result: result}, err
	}
}

// noBody is the decoder of requests without a body.
func noBody(kind Kind, body []byte) (struct{}, error) {
	if len(body) != 0 {
		return struct{}{}, fail(Malformed, "%v with a body of %d bytes: expected none", kind, len(body))
	}
	return struct{}{}, nil
}

// stat answers with a file, as the document may be longer than a packet.
func (c *connection) stat(r request) (reply, error) {
	if _, err := noBody(r.kind, r.body); err != nil {
		return reply{}, err
	}
	text, err := json.Marshal(c.server.Overview())
	if err != nil {
		return reply{}, err
	}
	file, err := sealedFile("plimsoll/stat", text)
	if err != nil {
		return reply{}, err
	}
	return reply{encode(uint64(len(text))), []*os.File{file}, true}, nil
}

// restore tries again to restore a session that was set aside, or gives it back.
func (c *connection) restore(r request) (reply, error) {
	if len(r.body) == 0 {
		return reply{}, fail(Malformed, "restore without a body: expected a document that names a session")
	}
	body, err := decodeText[restoreBody](r.kind, r.body)
	if err != nil {
		return reply{}, err
	}
	return reply{}, c.server.restoreAside(body)
}

// close gives the state back if the client says so.
func (c *connection) close(r request) (reply, error) {
	body, err := decode[closeBody](r.kind, r.body)
	if err != nil || body.Flags&giveBack == 0 {
		return reply{}, err
	}
	s := c.session
	c.session = nil
	return reply{}, c.server.forget(s)
}

// setStep records that the client wrote the whole state, and which step it is of.
func (s *session) setStep(b setStep) error {
	step := b.Step
	if step > maximumStep {
		return fail(Refused, "set_step %d: expected at most %d", step, int64(maximumStep))
	}
	if err := s.notInParts(SetStep); err != nil {
		return err
	}
	s.saveIsOver.Wait() // the checkpoint needs the step before
	s.record.forgetSteps()
	s.shard.SetSteps(int64(step))
	s.begun = int64(step)
	s.record.condition.Store(stateIsWhole)
	return nil
}

const maximumStep = 1 << 62

// checkLength refuses documents that are too long. Both open and restore call it.
func checkLength(document uint64) error {
	if document == 0 || document > maximumDocument {
		return fmt.Errorf("a document of %d bytes: expected 1 to %d", document, maximumDocument)
	}
	return nil
}

// readDocument reads the document of open from its memfd. It returns the text, too.
func readDocument(r request) (*Document, []byte, error) {
	b, err := decode[openBody](r.kind, r.body)
	if err != nil {
		return nil, nil, err
	}
	if err := checkLength(b.Length); err != nil {
		return nil, nil, fail(Refused, "open: %v", err)
	}
	if err := sealed(r.files[0], int64(b.Length), unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, nil, fail(Refused, "open: the document: %v", err)
	}
	text := make([]byte, b.Length)
	if _, err := r.files[0].ReadAt(text, 0); err != nil {
		return nil, nil, fail(Refused, "open: the document: %v", err)
	}
	d, err := parseDocument(text)
	return d, text, err
}

// SessionSchema is the schema of [Welcome].
const SessionSchema = "plimsoll.session/1"

// Welcome is the answer to open.
type Welcome struct {
	Schema      string `json:"schema"`
	Attached    bool   `json:"attached"`
	Step        int64  `json:"step"`
	Initialized bool   `json:"initialized"`
	Elements    int64  `json:"elements"`
	Service     string `json:"service"`
	Kernel      string `json:"kernel"`
	// PreparedStep is the prepared step, 0 for none. AskedStep is the step that a
	// client asked for last, and AskedFactor its factor.
	PreparedStep uint64  `json:"prepared_step"`
	AskedStep    uint64  `json:"asked_step"`
	AskedFactor  float64 `json:"asked_factor"`
	// Accumulated is how many accumulations were finished since the gradients were
	// cleared, at step ClearedStep. Accumulating is the number of one that is half
	// done, 0 for none.
	Accumulated  int64          `json:"accumulated"`
	Accumulating int64          `json:"accumulating"`
	ClearedStep  int64          `json:"cleared_step"`
	Arenas       []WelcomeArena `json:"arenas"`
}

// WelcomeArena is an arena that the trainer maps.
type WelcomeArena struct {
	Name      string           `json:"name"`
	Component ledger.Component `json:"component"`
	Type      string           `json:"type"`
	Bytes     ledger.Bytes     `json:"bytes"`
	Mapped    ledger.Bytes     `json:"mapped_bytes"`
}

func (c *connection) welcome(attached bool) (reply, error) {
	s := c.session
	w := Welcome{
		Schema: SessionSchema, Attached: attached, Step: s.shard.Steps(), Initialized: s.record.initialized(),
		Elements: s.shard.Config().Elements, Service: c.server.version, Kernel: c.server.kernel.String(),
	}
	w.PreparedStep = s.record.preparedStep.Load()
	w.AskedStep, w.AskedFactor = s.record.asked()
	added, cleared, _, half := s.shard.Accumulations()
	if w.Accumulated, w.ClearedStep = added, cleared; half {
		w.Accumulating = added + 1
	}
	var files []*os.File
	for _, a := range s.shared() {
		w.Arenas = append(w.Arenas, WelcomeArena{a.Name(), a.component, a.of, a.Size(), a.Mapped()})
		files = append(files, a.File())
	}
	text, err := json.Marshal(w)
	if err == nil && len(text) > maximumPacket/2 {
		err = fmt.Errorf("an answer of %d bytes", len(text))
	}
	return reply{result: text, files: files}, err
}

// decodeText decodes a request's body that is a JSON document.
func decodeText[T any](kind Kind, body []byte) (T, error) {
	var value T
	if err := json.Unmarshal(body, &value, json.RejectUnknownMembers(true)); err != nil {
		return value, fail(Refused, "%v: the document cannot be read: %v", kind, err)
	}
	return value, nil
}

func encodeStep(step int64) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(step)) }
