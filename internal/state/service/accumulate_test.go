//go:build linux

package service

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// large gives a document many elements: two types of moments, and a million elements in
// the last parameter.
func large(d *protocol.Document) {
	d.Parameters[2] = protocol.Piece{Name: "mlp", Shape: []int64{1_000_003}, Count: 1_000_003}
	d.Moments, d.Parameters[1].Moments = "int8", "fp32"
}

// someNumbers returns numbers to fill a window with.
func someNumbers(count int) []float32 {
	numbers, random := make([]float32, count), rand.New(rand.NewPCG(3, 3))
	for i := range numbers {
		numbers[i] = float32(random.ExpFloat64()) * 1e-3
	}
	return numbers
}

// accumulator is a training that repeats each request until it gets an answer. Each
// step writes some moments, then adds up gradients.
type accumulator struct {
	trainer
	numbers  []float32
	requests []func(s *servicetest.Session) error // the requests of one step
	step     int64                                // the step under way
}

func newAccumulator(t *testing.T, socket string) *accumulator {
	x := &accumulator{trainer: trainer{Socket: socket, Document: testDocument(large)}, numbers: someNumbers(1 << 21)}
	if err := x.init(); err != nil {
		t.Fatal(err)
	}
	all := uint64(100_000 + 777 + 1_000_003)
	x.requests = append(x.requests, (*servicetest.Session).ClearGradients)
	for i, part := range [][2]uint64{{0, all}, {100_001, 800_002}, {3, 2}, {17, all - 40}, {99_999, 70_000}} {
		x.requests = append(x.requests, func(s *servicetest.Session) error {
			x.does(accumulating)
			return s.Do(protocol.Accumulate, protocol.Encode(protocol.AccumulateBody{
				Type: 2, First: part[0], Count: part[1], Offset: 4 * uint64((x.step*97+int64(i)*13)%1000),
				Number: uint64(1 + i),
			}))
		})
	}
	for _, stream := range []uint32{protocol.SecondMoment, protocol.FirstMoment} {
		x.requests = append(x.requests, func(s *servicetest.Session) error {
			x.does(writingMoments)
			return s.Do(protocol.Write, protocol.Encode(protocol.TransferBody{What: stream,
				First: uint64(99_000 + 100*x.step%7), Count: 30_001,
				Offset: 4 * uint64(x.step%1000)}))
		})
	}
	x.requests = append(x.requests, func(s *servicetest.Session) error {
		x.does(stepping)
		return s.Step(x.step, 0.5, true, adamw...)
	})
	return x
}

func (x *accumulator) open() (*servicetest.Session, error) {
	s, err := openPatiently(x.Socket, x.Document)
	if err != nil {
		return nil, err
	}
	if err := s.MakeWindow(); err != nil {
		return s, err
	}
	copy(arena.View[float32](s.Window), x.numbers)
	return s, nil
}

// train goes on until stop, whatever happens to the service.
func (x *accumulator) train(stop func(step int64) bool) (*servicetest.Session, error) {
	s, err := x.open()
	if err == nil && !s.Welcome.Initialized {
		err = begin(s)
		copy(arena.View[float32](s.Window), x.numbers) // the weights passed through the window
	}
	for x.step = 1; err == nil && !stop(x.step-1); x.step++ {
		for _, request := range x.requests {
			for err = request(s); errors.Is(err, client.ErrLost); err = request(s) {
				if err := s.Detach(); err != nil {
					return nil, err
				}
				x.does(opening)
				if s, err = x.open(); err != nil && !errors.Is(err, client.ErrLost) {
					return nil, err
				}
			}
			if err != nil {
				break
			}
		}
	}
	return s, err
}

