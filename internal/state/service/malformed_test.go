//go:build linux

package service

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// From docs/protocol.md.
const (
	headerSize = 16
	answerBit  = 1 << 15 // in the kind of an answer
)

// validRequests returns a valid request of every kind.
func validRequests(t testing.TB) []protocol.Packet {
	t.Helper()
	text, err := json.Marshal(testDocument())
	if err != nil {
		t.Fatal(err)
	}
	all := []protocol.Packet{
		{Kind: protocol.Open, Body: protocol.Encode(protocol.OpenBody{Length: uint64(len(text))})},
		{Kind: protocol.Hold, Body: protocol.Encode(protocol.OpenBody{Length: uint64(len(text))})},
		{Kind: protocol.Window, Body: protocol.Encode(protocol.WindowBody{Bytes: 1 << 16})},
		{Kind: protocol.Write, Body: protocol.Encode(protocol.TransferBody{What: 1, First: 2, Count: 3, Offset: 4})},
		{Kind: protocol.Read, Body: protocol.Encode(protocol.TransferBody{Count: 1000})},
		{Kind: protocol.SetStep, Body: protocol.SetStepBody{Step: 3}.Encode()},
		{Kind: protocol.SetStep, Body: protocol.SetStepBody{Step: 3, Flags: protocol.KeepOwnSteps}.Encode()},
		{Kind: protocol.OwnSteps, Body: protocol.Encode(protocol.RangeBody{Count: 1})},
		{Kind: protocol.SetOwnSteps, Body: protocol.OwnStepsBody{Had: []uint64{1}}.Encode()},
		{Kind: protocol.Delta, Body: protocol.Encode(protocol.DeltaBody{Flags: protocol.WholeDelta})},
		{Kind: protocol.Decide, Body: protocol.Encode(protocol.DecideBody{Step: 1, GradScale: 0.5})},
		{Kind: protocol.Ready, Body: protocol.Encode(protocol.RangeBody{First: 0, Count: 1000})},
		{Kind: protocol.Ready, Body: protocol.ReadyBody{RangeBody: protocol.RangeBody{Count: 1000}, Step: 1}.Encode()},
		{Kind: protocol.Ready, Body: protocol.ReadyBody{RangeBody: protocol.RangeBody{Count: 1000}, Step: 1,
			Flags: protocol.NoGradients}.Encode()},
		{Kind: protocol.Norm},
		{Kind: protocol.Accumulate, Body: protocol.Encode(protocol.AccumulateBody{Type: 2, Count: 10, Number: 1})},
		{Kind: protocol.Clear},
		{Kind: protocol.Step, Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: 1, GradScale: 1,
			Flags: protocol.WaitForStep}, Hyperparameters: adamw}.Encode()},
		{Kind: protocol.Step, Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: 1, GradScale: 1,
			Flags: protocol.ArrivingStep}, Hyperparameters: adamw}.Encode()},
		{Kind: protocol.Step, Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: 1, GradScale: 1,
			Flags: protocol.LeavingStep}, Hyperparameters: adamw, LeftAlone: []byte{1}}.Encode()},
		{Kind: protocol.Wait, Body: protocol.Encode(protocol.WaitBody{Step: 1, First: 0, Count: 10})},
		{Kind: protocol.Save, Body: []byte(`{"directory": "/nowhere", "training": {"epoch": 1}}`)},
		{Kind: protocol.Saved},
		{Kind: protocol.Commit, Body: []byte(`{"directory": "/nowhere", "step": 300}`)},
		{Kind: protocol.Load, Body: []byte(`{"directory": "/nowhere"}`)},
		{Kind: protocol.Stat},
		{Kind: protocol.Close, Body: protocol.Encode(protocol.CloseBody{})},
		{Kind: protocol.Prepare, Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: 1},
			Hyperparameters: adamw}.Encode()},
		{Kind: protocol.Restore, Body: []byte(`{"session": "1", "discard": true}`)},
		{Kind: protocol.Order, Body: protocol.OrderBody{Flags: protocol.BeginAnew,
			Ranges: []protocol.RangeBody{{First: 100, Count: 10}, {First: 0, Count: 200}}}.Encode()},
	}
	for i := range all {
		all[i].Number = uint32(i)
	}
	return all
}

