//go:build linux

// Package servicetest is a trainer for tests of the optimizer service, in Go: every
// request of the protocol as a method.
package servicetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
)

// Session is a shard whose state the service holds. Its arenas are mapped in this
// process, too; slices of them are valid until Detach or Close.
type Session struct {
	client.Client
	Welcome    protocol.Welcome
	Parameters *arena.Arena
	Gradients  *arena.Arena
	Window     *arena.Arena // the staging buffer; nil before MakeWindow
}

// Open creates a session, or attaches to one that exists.
func Open(socket string, d *protocol.Document) (*Session, error) {
	dialed, err := client.Dial(socket)
	if err != nil {
		return nil, err
	}
	s := &Session{Client: *dialed}
	if err := s.Open(d); err != nil {
		return nil, errors.Join(err, s.Detach())
	}
	return s, nil
}

// Open creates the session on a connection that has none, or attaches to it.
func (s *Session) Open(d *protocol.Document) error {
	arenas, err := open(&s.Client, protocol.Open, d, func(result []byte) ([]protocol.WelcomeArena, error) {
		err := json.Unmarshal(result, &s.Welcome)
		return s.Welcome.Arenas, err
	})
	if err != nil {
		return err
	}
	s.Parameters, s.Gradients = arenas[ledger.Parameters], arenas[ledger.Gradients]
	if s.Parameters == nil || s.Gradients == nil || len(arenas) != 2 {
		return errors.New("the answer to open lacks parameters or gradients, or has another arena")
	}
	return nil
}

// open sends a document and maps the arenas of the answer.
func open(c *client.Client, kind protocol.Kind, document any,
	welcome func(result []byte) ([]protocol.WelcomeArena, error)) (map[ledger.Component]*arena.Arena, error) {
	text, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	file, err := protocol.SealedFile("plimsoll/document", text)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	result, files, err := c.Call(kind, protocol.Encode(protocol.OpenBody{Length: uint64(len(text))}), file)
	if err != nil {
		return nil, err
	}
	defer protocol.CloseAll(files)
	arenas, err := welcome(result)
	if err != nil {
		return nil, fmt.Errorf("the answer to %v: %w", kind, err)
	}
	if len(files) != len(arenas) {
		return nil, fmt.Errorf("the answer to %v names %d arenas and has %d files", kind, len(arenas), len(files))
	}
	mapped := map[ledger.Component]*arena.Arena{}
	for i, w := range arenas {
		file := files[i]
		pages, err := pagesOf(file)
		if err != nil {
			return nil, err
		}
		a, err := arena.Attach(w.Name, w.Bytes, pages, file)
		if err != nil {
			return nil, err
		}
		a.Adopt()
		files[i] = nil
		mapped[w.Component] = a
	}
	return mapped, nil
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

// Detach closes the connection and unmaps the arenas. The service keeps the state.
func (s *Session) Detach() error {
	err := s.Hangup()
	for _, a := range []*arena.Arena{s.Parameters, s.Gradients, s.Window} {
		if a != nil {
			err = errors.Join(err, a.Close())
		}
	}
	return err
}

// Close gives the state back and detaches.
func (s *Session) Close() error {
	return errors.Join(s.Do(protocol.Close, protocol.Encode(protocol.CloseBody{Flags: protocol.GiveBack})), s.Detach())
}

// WindowSize is the size of the window, the staging buffer that Write, Read and
// Accumulate copy through.
const WindowSize = 16 * ledger.MiB

// Write writes a range of a stream.
func (s *Session) Write(stream int, first int64, values []float32) error {
	return s.transfer(protocol.Write, stream, first, values)
}

// Read reads a range of a stream.
func (s *Session) Read(stream int, first int64, values []float32) error {
	return s.transfer(protocol.Read, stream, first, values)
}

func (s *Session) transfer(kind protocol.Kind, stream int, first int64, values []float32) error {
	if err := s.MakeWindow(); err != nil {
		return err
	}
	window := arena.View[float32](s.Window)
	for len(values) > 0 {
		part := values[:min(len(values), len(window))]
		if kind == protocol.Write {
			copy(window, part)
		}
		body := protocol.TransferBody{What: uint32(stream), First: uint64(first), Count: uint64(len(part))}
		if err := s.Do(kind, protocol.Encode(body)); err != nil {
			return err
		}
		if kind == protocol.Read {
			copy(part, window)
		}
		first, values = first+int64(len(part)), values[len(part):]
	}
	return nil
}

// MakeWindow gives the session a window, unless it has one.
func (s *Session) MakeWindow() error {
	if s.Window != nil {
		return nil
	}
	w, err := arena.New("window", WindowSize, arena.BasePages)
	if err != nil {
		return err
	}
	s.Window = w
	return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: uint64(WindowSize)}), w.File())
}

