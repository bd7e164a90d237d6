//go:build linux

package engine

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/tier"
)

// crashCase is a shard whose steps are broken off.
type crashCase struct {
	name     string
	format   kernel.Format
	chunk    int64
	sections []shard.Section // nil for one
	sums     bool
	retracts bool // steps may speculate
	kept     int  // chunks whose state stays in the window of a tier, at most
}

// crashCases have every algorithm and format of state; sections with moments of
// every type, and short blocks and chunks.
func crashCases() []crashCase {
	format := func(a kernel.Algorithm, state kernel.State, moments kernel.MomentType) kernel.Format {
		return kernel.Format{Algorithm: a, State: state, Moments: moments, Parameter: dtype.BF16, Gradient: dtype.BF16}
	}
	mixed := []shard.Section{
		{Elements: 30_001, Moments: kernel.MomentsInt8}, {Elements: 70, Group: 1}, {},
		{Elements: 20_000, Moments: kernel.MomentsBF16}, {Elements: 39_930, Moments: kernel.MomentsInt8, Group: 1},
	}
	cases := []crashCase{
		{"adamw split fp32", format(kernel.Adam, kernel.Split, kernel.MomentsFP32), 7000, nil, false, false, 0},
		{"adamw split bf16", format(kernel.Adam, kernel.Split, kernel.MomentsBF16), 16 << 10, nil, false, false, 0},
		{"adamw split int8", format(kernel.Adam, kernel.Split, kernel.MomentsInt8), shard.DefaultChunk, nil, false,
			false, 0},
		{"adamw fp32 mixed", format(kernel.Adam, kernel.FP32, kernel.MomentsInt8), 5000, mixed, false, false, 0},
		{"adamw split24 int8", format(kernel.Adam, kernel.Split24, kernel.MomentsInt8), 20_000, mixed, false, false, 0},
		{"lion split24 bf16", format(kernel.Lion, kernel.Split24, kernel.MomentsBF16), 700, nil, false, false, 0},
		{"lion split bf16", format(kernel.Lion, kernel.Split, kernel.MomentsBF16), 300, nil, false, false, 0},
		{"adagrad fp32 bf16", format(kernel.Adagrad, kernel.FP32, kernel.MomentsBF16), 9999, nil, false, false, 0},
		{"sgd fp32 fp32", format(kernel.SGD, kernel.FP32, kernel.MomentsFP32), 4096, nil, false, false, 0},
	}
	groups := []shard.Section{{Elements: 50_003}, {Elements: 70, Group: 1}, {}, {Elements: 39_928, Group: 1}}
	for _, gradients := range []dtype.Type{dtype.BF16, dtype.F32} {
		f := format(kernel.Adam, kernel.FP32, kernel.MomentsFP32)
		f.Gradient = gradients
		name := "adamw fp32 fp32, gradients " + gradients.String()
		cases = append(cases, crashCase{name, f, 3000, groups, false, false, 0})
	}
	for i := range cases {
		cases[i].sums = i%2 == 0
		cases[i].retracts = cases[i].format.Retractable() == nil
		cases[i].kept = i % 3
	}
	return cases
}

const crashElements = 90_001

// with returns the full configuration.
func (c crashCase) with(cpus []int, set kernel.Set) ShardConfig {
	sections := c.sections
	if sections == nil {
		sections = shard.Uniform(c.format, crashElements)
	}
	return ShardConfig{Layout: layout(c.format, c.chunk, sections), CPUs: cpus, Kernel: set, Journal: true,
		Sums: c.sums, Retracts: c.retracts}
}