// TestKilledWhileAccumulating kills the service at random instants of a training that
// adds up gradients and writes moments. Gradients and state must equal those of an
// undisturbed training.
func TestKilledWhileAccumulating(t *testing.T) {
	r := startService(t)
	x := newAccumulator(t, r.Socket)
	var enough atomic.Bool
	var steps atomic.Int64
	var killed *servicetest.Session
	ended := make(chan error, 1)
	go func() {
		var err error
		killed, err = x.train(func(int64) bool {
			steps.Add(1)
			return enough.Load()
		})
		ended <- err
	}()
	hit := killService(t, r, &x.trainer, &steps, 16, accumulating, accumulating, writingMoments)
	enough.Store(true)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	checkHits(t, hit, map[uint32]int{accumulating: 10, writingMoments: 10})
	half := strings.Count(r.log.String(), "is half done")
	t.Logf("%d kills, %d steps; %d times a gradient was half added", kills(), x.step-1, half)
	if !testing.Short() && half < kills()/20 {
		t.Errorf("only %d of %d kills left a gradient half added", half, kills())
	}
	calm := newAccumulator(t, startService(t).Socket)
	s, err := calm.train(func(step int64) bool { return step == x.step-1 })
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(s.Gradients.Bytes(), killed.Gradients.Bytes()) {
		t.Errorf("after %d kills the gradients are others than those of a training that was left alone", kills())
	}
	if got, want := fingerprint(t, killed), fingerprint(t, s); got != want {
		t.Errorf("after %d kills and %d steps the state is %s, want %s", kills(), x.step-1, got, want)
	}
	if err := errors.Join(s.Detach(), killed.Detach()); err != nil {
		t.Error(err)
	}
}

// awaitSum waits until the service has added to a random gradient, in the midst of an accumulation.
func awaitSum(t *testing.T, s *servicetest.Session, random *rand.Rand, before, after []byte) {
	t.Helper()
	at := random.IntN(len(before))
	for before[at] == after[at] {
		at = (at + 1) % len(before)
	}
	began := time.Now()
	for s.Gradients.Bytes()[at] == before[at] {
		if runtime.Gosched(); time.Since(began) > time.Minute {
			t.Fatalf("the service has not added to byte %d of the gradients within a minute", at)
		}
	}
}

// TestBothDieWhileAccumulating starts a new trainer after trainer and service died
// together. It clears the gradients, or repeats an accumulation that is half done.
func TestBothDieWhileAccumulating(t *testing.T) {
	r := startService(t)
	document := testDocument(large)
	numbers := someNumbers(1 << 21)
	s := begun(t, r.Socket, document)
	all := uint64(s.Welcome.Elements)
	request := protocol.AccumulateBody{Type: 2, First: 1, Count: all - 1}
	accumulate := func(s *servicetest.Session, number uint64) error {
		if err := s.MakeWindow(); err != nil {
			return err
		}
		copy(arena.View[float32](s.Window), numbers[:all])
		request.Number = number
		return s.Do(protocol.Accumulate, protocol.Encode(request))
	}
	// The sums after each number of accumulations.
	var sums [][]byte
	if err := s.ClearGradients(); err != nil {
		t.Fatal(err)
	}
	for n := range uint64(4) {
		sums = append(sums, bytes.Clone(s.Gradients.Bytes()))
		if err := accumulate(s, n+1); err != nil {
			t.Fatal(err)
		}
	}
	random := rand.New(rand.NewPCG(5, 5))
	halves, wanted := 0, 10
	if testing.Short() {
		wanted = 2
	}
	for attempt := 0; halves < wanted; attempt++ {
		if attempt == 50*wanted {
			t.Fatalf("of %d kills only %d left a gradient half added", attempt, halves)
		}
		before := uint64(1 + random.IntN(2))
		err := s.ClearGradients()
		for n := range before {
			err = errors.Join(err, accumulate(s, n+1))
		}
		if err != nil {
			t.Fatal(err)
		}
		request.Number = before + 1
		if _, err := s.Send(protocol.Accumulate, protocol.Encode(request)); err != nil {
			t.Fatal(err)
		}
		awaitSum(t, s, random, sums[before], sums[before+1])
		r.killAndWait(t)
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, r.Socket, document)
		switch w := s.Welcome; {
		case w.ClearedStep != 0 || w.Accumulated != int64(before) &&
			(w.Accumulated != int64(before+1) || w.Accumulating != 0):
			t.Fatalf("%d gradients were added, and one more begun: %+v", before, w)
		case w.Accumulating == 0:
			if !bytes.Equal(s.Gradients.Bytes(), sums[w.Accumulated]) {
				t.Fatalf("the gradients are not those after %d were added", w.Accumulated)
			}
			continue
		case w.Accumulating != int64(before+1):
			t.Fatalf("%d gradients were added, and one more is half: %+v", before, w)
		}
		halves++
		for kind, err := range map[protocol.Kind]error{
			protocol.Write:   s.Write(protocol.FirstMoment, 0, []float32{1}),
			protocol.Ready:   s.Ready(0, 1),
			protocol.Norm:    func() error { _, err := s.SumSquares(); return err }(),
			protocol.Prepare: s.Prepare(1, adamw...),
			protocol.Step:    s.Step(1, 1, true, adamw...),
		} {
			wantError(t, err, protocol.OutOfOrder,
				kind.String()+": accumulate *, of elements 1 to 1100780 in fp32, is half "+
					"done; repeat it, or clear the gradients")
		}
		wantError(t, accumulate(s, before+2), protocol.OutOfOrder,
			"accumulate *: * were finished since the gradients were "+
				"cleared, so the next is *")
		wantError(t, accumulate(s, before), protocol.OutOfOrder,
			"accumulate *: * were finished since the gradients were "+
				"cleared, so the next is *")
		request.Count--
		wantError(t, accumulate(s, before+1), protocol.OutOfOrder,
			"accumulate * of elements 1 to 1100779 in fp32: accumulate "+
				"* was begun with elements 1 to 1100780 in fp32; repeat that, or clear the gradients")
		request.Count++
		if halves%2 == 0 {
			continue // the next trainer clears
		}
		for range 2 {
			if err := accumulate(s, before+1); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(s.Gradients.Bytes(), sums[before+1]) {
			t.Fatalf("a gradient that was half added, and added again, is not what was added %d times", before+1)
		}
	}
	t.Logf("%d gradients were half added", halves)
}