// TestEveryKindHasARow checks that a kind has a name and a row, and that it is among the
// requests that the tests above and below malform.
func TestEveryKindHasARow(t *testing.T) {
	valid := map[protocol.Kind]bool{}
	for _, p := range validRequests(t) {
		valid[p.Kind] = true
	}
	for kind := protocol.Open; kind < protocol.Kinds; kind++ {
		if kind.String() == "" || requests[kind].handle == nil || !valid[kind] {
			t.Errorf("kind %d (%v) lacks a name, a row in requests, or a valid request", kind, kind)
		}
	}
}

// malform returns a malformed message, or by chance a valid one.
func malform(random *rand.Rand, valid []protocol.Packet) []byte {
	data := valid[random.IntN(len(valid))].Encode()
	switch random.IntN(7) {
	case 0: // noise
		data = make([]byte, 1+random.IntN(200))
		for i := range data {
			data[i] = byte(random.Uint32())
		}
	case 1: // cut short
		data = data[:random.IntN(len(data))]
	case 2: // a flipped bit
		data[random.IntN(len(data))] ^= 1 << random.IntN(8)
	case 3: // other numbers in the body
		for i := headerSize; i < len(data); i++ {
			if random.IntN(4) == 0 {
				data[i] = byte(random.Uint32())
			}
		}
	case 4: // another length
		binary.LittleEndian.PutUint32(data[12:], random.Uint32()>>random.IntN(32))
	case 5: // another kind
		binary.LittleEndian.PutUint16(data[6:], uint16(random.Uint32()))
	case 6: // too long
		data = append(data, make([]byte, 1+random.IntN(protocol.MaximumPacket))...)
		binary.LittleEndian.PutUint32(data[12:], uint32(len(data)-headerSize))
	}
	return data
}

// descriptors returns how many files a process has open.
func descriptors(t *testing.T, process int) int {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process))
	if err != nil || len(files) == 0 {
		t.Fatalf("the files of process %d: %v", process, err)
	}
	return len(files)
}