// newShard returns a shard of the case. Its weights and gradients depend on their place.
func (c crashCase) newShard(t testing.TB, journal bool) *Shard {
	config := c.with(cpus(t, 2), kernel.Available()[len(kernel.Available())-1])
	config.Journal = journal
	s, err := NewShard(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	fillShard(s)
	return s
}

// fillShard fills a shard with weights and gradients that depend on their place.
func fillShard(s *Shard) {
	s.Each(func(at shard.Chunk, k kernel.Chunk) {
		for i := range k.Len() {
			place := float64(at.First + int64(i))
			k.PutMasterWeight(s.Config().Format, i, float32(math.Sin(place))*0.1)
			k.Gradient.Put(i, float32(math.Cos(3*place))*0.01)
		}
	})
}

// beginNext begins a step. Its hyperparameters differ from the steps before, which
// exposes a step that is made twice, or partly as another.
func beginNext(s *Shard) error {
	u := nextUpdate(s)
	u.LeftAlone = leftNext(s)
	return s.BeginThen(u, nil)
}

// nextUpdate returns the next step, which leaves nothing alone.
func nextUpdate(s *Shard) Update {
	scale, optimizers := nextStep(s)
	return Update{Step: s.Steps() + 1, GradScale: scale, Optimizers: optimizers}
}

// leftNext returns the sections that the next step leaves alone: in turns, if there are several.
func leftNext(s *Shard) (sections []int) {
	count := len(s.config.Sections())
	for section := range count {
		if count > 1 && (s.Steps()+int64(section))%3 == 1 {
			sections = append(sections, section)
		}
	}
	return sections
}

// nextStep returns the numbers of the next step.
func nextStep(s *Shard) (gradScale float64, optimizers []optim.Optimizer) {
	step := s.Steps() + 1
	rate := 1e-3 / float64(1+step%5)
	var o optim.Optimizer
	switch s.config.Format.Algorithm {
	case kernel.Adam:
		a := optim.DefaultAdamW()
		a.LearningRate = rate
		o = a
	case kernel.Lion:
		o = optim.Lion{LearningRate: rate, Beta1: 0.9, Beta2: 0.99, WeightDecay: 0.1}
	case kernel.Adagrad:
		o = optim.Adagrad{LearningRate: rate, Epsilon: 1e-10}
	case kernel.SGD:
		o = optim.SGD{LearningRate: rate, Momentum: 0.9, Nesterov: true}
	}
	return 1 / float64(1+step%7), []optim.Optimizer{o, o}
}

func makeSteps(t rapid.TB, s *Shard, n int64) {
	for range n {
		if err := beginNext(s); err != nil {
			t.Fatal(err)
		}
		s.Wait()
	}
}

// imageOf returns all state of a shard.
func imageOf(s *Shard) []byte {
	var image []byte
	for i := range s.config.Streams {
		image = append(image, s.arenas[i].Bytes()...)
	}
	return image
}

// restoreImage copies an image back, and gives the shard the sums of it.
func restoreImage(s *Shard, image []byte) {
	for i := range s.config.Streams {
		image = image[copy(s.arenas[i].Bytes(), image):]
	}
	for unit := range s.done {
		state := s.chunk(unit).state()
		s.chunkSums.renew(unit, &state)
	}
}

// attachOther attaches the arenas of a shard a second time, as another process does,
// with other workers and kernels.
func attachOther(t rapid.TB, s *Shard, workers int, set kernel.Set) *Shard {
	files := map[string]*os.File{}
	for _, a := range s.Arenas() {
		files[a.Name()] = a.File()
	}
	config := s.config
	config.CPUs, config.Kernel = slices.Repeat(s.config.CPUs[:1], workers), set
	other, err := AttachShard(config, files)
	if err != nil {
		t.Fatal(err)
	}
	return other
}

// breakSecondStepOff leaves the memory of a shard that has made two steps as processes may leave it that are killed in
// the second. It returns the shard as the next process attaches it.
func breakSecondStepOff(t rapid.TB, s *Shard, before []byte, random *rand.Rand) *Shard {
	restoreImage(s, before)
	s.finished.Store(1)
	for unit := range s.done {
		s.done[unit].Store(1 << 2)
	}
	for _, slot := range s.slots {
		slot.undo.Begin()
	}
	for range 1 + random.IntN(3) {
		breakOff(s, random)
	}
	return attachOther(t, s, 1+random.IntN(3), kernel.Available()[random.IntN(len(kernel.Available()))])
}

// TestBrokenOffStepsAreFinished leaves the memory of a shard as a process may leave it
// that is killed in a step, or while it finishes one. Another process finishes the step.
func TestBrokenOffStepsAreFinished(t *testing.T) {
	for _, c := range crashCases() {
		t.Run(c.name, func(t *testing.T) {
			s := c.newShard(t, true)
			makeSteps(t, s, 1)
			before := imageOf(s)
			makeSteps(t, s, 1)
			after := imageOf(s)
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				other := breakSecondStepOff(t, s, before, random)
				defer other.Close()
				if steps := other.Steps(); steps != 1 {
					t.Fatalf("%d steps are finished while the second is under way", steps)
				}
				if beginNext(other) == nil {
					t.Fatal("a step began before the one under way was finished")
				}
				if _, err := New([]*Shard{other}, []optim.Optimizer{optim.DefaultAdamW()}, 0); err == nil ||
					!strings.Contains(err.Error(), "under way") {
					t.Fatalf("an engine of a shard whose step is under way: %v", err)
				}
				if !other.Finish() || other.Steps() != 2 || other.Finish() {
					t.Fatalf("the step was not finished, or twice: at %d", other.Steps())
				}
				if !bytes.Equal(imageOf(s), after) {
					t.Fatal("the state is another than after a step that is not broken off")
				}
			})
		})
	}
}

