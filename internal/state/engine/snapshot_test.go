//go:build linux

package engine

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// copyStreams copies the streams of a chunk that an update changes, as a saver does.
func copyStreams(s *Shard, state kernel.Chunk) [][]byte {
	var streams [][]byte
	for _, stream := range changed(s.config.Format, &state) {
		streams = append(streams, bytes.Clone(stream))
	}
	return streams
}

// TestSnapshotsAreOfOneInstant takes snapshots while steps run, with a saver
// that is now faster and now slower than the workers.
func TestSnapshotsAreOfOneInstant(t *testing.T) {
	s := slowCase().newShard(t, true)
	rapid.Check(t, func(t *rapid.T) {
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		pause := random.IntN(100)
		makeSteps(t, s, 1)
		before := map[shard.Chunk][][]byte{}
		for number := range s.config.Chunks {
			c := s.chunk(number)
			before[c.Chunk] = copyStreams(s, c.state())
		}
		var mutex sync.Mutex
		taken := map[shard.Chunk][][]byte{}
		x := s.Snapshot(func(at shard.Chunk, state kernel.Chunk) error {
			kept := copyStreams(s, state)
			if random := rand.IntN(50); random == 0 {
				for range pause {
					runtime.Gosched()
				}
			}
			mutex.Lock()
			defer mutex.Unlock()
			if _, twice := taken[at]; twice {
				t.Errorf("chunk %d was handed out twice", at.Number)
			}
			taken[at] = kept
			return nil
		})
		done := make(chan error, 1)
		startLate := random.IntN(4) == 0
		if !startLate {
			go func() { done <- x.Run(context.Background(), nil) }()
		}
		makeSteps(t, s, int64(random.IntN(3)))
		if startLate {
			done <- x.Run(context.Background(), nil)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if len(taken) != len(before) {
			t.Fatalf("%d chunks were handed out of %d", len(taken), len(before))
		}
		for at, want := range before {
			if !slices.EqualFunc(taken[at], want, bytes.Equal) {
				t.Fatalf("chunk %d is not as it was at the snapshot", at.Number)
			}
		}
	})
}

// TestSnapshotsSayWhereChunksAre rebuilds the arenas from a snapshot, as a saver does.
func TestSnapshotsSayWhereChunksAre(t *testing.T) {
	s := slowCase().newShard(t, true)
	makeSteps(t, s, 2)
	got := make([][]byte, len(s.config.Streams))
	for i, stream := range s.config.Streams {
		got[i] = make([]byte, stream.Size())
	}
	err := s.Snapshot(func(c shard.Chunk, state kernel.Chunk) error {
		for i := range s.config.Streams {
			stream := &s.config.Streams[i]
			if at, _, ok := s.config.In(stream, c); ok {
				copy(got[i][stream.BytesOf(shard.Between(0, at.First)):], state.Bytes(stream.Role))
			}
		}
		return nil
	}).Run(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, stream := range s.config.Streams {
		if !bytes.Equal(got[i], s.Arenas()[i].Bytes()) {
			t.Errorf("%s is not what its chunks say", stream.Arena)
		}
	}
}

// TestSnapshotsEndAtTheFirstError, in whichever goroutine: a step goes on without them.
func TestSnapshotsEndAtTheFirstError(t *testing.T) {
	s := slowShard(t)
	want := errors.New("no space left")
	cancelled, cancel := context.WithCancel(context.Background())
	defer cancel()
	for name, test := range map[string]struct {
		context context.Context
		step    bool
		want    error
	}{
		"the saver's":  {context.Background(), false, want},
		"a worker's":   {context.Background(), true, want},
		"cancellation": {cancelled, false, context.Canceled},
	} {
		var mutex sync.Mutex
		calls := 0
		x := s.Snapshot(func(shard.Chunk, kernel.Chunk) error {
			mutex.Lock()
			defer mutex.Unlock()
			if calls++; calls > 10 {
				cancel()
				if test.want == want {
					return want
				}
			}
			return nil
		})
		if test.step {
			makeSteps(t, s, 1)
		}
		if err := x.Run(test.context, nil); !errors.Is(err, test.want) {
			t.Errorf("%s: the error is %v, want %v", name, err, test.want)
		}
		after := calls
		makeSteps(t, s, 1)
		if calls != after || calls > 13 {
			t.Errorf("%s: copy was called %d times, and %d times when it had failed", name, after, calls-after)
		}
	}
}

func TestSnapshotsAreRefusedWhileAStepRuns(t *testing.T) {
	s := slowShard(t)
	refused := func(when string) {
		defer func() {
			if recover() == nil {
				t.Errorf("a snapshot %s was not refused", when)
			}
		}()
		s.Snapshot(func(shard.Chunk, kernel.Chunk) error { return nil })
	}
	if err := beginNext(s); err != nil {
		t.Fatal(err)
	}
	refused("while a step is under way")
	s.Wait()
	x := s.Snapshot(func(shard.Chunk, kernel.Chunk) error { return nil })
	refused("beside another")
	if err := x.Run(context.Background(), nil); err != nil {
		t.Error(err)
	}
}