// TestMalformedMessages sends malformed messages over many connections. The service
// answers, and goes on.
func TestMalformedMessages(t *testing.T) {
	r := startService(t)
	witness := begun(t, r.Socket, testDocument(small))
	mustStep(t, witness, 3)
	random := rand.New(rand.NewPCG(3, 3))
	valid := validRequests(t)
	pipe, other, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer protocol.CloseAll([]*os.File{pipe, other})
	wrong := []*os.File{memfd(t, nil, 1<<16, fixed), memfd(t, []byte("{}"), 1<<16, frozen), memfd(t, nil, 10, 0), pipe}
	messages := 10_000
	if testing.Short() {
		messages = 1000
	}
	process, sent, sessions := r.overview(t).Process, 0, 0
	var files int
	var memory ledger.Bytes
	for connections := 0; sent < messages; connections++ {
		client := dial(t, r)
		if random.IntN(2) == 0 { // half of them reach requests that need a session
			s := &servicetest.Session{Client: *client}
			if err := s.Open(testDocument(small, func(d *protocol.Document) { d.Part = "target" })); err != nil {
				t.Fatal(err)
			}
			sessions++
			for _, a := range []*arena.Arena{s.Parameters, s.Gradients} {
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range 1 + random.IntN(20) {
			var with []*os.File
			for range max(0, random.IntN(6)-3) {
				with = append(with, wrong[random.IntN(len(wrong))])
			}
			sent++
			if err := protocol.WritePacket(client.Conn, malform(random, valid), with...); err != nil {
				break // the service closed the connection
			}
			if err := client.Conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			data, received, err := protocol.ReadPacket(client.Conn, make([]byte, protocol.MaximumPacket))
			protocol.CloseAll(received)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("no answer in a minute")
			}
			if err != nil {
				break
			}
			if h := binary.LittleEndian.Uint16(data[6:]); h&answerBit == 0 {
				t.Fatalf("an answer of kind %#x", h)
			}
		}
		if err := client.Hangup(); err != nil {
			t.Fatal(err)
		}
		if connections == 100 { // all caches are filled by now
			files, memory = descriptors(t, process), beside(t, strconv.Itoa(process))
		}
	}
	o := r.overview(t)
	if o.Process != process {
		t.Fatalf("the service was process %d, and is %d", process, o.Process)
	}
	if sessions < 100 {
		t.Errorf("only %d connections had a session", sessions)
	}
	if o.Refused < int64(messages)/2 {
		t.Errorf("of %d malformed messages only %d were refused", messages, o.Refused)
	}
	await(t, "the files of clients to be closed", func() bool { return descriptors(t, process) <= files+2 })
	if now := beside(t, strconv.Itoa(process)); now > memory+16*ledger.MiB {
		t.Errorf("the service holds %v beside its arenas, and held %v after 100 connections", now, memory)
	}
	mustStep(t, witness, 6)
	got := fingerprint(t, witness)
	if err := witness.Close(); err != nil {
		t.Error(err)
	}
	if want := undisturbed(t, testDocument(small), 6); got != want {
		t.Errorf("another session has the state %s, want %s", got, want)
	}
	t.Logf("%d messages, %d refused, %d connections with a session", sent, o.Refused, sessions)
}

// TestNoFileIsLeft checks that the service closes every file itself: its garbage
// collector is off.
func TestNoFileIsLeft(t *testing.T) {
	r := startService(t, "GOGC=off")
	s := begun(t, r.Socket, testDocument(small))
	process := r.Process()
	before := descriptors(t, process)
	for range 20 {
		for _, ask := range []func() error{
			func() error { _, err := s.Overview(); return err },
			func() error {
				return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 1000}),
					memfd(t, nil, 1000, fixed))
			},
			func() error { return s.Do(protocol.Norm, nil) },
			func() error { return openAndClose(r.Socket) },
		} {
			if err := ask(); err != nil {
				t.Fatal(err)
			}
		}
		wantError(t, s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 1001}),
			memfd(t, nil, 1000, fixed)), protocol.Refused, "window: *")
		wantError(t, dial(t, r).Do(protocol.Norm, nil, memfd(t, nil, 1000, fixed)), protocol.Malformed,
			"norm with 1 file descriptors: expected 0")
	}
	await(t, "files to be closed", func() bool { return descriptors(t, process) <= before })
}

// openAndClose makes a session and gives it back.
func openAndClose(socket string) error {
	s, err := servicetest.Open(socket, testDocument(small, func(d *protocol.Document) { d.Part = "other" }))
	if err != nil {
		return err
	}
	return s.Close()
}