// MostAccumulated is the largest number of elements that one Accumulate can add.
const MostAccumulated = int(WindowSize / 4)

// Accumulate adds fp32 numbers to the gradients from element first on. Number counts
// the calls since the gradients were cleared, from 1. Repeat a call that got no answer
// ([ErrLost]) in the session that is opened next: the service does not add an element
// twice.
func (s *Session) Accumulate(number, first int64, values []float32) error {
	if len(values) > MostAccumulated {
		return fmt.Errorf("accumulate %d: %d numbers: expected at most %d, which the window holds", number, len(values),
			MostAccumulated)
	}
	if err := s.MakeWindow(); err != nil {
		return err
	}
	copy(arena.View[float32](s.Window), values)
	return s.Do(protocol.Accumulate, protocol.Encode(protocol.AccumulateBody{Type: 2, First: uint64(first),
		Count:  uint64(len(values)),
		Number: uint64(number)}))
}

// ClearGradients sets all gradients to 0.
func (s *Session) ClearGradients() error { return s.Do(protocol.Clear, nil) }

// SetStep tells the service that the full state was written, and the step that it belongs to.
func (s *Session) SetStep(step int64) error {
	return s.Do(protocol.SetStep, protocol.SetStepBody{Step: uint64(step)}.Encode())
}

// SetSteps is SetStep for parameters that have had different numbers of steps.
func (s *Session) SetSteps(step int64, had []uint64) error {
	if err := s.Do(protocol.SetOwnSteps, protocol.OwnStepsBody{Had: had}.Encode()); err != nil {
		return err
	}
	return s.Do(protocol.SetStep, protocol.SetStepBody{Step: uint64(step), Flags: protocol.KeepOwnSteps}.Encode())
}

// OwnSteps returns how many steps each of the session's parameters has had.
func (s *Session) OwnSteps(parameters int) ([]uint64, error) {
	result, _, err := s.Call(protocol.OwnSteps, protocol.Encode(protocol.RangeBody{Count: uint64(parameters)}))
	had := make([]uint64, parameters)
	if err == nil && len(result) != 8*parameters {
		err = fmt.Errorf("the answer to own_steps has %d bytes", len(result))
	}
	if err == nil {
		_, err = binary.Decode(result, binary.LittleEndian, had)
	}
	return had, err
}

// Ready tells the service that the gradients of a range are final.
func (s *Session) Ready(first, count int64) error {
	return s.Do(protocol.Ready, protocol.Encode(protocol.RangeBody{First: uint64(first), Count: uint64(count)}))
}

// SumSquares returns the sum of the squares of the gradients.
func (s *Session) SumSquares() (float64, error) {
	result, _, err := s.Call(protocol.Norm, nil)
	if err != nil {
		return 0, err
	}
	if len(result) != 8 {
		return 0, fmt.Errorf("the answer to norm has %d bytes", len(result))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(result)), nil
}

// Step makes a step, with the hyperparameters of each parameter group. With wait it returns once the step is done,
// otherwise once it has begun.
func (s *Session) Step(step int64, gradScale float64, wait bool, groups ...protocol.Hyperparameters) error {
	return s.begin(protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step), GradScale: gradScale},
		Hyperparameters: groups}, wait)
}

// Prepare is the first phase of the two-phase commit of a step. All gradients are
// final, and the service keeps the hyperparameters; the step does not begin.
func (s *Session) Prepare(step int64, groups ...protocol.Hyperparameters) error {
	return s.Do(protocol.Prepare, protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step)},
		Hyperparameters: groups}.Encode())
}

// StepLeaving is Step, and leaves parameters alone: those whose bits are set.
func (s *Session) StepLeaving(left []byte, step int64, gradScale float64, groups ...protocol.Hyperparameters) error {
	return s.begin(protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step), GradScale: gradScale,
		Flags: protocol.LeavingStep}, Hyperparameters: groups, LeftAlone: left}, true)
}

// PrepareLeaving is Prepare for a step that leaves parameters alone: those whose bits are set.
func (s *Session) PrepareLeaving(left []byte, step int64, groups ...protocol.Hyperparameters) error {
	return s.Do(protocol.Prepare, protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step),
		Flags: protocol.LeavingStep}, Hyperparameters: groups, LeftAlone: left}.Encode())
}

// StepPrepared is the second phase: it makes the step with the hyperparameters given to
// Prepare, by this client or an earlier one.
func (s *Session) StepPrepared(step int64, gradScale float64, wait bool) error {
	return s.begin(protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step), GradScale: gradScale,
		Flags: protocol.PreparedStep}}, wait)
}

func (s *Session) begin(b protocol.StepBody, wait bool) error {
	if wait {
		b.Flags |= protocol.WaitForStep
	}
	_, _, err := s.Call(protocol.Step, b.Encode())
	return err
}