// breakOff goes on with the update under way, as [Shard.Finish] does, and stops
// somewhere. Each slot stops at a place of its own.
func breakOff(s *Shard, random *rand.Rand) {
	for _, slot := range s.slots {
		unit := int(slot.unit.Load())
		if !slot.undo.Begun() || s.isDone(unit) {
			continue
		}
		if random.IntN(len(s.slots)) == 0 {
			c := s.chunk(unit)
			changePart(s, slot, unit, slot.undo.Restore(c.section.format, c.state()), random)
			return
		}
		s.resume(slot)
	}
	free := 0
	for _, unit := range random.Perm(s.config.Chunks)[:random.IntN(s.config.Chunks+1)] {
		switch {
		case free == len(s.slots) || s.isDone(unit) || s.isLeft(s.chunk(unit).Section):
		case random.IntN(2) == 0:
			s.updateUnit(free, unit)
		case s.phase() == speculated && !s.prepareRetraction(0, unit, new(s.chunk(unit).state())):
		default:
			s.slots[free].begin(unit)
			changePart(s, s.slots[free], unit, 0, random)
			free++
		}
	}
}

// changePart updates a chunk from some element on, and stops in the middle of a tile.
// That tile and the one before it may then hold any values.
func changePart(s *Shard, slot slot, unit, first int, random *rand.Rand) {
	c := s.chunk(unit)
	format, state, n := c.section.format, c.state(), int(c.Count)
	tile := format.Moments.Tile()
	tiles := random.IntN((n-first+tile-1)/tile + 1)
	end := min(first+tiles*tile, n)
	s.config.Kernel.UpdateLogged(format, s.constantsOf(c), state.Slice(0, end), first, slot.undo)
	broken := state.Slice(first+max(tiles-2, 0)*tile, end)
	for _, stream := range changed(format, &broken) {
		for i := range stream {
			stream[i] = byte(random.Int())
		}
	}
}

// changed returns the streams that an update reads and overwrites.
func changed(f kernel.Format, c *kernel.Chunk) [][]byte {
	streams := [][]byte{c.Moments[0].Data, c.Moments[1].Data, bytesOf(c.Headers), c.Bytes(kernel.LowRole),
		bytesOf(c.Master)}
	if f.State != kernel.FP32 {
		streams = append(streams, bytesOf(c.Parameter))
	}
	return streams
}

func bytesOf[T uint16 | float32](s []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t)))
}

// crashVariable turns this test binary into a process that makes steps until it is
// killed. It holds the numbers of the case, of the workers and of the kernels. The
// files of the arenas follow the standard ones, in the order of the arenas.
const crashVariable = "PLIMSOLL_TEST_CRASH"