// FuzzRequest parses packets as the service does.
func FuzzRequest(f *testing.F) {
	for _, p := range validRequests(f) {
		f.Add(p.Encode())
	}
	f.Add([]byte("PLIM"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := protocol.ParsePacket(data)
		if err != nil {
			var e *protocol.Error
			if !errors.As(err, &e) || e.Status != protocol.Malformed {
				t.Fatalf("%v is no answer to a malformed packet", err)
			}
			return
		}
		if again := p.Encode(); string(again) != string(data) {
			t.Fatalf("%x was parsed as %x", data, again)
		}
		decoders := map[protocol.Kind]func() ([]byte, error){
			protocol.Open:       decodeAndEncode[protocol.OpenBody](p),
			protocol.Hold:       decodeAndEncode[protocol.OpenBody](p),
			protocol.Window:     decodeAndEncode[protocol.WindowBody](p),
			protocol.Write:      decodeAndEncode[protocol.TransferBody](p),
			protocol.Read:       decodeAndEncode[protocol.TransferBody](p),
			protocol.Accumulate: decodeAndEncode[protocol.AccumulateBody](p),
			protocol.OwnSteps:   decodeAndEncode[protocol.RangeBody](p),
			protocol.Delta:      decodeAndEncode[protocol.DeltaBody](p),
			protocol.Decide:     decodeAndEncode[protocol.DecideBody](p),
			protocol.SetStep: func() ([]byte, error) {
				b, err := protocol.DecodeSetStep(p.Kind, p.Body)
				return b.Encode(), err
			},
			protocol.SetOwnSteps: func() ([]byte, error) {
				b, err := protocol.DecodeOwnSteps(p.Kind, p.Body)
				return b.Encode(), err
			},
			protocol.Wait:  decodeAndEncode[protocol.WaitBody](p),
			protocol.Close: decodeAndEncode[protocol.CloseBody](p),
			protocol.Ready: func() ([]byte, error) {
				r, err := protocol.DecodeReady(p.Kind, p.Body)
				return r.Encode(), err
			},
			protocol.Step: func() ([]byte, error) {
				s, err := protocol.DecodeStep(p.Kind, p.Body)
				return s.Encode(), err
			},
			protocol.Prepare: func() ([]byte, error) {
				s, err := protocol.DecodeStep(p.Kind, p.Body)
				return s.Encode(), err
			},
			protocol.Save: func() ([]byte, error) {
				_, err := protocol.DecodeText[protocol.SaveBody](p.Kind, p.Body)
				return p.Body, err
			},
			protocol.Commit: func() ([]byte, error) {
				_, err := protocol.DecodeText[protocol.CommitBody](p.Kind, p.Body)
				return p.Body, err
			},
			protocol.Load: func() ([]byte, error) {
				_, err := protocol.DecodeText[protocol.LoadBody](p.Kind, p.Body)
				return p.Body, err
			},
			protocol.Order: func() ([]byte, error) {
				o, err := protocol.DecodeOrder(p.Kind, p.Body)
				return o.Encode(), err
			},
			protocol.Restore: func() ([]byte, error) {
				_, err := protocol.DecodeText[protocol.RestoreBody](p.Kind, p.Body)
				return p.Body, err
			},
		}
		decode := decoders[p.Kind]
		if decode == nil {
			return // has no body
		}
		body, err := decode()
		var e *protocol.Error
		switch {
		case err != nil && !errors.As(err, &e):
			t.Fatalf("%v is no answer", err)
		case err == nil && string(body) != string(p.Body):
			t.Fatalf("the body %x was decoded as %x", p.Body, body)
		}
	})
}

func decodeAndEncode[T any](p protocol.Packet) func() ([]byte, error) {
	return func() ([]byte, error) {
		value, err := protocol.Decode[T](p.Kind, p.Body)
		return protocol.Encode(value), err
	}
}

// FuzzAnswer parses answers as a client does.
func FuzzAnswer(f *testing.F) {
	request := protocol.Packet{Kind: protocol.Step, Number: 7}
	f.Add(protocol.Packet{Kind: protocol.Step, Number: 7, Answer: true,
		Body: protocol.Encode(uint32(protocol.Done), uint64(3), 0.5)}.Encode())
	f.Add(protocol.Packet{Kind: protocol.Step, Number: 7, Answer: true,
		Body: append(protocol.Encode(uint32(protocol.Refused)), "no"...)}.Encode())
	f.Add(protocol.Packet{Kind: protocol.Step, Number: 8, Answer: true,
		Body: protocol.Encode(uint32(protocol.Done))}.Encode())
	f.Add(protocol.Packet{Kind: protocol.Step, Number: 7, Answer: true}.Encode())
	f.Add(request.Encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		result, err := protocol.ParseAnswer(data, request)
		if err != nil {
			return
		}
		p, err := protocol.ParsePacket(data)
		if err != nil || !p.Answer || p.Kind != request.Kind || p.Number != request.Number ||
			len(p.Body) != 4+len(result) {
			t.Fatalf("%x was taken for the answer", data)
		}
	})
}

