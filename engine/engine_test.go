package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/dtype"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/partition"
	"plimsoll/probe"
)

// cpus are n CPUs that this process may use, repeated when there are fewer.
func cpus(t testing.TB, n int) []int {
	mask := unix.NewCPUSet(8192)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		t.Fatal(err)
	}
	var usable []int
	for cpu := range 8192 {
		if mask.IsSet(cpu) {
			usable = append(usable, cpu)
		}
	}
	var list []int
	for i := range n {
		list = append(list, usable[i%len(usable)])
	}
	return list
}

var split = kernel.Format{Parameter: dtype.BF16, Gradient: dtype.BF16}

// newShards splits a model among ranks and fills it with values that depend on
// the place in the whole model alone.
func newShards(t testing.TB, elements int64, ranks, workers, chunk int, format kernel.Format, set kernel.Set) []*Shard {
	parts, err := partition.ZeRO(elements, ranks)
	if err != nil {
		t.Fatal(err)
	}
	var shards []*Shard
	for rank, part := range parts {
		s, err := NewShard(ShardConfig{Rank: rank, Elements: part.Held(), Format: format, Kernel: set, CPUs: cpus(t, workers), Chunk: chunk})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		s.Each(func(first int64, c kernel.Chunk) {
			for i := range c.Len() {
				w := float32(math.Sin(float64(part.First+first+int64(i)))) * 0.1
				if format.State == kernel.FP32 {
					c.Master[i] = w
				} else {
					c.Parameter[i], c.Low[i] = kernel.Separate(w)
				}
			}
		})
		shards = append(shards, s)
	}
	return shards
}

// setGradients writes the gradients of a step, which depend on the place in the
// whole model alone.
func setGradients(shards []*Shard, step int) {
	offset := int64(0)
	for _, s := range shards {
		s.Each(func(first int64, c kernel.Chunk) {
			for i := range c.Len() {
				place := offset + first + int64(i)
				g := float32(math.Cos(float64(place)*float64(step+1))) * 0.01
				if place >= testElements {
					g = 0 // padding
				}
				c.Gradient.Put(i, g)
			}
		})
		offset += s.config.Elements
	}
}

