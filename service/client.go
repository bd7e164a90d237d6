package service

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"golang.org/x/sys/unix"

	"plimsoll/arena"
	"plimsoll/ledger"
)

// Client is a connection to a service. It is not safe for concurrent use.
type Client struct {
	c      *net.UnixConn
	number uint32
	buffer []byte // holds the last answer
}

// Dial connects to the service at a socket. The service must run as this user or as
// root.
func Dial(socket string) (*Client, error) {
	c, err := dialTrusted(socket)
	if err != nil {
		return nil, fmt.Errorf("the optimizer service at %s: %w", socket, err)
	}
	return &Client{c: c, buffer: make([]byte, maximumPacket)}, nil
}

// Hangup closes the connection. The session stays.
func (c *Client) Hangup() error { return c.c.Close() }

// ErrLost reports that the service is gone. Connect again and open the session again.
var ErrLost = errors.New("the optimizer service is gone")

// call sends a request and waits for its answer. The result is valid until the next
// call.
func (c *Client) call(kind Kind, body []byte, files ...*os.File) ([]byte, []*os.File, error) {
	c.number++
	request := packet{kind: kind, number: c.number, body: body}
	if err := writePacket(c.c, request.encode(), files...); err != nil {
		return nil, nil, lost(err)
	}
	data, received, err := readPacket(c.c, c.buffer)
	if err != nil {
		return nil, nil, lost(err)
	}
	result, err := parseAnswer(data, request)
	if err != nil {
		closeAll(received)
		return nil, nil, err
	}
	return result, received, nil
}

// lost wraps errors of a connection that ended in [ErrLost].
func lost(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.ENOTCONN) {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

// parseAnswer returns the result in an answer, or the error that the service reported.
func parseAnswer(data []byte, request packet) ([]byte, error) {
	p, err := parsePacket(data)
	switch {
	case err != nil:
		return nil, fmt.Errorf("an answer of the service: %w", err)
	case !p.answer || p.kind != request.kind || p.number != request.number:
		return nil, fmt.Errorf("the service answered %v number %d, expected %v number %d", p.kind, p.number,
			request.kind, request.number)
	case len(p.body) < 4:
		return nil, fmt.Errorf("the service answered %v without a status", p.kind)
	}
	status, rest := Status(binary.LittleEndian.Uint32(p.body)), p.body[4:]
	if status != Done {
		return nil, &Error{status, string(rest)}
	}
	return rest, nil
}

// done sends a request whose answer has no result.
func (c *Client) done(kind Kind, body []byte, files ...*os.File) error {
	_, received, err := c.call(kind, body, files...)
	closeAll(received)
	return err
}

// Overview returns the status of the service.
func (c *Client) Overview() (*Overview, error) {
	result, files, err := c.call(Stat, nil)
	if err != nil {
		return nil, err
	}
	defer closeAll(files)
	if len(files) != 1 || len(result) != 8 {
		return nil, fmt.Errorf("the answer to stat has %d bytes and %d files", len(result), len(files))
	}
	length := binary.LittleEndian.Uint64(result)
	o := &Overview{}
	if err := json.UnmarshalRead(io.NewSectionReader(files[0], 0, int64(length)), o); err != nil {
		return nil, fmt.Errorf("the answer to stat: %w", err)
	}
	return o, nil
}

// Restore tries again to restore a session that was set aside. With discard it gives
// the session's memory back instead.
func (c *Client) Restore(name string, discard bool) error {
	body, err := json.Marshal(restoreBody{name, discard})
	if err != nil {
		return err
	}
	return c.done(Restore, body)
}

// Session is a shard whose state the service holds. Its arenas are mapped in this
// process, too; slices of them are valid until Detach or Close.
type Session struct {
	Client
	Welcome    Welcome
	Parameters *arena.Arena
	Gradients  *arena.Arena
	window     *arena.Arena
}

// OpenSession creates a session, or attaches to one that exists.
func OpenSession(socket string, d *Document) (*Session, error) {
	client, err := Dial(socket)
	if err != nil {
		return nil, err
	}
	s := &Session{Client: *client}
	if err := s.open(d); err != nil {
		return nil, errors.Join(err, s.Detach())
	}
	return s, nil
}

func (s *Session) open(d *Document) error {
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	document, err := sealedFile("plimsoll/document", text)
	if err != nil {
		return err
	}
	defer document.Close()
	result, files, err := s.call(Open, encode(openBody{uint64(len(text))}), document)
	if err != nil {
		return err
	}
	defer closeAll(files)
	if err := json.Unmarshal(result, &s.Welcome); err != nil {
		return fmt.Errorf("the answer to open: %w", err)
	}
	if len(files) != len(s.Welcome.Arenas) {
		return fmt.Errorf("the answer to open names %d arenas and has %d files", len(s.Welcome.Arenas), len(files))
	}
	for i, w := range s.Welcome.Arenas {
		file := files[i]
		pages, err := pagesOf(file)
		if err != nil {
			return err
		}
		a, err := arena.Attach(w.Name, w.Bytes, pages, file)
		if err != nil {
			return err
		}
		a.Adopt()
		files[i] = nil
		switch w.Component {
		case ledger.Parameters:
			s.Parameters = a
		case ledger.Gradients:
			s.Gradients = a
		default:
			return errors.Join(fmt.Errorf("the answer to open has an arena of %s", w.Component), a.Close())
		}
	}
	if s.Parameters == nil || s.Gradients == nil {
		return errors.New("the answer to open lacks parameters or gradients")
	}
	return nil
}

// pagesOf returns the kind of pages that a file has.
func pagesOf(file *os.File) (arena.Pages, error) {
	var system unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &system); err != nil {
		return arena.BasePages, fmt.Errorf("%s: fstatfs: %w", file.Name(), err)
	}
	if system.Type == unix.HUGETLBFS_MAGIC {
		return arena.HugetlbPages, nil
	}
	return arena.BasePages, nil
}

