//go:build linux

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/tier"
	"plimsoll/internal/state/tier/tiertest"
)

// onTier returns the configuration of a case with its state on a tier.
func (c crashCase) onTier(t testing.TB, disk tier.Disk, lanes int, folders ...string) ShardConfig {
	config := c.with(cpus(t, 2), kernel.Available()[len(kernel.Available())-1])
	window := Window{Lanes: lanes, Kept: min(c.kept, config.Chunks)}
	config.Tier, config.Retracts = c.tierOn(disk, window, folders...), false
	return config
}

func (c crashCase) tierOn(disk tier.Disk, window Window, folders ...string) *Tier {
	return &Tier{Disk: disk, Folders: folders, Name: "rank0", Label: []byte(c.name), Window: window,
		Suits: func(label []byte) error {
			if string(label) != c.name {
				return fmt.Errorf("it is of %s", label)
			}
			return nil
		}}
}

// openOnTier returns a shard on a tier, which is closed with the test.
func openOnTier(t testing.TB, config ShardConfig) *Shard {
	s, err := NewShard(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// small is a case with few small chunks, for tests that try every call.
func (c crashCase) small() crashCase {
	if c.sections == nil {
		c.sections = shard.Uniform(c.format, 2500)
	} else {
		c.sections = slices.Clone(c.sections)
		for i := range c.sections {
			c.sections[i].Elements /= 20
		}
	}
	c.chunk, c.kept = 600, 3
	return c
}

// setGradientsOf gives a shard the gradients of a step.
func setGradientsOf(s *Shard, step int64) {
	for unit := range s.chunks {
		c := s.chunk(unit)
		gradient := c.state().Gradient
		for i := range int(c.Count) {
			gradient.Put(i, float32(math.Cos(float64(3*(c.First+int64(i))+step)))*0.01)
		}
	}
}

// stateOf returns all state of a shard, wherever it is.
func stateOf(t testing.TB, s *Shard) []byte {
	t.Helper()
	image := make([][]byte, len(s.chunks))
	err := s.ViewOf(s.config.Range(), func(at shard.Chunk, c kernel.Chunk) {
		for _, stream := range s.config.Streams {
			if stream.Role != kernel.GradientRole {
				image[at.Number] = append(image[at.Number], c.Bytes(stream.Role)...)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return append(bytes.Join(image, nil), fmt.Sprint(s.OwnSteps())...)
}

// weigh gives a shard weights.
func weigh(s *Shard) {
	s.Each(func(at shard.Chunk, k kernel.Chunk) {
		for i := range k.Len() {
			k.PutMasterWeight(s.config.Format, i, float32(math.Sin(float64(at.First+int64(i))))*0.1)
		}
	})
}

// stepOn makes the next step from its gradients, and returns its error.
func stepOn(s *Shard) error {
	setGradientsOf(s, s.Steps()+1)
	if err := beginNext(s); err != nil {
		return err
	}
	s.Wait()
	return s.Err()
}

// statesOf returns the state after each of some steps of a shard in memory.
func (c crashCase) statesOf(t testing.TB, steps int) [][]byte {
	s := openOnTier(t, c.with(cpus(t, 2), kernel.Generic))
	weigh(s)
	states := [][]byte{stateOf(t, s)}
	for range steps {
		if err := stepOn(s); err != nil {
			t.Fatal(err)
		}
		states = append(states, stateOf(t, s))
	}
	return states
}

// TestATierHasTheBitsOfMemory with windows of any size, folders and orders.
func TestATierHasTheBitsOfMemory(t *testing.T) {
	for number, c := range crashCases() {
		t.Run(c.name, func(t *testing.T) {
			const steps = 6
			want := c.statesOf(t, steps)
			folders := [][]string{{"/a"}, {"/a", "/b"}, {"/a", "/b", "/c"}}[number%3]
			c.kept = []int{0, 7, math.MaxInt}[number/3%3]
			s := openOnTier(t, c.onTier(t, tiertest.New(), 1+number%4, folders...))
			random := rand.New(rand.NewPCG(uint64(number), 0))
			weigh(s)
			for step := range steps {
				if !bytes.Equal(stateOf(t, s), want[step]) {
					t.Fatalf("step %d: the state is another than in memory", step)
				}
				s.SetOrder(randomRanges(s, random, 4))
				setGradientsOf(s, s.Steps()+1)
				if err := beginNext(s); err != nil {
					t.Fatal(err)
				}
				waitAnywhere(s, random)()
				s.Wait()
			}
			if err := s.Err(); err != nil || !bytes.Equal(stateOf(t, s), want[steps]) {
				t.Fatalf("the last state is another than in memory: %v", err)
			}
		})
	}
}

// TestAWindowIsCounted holds the arenas of a shard on a tier to what they say.
func TestAWindowIsCounted(t *testing.T) {
	config := crashCases()[0].onTier(t, tiertest.New(), 3, "/a")
	var components []ledger.Component
	for _, plan := range config.Arenas() {
		components = append(components, plan.Component)
		want := config.WindowBytes(Window{Lanes: 3})
		if plan.Component == ledger.TierWindow && (plan.Size != want || plan.Size > 700*ledger.KiB) {
			t.Errorf("the window has %v", plan.Size)
		}
	}
	want := []ledger.Component{ledger.Parameters, ledger.Gradients, ledger.TierWindow, ledger.GradientNormSums,
		ledger.StepJournal}
	if !slices.Equal(components, want) {
		t.Errorf("arenas %v, want %v", components, want)
	}
	for _, want := range []Window{{}, {Lanes: 1}, {Lanes: 5}, {Lanes: mostLanes}, {mostLanes, 1},
		{mostLanes, config.Chunks - 1}, {mostLanes, config.Chunks}} {
		size := config.WindowBytes(want)
		if got := config.WindowWithin(size); got != want {
			t.Errorf("%+v within %v, want %+v", got, size, want)
		}
		if got := config.WindowWithin(size - 1); want != (Window{}) && config.WindowBytes(got) >= size {
			t.Errorf("%+v within a byte less than %v", got, size)
		}
	}
	if got := config.WindowWithin(ledger.TiB); got.Kept != config.Chunks {
		t.Errorf("%+v are within a TiB, of %d chunks", got, config.Chunks)
	}
}

// run makes a new shard on a disk, or goes on with the one that is there, up to a number of steps. It returns the steps
// that it has seen finished; -1 for none, not even the first state.
func (c crashCase) run(t testing.TB, disk tier.Disk, steps int64) (seen int64, err error) {
	seen = -1
	s, err := NewShard(c.onTier(t, disk, 2, "/a", "/b"))
	if err != nil {
		return seen, err
	}
	defer s.Close()
	found, err := s.Restore()
	if err != nil {
		return seen, err
	}
	if !found {
		weigh(s)
		if err := s.Commit(); err != nil {
			return seen, err
		}
	}
	for seen = s.Steps(); seen < steps; seen = s.Steps() {
		if err := stepOn(s); err != nil {
			return seen, err
		}
	}
	return seen, nil
}

// isWhole compares what a disk holds with the states after each step, and returns the step.
func (c crashCase) isWhole(t testing.TB, disk tier.Disk, want [][]byte, what string) int64 {
	t.Helper()
	c.kept = 0
	s, err := NewShard(c.onTier(t, disk, 1, "/a", "/b"))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer s.Close()
	found, err := s.Restore()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if !found {
		return -1
	}
	if !bytes.Equal(stateOf(t, s), want[s.Steps()]) {
		t.Fatalf("%s: the files hold step %d, and not its bits", what, s.Steps())
	}
	return s.Steps()
}

// TestPowerMayGoOffAtAnyCall of several steps, and what was not brought to the disk may be dropped, torn and reordered.
// The state is the one before the step or the one after it, whole, and training goes on from there to the same bits.
func TestPowerMayGoOffAtAnyCall(t *testing.T) {
	const steps = 3
	list := crashCases()
	if testing.Short() {
		list = []crashCase{list[0], list[4]}
	}
	instants := 0
	for _, c := range list {
		c = c.small()
		t.Run(c.name, func(t *testing.T) {
			want := c.statesOf(t, steps+2)
			whole := tiertest.New()
			if _, err := c.run(t, whole, steps); err != nil {
				t.Fatal(err)
			}
			for call := range whole.Calls() {
				disk := tiertest.New()
				disk.At, disk.Fault = call, tiertest.PowerOff
				seen, err := c.run(t, disk, steps)
				if err == nil {
					t.Logf("call %d: there were fewer calls", call)
					continue
				}
				for seed := range uint64(3) {
					instants++
					what := fmt.Sprintf("power off at call %d, seed %d", call, seed)
					after := disk.Reboot(rand.New(rand.NewPCG(uint64(call), seed)))
					found := c.isWhole(t, after, want, what)
					if found != seen && found != seen+1 {
						t.Fatalf("%s: the files hold step %d, and step %d was finished", what, found, seen)
					}
					if _, err := c.run(t, after, steps+2); err != nil {
						t.Fatalf("%s: going on: %v", what, err)
					}
					c.isWhole(t, after, want, what)
				}
			}
		})
	}
	t.Logf("the power went off at %d instants", instants)
}

// TestAnErrorEndsTheStep at any call: of reading, writing, bringing to the disk; and short reads and writes.
func TestAnErrorEndsTheStep(t *testing.T) {
	const steps = 2
	c := crashCases()[0].small()
	want := c.statesOf(t, steps+1)
	for _, fault := range []struct {
		kind tiertest.Fault
		err  error
	}{
		{tiertest.Fail, fs.ErrPermission}, {tiertest.Fail, errors.New("input/output error")},
		{tiertest.Fail, errors.New("no space left on device")}, {tiertest.Short, nil},
	} {
		whole := tiertest.New()
		if _, err := c.run(t, whole, steps); err != nil {
			t.Fatal(err)
		}
		for call := range whole.Calls() {
			disk := tiertest.New()
			disk.At, disk.Fault, disk.Err = call, fault.kind, fault.err
			seen, err := c.run(t, disk, steps)
			if err == nil && disk.Calls() > call && call > 0 {
				t.Fatalf("call %d: a fault, and no error", call)
			}
			if err == nil {
				continue
			}
			if fault.err != nil && !strings.Contains(err.Error(), fault.err.Error()) {
				t.Fatalf("call %d: the error %v does not say %v", call, err, fault.err)
			}
			if found := c.isWhole(t, disk, want, fmt.Sprint("call ", call)); found != seen && found != seen+1 {
				t.Fatalf("call %d: the files hold step %d, and step %d was finished", call, found, seen)
			}
		}
	}
}

// TestScrubReadsFiles: what flips in the files of a shard at rest is found before a step reads it, and looking for it
// counts as no traffic.
func TestScrubReadsFiles(t *testing.T) {
	c := crashCases()[1].small()
	random := rand.New(rand.NewPCG(3, 4))
	found := 0
	for range 60 {
		disk := tiertest.New()
		if _, err := c.run(t, disk, 2); err != nil {
			t.Fatal(err)
		}
		s, err := NewShard(c.onTier(t, disk, 2, "/a", "/b"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Restore(); err != nil {
			t.Fatal(err)
		}
		scrubAll := func() {
			for range s.config.Chunks {
				if s.Scrub() == 0 && s.Err() == nil {
					t.Fatal("the scrubber has read nothing")
				}
			}
		}
		before, _ := s.TierTraffic()
		scrubAll()
		if read, _ := s.TierTraffic(); s.Err() != nil || read != before {
			t.Fatalf("sound files: %v, and %d bytes count as read, where %d did", s.Err(), read, before)
		}
		paths := slices.DeleteFunc(disk.Paths(), func(path string) bool { return !strings.HasSuffix(path, ".data") })
		path := paths[random.IntN(len(paths))]
		disk.Flip(path, random.Int64N(8*disk.Size(path)))
		scrubAll()
		if err := s.Err(); err != nil {
			if !errors.Is(err, tier.ErrDamaged) || !strings.Contains(err.Error(), path) {
				t.Fatalf("the error is %v, and %s has a flipped bit", err, path)
			}
			found++
		} else if err := stepOn(s); err != nil {
			t.Fatalf("the scrubber has found nothing, and a step says %v", err)
		}
		s.Close()
	}
	if found < 10 || found > 50 { // the other slots are as large
		t.Errorf("%d of 60 flips were found: half of the files is not used", found)
	}
}

// TestFlippedBitsInFilesAreFound: every bit of a file that is flipped is found, or does nothing.
func TestFlippedBitsInFilesAreFound(t *testing.T) {
	c := crashCases()[1].small()
	want := c.statesOf(t, 3)
	random := rand.New(rand.NewPCG(1, 2))
	found, harmless := 0, 0
	for range 400 {
		disk := tiertest.New()
		if _, err := c.run(t, disk, 2); err != nil {
			t.Fatal(err)
		}
		path := disk.Paths()[random.IntN(len(disk.Paths()))]
		bit := random.Int64N(8 * disk.Size(path))
		disk.Flip(path, bit)
		s, err := NewShard(c.onTier(t, disk, 2, "/a", "/b"))
		if err != nil {
			found++
			continue
		}
		if _, err = s.Restore(); err == nil && s.Steps() != 2 {
			t.Fatalf("bit %d of %s: flipped, and the files hold step %d", bit, path, s.Steps())
		}
		for err == nil && s.Steps() < 3 {
			err = stepOn(s)
		}
		switch {
		case err != nil && (errors.Is(err, tier.ErrDamaged) || errors.Is(err, ErrDamaged)):
			found++
		case err != nil:
			t.Fatalf("bit %d of %s: %v", bit, path, err)
		case bytes.Equal(stateOf(t, s), want[3]):
			harmless++
		default:
			t.Fatalf("bit %d of %s: flipped, and other bits than in memory", bit, path)
		}
		s.Close()
	}
	t.Logf("%d flips were found, %d hit what is not used, or a copy", found, harmless)
	if found < 100 || harmless < 10 {
		t.Error("that proves little")
	}
}

// TestATierOfAnotherJobIsRefused, and one that lacks a file.
func TestATierOfAnotherJobIsRefused(t *testing.T) {
	disk, c := tiertest.New(), crashCases()[0].small()
	if _, err := c.run(t, disk, 1); err != nil {
		t.Fatal(err)
	}
	other := c
	other.name = "another job"
	for want, config := range map[string]ShardConfig{
		"it is of " + c.name:                      other.onTier(t, disk, 2, "/a", "/b"),
		"it was made for 2 folders":               c.onTier(t, disk, 2, "/a"),
		"give the folders in the order":           c.onTier(t, disk, 2, "/a", "/c"),
		"it was made for 2 folders and an index ": c.onTier(t, disk, 2, "/a", "/b", "/c"),
	} {
		if s, err := NewShard(config); err == nil {
			s.Close()
			t.Errorf("opened; want an error of %q", want)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %q, want %q", err, want)
		}
	}
	disk.Remove(disk.Paths()[0])
	if s, err := NewShard(c.onTier(t, disk, 2, "/a", "/b")); err == nil {
		s.Close()
		t.Error("a tier that lacks a file was opened")
	}
}

// TestRollBack goes back one step, and no further, and not once a step has begun to overwrite it.
func TestRollBack(t *testing.T) {
	c := crashCases()[0].small()
	want := c.statesOf(t, 5)
	disk := tiertest.New()
	if _, err := c.run(t, disk, 3); err != nil {
		t.Fatal(err)
	}
	s := openOnTier(t, c.onTier(t, disk, 2, "/a", "/b"))
	if _, err := s.Restore(); err != nil {
		t.Fatal(err)
	}
	if err := s.RollBack(1); err == nil {
		t.Error("rolled back by two steps")
	}
	if err := s.RollBack(2); err != nil {
		t.Fatal(err)
	}
	if s.Steps() != 2 || !bytes.Equal(stateOf(t, s), want[2]) {
		t.Fatalf("step %d, and not the bits of step 2", s.Steps())
	}
	if err := s.RollBack(1); err == nil {
		t.Error("rolled back twice")
	}
	s.Close()
	if found := c.isWhole(t, disk, want, "after rolling back"); found != 2 {
		t.Errorf("the files hold step %d", found)
	}
	if _, err := c.run(t, disk, 5); err != nil {
		t.Fatal(err)
	}
	c.isWhole(t, disk, want, "after going on")
}

// TestSnapshotsOfATier are of one step, while steps go on.
func TestSnapshotsOfATier(t *testing.T) {
	c := crashCases()[4]
	want := c.statesOf(t, 4)
	s := openOnTier(t, c.onTier(t, tiertest.New(), 3, "/a"))
	weigh(s)
	if err := stepOn(s); err != nil {
		t.Fatal(err)
	}
	var mutex sync.Mutex
	image := make([][]byte, len(s.chunks))
	own := fmt.Sprint(s.OwnSteps())
	x := s.Snapshot(func(at shard.Chunk, c kernel.Chunk) error {
		mutex.Lock()
		defer mutex.Unlock()
		for _, stream := range s.config.Streams {
			if stream.Role != kernel.GradientRole {
				image[at.Number] = append(image[at.Number], c.Bytes(stream.Role)...)
			}
		}
		return nil
	})
	done := make(chan error)
	go func() { done <- x.Run(context.Background(), nil) }()
	for range 3 {
		if err := stepOn(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(append(bytes.Join(image, nil), own...), want[1]) {
		t.Error("the snapshot is not of the step that it was taken at")
	}
	if !bytes.Equal(stateOf(t, s), want[4]) {
		t.Error("the steps beside the snapshot have other bits")
	}
}

// TestTrafficOfATierLeavesTheState on a real disk.
func TestTrafficOfATierLeavesTheState(t *testing.T) {
	c := crashCases()[0]
	want := c.statesOf(t, 3)
	config := c.onTier(t, tier.HostDisk{}, 4, t.TempDir(), t.TempDir())
	config.Tier.Scratch = true
	s := openOnTier(t, config)
	weigh(s)
	for range 3 {
		if err := stepOn(s); err != nil {
			t.Fatal(err)
		}
		s.startTraffic()
		s.wait()
	}
	if err := s.Err(); err != nil || !bytes.Equal(stateOf(t, s), want[3]) {
		t.Errorf("the state is another than in memory: %v", err)
	}
	for _, folder := range config.Tier.Folders {
		if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
			t.Errorf("%s has %v, %v", folder, left, err)
		}
	}
}

// TestProcessesAreKilledOnATier kills processes that make steps on a real disk, at any instant. The next one goes on
// with what the window and the files have.
func TestProcessesAreKilledOnATier(t *testing.T) {
	kills := 30 // of each case
	if testing.Short() {
		kills = 5
	}
	const lanes = 3
	killed, inStep, held := 0, 0, 0
	for number, c := range crashCases() {
		folder := t.TempDir()
		s := openOnTier(t, c.onTier(t, tier.HostDisk{}, lanes, folder))
		fillShard(s)
		random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
		for range kills {
			child := startCrashChild(t, s, number, 1+random.IntN(3), s.config.Kernel, folder)
			until := s.Steps() + random.Int64N(3)
			await(t, func() bool { return s.Steps() >= until })
			if random.IntN(2) == 0 {
				await(t, func() bool { return s.isUnderway() && holdsSome(s) })
			}
			child.Process.Kill()
			child.Wait()
			killed++
			if s.isUnderway() {
				inStep++
			}
			if holdsSome(s) {
				held++
			}
		}
		last := attachOther(t, s, 2, s.config.Kernel)
		last.Finish()
		undisturbed := c.newShard(t, false)
		makeSteps(t, undisturbed, last.Steps())
		if !bytes.Equal(stateOf(t, last), stateOf(t, undisturbed)) {
			t.Errorf("%s: after %d steps and %d kills the state is another than that of a process that was left alone",
				c.name, last.Steps(), kills)
		}
		last.Close()
	}
	t.Logf("%d processes were killed, %d of them in a step, %d while the window had what the files did not", killed,
		inStep, held)
	if inStep*held == 0 {
		t.Error("that proves little")
	}
}

// holdsSome reports whether a lane holds a chunk that the files do not have.
func holdsSome(s *Shard) bool {
	return slices.ContainsFunc(s.tier.lanes, func(l *lane) bool { return l.holds.Load() != 0 })
}

func TestStepsOnATierBeginNothingEarly(t *testing.T) {
	s := openOnTier(t, crashCases()[0].onTier(t, tiertest.New(), 2, "/a"))
	if err := s.BeginArriving(nextUpdate(s), nil); err == nil || !strings.Contains(err.Error(), "tier") {
		t.Errorf("a step began before its gradients were there: %v", err)
	}
}
