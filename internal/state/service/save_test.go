//go:build linux

package service

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// savedAtTwo starts a service with a session that was saved at step 2. It returns the
// directory and the fingerprint of that state.
func savedAtTwo(t *testing.T) (r *running, s *servicetest.Session, directory, saved string) {
	t.Helper()
	r = startService(t)
	s = begun(t, r.Socket, testDocument(small))
	mustStep(t, s, 2)
	return r, s, committed(t, s), fingerprint(t, s)
}

// wantLoaded checks that a session is whole, with the state that was saved at step 2.
func wantLoaded(t *testing.T, r *running, s *servicetest.Session, saved string) {
	t.Helper()
	if got, status := fingerprint(t, s), r.overview(t).Sessions[0]; got != saved || !status.Initialized ||
		status.Step != 2 {
		t.Errorf("%s at step %d was loaded, initialized %v, want %s", got, status.Step, status.Initialized, saved)
	}
}

// TestFilesThatChangeWhileTheyAreLoaded damages a checkpoint again and again during
// loads. Either nothing was overwritten, or the state is no longer taken for whole.
func TestFilesThatChangeWhileTheyAreLoaded(t *testing.T) {
	r, s, directory, saved := savedAtTwo(t)
	mustStep(t, s, 4)
	later := fingerprint(t, s)
	stop := make(chan struct{})
	var damaging sync.WaitGroup
	damaging.Go(func() { damage(t, dataFile(t, directory), stop) })
	outcomes := map[string]int{}
	for deadline := time.Now().Add(20 * time.Second); (outcomes["in part"] == 0 || outcomes["not at all"] == 0) &&
		time.Now().Before(deadline); {
		_, err := s.Load(directory)
		status := r.overview(t).Sessions[0]
		var e *protocol.Error
		switch {
		case err == nil:
			outcomes["whole"]++
			if got := fingerprint(t, s); got != saved || !status.Initialized || status.Step != 2 {
				t.Fatalf("loaded, at step %d, initialized %v: %s, want %s", status.Step, status.Initialized, got, saved)
			}
			later = saved
		case !errors.As(err, &e) || e.Status != protocol.Storage:
			t.Fatal(err)
		case strings.Contains(e.Message, "only partly loaded"):
			outcomes["in part"]++
			if status.Initialized {
				t.Fatalf("the state passes for whole after: %v", err)
			}
		default:
			outcomes["not at all"]++
			if got := fingerprint(t, s); status.Initialized && got != later {
				t.Fatalf("the state is %s after what was refused, and was %s: %v", got, later, err)
			}
		}
	}
	close(stop)
	damaging.Wait()
	t.Logf("%v", outcomes)
	if outcomes["in part"] == 0 || outcomes["not at all"] == 0 {
		t.Error("the damage never came between reading twice")
	}
	if _, err := s.Load(directory); err != nil {
		t.Fatal(err)
	}
	if got := fingerprint(t, s); got != saved {
		t.Errorf("in the end %s was loaded, want %s", got, saved)
	}
}

