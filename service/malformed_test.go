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

	"plimsoll/arena"
	"plimsoll/ledger"
)

// requests returns a valid request of every kind.
func requests(t testing.TB) []packet {
	t.Helper()
	text, err := json.Marshal(testDocument())
	if err != nil {
		t.Fatal(err)
	}
	all := []packet{
		{kind: Open, body: encode(openBody{uint64(len(text))})},
		{kind: Window, body: encode(windowBody{1 << 16})},
		{kind: Write, body: encode(transfer{What: 1, First: 2, Count: 3, Offset: 4})},
		{kind: Read, body: encode(transfer{Count: 1000})},
		{kind: SetStep, body: encode(setStep{3})},
		{kind: Ready, body: encode(stretch{0, 1000})},
		{kind: Norm},
		{kind: Accumulate, body: encode(accumulation{Type: 2, Count: 10, Number: 1})},
		{kind: Clear},
		{kind: Step, body: stepBody{stepHeader{Step: 1, Factor: 1, Flags: waitForStep}, adamw}.encode()},
		{kind: Wait, body: encode(waitBody{1, 0, 10})},
		{kind: Save, body: []byte(`{"directory": "/nowhere", "training": {"epoch": 1}}`)},
		{kind: Saved},
		{kind: Commit, body: []byte(`{"directory": "/nowhere", "step": 300}`)},
		{kind: Load, body: []byte(`{"directory": "/nowhere"}`)},
		{kind: Stat},
		{kind: Close, body: encode(closeBody{})},
		{kind: Prepare, body: stepBody{stepHeader{Step: 1}, adamw}.encode()},
		{kind: Restore, body: []byte(`{"session": "1", "discard": true}`)},
	}
	for i := range all {
		all[i].number = uint32(i)
	}
	return all
}

// malform returns a malformed message, or by chance a valid one.
func malform(random *rand.Rand, valid []packet) []byte {
	data := valid[random.IntN(len(valid))].encode()
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
		data = append(data, make([]byte, 1+random.IntN(maximumPacket))...)
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
	valid := requests(t)
	pipe, other, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]*os.File{pipe, other})
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
			s := &Session{Client: *client}
			if err := s.open(testDocument(small, func(d *Document) { d.Part = "target" })); err != nil {
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
			if err := writePacket(client.c, malform(random, valid), with...); err != nil {
				break // the service closed the connection
			}
			if err := client.c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
				t.Fatal(err)
			}
			data, received, err := readPacket(client.c, make([]byte, maximumPacket))
			closeAll(received)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("no answer in 20 s")
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
			func() error { return s.done(Window, encode(windowBody{1000}), memfd(t, nil, 1000, fixed)) },
			func() error { return s.done(Norm, nil) },
			func() error { return openAndClose(r.Socket) },
		} {
			if err := ask(); err != nil {
				t.Fatal(err)
			}
		}
		wantError(t, s.done(Window, encode(windowBody{1001}), memfd(t, nil, 1000, fixed)), Refused, "window: *")
		wantError(t, dial(t, r).done(Norm, nil, memfd(t, nil, 1000, fixed)), Malformed,
			"norm with 1 file descriptors: expected 0")
	}
	await(t, "files to be closed", func() bool { return descriptors(t, process) <= before })
}

// openAndClose makes a session and gives it back.
func openAndClose(socket string) error {
	s, err := OpenSession(socket, testDocument(small, func(d *Document) { d.Part = "other" }))
	if err != nil {
		return err
	}
	return s.Close()
}

