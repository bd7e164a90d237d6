//go:build linux

package service

import (
	"context"
	"os"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/state/service/protocol"
)

// A request is a packet with the files that came with it.
type request struct {
	protocol.Packet
	files []*os.File
	// plain is set where files are files of a folder that is the user's alone, as nothing can seal those.
	plain bool
}

// checkFile checks that the file of a request has a size, and that it cannot lose what its seals keep.
func (r request) checkFile(size int64, seals int) error {
	if r.plain {
		return protocol.CheckSize(r.files[0], size)
	}
	return protocol.CheckSeals(r.files[0], size, seals)
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
	inSession     traits = 1 << iota // needs the session that open made
	afterStep                        // waits for the step under way
	whileArriving                    // also while the step under way waits for gradients
	afterSum                         // out of order while an accumulation is half done
	onDisk                           // waits for a file system: a service that ends has more patience
	ofStates                         // sessions of states have it, too
	last                             // the service closes the connection after the answer
)

func (k requestKind) is(some traits) bool { return k.traits&some != 0 }

// requests has a row for each kind of requests. The decoder in a row reads the body.
var requests = [protocol.Kinds]requestKind{
	protocol.Open:    {1, 0, (*connection).openSession},
	protocol.Hold:    {1, 0, (*connection).openSession},
	protocol.Window:  {1, inSession, (*connection).setWindow},
	protocol.Write:   {0, inSession | afterStep | afterSum, change(protocol.Decode, (*heldShard).write)},
	protocol.Read:    {0, inSession | afterStep, change(protocol.Decode, (*heldShard).read)},
	protocol.SetStep: {0, inSession | afterStep | ofStates, change(protocol.DecodeSetStep, contents.setStep)},
	protocol.Ready: {0, inSession | afterStep | whileArriving | afterSum,
		change(protocol.DecodeReady, (*heldShard).ready)},
	protocol.Norm:       {0, inSession | afterStep | whileArriving | afterSum, ask(noBody, (*heldShard).norm)},
	protocol.Accumulate: {0, inSession | afterStep, change(protocol.Decode, (*heldShard).accumulate)},
	protocol.Clear:      {0, inSession | afterStep, change(noBody, (*heldShard).clear)},
	protocol.Step:       {0, inSession | afterStep | whileArriving | afterSum, (*connection).step},
	protocol.Wait:       {0, inSession, ask(protocol.Decode, (*heldShard).wait)},
	protocol.Save:       {0, inSession | afterStep | onDisk | ofStates, until((*session).save)},
	protocol.Saved:      {0, inSession | onDisk | ofStates, (*connection).saved},
	protocol.Commit:     {0, inSession | onDisk | ofStates, ask(protocol.DecodeText, (*session).commit)},
	protocol.Load:       {0, inSession | afterStep | whileArriving | ofStates, until((*session).load)},
	protocol.Stat:       {0, 0, (*connection).stat},
	protocol.Close:      {0, inSession | ofStates | last, (*connection).close},
	protocol.Prepare:    {0, inSession | afterStep | afterSum, change(protocol.DecodeStep, (*heldShard).prepare)},
	protocol.Restore:    {0, 0, (*connection).restore},
	protocol.Order:      {0, inSession, change(protocol.DecodeOrder, (*heldShard).setOrder)},
	protocol.OwnSteps:   {0, inSession | afterStep, ask(protocol.Decode, (*heldShard).ownSteps)},
	protocol.SetOwnSteps: {0, inSession | afterStep | afterSum,
		change(protocol.DecodeOwnSteps, (*heldShard).setOwnSteps)},
	protocol.Delta:  {1, inSession | afterStep, (*connection).delta},
	protocol.Decide: {0, inSession | afterStep | whileArriving, change(protocol.Decode, (*heldShard).decide)},
}