// TestLoadIntoANewSession loads into a session that has nothing to keep. A partly
// loaded state is not taken for whole, and a good checkpoint can be loaded next.
func TestLoadIntoANewSession(t *testing.T) {
	r, s, directory, saved := savedAtTwo(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := dataFile(t, directory)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	damaged := bytes.Clone(whole)
	damaged[len(damaged)-100] ^= 1
	if err := os.WriteFile(name, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, r.Socket, testDocument(small))
	if _, err := s.Load(directory); err == nil || !strings.Contains(err.Error(), "only partly loaded") ||
		!strings.Contains(err.Error(), filepath.Base(name)) {
		t.Errorf("%v, want what was damaged", err)
	}
	if r.overview(t).Sessions[0].Initialized {
		t.Error("what was loaded in part passes for whole")
	}
	// Moments of the checkpoint are no zeros that training begins with.
	const mend = "*a load was interrupted, and only some of the state is the checkpoint's: load again, or give the " +
		"state back and open it anew"
	wantError(t, begin(s), protocol.OutOfOrder, "set_step"+mend)
	wantError(t, stepOnce(s, 1), protocol.OutOfOrder, "step"+mend)
	if err := os.WriteFile(name, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(directory); err != nil {
		t.Fatal(err)
	}
	wantLoaded(t, r, s, saved)
}

// TestLoadAsOneOfSeveral loads one of several shards. No client can go on from that
// state, whoever dies, until set_step says that all are loaded.
func TestLoadAsOneOfSeveral(t *testing.T) {
	r, s, directory, saved := savedAtTwo(t)
	mustStep(t, s, 4)
	load := func(several bool) {
		t.Helper()
		if step, err := s.Ask(protocol.Load, protocol.LoadBody{Directory: directory, Several: several}); err != nil ||
			step != 2 {
			t.Fatalf("step %d was loaded: %v", step, err)
		}
	}
	load(true)
	for range 2 {
		_, err := s.Save(t.TempDir(), nil)
		wantError(t, err, protocol.OutOfOrder, "save: the state is incomplete*")
		wantError(t, s.Prepare(3, adamw...), protocol.OutOfOrder,
			"prepare: this state was loaded as one of several, and "+
				"no set_step has confirmed that all were: load all again*")
		wantError(t, stepOnce(s, 3), protocol.OutOfOrder, "step: this state was loaded as one of several*")
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		r.killAndWait(t)
		if s = mustOpen(t, r.Socket, testDocument(small)); s.Welcome.Initialized || s.Welcome.Step != 2 {
			t.Errorf("the state passes for whole: %+v", s.Welcome)
		}
	}
	for _, several := range []bool{false, true} {
		load(several)
		if several {
			if err := s.SetStep(2); err != nil {
				t.Fatal(err)
			}
		}
		wantLoaded(t, r, s, saved)
		if err := stepOnce(s, 3); err != nil {
			t.Error(err)
		}
	}
}

// TestServiceEndsWhileItLoads checks that a service that ends does not finish a load,
// which is of no more use.
func TestServiceEndsWhileItLoads(t *testing.T) {
	server, socket, end := serveUntil(t)
	document := testDocument(small)
	s := begun(t, socket, document)
	directory := committed(t, s)
	held, s := holdLoads(t, server, s, socket, document)
	outcome := make(chan error, 1)
	go func() {
		_, err := s.Load(directory)
		outcome <- err
	}()
	<-held.begun
	end()
	if err := <-held.brokenOff; err == nil {
		t.Error("the service has finished the load")
	}
	if err := <-outcome; !errors.Is(err, client.ErrLost) {
		t.Errorf("%v, want that the service is gone: the next is to be asked again", err)
	}
}

// heldLoads are contents that begin to load only when the load shall be broken off.
type heldLoads struct {
	contents
	begun     chan struct{}
	brokenOff chan error // the end of the load
}

// holdLoads holds the next load of the only session. It opens the session of a document again: a connection uses the
// contents that it has found.
func holdLoads(t *testing.T, server *Server, s *servicetest.Session, socket string,
	d *protocol.Document) (*heldLoads, *servicetest.Session) {
	t.Helper()
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	await(t, "the service to let the client go", func() bool { return server.Overview().Clients == 0 })
	server.mu.Lock()
	session := server.all[keyOf(d)]
	held := &heldLoads{session.contents, make(chan struct{}), make(chan error, 1)}
	session.contents = held
	server.mu.Unlock()
	return held, mustOpen(t, socket, d)
}

func (h *heldLoads) load(until context.Context, b protocol.LoadBody) (int64, jsontext.Value, error) {
	close(h.begun)
	select {
	case <-until.Done():
	case <-time.After(2 * time.Minute): // the test fails: the load is finished
	}
	step, training, err := h.contents.load(until, b)
	h.brokenOff <- err
	return step, training, err
}

// TestReplicasSaveOnce has two sessions with the same state save it together, and one
// session load it.
func TestReplicasSaveOnce(t *testing.T) {
	r := startService(t)
	document := func(rank int) *protocol.Document {
		return testDocument(small, func(d *protocol.Document) { d.Rank, d.World, d.LocalWorld = rank, 2, 2 })
	}
	replicas := []*servicetest.Session{begun(t, r.Socket, document(0)), begun(t, r.Socket, document(1))}
	directory, elements := t.TempDir(), int64(0)
	for replica, s := range replicas {
		mustStep(t, s, 2)
		if step, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: directory, Replica: replica,
			Replicas: 2}); err != nil ||
			step != 2 {
			t.Fatalf("step %d is saved: expected 2 (%v)", step, err)
		}
		if _, err := s.Saved(); err != nil {
			t.Fatal(err)
		}
	}
	want := fingerprint(t, replicas[0])
	if err := replicas[1].Commit(directory, 2); err != nil {
		t.Fatal(err)
	}
	found, err := checkpoint.Open(directory)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found.Files() {
		elements += f.Parameters
	}
	if elements != replicas[0].Welcome.Elements {
		t.Errorf("%d elements were written, want %d", elements, replicas[0].Welcome.Elements)
	}
	mustStep(t, replicas[1], 3)
	if _, err := replicas[1].Load(directory); err != nil {
		t.Fatal(err)
	}
	if got := fingerprint(t, replicas[1]); got != want {
		t.Errorf("%s was loaded, and %s was saved", got, want)
	}
}