// fingerprint hashes all state of a model's elements, in order.
func fingerprint(shards []*Shard, elements int64) string {
	h := sha256.New()
	left := elements
	for _, s := range shards {
		n := int(min(left, s.config.Elements))
		left -= int64(n)
		for i := range n {
			var row [14]byte
			w := float32(0)
			if s.config.Format.State == kernel.FP32 {
				w = s.whole.Master[i]
			} else {
				w = kernel.Merge(s.whole.Parameter[i], s.whole.Low[i])
			}
			binary.LittleEndian.PutUint32(row[0:], math.Float32bits(w))
			for m := range s.config.Format.Algorithm.Moments() {
				binary.LittleEndian.PutUint32(row[4+4*m:], math.Float32bits(s.whole.Moments[m].At(i)))
			}
			h.Write(row[:])
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

const testElements = 3*normBlock + 12345

func newEngine(t testing.TB, shards []*Shard, clip float64) *Engine {
	e, err := New(shards, []optim.Optimizer{optim.DefaultAdamW()}, clip)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func trajectory(t *testing.T, ranks, workers, chunk int, format kernel.Format, set kernel.Set, steps int) string {
	shards := newShards(t, testElements, ranks, workers, chunk, format, set)
	e := newEngine(t, shards, 0.5)
	for step := range steps {
		setGradients(shards, step)
		if r := e.Step(1); r.Skipped || r.GradientNorm < 0.5 {
			t.Fatalf("step %d: %+v: expected a norm that is clipped", step, r)
		}
	}
	return fingerprint(shards, testElements)
}

// TestSameBitsHoweverTheWorkIsSplit runs 100 clipped steps with different
// numbers of workers, chunk sizes and kernels, and in both state formats.
func TestSameBitsHoweverTheWorkIsSplit(t *testing.T) {
	steps := 100
	if testing.Short() {
		steps = 10
	}
	for _, gradient := range []dtype.Type{dtype.BF16, dtype.F32} {
		format := split
		format.Gradient = gradient
		fp32 := format
		fp32.State = kernel.FP32
		available := kernel.Available()
		fastest := available[len(available)-1]
		want := trajectory(t, 1, 1, DefaultChunk, format, fastest, steps)
		for _, test := range []struct {
			workers, chunk int
			format         kernel.Format
			set            kernel.Set
		}{
			{2, DefaultChunk, format, fastest},
			{3, 1000, format, fastest},
			{3, 4096, fp32, fastest},
			{2, testElements, fp32, fastest},
		} {
			if got := trajectory(t, 1, test.workers, test.chunk, test.format, test.set, steps); got != want {
				t.Errorf("%d workers, chunks of %d, %v, %v kernels: %s, want %s", test.workers, test.chunk, test.format, test.set, got, want)
			}
		}
		// The reference takes its time: fewer steps.
		want = trajectory(t, 1, 2, DefaultChunk, format, fastest, 3)
		for _, set := range available {
			if got := trajectory(t, 1, 1, 77, format, set, 3); got != want {
				t.Errorf("%v kernels: %s, want %s", set, got, want)
			}
		}
	}
}

// TestRanksShareOneNorm holds the clipped update of 3 ranks against that of 1.
// The order of the sum differs by the shards' ends, so the norm may differ in
// its last bit, and with it the scale in its last.
func TestRanksShareOneNorm(t *testing.T) {
	norms := map[int]float64{}
	for _, ranks := range []int{1, 3} {
		shards := newShards(t, testElements, ranks, 2, 0, split, kernel.Available()[0])
		setGradients(shards, 1)
		norms[ranks] = newEngine(t, shards, 1).Step(1).GradientNorm
	}
	if d := math.Abs(norms[1]-norms[3]) / norms[1]; d > 1e-12 {
		t.Errorf("the norm over 1 rank is %v, over 3 ranks %v", norms[1], norms[3])
	}
}

// TestOverflowTouchesNothing puts an infinity or NaN into one gradient of one
// rank.
func TestOverflowTouchesNothing(t *testing.T) {
	for _, bad := range []float64{math.Inf(1), math.Inf(-1), math.NaN()} {
		shards := newShards(t, testElements, 2, 1, 0, split, kernel.Available()[len(kernel.Available())-1])
		e := newEngine(t, shards, 1)
		setGradients(shards, 0)
		e.Step(1)
		before := fingerprint(shards, testElements)
		shards[1].chunk(777, 1).Gradient.Put(0, float32(bad))
		if r := e.Step(1); !r.Skipped {
			t.Errorf("a gradient of %g was taken: %+v", bad, r)
		}
		if e.Steps() != 1 {
			t.Errorf("the step counter is %d after a skipped step, want 1", e.Steps())
		}
		if after := fingerprint(shards, testElements); after != before {
			t.Errorf("a gradient of %g changed the state", bad)
		}
	}
}

// TestLossScaleIsDividedOut: gradients and loss scale both 1024 times as large
// change nothing, as both are powers of two.
func TestLossScaleIsDividedOut(t *testing.T) {
	var prints []string
	for _, scale := range []float32{1, 1024} {
		format := kernel.Format{State: kernel.FP32, Parameter: dtype.F16, Gradient: dtype.F16}
		shards := newShards(t, testElements, 1, 2, 0, format, kernel.Available()[len(kernel.Available())-1])
		shards[0].Each(func(first int64, c kernel.Chunk) {
			for i := range c.Len() {
				c.Gradient.Put(i, scale*float32(1+(first+int64(i))%64)/64)
			}
		})
		newEngine(t, shards, 1).Step(float64(scale))
		prints = append(prints, fingerprint(shards, testElements))
	}
	if prints[0] != prints[1] {
		t.Error("the update depends on the loss scale")
	}
}

// TestGroupsHaveTheirOwnHyperparameters updates two groups whose border is in
// the middle of a chunk, and changes a learning rate between steps.
func TestGroupsHaveTheirOwnHyperparameters(t *testing.T) {
	const border = DefaultChunk + 777
	run := func(groups []int64, optimizers [][]optim.Optimizer) *Shard {
		s, err := NewShard(ShardConfig{Elements: testElements, Groups: groups, Format: split, Kernel: kernel.Available()[0], CPUs: cpus(t, 2)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		e, err := New([]*Shard{s}, optimizers[0], 0)
		if err != nil {
			t.Fatal(err)
		}
		for step, now := range optimizers {
			for i, o := range now {
				if err := e.SetOptimizer(i, o); err != nil {
					t.Fatal(err)
				}
			}
			setGradients([]*Shard{s}, step)
			e.Step(1)
		}
		return s
	}
	with := func(rate float64) optim.Optimizer { a := optim.DefaultAdamW(); a.LearningRate = rate; return a }
	both := run([]int64{border, testElements - border}, [][]optim.Optimizer{{with(1e-3), with(1e-4)}, {with(2e-3), with(3e-4)}})
	for _, part := range []struct {
		rates      [2]float64
		first, end int
	}{{[2]float64{1e-3, 2e-3}, 0, border}, {[2]float64{1e-4, 3e-4}, border, testElements}} {
		one := run(nil, [][]optim.Optimizer{{with(part.rates[0])}, {with(part.rates[1])}})
		for i := part.first; i < part.end; i++ {
			if both.whole.Parameter[i] != one.whole.Parameter[i] || both.whole.Low[i] != one.whole.Low[i] {
				t.Fatalf("element %d is not what learning rates %v give", i, part.rates)
			}
		}
	}
}

func TestWrongOptimizersAreRefused(t *testing.T) {
	shards := newShards(t, 1000, 1, 1, 0, split, kernel.Generic)
	for name, optimizers := range map[string][]optim.Optimizer{
		"too many":  {optim.DefaultAdamW(), optim.DefaultAdamW()},
		"none":      {},
		"other":     {optim.DefaultLion()},
		"not valid": {optim.Adam{LearningRate: -1}},
	} {
		if _, err := New(shards, optimizers, 0); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestGradientsThatArriveEarly gives the same norm as those that are all there
// at the step, whatever the ranges; and a second step does not use old sums.
func TestGradientsThatArriveEarly(t *testing.T) {
	shards := newShards(t, testElements, 1, 2, 0, split, kernel.Available()[0])
	e := newEngine(t, shards, 1)
	var want [2]float64
	for step := range want {
		setGradients(shards, step)
		want[step] = e.Step(1).GradientNorm
	}
	for _, ranges := range [][][2]int64{
		{{0, testElements}},
		{{0, 100}, {100, normBlock}, {2 * normBlock, testElements - 2*normBlock}},
		{{testElements - 5, 5}, {1, testElements - 1}},
	} {
		for step := range want {
			setGradients(shards, step)
			for _, r := range ranges {
				shards[0].GradientsArrived(r[0], r[1])
			}
			if got := e.Step(1).GradientNorm; got != want[step] {
				t.Errorf("ranges %v: norm %v, want %v", ranges, got, want[step])
			}
		}
	}
}

// TestAccumulatedGradients adds two bf16 gradients, in ranges that cut chunks,
// to fp32 sums, and takes the step that their sum takes.
func TestAccumulatedGradients(t *testing.T) {
	format := kernel.Format{Parameter: dtype.BF16, Gradient: dtype.F32}
	var prints []string
	for _, accumulated := range []bool{false, true} {
		s := newShards(t, testElements, 1, 2, 0, format, kernel.Available()[len(kernel.Available())-1])[0]
		gradient := kernel.Array{Type: dtype.BF16, Data: make([]byte, 2*testElements)}
		for i := range testElements {
			gradient.Put(i, float32(i%200-100)/64)
		}
		if accumulated {
			s.whole.Gradient.Put(5, 77) // from an earlier step
			s.ClearGradients()
			for range 2 {
				for from := 0; from < testElements; from += 100_001 {
					s.Accumulate(int64(from), gradient.Slice(from, min(from+100_001, testElements)))
				}
			}
		} else {
			for i := range testElements {
				s.whole.Gradient.Put(i, 2*gradient.At(i))
			}
		}
		newEngine(t, []*Shard{s}, 1).Step(1)
		prints = append(prints, fingerprint([]*Shard{s}, testElements))
	}
	if prints[0] != prints[1] {
		t.Error("accumulated gradients give another step than their sum")
	}
}

// TestMoreElementsThan31BitsCount updates the end of a shard of more than 2^31
// elements. Only the pages at its end are ever touched.
func TestMoreElementsThan31BitsCount(t *testing.T) {
	const elements, tail = 1<<31 + 3*DefaultChunk + 77, 2*DefaultChunk + 77
	for _, format := range []kernel.Format{split, {State: kernel.FP32, Parameter: dtype.BF16, Gradient: dtype.F32}} {
		set := kernel.Available()[len(kernel.Available())-1]
		large, err := NewShard(ShardConfig{Elements: elements, Format: format, Kernel: set, CPUs: cpus(t, 2)})
		if errors.Is(err, unix.ENOMEM) {
			t.Skip("the kernel does not map so much: ", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer large.Close()
		small, err := NewShard(ShardConfig{Elements: tail, Format: format, Kernel: set, CPUs: cpus(t, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer small.Close()
		for s, first := range map[*Shard]int{large: elements - tail, small: 0} {
			end := s.chunk(first, tail)
			for i := range tail {
				end.Gradient.Put(i, float32(i%1000-500)*1e-5)
			}
			optim.DefaultAdamW().Constants(&s.groups[0].constants, 1, 1)
			units := (int64(s.config.Elements) + DefaultChunk - 1) / DefaultChunk
			s.startUnits(DefaultChunk, units-tail/DefaultChunk-1, units, true, s.updateUnit)
			s.wait()
			s.GradientsArrived(int64(first), tail)
		}
		offset := elements - tail
		for i := range tail {
			a, b := large.chunk(offset+i, 1), small.chunk(i, 1)
			if a.Parameter[0] != b.Parameter[0] || a.Moments[0].At(0) != b.Moments[0].At(0) || a.Moments[1].At(0) != b.Moments[1].At(0) {
				t.Fatalf("%v: element %d differs from that of a small shard", format, offset+i)
			}
		}
	}
}

func TestTrafficLeavesTheState(t *testing.T) {
	shards := newShards(t, testElements, 2, 2, 0, split, kernel.Available()[len(kernel.Available())-1])
	e := newEngine(t, shards, 1)
	before := fingerprint(shards, testElements)
	e.Traffic()
	if fingerprint(shards, testElements) != before {
		t.Error("moving the bytes changed them")
	}
}

func TestStepAllocatesNothing(t *testing.T) {
	shards := newShards(t, testElements, 2, 2, 0, split, kernel.Available()[len(kernel.Available())-1])
	e := newEngine(t, shards, 1)
	setGradients(shards, 0)
	if n := testing.AllocsPerRun(20, func() { e.Step(1) }); n != 0 {
		t.Errorf("%v heap allocations a step", n)
	}
}

// TestArenasAreTheList compares the list of arenas, which plans are made from,
// with what the kernel says is mapped and resident.
func TestArenasAreTheList(t *testing.T) {
	format := kernel.Format{State: kernel.FP32, Parameter: dtype.F16, Gradient: dtype.F32}
	shards := newShards(t, testElements, 2, 2, 0, format, kernel.Available()[0])
	newEngine(t, shards, 1).gradientNorm()
	for _, s := range shards {
		s.Each(func(_ int64, c kernel.Chunk) {
			clear(c.Parameter)
			clear(c.Moments[0].Data)
			clear(c.Moments[1].Data)
			clear(c.Gradient.Data)
		})
	}
	memory, err := probe.Process(os.DirFS("/"), "self")
	if err != nil {
		t.Fatal(err)
	}
	mapped := 0
	for name := range memory.Mappings {
		if strings.HasPrefix(name, "/memfd:plimsoll/") {
			mapped++
		}
	}
	for _, s := range shards {
		for _, plan := range s.config.Arenas() {
			mapped--
			resident := memory.Mappings["/memfd:plimsoll/"+plan.Name].Resident
			if want := s.config.Pages.Round(plan.Size); resident != want {
				t.Errorf("%s: %v resident, planned %v in whole pages", plan.Name, resident, want)
			}
		}
	}
	if mapped != 0 {
		t.Errorf("%d arenas are mapped beside the list", mapped)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	good := ShardConfig{Elements: 100, Format: split, CPUs: cpus(t, 1)}
	for name, spoil := range map[string]func(*ShardConfig){
		"no elements":        func(c *ShardConfig) { c.Elements = 0 },
		"no CPUs":            func(c *ShardConfig) { c.CPUs = nil },
		"negative chunk":     func(c *ShardConfig) { c.Chunk = -1 },
		"no such CPU":        func(c *ShardConfig) { c.CPUs = []int{8000} },
		"fp16 split":         func(c *ShardConfig) { c.Format.Parameter = dtype.F16 },
		"int8 gradient":      func(c *ShardConfig) { c.Format.Gradient = dtype.I8 },
		"groups of too few":  func(c *ShardConfig) { c.Groups = []int64{50, 49} },
		"groups of too many": func(c *ShardConfig) { c.Groups = []int64{101} },
		"negative group":     func(c *ShardConfig) { c.Groups = []int64{-1, 101} },
		"too large":          func(c *ShardConfig) { c.Elements = 1 << 58 },
	} {
		c := good
		spoil(&c)
		if s, err := NewShard(c); err == nil {
			s.Close()
			t.Errorf("%s: no error", name)
		}
	}
	s, err := NewShard(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestCursorFillsACacheLine(t *testing.T) {
	if size := unsafe.Sizeof(cursor{}); size != 64 {
		t.Errorf("a cursor takes %d bytes", size)
	}
}