// handle carries out a request.
func (c *connection) handle(r request) (reply, error) {
	kind := requests[r.Kind]
	switch {
	case len(r.files) != kind.files:
		return reply{}, protocol.Malformed.Errorf("%v with %d file descriptors: expected %d", r.Kind,
			len(r.files), kind.files)
	case kind.is(inSession) && c.session == nil:
		return reply{}, protocol.OutOfOrder.Errorf("%v: there is no session; open one first", r.Kind)
	}
	if !kind.is(inSession) || kind.is(last) {
		return kind.handle(c, r)
	}
	return c.session.answer(r.Kind, func() (reply, error) {
		if err := c.session.contents.before(r.Kind, kind.traits); err != nil {
			return reply{}, err
		}
		return kind.handle(c, r)
	})
}

// answer returns the answer to a request, or the damage that is found.
func (s *session) answer(kind protocol.Kind, handle func() (reply, error)) (out reply, err error) {
	if err := s.refuseDamaged(kind); err != nil {
		return reply{}, err
	}
	if s.guard(func() { out, err = handle() }) != nil && err != errLater {
		return reply{}, s.refuseDamaged(kind)
	}
	return out, err
}

// change returns the handler of a request that has no result.
func change[S, T any](decode func(protocol.Kind, []byte) (T, error), do func(S, T) error) handler {
	return ask(decode, func(s S, body T) ([]byte, error) { return nil, do(s, body) })
}

// ask returns the handler of a request that has a result. S is the session, or contents of a kind: before has refused
// requests that the contents do not have.
func ask[S, T any](decode func(protocol.Kind, []byte) (T, error), do func(S, T) ([]byte, error)) handler {
	return func(c *connection, r request) (reply, error) {
		body, err := decode(r.Kind, r.Body)
		if err != nil {
			return reply{}, err
		}
		s, ofAll := any(c.session).(S)
		if !ofAll {
			s = any(c.session.contents).(S)
		}
		result, err := do(s, body)
		return reply{result: result}, err
	}
}

// until returns the handler of a request that may take long. It stops when the service ends, or when another client
// wants the session of a client that hung up.
func until[T any](do func(*session, context.Context, T) ([]byte, error)) handler {
	return func(c *connection, r request) (reply, error) {
		body, err := protocol.DecodeText[T](r.Kind, r.Body)
		if err != nil {
			return reply{}, err
		}
		until, cancel := context.WithCancel(c.server.until)
		defer cancel()
		defer context.AfterFunc(c.abandoned, cancel)()
		result, err := do(c.session, until, body)
		return reply{result: result}, err
	}
}

// noBody is the decoder of requests without a body.
func noBody(kind protocol.Kind, body []byte) (struct{}, error) {
	if len(body) != 0 {
		return struct{}{}, protocol.Malformed.Errorf("%v with a body of %d bytes: expected none", kind,
			len(body))
	}
	return struct{}{}, nil
}

// stat answers with a file, as the document may be longer than a packet.
func (c *connection) stat(r request) (reply, error) {
	if _, err := noBody(r.Kind, r.Body); err != nil {
		return reply{}, err
	}
	text, err := json.Marshal(c.server.Overview())
	if err != nil {
		return reply{}, err
	}
	file, err := c.server.given.newFile("plimsoll/stat", text)
	if err != nil {
		return reply{}, err
	}
	return reply{protocol.Encode(uint64(len(text))), []*os.File{file}, true}, nil
}

// restore tries again to restore a session that was set aside, or gives it back.
func (c *connection) restore(r request) (reply, error) {
	if len(r.Body) == 0 {
		return reply{}, protocol.Malformed.Errorf("restore without a body: expected a document that names a session")
	}
	body, err := protocol.DecodeText[protocol.RestoreBody](r.Kind, r.Body)
	if err != nil {
		return reply{}, err
	}
	return reply{}, c.server.restoreAside(body)
}

// close gives the state back if the client asks for that.
func (c *connection) close(r request) (reply, error) {
	body, err := protocol.Decode[protocol.CloseBody](r.Kind, r.Body)
	if err != nil || body.Flags&protocol.GiveBack == 0 {
		return reply{}, err
	}
	s := c.session
	c.session = nil
	return reply{}, c.server.forget(s, body.Flags&protocol.KeepTier != 0)
}