// TestTwoJobsSaveOneStep has two jobs save the same step in one folder, at different
// times. No checkpoint has files of both.
func TestTwoJobsSaveOneStep(t *testing.T) {
	document := func(rank int) *protocol.Document {
		return testDocument(small, func(d *protocol.Document) {
			d.Rank, d.World, d.LocalWorld = rank, 2, 2
			d.Parameters = [][]protocol.Piece{d.Parameters[:2], d.Parameters[2:]}[rank]
		})
	}
	jobs, prints := map[string][]*servicetest.Session{}, map[string][]string{}
	for job, gradients := range map[string]int64{"one": 1, "other": 5} {
		r := startService(t)
		for rank := range 2 {
			s := begun(t, r.Socket, document(rank))
			putGradients(s, gradients, 0, s.Welcome.Elements)
			if err := s.Step(1, 1, true, adamw...); err != nil {
				t.Fatal(err)
			}
			jobs[job] = append(jobs[job], s)
			prints[job] = append(prints[job], fingerprint(t, s))
		}
	}
	const commit = -1
	type act struct {
		job  string
		rank int    // the rank that saves
		want string // the error
	}
	const mend = ": this is of save *, but the commit is of save * of the same step: another job saves in this " +
		"folder, or has left it here*give each job, and each optimizer of a program, a folder of its own*"
	for name, acts := range map[string][]act{
		"one is faster": {
			{"one", 0, ""}, {"one", 1, ""}, {"other", 0, ""},
			{"one", commit, "rank-00000-of-00002-bf16.json" + mend},
			{"other", commit, "rank-00001-of-00002-bf16.json" + mend},
			{"other", 1, ""}, {"other", commit, ""},
			{"one", commit, "step-00000001" + mend}, {"other", commit, ""},
		},
		"each has a rank that is faster": {
			{"one", 0, ""}, {"other", 1, ""}, {"other", 0, ""}, {"one", 1, ""},
			{"one", commit, "rank-00000-of-00002-bf16.json" + mend},
			{"other", commit, "rank-00001-of-00002-bf16.json" + mend},
			{"one", 0, ""}, {"one", commit, ""},
		},
		"one has committed": {
			{"one", 0, ""}, {"one", 1, ""}, {"one", commit, ""}, {"other", 0, ""}, {"one", commit, ""},
			{"other", 1, ""}, {"other", commit, ""}, {"one", commit, "step-00000001" + mend},
		},
		"nobody says who it is": {
			{"", 0, ""}, {"", 1, ""}, {"one", commit, "rank-00000-of-00002-bf16.json" + mend},
			{"one", 0, ""}, {"", commit, "rank-00000-of-00002-bf16.json" + mend}, {"one", 1, ""}, {"one", commit, ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			directory, committed := t.TempDir(), ""
			for _, a := range acts {
				session := jobs[cmp.Or(a.job, "other")][max(a.rank, 0)]
				if a.rank != commit {
					_, err := session.Ask(protocol.Save, protocol.SaveBody{Directory: directory, Identity: a.job})
					if err == nil {
						_, err = session.Saved()
					}
					if err != nil {
						t.Fatal(err)
					}
					continue
				}
				_, err := session.Ask(protocol.Commit,
					protocol.CommitBody{Directory: directory, Step: 1, Identity: a.job})
				if a.want != "" {
					wantError(t, err, protocol.Storage, "commit: *"+a.want)
				} else if committed = a.job; err != nil {
					t.Fatal(err)
				}
			}
			r := startService(t)
			for rank, want := range prints[committed] {
				s := mustOpen(t, r.Socket, document(rank))
				if _, err := s.Load(directory); err != nil {
					t.Fatal(err)
				}
				if got := fingerprint(t, s); got != want {
					t.Errorf("rank %d loads %s, and %q has saved %s", rank, got, committed, want)
				}
			}
		})
	}
}