func TestMain(m *testing.M) {
	if text := os.Getenv(crashVariable); text != "" {
		fmt.Fprintln(os.Stderr, runCrashChild(text))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func runCrashChild(text string) error {
	var number, workers int
	var set kernel.Set
	var folder string // of a tier, if there is one
	if n, err := fmt.Sscan(text, &number, &workers, &set, &folder); n < 3 {
		return err
	}
	list, err := usableCPUs(workers)
	if err != nil {
		return err
	}
	config := crashCases()[number].with(list, set)
	if folder != "" {
		window := Window{Lanes: 3, Kept: crashCases()[number].kept}
		config.Tier, config.Retracts = crashCases()[number].tierOn(tier.HostDisk{}, window, folder), false
	}
	files := map[string]*os.File{}
	for i, plan := range config.Arenas() {
		files[plan.Name] = os.NewFile(uintptr(3+i), plan.Name)
	}
	s, err := AttachShard(config, files)
	if err != nil {
		return err
	}
	os.Stdout.Write([]byte{1}) // from here on it may be killed
	random := rand.New(rand.NewPCG(rand.Uint64(), 0))
	if err := finishAnyhow(s, random); err != nil {
		return err
	}
	for {
		s.SetOrder(randomRanges(s, random, 4))
		if s.config.Retracts && random.IntN(2) == 0 {
			if err := speculateAnyhow(s, random); err != nil {
				return err
			}
			continue
		}
		begin, arrive := beginNext, func(*Shard, *rand.Rand, func(shard.Range)) {}
		if folder == "" && random.IntN(2) == 0 {
			begin, arrive = beginNextArriving, arriveAnyhow
		}
		if err := begin(s); err != nil {
			return err
		}
		wait := waitAnywhere(s, random)
		arrive(s, random, writeNothing)
		s.Wait()
		wait()
	}
}

// startCrashChild starts a process that makes steps over the arenas of a shard.
func startCrashChild(t *testing.T, s *Shard, number, workers int, set kernel.Set, folder ...string) *exec.Cmd {
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %d %s", crashVariable, number, workers, set,
		strings.Join(folder, "")))
	command.Stderr = os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // it makes steps without end
	for _, a := range s.Arenas() {
		command.ExtraFiles = append(command.ExtraFiles, a.File())
	}
	ready, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		t.Fatalf("the process did not attach: %v", err)
	}
	return command
}

// isInChunk reports whether a process is changing a chunk in a step.
func isInChunk(s *Shard) bool {
	return s.isUnderway() && slices.ContainsFunc(s.slots, func(slot slot) bool { return isChanging(s, slot) })
}

// TestKilledProcesses kills processes that make steps over the same memory, one after
// the other, each at some instant. The state must be that of a process that was not
// killed.
func TestKilledProcesses(t *testing.T) {
	kills := 50 // of each case
	if testing.Short() {
		kills = 6
	}
	killed, inStep, inChunk, waiting := 0, 0, 0, 0
	phases := map[phase]int{}
	for number, c := range crashCases() {
		s := c.newShard(t, true)
		random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
		for range kills {
			set := kernel.Available()[random.IntN(len(kernel.Available()))]
			child := startCrashChild(t, s, number, 1+random.IntN(3), set)
			until := s.Steps() + random.Int64N(3)
			await(t, func() bool { return s.Steps() >= until })
			if of := []phase{redone, skipped}[random.IntN(2)]; c.retracts && random.IntN(3) > 0 {
				await(t, func() bool { return s.isUnderway() && s.phase() == of })
			} else if random.IntN(2) == 0 {
				await(t, func() bool { return isInChunk(s) })
			} else {
				for range random.IntN(1000) {
					runtime.Gosched() // the child goes on
				}
			}
			child.Process.Kill()
			child.Wait()
			killed++
			if s.isUnderway() {
				inStep++
				phases[s.phase()]++
			}
			if s.isArriving() {
				waiting++
			}
			if isInChunk(s) {
				inChunk++
			}
		}
		last := attachOther(t, s, 2, s.config.Kernel)
		if err := finishAnyhow(last, random); err != nil {
			t.Fatal(err)
		}
		steps := last.Steps()
		last.Close()
		undisturbed := c.newShard(t, false)
		makeSteps(t, undisturbed, steps)
		if !bytes.Equal(imageOf(s), imageOf(undisturbed)) {
			t.Errorf("%s: after %d steps and %d kills the state is another than that of a process that was left alone",
				c.name, steps, kills)
		}
		t.Logf("%s: %d steps", c.name, steps)
	}
	t.Logf("%d processes were killed, %d of them in a step, %d while a chunk was changed, %d while gradients "+
		"arrived", killed, inStep, inChunk, waiting)
	t.Logf("phases: %v", phases)
	if !testing.Short() && (phases[speculated] < 5 || phases[redone] < 3 || phases[skipped] < 3) {
		t.Errorf("processes were killed in the phases %v: that proves little", phases)
	}
	if inStep*inChunk*waiting == 0 ||
		!testing.Short() && (inStep < killed/2 || inChunk < killed/4 || waiting < killed/8) {
		t.Errorf("%d processes were killed, only %d of them in a step, %d while a chunk was changed and %d while "+
			"gradients arrived: that proves little", killed, inStep, inChunk, waiting)
	}
}

// isChanging reports whether a slot is in the middle of a chunk.
func isChanging(s *Shard, slot slot) bool {
	return slot.undo.Begun() && !s.isDone(int(slot.unit.Load()))
}
