//go:build linux

package service

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// trainer is a training that resumes wherever it was broken off. The state at a step
// depends only on the step's number, however often a checkpoint was loaded in between.
type trainer struct {
	Socket   string
	Document *protocol.Document
	// Others are further shards, which make their steps together with this one.
	Others []*protocol.Document
	// Ranges makes the trainer wait for steps range by range, in another order than that which it gives to the service.
	Ranges bool
	// Arriving makes the trainer begin steps before their gradients are there. If the document asks for a log to
	// retract steps with, they begin before it is known what becomes of them.
	Arriving bool
	// Checkpoints is a folder that the trainer saves to, and loads from, now and then;
	// empty for none.
	Checkpoints string
	// Phase is a file in which the trainer writes its activity. The test reads there
	// what a kill hit.
	Phase string

	activity, mended *atomic.Uint32
	changed          events   // the activities; see now
	tellTest         *os.File // tells them to the test, from a process of its own
	random           *rand.Rand
	begun            int64   // the last step that this process began before its gradients were there
	scale            float64 // of its gradients
}

// The activities of a trainer. It may be saving at the same time.
const (
	opening = iota + 1
	writingWeights
	writingGradients
	norming
	stepping
	committing
	loading
	accumulating
	writingMoments
	arriving // one half of the gradients has come in a step that began before
	deciding // all of them have come in a step that speculates

	saving = 1 << 8
)

// does records the current activity.
func (x *trainer) does(activity uint32) { x.now(x.activity.Load()&saving | activity) }

// now records the current activities, and tells the test of them.
func (x *trainer) now(activities uint32) {
	x.activity.Store(activities)
	x.changed.tell()
	if x.tellTest != nil {
		_, _ = x.tellTest.Write([]byte{1}) // fails if the test has ended
	}
}

// is reports whether an activity is the one meant.
func is(activity, meant uint32) bool {
	return activity&^saving == meant || activity&saving != 0 && meant == saving
}

