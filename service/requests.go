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

// filesWith is how many files come with a request of each kind.
var filesWith = map[Kind]int{Open: 1, Window: 1}

// handle carries out a request.
func (c *connection) handle(p packet, files []*os.File) ([]byte, []*os.File, error) {
	if want := filesWith[p.kind]; len(files) != want {
		return nil, nil, fail(Malformed, "%v with %d file descriptors: expected %d", p.kind, len(files), want)
	}
	switch {
	case p.kind == Open:
		return c.openSession(p.body, files)
	case p.kind == Stat:
		if len(p.body) != 0 {
			return nil, nil, fail(Malformed, "stat with a body of %d bytes: expected none", len(p.body))
		}
		return c.server.answerStat()
	case p.kind == Restore:
		if len(p.body) == 0 {
			return nil, nil, fail(Malformed, "restore without a body: expected a document that names a session")
		}
		body, err := decodeText[restoreBody](p.kind, p.body)
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, c.server.restoreAside(body)
	case c.session == nil:
		return nil, nil, fail(OutOfOrder, "%v: there is no session; open one first", p.kind)
	}
	result, err := c.inSession(p, files)
	return result, nil, err
}

// answerStat answers with a file, as the document may be longer than a packet.
func (s *Server) answerStat() ([]byte, []*os.File, error) {
	text, err := json.Marshal(s.Overview())
	if err != nil {
		return nil, nil, err
	}
	file, err := sealedFile("plimsoll/stat", text)
	if err != nil {
		return nil, nil, err
	}
	return encode(uint64(len(text))), []*os.File{file}, nil
}

// inSession carries out a request that needs a session.
func (c *connection) inSession(p packet, files []*os.File) ([]byte, error) {
	s := c.session
	switch p.kind {
	case Norm, Clear, Saved:
		if len(p.body) != 0 {
			return nil, fail(Malformed, "%v with a body of %d bytes: expected none", p.kind, len(p.body))
		}
	}
	switch p.kind {
	case Write, Ready, Norm, Prepare, Step:
		if err := s.notHalfAdded(p.kind); err != nil {
			return nil, err
		}
	}
	switch p.kind {
	case Window:
		body, err := decode[windowBody](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, s.setWindow(body.Bytes, files[0])
	case Write, Read:
		body, err := decode[transfer](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, map[Kind]func(transfer) error{Write: s.write, Read: s.read}[p.kind](body)
	case Accumulate:
		body, err := decode[accumulation](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, s.accumulate(body)
	case SetStep:
		body, err := decode[setStep](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, s.setStep(body.Step)
	case Ready:
		body, err := decode[stretch](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, s.ready(body.First, body.Count)
	case Norm:
		return encode(s.norm()), nil
	case Clear:
		s.settle()
		s.record.forgetPrepared()
		s.shard.ForgetArrived()
		s.shard.ClearGradients()
		return nil, nil
	case Prepare:
		body, err := decodeStep(p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return nil, s.prepare(body)
	case Step:
		return c.step(p)
	case Wait:
		body, err := decode[waitBody](p.kind, p.body)
		if err != nil {
			return nil, err
		}
		return encode(body.Step, 0.0), s.wait(body)
	case Save:
		return s.save(p.body, c.server.say)
	case Saved:
		return s.saved(c.abandoned)
	case Commit:
		return s.commit(p.body)
	case Load:
		return c.load(p.body)
	}
	body, err := decode[closeBody](Close, p.body)
	if err != nil {
		return nil, err
	}
	if body.Flags&giveBack != 0 {
		c.session = nil
		return nil, c.server.forget(s)
	}
	return nil, nil
}

// setStep records that the client wrote the whole state, and which step it is of.
func (s *session) setStep(step uint64) error {
	if step > maximumStep {
		return fail(Refused, "set_step %d: expected at most %d", step, int64(maximumStep))
	}
	if err := s.notInParts(SetStep); err != nil {
		return err
	}
	s.settle()
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
func readDocument(body []byte, files []*os.File) (*Document, []byte, error) {
	b, err := decode[openBody](Open, body)
	if err != nil {
		return nil, nil, err
	}
	if err := checkLength(b.Length); err != nil {
		return nil, nil, fail(Refused, "open: %v", err)
	}
	if err := sealed(files[0], int64(b.Length), unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, nil, fail(Refused, "open: the document: %v", err)
	}
	text := make([]byte, b.Length)
	if _, err := files[0].ReadAt(text, 0); err != nil {
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

func (c *connection) welcome(attached bool) ([]byte, []*os.File, error) {
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
	return text, files, err
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
