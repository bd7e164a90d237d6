//go:build linux

package service

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/states"
)

// flipsTried is how many bits of each place are flipped.
func flipsTried(bits int) int {
	if testing.Short() {
		return min(bits, 300)
	}
	return min(bits, 10_000)
}

// outcomes counts what flips have come to.
type outcomes struct{ tried, found, harmless int }

// leave has a service make a session, of which the files stay. It returns them by the names that a keeper has.
func leave(t *testing.T, d *protocol.Document) (kept map[string]*os.File) {
	t.Helper()
	server, socket := serveHere(t)
	s := begun(t, socket, d)
	mustStep(t, s, 2)
	if err := s.Prepare(3, adamw...); err != nil {
		t.Fatal(err)
	}
	kept = map[string]*os.File{}
	session := theSession(server)
	for i, name := range session.keptNames() {
		file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", session.arenas()[i].File().Fd()), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		kept[name] = file
	}
	return kept
}

// inherit starts a service that has inherited files. It does not close them.
func inherit(t *testing.T, kept map[string]*os.File) *Server {
	t.Helper()
	files := map[string]*os.File{}
	for name, file := range kept {
		again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = again
	}
	server, err := NewServer("test", &Inherited{Files: files}, testHost, allForUpdates, Tier{}, func(string, ...any) {})
	if err != nil {
		t.Fatal(err)
	}
	return server
}

// imageOf reads a file.
func imageOf(t *testing.T, file *os.File) []byte {
	t.Helper()
	info, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	image := make([]byte, info.Size())
	if _, err := file.ReadAt(image, 0); err != nil {
		t.Fatal(err)
	}
	return image
}

// told is what a service tells the client that opens a session, and what it would make a prepared step with.
func told(s *session) (welcome string, err error) {
	err = s.guard(func() {
		welcome = fmt.Sprintf("%+v", s.contents.welcome(true, nil))
		if s.header.preparedStep.Load() != 0 {
			groups, left := s.header.prepared()
			welcome += fmt.Sprint(groups, left)
		}
	})
	return welcome, err
}

// TestEveryFlipOfAHeaderIsFound flips bits of a session header that a service finds. None makes the session a new one,
// or one of another step: the service sets it aside and says why, or tells its client what it would have told without
// the flip.
func TestEveryFlipOfAHeaderIsFound(t *testing.T) {
	d := testDocument(small)
	kept := leave(t, d)
	header, name := kept["1"], keyOf(d).String()
	image := imageOf(t, header)
	server := inherit(t, kept)
	want, err := told(theSession(server))
	if err != nil {
		t.Fatal(err)
	}
	release(t, server)
	used := int(fieldsOf(image).size())
	count, random := outcomes{}, rand.New(rand.NewPCG(3, 4))
	for _, bit := range random.Perm(8 * used)[:flipsTried(8*used)] {
		count.tried++
		mend := spoil(t, header, int64(bit/8), []byte{image[bit/8] ^ 1<<(bit%8)})
		server := inherit(t, kept)
		switch session := theSession(server); {
		case session == nil && len(server.aside) == 1 && strings.Contains(server.aside["1"].reason.Error(), "header"):
			count.found++
		case session == nil:
			t.Errorf("byte %d, bit %d: the session is neither there nor set aside: %v", bit/8, bit%8, server.aside)
		default:
			got, err := told(session)
			if err != nil {
				count.found++
			} else if got == want {
				count.harmless++
			} else {
				t.Errorf("byte %d, bit %d: nobody has noticed: %s, want %s", bit/8, bit%8, got, want)
			}
		}
		release(t, server)
		mend()
		_, _ = header.WriteAt(image, 0) // the service has counted its attempts
	}
	t.Logf("%s: %d flips: %d found, %d harmless, 0 silent", name, count.tried, count.found, count.harmless)
	if count.found == 0 || count.harmless > count.tried/2 {
		t.Errorf("%+v", count)
	}
}

// release lets go of the sessions of a service that was never served.
func release(t *testing.T, s *Server) {
	t.Helper()
	for _, session := range s.all {
		if err := session.close(); err != nil {
			t.Error(err)
		}
	}
	for _, l := range s.aside {
		if err := s.giveBack(l); err != nil {
			t.Error(err)
		}
	}
}