// sealedFile returns a memfd with a text. Its seals forbid any change.
func sealedFile(name string, text []byte) (*os.File, error) {
	descriptor, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	file := os.NewFile(uintptr(descriptor), name)
	_, err = file.Write(text)
	if err == nil {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Detach closes the connection and unmaps the arenas. The service keeps the state.
func (s *Session) Detach() error {
	err := s.Hangup()
	for _, a := range []*arena.Arena{s.Parameters, s.Gradients, s.window} {
		if a != nil {
			err = errors.Join(err, a.Close())
		}
	}
	return err
}

// Close gives the state back and detaches.
func (s *Session) Close() error {
	return errors.Join(s.done(Close, encode(closeBody{giveBack})), s.Detach())
}

// The streams of the state.
const (
	MasterWeights = masterStream
	FirstMoment   = firstMomentStream
	SecondMoment  = secondMomentStream
)

// windowSize is the size of the window, the staging buffer that Write, Read and
// Accumulate copy through.
const windowSize = 16 * ledger.MiB

// Write writes a range of a stream.
func (s *Session) Write(stream int, first int64, values []float32) error {
	return s.transfer(Write, stream, first, values)
}

// Read reads a range of a stream.
func (s *Session) Read(stream int, first int64, values []float32) error {
	return s.transfer(Read, stream, first, values)
}

func (s *Session) transfer(kind Kind, stream int, first int64, values []float32) error {
	if err := s.makeWindow(); err != nil {
		return err
	}
	window := arena.View[float32](s.window)
	for len(values) > 0 {
		part := values[:min(len(values), len(window))]
		if kind == Write {
			copy(window, part)
		}
		body := transfer{What: uint32(stream), First: uint64(first), Count: uint64(len(part))}
		if err := s.done(kind, encode(body)); err != nil {
			return err
		}
		if kind == Read {
			copy(part, window)
		}
		first, values = first+int64(len(part)), values[len(part):]
	}
	return nil
}

func (s *Session) makeWindow() error {
	if s.window != nil {
		return nil
	}
	w, err := arena.New("window", windowSize, arena.BasePages)
	if err != nil {
		return err
	}
	s.window = w
	return s.done(Window, encode(windowBody{uint64(windowSize)}), w.File())
}

// MostAccumulated is the largest number of elements that one Accumulate can add.
const MostAccumulated = int(windowSize / 4)

// Accumulate adds fp32 numbers to the gradients from element first on. Number counts
// the calls since the gradients were cleared, from 1. Repeat a call that got no answer
// ([ErrLost]) in the session that is opened next: the service does not add an element
// twice.
func (s *Session) Accumulate(number, first int64, values []float32) error {
	if len(values) > MostAccumulated {
		return fmt.Errorf("accumulate %d: %d numbers: expected at most %d, which the window holds", number, len(values),
			MostAccumulated)
	}
	if err := s.makeWindow(); err != nil {
		return err
	}
	copy(arena.View[float32](s.window), values)
	return s.done(Accumulate, encode(accumulation{Type: 2, First: uint64(first), Count: uint64(len(values)),
		Number: uint64(number)}))
}

// ClearGradients sets all gradients to 0.
func (s *Session) ClearGradients() error { return s.done(Clear, nil) }

// SetStep tells the service that the whole state was written, and which step it is of.
func (s *Session) SetStep(step int64) error {
	return s.done(SetStep, encode(setStep{uint64(step)}))
}

// Ready tells the service that the gradients of a range are final.
func (s *Session) Ready(first, count int64) error {
	return s.done(Ready, encode(stretch{uint64(first), uint64(count)}))
}

// SumSquares returns the sum of the squares of the gradients.
func (s *Session) SumSquares() (float64, error) {
	result, _, err := s.call(Norm, nil)
	if err != nil {
		return 0, err
	}
	if len(result) != 8 {
		return 0, fmt.Errorf("the answer to norm has %d bytes", len(result))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(result)), nil
}

// Hyperparameters are the numbers of one parameter group, in the order of the protocol.
type Hyperparameters = [hyperparameters]float64

// Step makes a step, with the hyperparameters of each parameter group. With wait it
// returns when the step is done, else when it has begun.
func (s *Session) Step(step int64, factor float64, wait bool, groups ...Hyperparameters) error {
	return s.begin(stepBody{stepHeader: stepHeader{Step: uint64(step), Factor: factor}, groups: groups}, wait)
}

// Prepare is the first phase of the two-phase commit of a step. All gradients are
// final, and the service keeps the hyperparameters; the step does not begin.
func (s *Session) Prepare(step int64, groups ...Hyperparameters) error {
	return s.done(Prepare, stepBody{stepHeader: stepHeader{Step: uint64(step)}, groups: groups}.encode())
}

// StepPrepared is the second phase: it makes the step with the hyperparameters given to
// Prepare, by this client or an earlier one.
func (s *Session) StepPrepared(step int64, factor float64, wait bool) error {
	return s.begin(stepBody{stepHeader: stepHeader{Step: uint64(step), Factor: factor, Flags: preparedStep}}, wait)
}

func (s *Session) begin(b stepBody, wait bool) error {
	if wait {
		b.Flags |= waitForStep
	}
	_, _, err := s.call(Step, b.encode())
	return err
}

// Wait returns when a range of the parameters has had a step.
func (s *Session) Wait(step, first, count int64) error {
	return s.done(Wait, encode(waitBody{uint64(step), uint64(first), uint64(count)}))
}

// Save begins to write the state into a folder of checkpoints. It returns the step of
// that state.
func (s *Session) Save(directory string, training jsontext.Value) (int64, error) {
	return s.ask(Save, saveBody{Directory: directory, Training: training})
}

// Saved waits until no save is under way. It returns the step that was saved last.
func (s *Session) Saved() (int64, error) { return s.ask(Saved, nil) }

// Commit makes a checkpoint of what all ranks saved at a step. Ranks without any state
// are left out.
func (s *Session) Commit(directory string, step int64, without ...int) error {
	_, err := s.ask(Commit, commitBody{Directory: directory, Step: step, Without: without})
	return err
}

// Load overwrites the state with that of a checkpoint. It returns the checkpoint's
// step.
func (s *Session) Load(directory string) (int64, error) {
	return s.ask(Load, loadBody{Directory: directory})
}

// ask sends a request with a JSON document. Its answer begins with a step.
func (s *Session) ask(kind Kind, document any) (int64, error) {
	var body []byte
	if document != nil {
		var err error
		if body, err = json.Marshal(document); err != nil {
			return 0, err
		}
	}
	result, _, err := s.call(kind, body)
	if err != nil {
		return 0, err
	}
	if len(result) < 8 {
		return 0, fmt.Errorf("the answer to %v has %d bytes", kind, len(result))
	}
	return int64(binary.LittleEndian.Uint64(result)), nil
}