// TestAccumulateIsCounted checks that the count goes on over steps and checkpoints,
// which do not change it.
func TestAccumulateIsCounted(t *testing.T) {
	r := startService(t)
	document := testDocument(small)
	s := begun(t, r.Socket, document)
	mustStep(t, s, 2)
	one := []float32{1}
	wantError(t, s.Accumulate(0, 0, one), protocol.OutOfOrder,
		"accumulate 0: 0 were finished since the gradients were "+
			"cleared, so the next is 1")
	if err := errors.Join(s.ClearGradients(), s.Accumulate(1, 0, one), s.Accumulate(2, 5, one), s.Prepare(3, adamw...),
		s.Accumulate(2, 5, one)); err != nil {
		t.Fatal(err)
	}
	wantError(t, s.Accumulate(1, 0, one), protocol.OutOfOrder,
		"accumulate 1: 2 were finished since the gradients were "+
			"cleared, so the next is 3")
	wantError(t, s.Accumulate(2, 6, one), protocol.OutOfOrder,
		"accumulate 2 of elements 6 to 7 in fp32: accumulate 2 was "+
			"begun with elements 5 to 6 in fp32; repeat that, or clear the gradients")
	wantError(t, s.Accumulate(4, 0, one), protocol.OutOfOrder,
		"accumulate 4: 2 were finished since the gradients were "+
			"cleared, so the next is 3")
	if err := s.Accumulate(3, 0, make([]float32, servicetest.MostAccumulated+1)); err == nil ||
		!strings.Contains(err.Error(), "4194305 numbers: expected at most 4194304") {
		t.Errorf("more numbers than a window holds: %v", err)
	}
	// Repeating a finished accumulation keeps the prepared step.
	if err := s.StepPrepared(3, 1, true); err != nil {
		t.Fatal(err)
	}
	r.killAndWait(t)
	s = mustOpen(t, r.Socket, document)
	if w := s.Welcome; w.Accumulated != 2 || w.Accumulating != 0 || w.ClearedStep != 2 || w.Step != 3 {
		t.Errorf("the session is %+v", w)
	}
	if err := errors.Join(s.Accumulate(2, 5, one), s.Accumulate(3, 5, one)); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, len(s.Gradients.Bytes()))
	copy(want, []byte{0x80, 0x3f})
	copy(want[2*5:], []byte{0, 0x40})
	if !slices.Equal(s.Gradients.Bytes(), want) {
		t.Error("the gradients are not those that were added once each")
	}
}
