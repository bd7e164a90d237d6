//go:build linux

package service

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// These tests are quick, and long under make soak.

// soaked returns quick, or long under make soak.
func soaked(quick, long int) int {
	if isSoak() {
		return long
	}
	return quick
}

// TestKilledWithManySessions kills the service at random instants while many sessions
// make steps. No bit of any session may differ.
func TestKilledWithManySessions(t *testing.T) {
	sessions, kills := soaked(16, 100), soaked(6, 200)
	r := startService(t)
	var enough atomic.Bool
	var steps atomic.Int64
	var progress events
	var training sync.WaitGroup
	reached, prints := make([]atomic.Int64, sessions), make([]string, sessions)
	opened := make([]*atomic.Bool, sessions)
	for rank := range sessions {
		opened[rank] = &atomic.Bool{}
		x := &trainer{Socket: r.Socket, Document: tiny(rank, sessions)}
		if err := x.init(); err != nil {
			t.Fatal(err)
		}
		training.Go(func() {
			s, err := x.train(func(step int64) bool {
				reached[rank].Store(step)
				opened[rank].Store(true)
				steps.Add(1)
				progress.tell()
				return enough.Load()
			})
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
				progress.tell()
				return
			}
			prints[rank] = fingerprint(t, s)
			if err := s.Detach(); err != nil {
				t.Error(err)
			}
		})
	}
	progress.await(t, "every session", func() bool {
		return t.Failed() || !slices.ContainsFunc(opened, func(o *atomic.Bool) bool { return !o.Load() })
	})
	random := rand.New(rand.NewPCG(5, 5))
	for i := range kills {
		if random.IntN(8) > 0 { // else kill it while it restores
			before := steps.Load()
			progress.await(t, "steps", func() bool { return steps.Load() >= before+int64(sessions) || t.Failed() })
		}
		linger(random)
		r.killAndWait(t)
		if i%20 == 19 {
			if o := r.overview(t); len(o.SetAside) != 0 {
				t.Fatalf("set aside are %+v", o.SetAside)
			}
		}
	}
	for rank := range reached { // every session has noticed the last kill
		last := reached[rank].Load()
		progress.await(t, "a step of each", func() bool { return reached[rank].Load() >= last+2 || t.Failed() })
	}
	enough.Store(true)
	training.Wait()
	t.Logf("%d kills, %d services, %d steps of %d sessions", kills, r.started.Load(), steps.Load(), sessions)
	r.end()
	calm := startService(t)
	for rank, got := range prints {
		s := begun(t, calm.Socket, tiny(rank, sessions))
		mustStepAs(t, s, reached[rank].Load())
		if want := fingerprint(t, s); got != want {
			t.Errorf("rank %d holds %s after step %d, want %s", rank, got, reached[rank].Load(), want)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// mustStepAs makes the steps of an undisturbed trainer.
func mustStepAs(t *testing.T, s *servicetest.Session, last int64) {
	t.Helper()
	x := &trainer{Document: tiny(0, 1)}
	if err := x.init(); err != nil {
		t.Fatal(err)
	}
	for step := int64(1); step <= last; step++ {
		if err := x.step(s, step); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMutatedDocumentsAndRequests sends mutated documents and requests while other
// clients hold state. The service keeps running, and carries out or refuses each
// request. The others' state keeps its bits, even over kills.
func TestMutatedDocumentsAndRequests(t *testing.T) {
	mutations := soaked(1500, 10_000)
	r := startService(t)
	prints := openMany(t, r, 3)
	process := r.overview(t).Process
	random := rand.New(rand.NewPCG(9, 9))
	valid := validRequests(t)
	mutated := tiny(0, 3)
	mutated.Part = "mutated"
	document, err := json.Marshal(mutated)
	if err != nil {
		t.Fatal(err)
	}
	opened, killed, inSession := 0, 0, 0
	own := testDocument(small, func(d *protocol.Document) { d.Part, d.World, d.LocalWorld = "own", 3, 3 })
	var session *servicetest.Session // the target of the requests
	for i := range mutations {
		if i%2 == 0 {
			accepted, err := openMutated(r.Socket, mutate(random, document))
			if e := (*protocol.Error)(nil); err != nil && !errors.As(err, &e) && !errors.Is(err, client.ErrLost) {
				t.Fatalf("mutation %d: %v", i, err)
			}
			if accepted {
				opened++
			}
		} else {
			if session == nil {
				session = mustOpen(t, r.Socket, own)
				if err := session.MakeWindow(); err != nil {
					t.Fatal(err)
				}
			}
			err := session.Conn.SetDeadline(time.Now().Add(time.Minute))
			if err == nil {
				err = protocol.WritePacket(session.Conn, malform(random, valid))
			}
			if err == nil {
				var files []*os.File
				_, files, err = protocol.ReadPacket(session.Conn, make([]byte, protocol.MaximumPacket))
				protocol.CloseAll(files)
			}
			if inSession++; err != nil { // the service closes connections with malformed requests
				if err := session.Detach(); err != nil {
					t.Fatal(err)
				}
				session = nil
			}
		}
		if i%500 != 499 {
			continue
		}
		if now := r.overview(t).Process; now != process {
			t.Fatalf("mutation %d or one before has ended the service, process %d", i, process)
		}
		r.killAndWait(t)
		killed++
		checkMany(t, r, prints)
		process = r.overview(t).Process
	}
	if opened == 0 {
		t.Error("no mutated document was accepted: mutations are too wild")
	}
	checkMany(t, r, prints)
	t.Logf("%d documents, of which %d were accepted; %d requests in a session; %d kills", mutations-inSession, opened,
		inSession, killed)
}

// openMutated opens a session with any document, and gives it back.
func openMutated(socket string, text []byte) (accepted bool, err error) {
	client, err := client.Dial(socket)
	if err != nil {
		return false, err
	}
	defer client.Hangup()
	file, err := protocol.SealedFile("document", text)
	if err != nil {
		return false, err
	}
	defer file.Close()
	_, files, err := client.Call(protocol.Open, protocol.Encode(protocol.OpenBody{Length: uint64(len(text))}), file)
	protocol.CloseAll(files)
	if err != nil {
		return false, err
	}
	return true, client.Do(protocol.Close, protocol.Encode(protocol.CloseBody{Flags: protocol.GiveBack}))
}

// mutate changes a document a little; often the result is still valid.
func mutate(random *rand.Rand, document []byte) []byte {
	text := append([]byte{}, document...)
	for range 1 + random.IntN(3) {
		at := random.IntN(len(text))
		switch random.IntN(6) {
		case 0: // a bit
			text[at] ^= 1 << random.IntN(8)
		case 1: // a digit
			if text[at] >= '0' && text[at] <= '9' {
				text[at] = byte('0' + random.IntN(10))
			}
		case 2: // cut out
			end := min(len(text), at+1+random.IntN(10))
			text = append(text[:at], text[end:]...)
		case 3: // duplicated
			end := min(len(text), at+random.IntN(60))
			text = append(text[:end], append(append([]byte{}, text[at:end]...), text[end:]...)...)
		case 4: // a large number, or none
			number := fmt.Sprint([]any{-1, 0, int64(1) << 40, "null", 1e300, "[]"}[random.IntN(6)])
			text = append(text[:at], append([]byte(number), text[at:]...)...)
		case 5: // unchanged, with spaces
			text = append(text, ' ')
		}
		if len(text) == 0 {
			return []byte("{}")
		}
	}
	return text
}

// TestLongNamesOfManySessions opens the most sessions, with the longest names.
func TestLongNamesOfManySessions(t *testing.T) {
	sessions := soaked(24, 220)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur < 4096 {
		t.Skipf("a process may have %d descriptors (%v)", limit.Cur, err)
	}
	r := startService(t)
	long := func(rank int) *protocol.Document {
		d := tiny(rank, sessions)
		d.Part = fmt.Sprintf("%064d", rank)
		return d
	}
	for rank := range sessions {
		s := begun(t, r.Socket, long(rank))
		if err := errors.Join(s.SetStep(7), s.Detach()); err != nil {
			t.Fatal(err)
		}
	}
	r.killAndWait(t)
	if o := r.overview(t); len(o.Sessions) != sessions || len(o.SetAside) > 0 {
		t.Fatalf("%d of %d sessions are there; set aside are %+v", len(o.Sessions), sessions, o.SetAside)
	}
}