// FuzzRequest parses packets as the service does.
func FuzzRequest(f *testing.F) {
	for _, p := range requests(f) {
		f.Add(p.encode())
	}
	f.Add([]byte("PLIM"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parsePacket(data)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status != Malformed {
				t.Fatalf("%v is no answer to a malformed packet", err)
			}
			return
		}
		if again := p.encode(); string(again) != string(data) {
			t.Fatalf("%x was parsed as %x", data, again)
		}
		decoders := map[Kind]func() ([]byte, error){
			Open:       decodeAndEncode[openBody](p),
			Window:     decodeAndEncode[windowBody](p),
			Write:      decodeAndEncode[transfer](p),
			Read:       decodeAndEncode[transfer](p),
			Accumulate: decodeAndEncode[accumulation](p),
			SetStep:    decodeAndEncode[setStep](p),
			Ready:      decodeAndEncode[stretch](p),
			Wait:       decodeAndEncode[waitBody](p),
			Close:      decodeAndEncode[closeBody](p),
			Step: func() ([]byte, error) {
				s, err := decodeStep(p.kind, p.body)
				return s.encode(), err
			},
			Prepare: func() ([]byte, error) {
				s, err := decodeStep(p.kind, p.body)
				return s.encode(), err
			},
			Save:   func() ([]byte, error) { _, err := decodeText[saveBody](p.kind, p.body); return p.body, err },
			Commit: func() ([]byte, error) { _, err := decodeText[commitBody](p.kind, p.body); return p.body, err },
			Load:   func() ([]byte, error) { _, err := decodeText[loadBody](p.kind, p.body); return p.body, err },
			Restore: func() ([]byte, error) {
				_, err := decodeText[restoreBody](p.kind, p.body)
				return p.body, err
			},
		}
		decode := decoders[p.kind]
		if decode == nil {
			return // has no body
		}
		body, err := decode()
		var e *Error
		switch {
		case err != nil && !errors.As(err, &e):
			t.Fatalf("%v is no answer", err)
		case err == nil && string(body) != string(p.body):
			t.Fatalf("the body %x was decoded as %x", p.body, body)
		}
	})
}

func decodeAndEncode[T any](p packet) func() ([]byte, error) {
	return func() ([]byte, error) {
		value, err := decode[T](p.kind, p.body)
		return encode(value), err
	}
}

// FuzzAnswer parses answers as a client does.
func FuzzAnswer(f *testing.F) {
	request := packet{kind: Step, number: 7}
	f.Add(packet{kind: Step, number: 7, answer: true, body: encode(uint32(Done), uint64(3), 0.5)}.encode())
	f.Add(packet{kind: Step, number: 7, answer: true, body: append(encode(uint32(Refused)), "no"...)}.encode())
	f.Add(packet{kind: Step, number: 8, answer: true, body: encode(uint32(Done))}.encode())
	f.Add(packet{kind: Step, number: 7, answer: true}.encode())
	f.Add(request.encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		result, err := parseAnswer(data, request)
		if err != nil {
			return
		}
		p, err := parsePacket(data)
		if err != nil || !p.answer || p.kind != request.kind || p.number != request.number ||
			len(p.body) != 4+len(result) {
			t.Fatalf("%x was taken for the answer", data)
		}
	})
}

// FuzzDocument parses documents of open. An accepted document describes a shard, and
// stays the same when written and read again.
func FuzzDocument(f *testing.F) {
	for _, change := range []func(*Document){
		func(*Document) {},
		func(d *Document) { d.State, d.Moments, d.Parameter, d.Gradient = "fp32", "int8", "fp32", "fp16" },
		func(d *Document) { d.Optimizer, d.CPUs, d.Parameters[0].Moments = "lion", []int{0, 1}, "int8" },
		func(d *Document) { d.Parameters[0].Shape = []int64{1 << 40, 1 << 40} },
	} {
		text, err := json.Marshal(testDocument(change))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"schema": "plimsoll.open/1", "unknown": 1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := parseDocument(text)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status != Refused {
				t.Fatalf("%v is no answer to a document that is wrong", err)
			}
			return
		}
		again, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		other, err := parseDocument(again)
		if err != nil || d.same(other) != nil {
			t.Fatalf("%s cannot be read again, or differs: %v", again, err)
		}
		config, err := d.config(0, arena.BasePages, []int{0})
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
		for _, a := range config.Arenas() {
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
	record, err := newRecord(testDocument(), text, arena.BasePages)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(record.Whole())
	broken := append([]byte{}, record.Whole()...)
	headOf(broken).document |= 1 << 24
	f.Add(broken)
	groups := append([]byte{}, record.Whole()...)
	headOf(groups).groupCount = 1
	f.Add(groups)
	f.Add([]byte{})
	pages, err := newRecord(testDocument(), text, 200) // no such kind of pages exists
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
		a, d, err := readRecord("record", file)
		if err != nil {
			if a != nil {
				t.Fatal("a record that cannot be read is mapped still")
			}
			return
		}
		defer a.Close()
		if err := d.validate(); err != nil {
			t.Fatal(err)
		}
		pages := a.kindOfPages()
		if _, err := d.config(0, pages, nil); err != nil {
			t.Fatal(err)
		}
		_ = pages.Size() + pages.Round(1)
		_ = pages.String()
	})
}