// FuzzDocument parses documents of open and hold. An accepted document describes a shard, or states, and
// stays the same when written and read again.
func FuzzDocument(f *testing.F) {
	for _, change := range []func(*protocol.Document){
		func(*protocol.Document) {},
		func(d *protocol.Document) {
			d.State, d.Moments, d.Parameter, d.Gradient = "fp32", "int8", "fp32", "fp16"
		},
		func(d *protocol.Document) { d.Optimizer, d.CPUs, d.Parameters[0].Moments = "lion", []int{0, 1}, "int8" },
		func(d *protocol.Document) { d.Parameters[0].Shape = []int64{1 << 40, 1 << 40} },
	} {
		text, err := json.Marshal(testDocument(change))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	text, err := json.Marshal(holdDocument())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"schema": "plimsoll.open/1", "unknown": 1}`))
	f.Add([]byte(`{"schema": "plimsoll.hold/1", "unknown": 1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := protocol.ReadDocument(text)
		if err != nil {
			var e *protocol.Error
			if !errors.As(err, &e) || e.Status != protocol.Refused {
				t.Fatalf("%v is no answer to a document that is wrong", err)
			}
			return
		}
		again, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		other, err := protocol.ReadDocument(again)
		if err != nil || d.Difference(other) != nil {
			t.Fatalf("%s cannot be read again, or differs: %v", again, err)
		}
		var arenas []arena.Plan
		switch d := d.(type) {
		case *protocol.HoldDocument:
			arenas = arenasOfStates(d)
		case *protocol.Document:
			config, err := shardConfig(d, 0, arena.BasePages, []int{0})
			if err != nil {
				t.Fatal(err)
			}
			whole := config.Elements
			for _, s := range config.Sections() {
				whole -= s.Elements
			}
			if whole != 0 {
				t.Fatalf("%d of %d elements are in no section", whole, config.Elements)
			}
			arenas = config.Arenas()
		}
		for _, a := range arenas {
			if a.Size <= 0 {
				t.Fatalf("arena %s of %d bytes", a.Name, a.Size)
			}
		}
	})
}

// FuzzNotification parses messages to the keeper.
func FuzzNotification(f *testing.F) {
	for _, text := range []string{"READY=1", "FDSTORE=1\nFDPOLL=0\nFDNAME=rank0/bf16/session",
		"FDSTOREREMOVE=1\nFDNAME=x\n", "=\n\n=", "A=B=C"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		k := &Keeper{}
		file, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		fields := parseNotification(text)
		k.take(fields, []*os.File{file})
		for _, kept := range k.kept {
			if kept.name != fields["FDNAME"] {
				t.Fatalf("a file is kept as %q, and %q was said", kept.name, fields["FDNAME"])
			}
			file.Close()
		}
		if _, err := file.Stat(); err == nil {
			t.Fatal("a file was neither kept nor closed")
		}
	})
}

// FuzzRecord reads session headers as a restarted service does.
func FuzzRecord(f *testing.F) {
	text, err := json.Marshal(testDocument())
	if err != nil {
		f.Fatal(err)
	}
	header, err := newHeader(testDocument(), text, arena.Memory, arena.BasePages, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(header.Whole())
	broken := append([]byte{}, header.Whole()...)
	fieldsOf(broken).document |= 1 << 24
	f.Add(broken)
	groups := append([]byte{}, header.Whole()...)
	fieldsOf(groups).groupCount = 1
	f.Add(groups)
	f.Add([]byte{})
	pages, err := newHeader(testDocument(), text, arena.Memory, 200, 0) // no such kind of pages exists
	if err != nil {
		f.Fatal(err)
	}
	f.Add(pages.Whole())
	f.Fuzz(func(t *testing.T, content []byte) {
		descriptor, err := unix.MemfdCreate("record", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(descriptor), "record")
		defer file.Close()
		if _, err := file.Write(content); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, fixed|unix.F_SEAL_SEAL); err != nil {
			t.Fatal(err)
		}
		a, d, err := readHeader("record", arena.Memory, file)
		if err != nil {
			if a != nil {
				t.Fatal("a header that cannot be read is mapped still")
			}
			return
		}
		defer a.Close()
		if err := d.Validate(); err != nil {
			t.Fatal(err)
		}
		pages := a.kindOfPages()
		if _, err := shardConfig(d.(*protocol.Document), 0, pages, nil); err != nil {
			t.Fatal(err)
		}
		_ = pages.Size() + pages.Round(1)
		_ = pages.String()
	})
}