// TestWriteWaitsForASave checks that a write during a save does not get into the
// checkpoint.
func TestWriteWaitsForASave(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument(of(4<<20)))
	putGradients(s, 1, 0, s.Welcome.Elements)
	if err := s.Step(1, 1, true, adamw[0]); err != nil {
		t.Fatal(err)
	}
	saved := fingerprint(t, s)
	for tries, waited := 0, false; !waited; tries++ {
		if tries == 20 {
			t.Fatal("every save was over before anything could be written")
		}
		directory := t.TempDir()
		if _, err := s.Save(directory, nil); err != nil {
			t.Fatal(err)
		}
		waited = r.overview(t).Sessions[0].Saving
		if err := s.Write(protocol.MasterWeights, 0, make([]float32, s.Welcome.Elements)); err != nil {
			t.Fatal(err)
		}
		if step, err := s.Saved(); err != nil || step != 1 {
			t.Fatalf("step %d was saved: %v", step, err)
		}
		if err := s.Commit(directory, 1); err != nil {
			t.Fatal(err)
		}
		if now := fingerprint(t, s); now == saved {
			t.Fatal("nothing was written")
		}
		if _, err := s.Load(directory); err != nil {
			t.Fatal(err)
		}
		if loaded := fingerprint(t, s); loaded != saved {
			t.Fatalf("%s was saved, want %s", loaded, saved)
		}
	}
}

// committed saves a checkpoint of a session and returns its folder.
func committed(t *testing.T, s *servicetest.Session) string {
	t.Helper()
	directory := t.TempDir()
	_, err := s.Save(directory, nil)
	var step int64
	if err == nil {
		step, err = s.Saved()
	}
	if err == nil {
		err = s.Commit(directory, step)
	}
	if err != nil {
		t.Fatal(err)
	}
	return directory
}

// dataFile returns the file that the only rank of a checkpoint wrote.
func dataFile(t *testing.T, directory string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(directory, "step-*", "*.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	return files[0]
}

// damage changes a byte of a file, and back, until stop.
func damage(t *testing.T, name string, stop <-chan struct{}) {
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		t.Error(err)
		return
	}
	at := info.Size() - 100
	whole := make([]byte, 1)
	if _, err := file.ReadAt(whole, at); err != nil {
		t.Error(err)
		return
	}
	for ended := false; !ended; {
		for _, b := range []byte{^whole[0], whole[0]} {
			if _, err := file.WriteAt([]byte{b}, at); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		}
		select {
		case <-stop:
			ended = true
		default:
		}
	}
}

// TestFailureIsNotTheNextClients checks that a client is not told of an earlier
// client's failed save, over or still under way.
func TestFailureIsNotTheNextClients(t *testing.T) {
	r := startService(t)
	for range 20 { // in some tries the folder goes before the file is complete
		s := begun(t, r.Socket, testDocument())
		mustStep(t, s, 2)
		gone := t.TempDir()
		if _, err := s.Save(gone, nil); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.RemoveAll(gone), s.Detach()); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, r.Socket, testDocument())
		if _, err := s.Save(t.TempDir(), nil); err != nil {
			t.Fatal(err)
		}
		if step, err := s.Saved(); err != nil || step != s.Welcome.Step {
			t.Fatalf("step %d was saved (%v), want %d", step, err, s.Welcome.Step)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