// init prepares the trainer. It may be called more than once.
func (x *trainer) init() error {
	if x.activity != nil {
		return nil
	}
	x.random = rand.New(rand.NewPCG(rand.Uint64(), 0))
	gradientPatterns[x.Document.Gradient]() // computed now, as it takes long
	x.activity, x.mended = &atomic.Uint32{}, &atomic.Uint32{}
	if x.Phase == "" {
		return nil
	}
	file, err := os.OpenFile(x.Phase, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Truncate(8); err != nil {
		return err
	}
	page, err := unix.Mmap(int(file.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	x.activity, x.mended = (*atomic.Uint32)(unsafe.Pointer(&page[0])), (*atomic.Uint32)(unsafe.Pointer(&page[4]))
	return nil
}

// train goes on until stop, whatever happens to the service.
func (x *trainer) train(stop func(step int64) bool) (*servicetest.Session, error) {
	if err := x.init(); err != nil {
		return nil, err
	}
	for {
		x.now(opening)
		s, err := openPatiently(x.Socket, x.Document)
		if err != nil {
			return nil, err
		}
		err = x.goOn(s, stop)
		if err == nil {
			return s, nil
		}
		if detached := s.Detach(); !errors.Is(err, client.ErrLost) || detached != nil {
			return nil, errors.Join(err, detached)
		}
	}
}

func (x *trainer) goOn(s *servicetest.Session, stop func(step int64) bool) error {
	step, saved := s.Welcome.Step, int64(-1)
	if x.Ranges {
		if err := s.Order(x.ranges(s)...); err != nil {
			return err
		}
	}
	if waiting := int64(s.Welcome.ArrivingStep); waiting != 0 && waiting == x.begun {
		if err := x.arrive(s, waiting); err != nil {
			return err
		}
		step = waiting
	} else if !s.Welcome.Initialized {
		x.does(writingWeights)
		var err error
		if complete, _ := filepath.Glob(filepath.Join(x.Checkpoints, "step-*")); x.Checkpoints != "" &&
			len(complete) > 0 {
			// A load was broken off; the session takes no weights then.
			step, err = s.Load(x.Checkpoints)
		} else if s.Welcome.TornStep != 0 {
			err = s.Do(protocol.Close, protocol.Encode(protocol.CloseBody{Flags: protocol.GiveBack}))
			return cmp.Or(err, client.ErrLost) // open it anew
		} else {
			err = begin(s)
		}
		if err != nil {
			return err
		}
	}
	for !stop(step) {
		step++
		make := x.step
		if x.Arriving {
			make = x.stepArriving
		}
		if err := make(s, step); err != nil {
			return err
		}
		if x.Checkpoints == "" {
			continue
		}
		var err error
		switch {
		case saved < 0 && step%5 == 0:
			x.now(x.activity.Load() | saving)
			saved, err = s.Save(x.Checkpoints, nil)
		case saved >= 0 && x.random.IntN(3) == 0:
			err = x.commit(s, saved)
			saved = -1
		case saved < 0 && x.random.IntN(6) == 0:
			x.does(loading)
			var now int64
			if now, err = s.Load(x.Checkpoints); err == nil {
				step = now
			} else if e := (*protocol.Error)(nil); errors.As(err, &e) &&
				strings.Contains(e.Message, "no complete checkpoint") {
				err = nil // no checkpoint was committed yet
			}
		}
		if err != nil {
			return err
		}
	}
	x.now(opening)
	return nil
}

// step makes a step. Gradients become ready range by range.
func (x *trainer) step(s *servicetest.Session, step int64) error {
	x.does(writingGradients)
	all := s.Welcome.Elements
	for first := int64(0); first < all; first += piece {
		end := min(first+piece, all)
		putGradients(s, step, first, end)
		if err := s.Ready(first, end-first); err != nil {
			return err
		}
	}
	x.does(norming)
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	x.does(stepping)
	err = s.Step(step, optim.GradScale(math.Sqrt(sum), 1, 1), !x.Ranges, adamw...)
	if !x.Ranges {
		return err
	}
	finished := false
	for _, r := range x.ranges(s) {
		if err != nil {
			return err
		}
		var seconds float64
		seconds, err = s.Wait(step, int64(r.First), int64(r.Count))
		finished = seconds > 0
	}
	if err == nil && !finished {
		err = fmt.Errorf("all of step %d was waited for, and the service has not said that it is finished", step)
	}
	return err
}

// stepArriving makes a step that begins before its gradients are there.
func (x *trainer) stepArriving(s *servicetest.Session, step int64) error {
	x.does(norming)
	putGradients(s, step, 0, s.Welcome.Elements)
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	for i := range s.Gradients.Bytes() {
		s.Gradients.Bytes()[i] = 0x7f // huge or NaN: a chunk that is updated too early shows
	}
	x.does(stepping)
	x.begun, x.scale = step, optim.GradScale(math.Sqrt(sum), 1, 1)
	begin, scale := s.BeginArriving, x.scale
	if x.Document.Retracts {
		begin, scale = s.BeginSpeculating, x.scale*float64(1+x.random.IntN(2))
	}
	if err := begin(step, scale, adamw...); err != nil {
		return err
	}
	return x.arrive(s, step)
}

// arrive writes the gradients of a step that has begun, and waits for the step.
func (x *trainer) arrive(s *servicetest.Session, step int64) error {
	x.does(stepping)
	ranges := x.ranges(s)
	for i, r := range ranges {
		if i == (len(ranges)+1)/2 {
			x.does(arriving)
			linger(x.random)
		}
		putGradients(s, step, int64(r.First), int64(r.First+r.Count))
		if err := s.ReadyFor(step, int64(r.First), int64(r.Count)); err != nil {
			return err
		}
	}
	if x.Document.Retracts {
		x.does(deciding)
		if made, err := x.decide(s, step); err != nil || !made {
			return err
		}
	}
	for _, r := range ranges {
		if _, err := s.Wait(step, int64(r.First), int64(r.Count)); err != nil {
			return err
		}
	}
	return nil
}

// decide has a step made whose gradients are all there. Some steps it has retracted, and then made by another step of
// the same number: it reports whether the step was made by its first attempt.
func (x *trainer) decide(s *servicetest.Session, step int64) (made bool, err error) {
	sum, err := s.SumSquares()
	if err == nil && optim.GradScale(math.Sqrt(sum), 1, 1) != x.scale {
		err = fmt.Errorf("step %d: the sum of squares is %v, which has another factor than %v", step, sum, x.scale)
	}
	if err != nil {
		return false, err
	}
	if x.random.IntN(4) > 0 {
		return true, s.Decide(step, x.scale, false)
	}
	if err := s.Decide(step, 0, true); err != nil {
		return false, err
	}
	return false, x.stepArriving(s, step)
}

const piece = 50_000 // elements of a range of gradients or parameters

// ranges returns ranges that cover the shard, in random order.
func (x *trainer) ranges(s *servicetest.Session) []protocol.RangeBody {
	var ranges []protocol.RangeBody
	for first := int64(0); first < s.Welcome.Elements; first += piece {
		count := min(piece, s.Welcome.Elements-first)
		ranges = append(ranges, protocol.RangeBody{First: uint64(first), Count: uint64(count)})
	}
	x.random.Shuffle(len(ranges), func(i, j int) { ranges[i], ranges[j] = ranges[j], ranges[i] })
	return ranges
}

// commit makes a checkpoint of what was saved, and removes the earlier ones.
func (x *trainer) commit(s *servicetest.Session, step int64) error {
	saved, err := s.Saved()
	if err != nil {
		return err
	}
	if saved != step {
		return fmt.Errorf("saved is of step %d, and step %d was being saved", saved, step)
	}
	x.now(committing)
	if err := s.Commit(x.Checkpoints, step); err != nil {
		return err
	}
	older, err := filepath.Glob(filepath.Join(x.Checkpoints, "step-*"))
	for _, folder := range older {
		var n int64
		if _, scanned := fmt.Sscanf(filepath.Base(folder), "step-%d", &n); scanned == nil && n != step {
			err = errors.Join(err, os.RemoveAll(folder))
		}
	}
	return err
}

// trainInThisProcess trains until this process is killed.
func trainInThisProcess(text string) error {
	x := &trainer{tellTest: os.NewFile(tellDescriptor, "the test")}
	if err := json.Unmarshal([]byte(text), x); err != nil {
		return err
	}
	never := func(int64) bool { return false }
	if x.Others != nil {
		_, err := x.trainTogether(never)
		return err
	}
	_, err := x.train(never)
	return err
}

// hits are how often each activity was hit.
type hits map[uint32]int

func (h hits) count(activity uint32) {
	h[activity&^saving]++
	if activity&saving != 0 {
		h[saving]++
	}
}

// kills returns how often a test kills something.
func kills() int {
	if testing.Short() {
		return 10
	}
	return 200
}

// killService kills the service at random instants. One half of the kills hit the
// training anywhere, at most so many activities after two steps. Some of them hit the start
// of a service after a kill. The other half hit given activities.
func killService(t *testing.T, r *running, x *trainer, steps *atomic.Int64, within int64, at ...uint32) hits {
	random := rand.New(rand.NewPCG(7, 7))
	hit := hits{}
	for i := range kills() {
		starts := random.IntN(8) == 0
		if !starts {
			before := steps.Load()
			x.changed.await(t, "a step", func() bool { return steps.Load() >= before+2 })
		}
		if i%2 == 1 {
			x.changed.await(t, "what is to be hit", func() bool { return is(x.activity.Load(), at[i/2%len(at)]) })
		} else if !starts {
			x.changed.awaitMore(t, "activities", random.Int64N(within))
		}
		linger(random)
		hit.count(x.activity.Load())
		r.killAndWait(t)
	}
	r.overview(t)
	return hit
}

// linger gives the processor away a random number of times: what was waited for goes on meanwhile.
func linger(random *rand.Rand) {
	for range random.IntN(1000) {
		runtime.Gosched()
	}
}

// small gives a document few elements, in full parameters.
func small(d *protocol.Document) {
	d.Parameters[0].Shape, d.Parameters[0].Count = []int64{300, 100}, 30_000
	d.Parameters[2] = protocol.Piece{Name: "mlp", Shape: []int64{19_999}, Count: 19_999}
}

// full gives a document full parameters, in several chunks.
func full(d *protocol.Document) {
	small(d)
	d.Parameters[2].Shape, d.Parameters[2].Count = []int64{299_999}, 299_999
}

// TestServiceIsKilled kills the service at random instants of a training. It is
// restarted, and the training ends with the same bits as an undisturbed one.
func TestServiceIsKilled(t *testing.T) {
	shard := func(rank int, part string, change ...func(*protocol.Document)) *protocol.Document {
		return testDocument(append(change, func(d *protocol.Document) {
			d.World, d.LocalWorld, d.Rank, d.Part = 2, 2, rank, part
		})...)
	}
	eight := func(d *protocol.Document) {
		small(d)
		d.State, d.Moments, d.Parameters[1].Moments = "fp32", "int8", "fp32"
	}
	half := func(d *protocol.Document) { small(d); d.Moments, d.Gradient = "bf16", "fp32" }
	parts := []*protocol.Document{shard(0, "a", eight), shard(0, "b", half), shard(1, "a", eight), shard(1, "b", half)}
	const finished, waiting = "which was under way", "waits for the gradients of"
	for _, c := range []struct {
		name     string
		ranges   bool
		arriving bool
		shards   []*protocol.Document
		says     string // what the next service says if the kill hit a step
		atLeast  int    // percentage of such kills
		onTier   bool
	}{
		{"a shard, steps that are waited for", false, false, []*protocol.Document{testDocument()}, finished, 4, false},
		{"ranks and parts, waited for by ranges", true, false, parts, finished, 10, false},
		{"ranks and parts on a tier", true, false, parts, finished, 10, true},
		{"a shard, gradients arrive in the step", false, true, []*protocol.Document{testDocument()},
			waiting, 10, false},
		{"ranks and parts, gradients arrive in the step", false, true, parts, waiting, 10, false},
		{"a shard, steps that speculate", false, true, []*protocol.Document{testDocument(retracts)},
			waiting, 10, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var variables []string
			if c.onTier {
				variables = onTier(t.TempDir(), t.TempDir())
			}
			r := startService(t, variables...)
			var enough atomic.Bool
			var steps atomic.Int64
			var first *trainer
			var training sync.WaitGroup
			reached, prints := make([]int64, len(c.shards)), make([]string, len(c.shards))
			for i, d := range c.shards {
				x := &trainer{Socket: r.Socket, Document: d, Ranges: c.ranges, Arriving: c.arriving}
				if err := x.init(); err != nil {
					t.Fatal(err)
				}
				first = cmp.Or(first, x)
				training.Go(func() {
					s, err := x.train(func(step int64) bool {
						reached[i] = step
						steps.Add(1)
						return enough.Load()
					})
					if err != nil {
						t.Error(err)
						return
					}
					prints[i] = fingerprint(t, s)
					if err := s.Detach(); err != nil {
						t.Error(err)
					}
				})
			}
			killService(t, r, first, &steps, 8, stepping)
			enough.Store(true)
			training.Wait()
			hit := strings.Count(r.log.String(), c.says)
			t.Logf("%d kills, %d services, %d steps of the first shard; %d times a step was finished by "+
				"the next service", kills(), r.started.Load(), reached[0], hit)
			if !testing.Short() && hit*100 < kills()*c.atLeast {
				t.Errorf("only %d of %d kills hit a step: expected at least %d %%", hit, kills(), c.atLeast)
			}
			r.end()
			for i, d := range c.shards {
				if want := undisturbed(t, d, reached[i]); prints[i] != want {
					t.Errorf("rank %d, part %s: after %d kills and %d steps the state is %s, want %s", d.Rank, d.Part,
						kills(), reached[i], prints[i], want)
				}
			}
		})
	}
}

// killTrainer starts trainers, one after the other, and kills each at a random instant:
// one half anywhere, at most so many activities after its start, the other half at given
// activities. It returns how often each activity was hit.
func killTrainer(t *testing.T, x *trainer, within int64, at ...uint32) hits {
	t.Helper()
	if err := x.init(); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(x)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(8, 8))
	hit := hits{}
	for i := range kills() {
		x.activity.Store(0)
		child := startTeller(t, trainVariable+"="+string(text))
		begun := uint32(writingGradients)
		if i%10 == 0 {
			begun = opening // attaching, or writing the weights
		}
		child.await(t, "a trainer", func() bool { return x.activity.Load()&^saving >= begun })
		if i%2 == 0 {
			child.awaitMore(t, "activities", random.Int64N(within))
		} else {
			child.await(t, "what is to be hit", func() bool { return is(x.activity.Load(), at[i/2%len(at)]) })
		}
		linger(random)
		child.kill(t)
		hit.count(x.activity.Load())
	}
	return hit
}

// checkEnd lets a training make some more steps, and compares its state with that of an
// undisturbed training.
func checkEnd(t *testing.T, r *running, x *trainer) {
	t.Helper()
	calm := &trainer{Socket: x.Socket, Document: x.Document, Checkpoints: x.Checkpoints, Arriving: x.Arriving}
	first, last := int64(-1), int64(0)
	s, err := calm.train(func(step int64) bool {
		if first < 0 {
			first = step
		}
		last = step
		return step == first+5
	})
	if err != nil {
		t.Fatal(err)
	}
	got := fingerprint(t, s)
	if err := s.Detach(); err != nil {
		t.Error(err)
	}
	r.end()
	if want := undisturbed(t, x.Document, last); got != want {
		t.Errorf("after %d kills and %d steps the state is %s, want %s", kills(), last, got, want)
	}
	if first < int64(kills())/5 && !x.Arriving { // those begin again at a checkpoint, or anew
		t.Errorf("the trainings that were killed got to step %d in %d kills", first, kills())
	}
	t.Logf("%d steps", last)
}

// checkHits checks that enough of the kills hit the activities meant. A few kills prove
// nothing.
func checkHits(t *testing.T, hit hits, least map[uint32]int) {
	t.Helper()
	names := map[uint32]string{opening: "opening", writingWeights: "writing weights",
		writingGradients: "writing gradients", norming: "norm", stepping: "step", committing: "commit", loading: "load",
		accumulating: "accumulate", writingMoments: "writing moments",
		arriving: "gradients arrive", deciding: "decide", saving: "beside, saving"}
	for activity, name := range names {
		if percent := least[activity]; !testing.Short() && hit[activity]*100 < kills()*percent {
			t.Errorf("only %d of %d kills hit %s: expected at least %d %%", hit[activity], kills(), name, percent)
		}
		if hit[activity] > 0 {
			t.Logf("%d of %d kills hit: %s", hit[activity], kills(), name)
		}
	}
}

// TestTrainerIsKilled kills the trainer at random instants. Another one attaches and
// goes on from the last finished step.
func TestTrainerIsKilled(t *testing.T) {
	r := startService(t)
	x := &trainer{Socket: r.Socket, Document: testDocument(), Ranges: true, Phase: filepath.Join(t.TempDir(), "phase")}
	process := r.overview(t).Process
	hit := killTrainer(t, x, 16, stepping)
	checkHits(t, hit, map[uint32]int{writingGradients: 10, stepping: 10})
	if now := r.overview(t).Process; now != process {
		t.Errorf("the service was process %d and is %d: a trainer that was killed has ended it", process, now)
	}
	checkEnd(t, r, x)
}

// TestTrainerIsKilledWhileGradientsArrive kills the trainer in steps that wait for its gradients. Another one finds out
// that the state is torn, and begins at the last checkpoint, or anew.
func TestTrainerIsKilledWhileGradientsArrive(t *testing.T) {
	r := startService(t)
	x := &trainer{Socket: r.Socket, Document: testDocument(full), Arriving: true, Checkpoints: t.TempDir(),
		Phase: filepath.Join(t.TempDir(), "phase")}
	checkHits(t, killTrainer(t, x, 30, arriving, saving), map[uint32]int{arriving: 10, saving: 10})
	torn := strings.Count(r.log.String(), "the state is torn")
	t.Logf("%d times the trainer was killed in the middle of a step", torn)
	if !testing.Short() && torn*100 < kills()*10 {
		t.Errorf("only %d of %d kills hit a step whose gradients arrive", torn, kills())
	}
	checkCheckpoint(t, x)
	checkEnd(t, r, x)
}

// TestTrainerIsKilledWhileItSpeculates kills the trainer in steps that wait for its gradients, or for its verdict. The
// state stays whole: another one goes on from the step before.
func TestTrainerIsKilledWhileItSpeculates(t *testing.T) {
	r := startService(t)
	x := &trainer{Socket: r.Socket, Document: testDocument(retracts), Arriving: true,
		Phase: filepath.Join(t.TempDir(), "phase")}
	checkHits(t, killTrainer(t, x, 30, arriving, deciding), map[uint32]int{arriving: 10, deciding: 10})
	log := r.log.String()
	if strings.Contains(log, "torn") || !testing.Short() && !strings.Contains(log, "in the middle") {
		t.Errorf("the service says\n%s", log)
	}
	checkEnd(t, r, x)
}

// retracts asks for a log to retract steps with.
func retracts(d *protocol.Document) { d.Retracts = true }

// TestKilledWhileSaving kills the service, or the trainer, while checkpoints are
// written, committed and loaded.
func TestKilledWhileSaving(t *testing.T) {
	least := map[uint32]int{saving: 10, loading: 5}
	t.Run("service", func(t *testing.T) {
		r := startService(t)
		x := &trainer{Socket: r.Socket, Document: testDocument(small), Checkpoints: t.TempDir()}
		if err := x.init(); err != nil {
			t.Fatal(err)
		}
		var enough atomic.Bool
		var steps atomic.Int64
		ended := make(chan error, 1)
		go func() {
			s, err := x.train(func(int64) bool {
				steps.Add(1)
				return enough.Load()
			})
			if err == nil {
				err = s.Detach()
			}
			ended <- err
		}()
		hit := killService(t, r, x, &steps, 30, saving, loading)
		enough.Store(true)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		checkHits(t, hit, least)
		checkCheckpoint(t, x)
		checkEnd(t, r, x)
	})
	t.Run("trainer", func(t *testing.T) {
		r := startService(t)
		x := &trainer{Socket: r.Socket, Document: testDocument(small), Checkpoints: t.TempDir(),
			Phase: filepath.Join(t.TempDir(), "phase")}
		checkHits(t, killTrainer(t, x, 30, saving, loading), least)
		checkCheckpoint(t, x)
		checkEnd(t, r, x)
	})
}

// checkCheckpoint loads the newest checkpoint and checks that it has the state of its
// step. A training that was killed too often has none yet.
func checkCheckpoint(t *testing.T, x *trainer) {
	t.Helper()
	calm, err := x.train(func(int64) bool {
		complete, _ := filepath.Glob(filepath.Join(x.Checkpoints, "step-*"))
		return len(complete) > 0
	})
	if err == nil {
		err = calm.Detach()
	}
	if err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, startService(t).Socket, x.Document)
	step, err := s.Load(x.Checkpoints)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fingerprint(t, s), undisturbed(t, x.Document, step); got != want {
		t.Errorf("the checkpoint of step %d holds %s, want %s", step, got, want)
	}
}