// TestFlipWhileServing flips a bit of every kind of memory under a service with a client. The step, or the request,
// that reads it is refused and says where. So is everything after it, until the user frees the memory.
func TestFlipWhileServing(t *testing.T) {
	for name, flip := range map[string]struct {
		arena string
		at    int
		want  string
	}{
		"condition":     {"session", conditionAt, "condition of the state"},
		"updates begun": {"step_journal", 48 + 4, "updates begun"},
		"first moment":  {"exp_avg", 40_000, "chunk 0"},
		"low words":     {"master_weights_low", 7, "chunk 0"},
	} {
		t.Run(name, func(t *testing.T) {
			server, socket := serveHere(t)
			server.SetSums(AllSums)
			d := testDocument(small)
			s := begun(t, socket, d)
			mustStep(t, s, 2)
			for _, a := range theSession(server).arenas() {
				if filepath.Base(a.Name()) == flip.arena {
					a.Bytes()[flip.at] ^= 8
				}
			}
			err := stepOnce(s, 3)
			wantDamage(t, err, flip.arena, flip.want)
			_, err = s.Save(t.TempDir(), nil)
			wantDamage(t, err, flip.arena, flip.want)
			if err := s.Detach(); err != nil {
				t.Fatal(err)
			}
			_, err = openPatiently(socket, d)
			wantDamage(t, err, flip.arena, flip.want)
			o := server.Overview()
			if len(o.Sessions) != 0 || len(o.SetAside) != 1 || !strings.Contains(o.SetAside[0].Reason, flip.want) {
				t.Fatalf("%+v", o)
			}
			name := o.SetAside[0].Name
			if err := server.restoreAside(protocol.RestoreBody{Session: name}); err == nil {
				t.Error("the session is restored")
			}
			if err := server.restoreAside(protocol.RestoreBody{Session: name, Discard: true}); err != nil {
				t.Error(err)
			}
			if s := mustOpen(t, socket, d); s.Welcome.Attached {
				t.Error("what was given back is there")
			}
		})
	}
}

// TestDamageThatNobodyAskedFor: who asks for the status of a service may be the first to read a number that has
// changed, and so may a service that is asked to end. That ends no service: the session is set aside, and others are
// not.
func TestDamageThatNobodyAskedFor(t *testing.T) {
	for name, read := range map[string]func(*Server){
		"status": func(s *Server) { s.Overview() }, "end": func(s *Server) { s.underway() },
	} {
		for want, at := range map[string]struct {
			arena string
			byte  int
		}{"updates begun": {"step_journal", 48 + 4}, "updates finished": {"step_journal", 56 + 4},
			"position": {"held_control", 64 + 2}} {
			t.Run(name+" "+want, func(t *testing.T) {
				server, socket := serveHere(t)
				begun(t, socket, testDocument(small))
				h := holder{mustHold(t, socket, holdDocument()), holdDocument(), nil}
				h.step()
				for _, session := range server.all {
					for _, a := range session.arenas() {
						if filepath.Base(a.Name()) == at.arena {
							a.Bytes()[at.byte] ^= 8
						}
					}
				}
				read(server)
				o := server.Overview()
				if len(o.Sessions) != 1 || len(o.SetAside) != 1 || !strings.Contains(o.SetAside[0].Reason, want) {
					t.Fatalf("%+v", o)
				}
			})
		}
	}
}

// wantDamage checks an error about memory that has changed.
func wantDamage(t *testing.T, err error, place, field string) {
	t.Helper()
	wrong := new(protocol.Error)
	if !errors.As(err, &wrong) || wrong.Status != protocol.Refused {
		t.Fatalf("the error is %v", err)
	}
	all := []string{place, field, "memory has changed since it was written", "last checkpoint", "--discard"}
	for _, want := range all {
		if !strings.Contains(wrong.Message, want) {
			t.Errorf("the error is %q, want %q", wrong.Message, want)
		}
	}
}

// TestFlipsOfControl flips every bit of the head of a control arena, under a service and before it attaches.
func TestFlipsOfControl(t *testing.T) {
	server, socket := serveHere(t)
	d := holdDocument()
	h := holder{mustHold(t, socket, d), d, nil}
	h.step()
	h.step()
	session := server.all[keyOf(d)]
	memory := session.arenas()[1].Bytes()
	want, err := told(session)
	if err != nil {
		t.Fatal(err)
	}
	found, harmless := 0, 0
	for bit := range 8 * 512 {
		memory[bit/8] ^= 1 << (bit % 8)
		got, err := told(session)
		session.damage.Store(nil)
		_, attached := attachControl(session)
		memory[bit/8] ^= 1 << (bit % 8)
		switch {
		case err != nil || attached != nil:
			found++
		case got == want:
			harmless++
		default:
			t.Errorf("byte %d, bit %d: nobody has noticed: %s", bit/8, bit%8, got)
		}
	}
	t.Logf("the head of a control arena: %d found, %d harmless, 0 silent", found, harmless)
	if found != 8*8*8 {
		t.Errorf("%d flips are found: expected those of 8 words", found)
	}
}

// attachControl attaches the control arena of a session, as the next service does.
func attachControl(s *session) (*states.Control, error) {
	return states.OverlayControl(s.arenas()[1].Bytes(), &s.document.(*protocol.HoldDocument).Description)
}

// conditionAt is the place of the condition in a header.
const conditionAt = int(unsafe.Offsetof(headerFields{}.condition)) + 3

// TestFlipsOfAHeaderInUse: what a header says of its own layout is read once. A bit that flips there later ends no
// service, and moves nothing.
func TestFlipsOfAHeaderInUse(t *testing.T) {
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument(small))
	header := theSession(server).header
	for step := int64(1); step < 4; step++ {
		for bit := range 8 * unsafe.Offsetof(headerFields{}.checksum) {
			header.Bytes()[bit/8] ^= 1 << (bit % 8)
			if err := s.Prepare(step, adamw...); err != nil {
				t.Fatalf("bit %d: %v", bit, err)
			}
			header.Bytes()[bit/8] ^= 1 << (bit % 8)
		}
		if err := s.StepPrepared(step, 1, true); err != nil {
			t.Fatal(err)
		}
	}
}