// BeginArriving begins a step before its gradients are there: see ReadyFor.
func (s *Session) BeginArriving(step int64, gradScale float64, groups ...protocol.Hyperparameters) error {
	return s.begin(protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step), GradScale: gradScale,
		Flags: protocol.ArrivingStep}, Hyperparameters: groups}, false)
}

// BeginSpeculating begins a step before its gradients are there and before it is known what becomes of it: see Decide.
func (s *Session) BeginSpeculating(step int64, gradScale float64, groups ...protocol.Hyperparameters) error {
	return s.begin(protocol.StepBody{StepHeader: protocol.StepHeader{Step: uint64(step), GradScale: gradScale,
		Flags: protocol.ArrivingStep | protocol.Speculating}, Hyperparameters: groups}, false)
}

// Decide says that a step that speculates is made with a factor, or skipped.
func (s *Session) Decide(step int64, gradScale float64, skip bool) error {
	body := protocol.DecideBody{Step: uint64(step), GradScale: gradScale}
	if skip {
		body.GradScale, body.Flags = 0, protocol.SkipStep
	}
	return s.Do(protocol.Decide, protocol.Encode(body))
}

// ReadyFor tells the service that the gradients of a range have come, of a step that has begun before.
func (s *Session) ReadyFor(step, first, count int64) error {
	return s.Do(protocol.Ready, protocol.ReadyBody{
		RangeBody: protocol.RangeBody{First: uint64(first), Count: uint64(count)}, Step: uint64(step)}.Encode())
}

// NoneFor tells the service that the parameters of a range get no gradients in a step that has begun before.
func (s *Session) NoneFor(step, first, count int64) error {
	return s.Do(protocol.Ready, protocol.ReadyBody{RangeBody: protocol.RangeBody{First: uint64(first),
		Count: uint64(count)}, Step: uint64(step), Flags: protocol.NoGradients}.Encode())
}

// Wait returns when a range of the parameters has had a step. If the step is finished as a whole, it returns the
// seconds that the step took, else 0.
func (s *Session) Wait(step, first, count int64) (seconds float64, err error) {
	result, _, err := s.Call(protocol.Wait, protocol.Encode(protocol.WaitBody{Step: uint64(step), First: uint64(first),
		Count: uint64(count)}))
	if err != nil {
		return 0, err
	}
	var stepped struct {
		Step    uint64
		Seconds float64
	}
	if _, err := binary.Decode(result, binary.LittleEndian, &stepped); err != nil || stepped.Step != uint64(step) {
		return 0, fmt.Errorf("the answer to wait for step %d has %d bytes, and is of step %d", step, len(result),
			stepped.Step)
	}
	return stepped.Seconds, nil
}

// Order tells the service in which order steps update ranges, anew. It sends as many requests as it needs.
func (s *Session) Order(ranges ...protocol.RangeBody) error {
	const most = 4000 // that a packet holds
	for anew := uint32(protocol.BeginAnew); anew != 0 || len(ranges) > 0; anew = 0 {
		part := ranges[:min(len(ranges), most)]
		ranges = ranges[len(part):]
		if err := s.Do(protocol.Order, protocol.OrderBody{Flags: anew, Ranges: part}.Encode()); err != nil {
			return err
		}
	}
	return nil
}

// Save begins to write the state into a folder of checkpoints. It returns the step of
// that state.
func (s *Session) Save(directory string, training jsontext.Value) (int64, error) {
	return s.Ask(protocol.Save, protocol.SaveBody{Directory: directory, Training: training})
}

// Saved waits until no save is under way. It returns the step that was saved last.
func (s *Session) Saved() (int64, error) { return s.Ask(protocol.Saved, nil) }

// Commit makes a checkpoint of what all ranks saved at a step. Ranks without any state
// are left out.
func (s *Session) Commit(directory string, step int64, without ...int) error {
	_, err := s.Ask(protocol.Commit, protocol.CommitBody{Directory: directory, Step: step, Without: without})
	return err
}

// Load overwrites the state with that of a checkpoint. It returns the checkpoint's
// step.
func (s *Session) Load(directory string) (int64, error) {
	return s.Ask(protocol.Load, protocol.LoadBody{Directory: directory})
}

// Ask sends a request with a JSON document. Its answer begins with a step.
func (s *Session) Ask(kind protocol.Kind, document any) (int64, error) {
	var body []byte
	if document != nil {
		var err error
		if body, err = json.Marshal(document); err != nil {
			return 0, err
		}
	}
	result, _, err := s.Call(kind, body)
	if err != nil {
		return 0, err
	}
	if len(result) < 8 {
		return 0, fmt.Errorf("the answer to %v has %d bytes", kind, len(result))
	}
	return int64(binary.LittleEndian.Uint64(result)), nil
}
