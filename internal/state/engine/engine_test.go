//go:build linux

package engine

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// cpus returns n CPUs that this process may use. It repeats them if there are fewer.
func cpus(t testing.TB, n int) []int {
	list, err := usableCPUs(n)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func usableCPUs(n int) ([]int, error) {
	mask := unix.NewCPUSet(8192)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		return nil, err
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
	return list, nil
}

var split = kernel.Format{Parameter: dtype.BF16, Gradient: dtype.BF16}

// layout lays out a shard. It panics if that is impossible.
func layout(format kernel.Format, chunk int64, sections []shard.Section) *shard.Layout {
	l, err := shard.NewLayout(format, chunk, sections)
	if err != nil {
		panic(err)
	}
	return l
}

// uniform lays out a shard of one section and chunks of the usual size.
func uniform(format kernel.Format, elements int64) *shard.Layout {
	return layout(format, shard.DefaultChunk, shard.Uniform(format, elements))
}

// newShards splits a model among ranks. A chunk of 0 is one of the usual size. The
// values depend on the place in the full model alone.
func newShards(t testing.TB, elements int64, ranks, workers, chunk int, format kernel.Format, set kernel.Set) []*Shard {
	parts, err := shard.ZeRO(elements, ranks)
	if err != nil {
		t.Fatal(err)
	}
	var shards []*Shard
	for rank, part := range parts {
		l := layout(format, int64(cmp.Or(chunk, shard.DefaultChunk)), shard.Uniform(format, part.Held()))
		s, err := NewShard(ShardConfig{Rank: rank, Layout: l, Kernel: set, CPUs: cpus(t, workers)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		s.Each(func(at shard.Chunk, c kernel.Chunk) {
			for i := range c.Len() {
				w := float32(math.Sin(float64(part.First+at.First+int64(i)))) * 0.1
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

// setGradients writes the gradients of a step. They depend on the place in the full
// model alone.
func setGradients(shards []*Shard, step int) {
	offset := int64(0)
	for _, s := range shards {
		s.Each(func(at shard.Chunk, c kernel.Chunk) {
			for i := range c.Len() {
				place := offset + at.First + int64(i)
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
		for i := range min(left, s.config.Elements) {
			var row [14]byte
			c, at := locate(s, int(i))
			binary.LittleEndian.PutUint32(row[0:], math.Float32bits(master(c, at)))
			for m := range s.config.Format.Algorithm.Moments() {
				binary.LittleEndian.PutUint32(row[4+4*m:], math.Float32bits(c.Moment(m, at)))
			}
			h.Write(row[:])
		}
		left -= s.config.Elements
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// locate returns the state of the section of an element, and the element's place in it.
func locate(s *Shard, element int) (kernel.Chunk, int) {
	last := len(s.sections) - 1
	for int(s.sections[last].first) > element {
		last--
	}
	return s.sections[last].state, element - int(s.sections[last].first)
}

// master returns a master weight.
func master(c kernel.Chunk, i int) float32 {
	if c.Low != nil {
		return kernel.Merge(c.Parameter[i], c.Low[i])
	}
	return c.Master[i]
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
// numbers of workers, chunk sizes and kernels, and in both state formats; with
// moments in fp32 and in int8.
func TestSameBitsHoweverTheWorkIsSplit(t *testing.T) {
	steps := 100
	if testing.Short() {
		steps = 4
	}
	for _, change := range []func(*kernel.Format){
		func(*kernel.Format) {},
		func(f *kernel.Format) { f.Gradient = dtype.F32 },
		func(f *kernel.Format) { f.Moments = kernel.MomentsInt8 },
	} {
		format := split
		change(&format)
		fp32 := format
		fp32.State = kernel.FP32
		available := kernel.Available()
		fastest := available[len(available)-1]
		want := trajectory(t, 1, 1, shard.DefaultChunk, format, fastest, steps)
		for _, test := range []struct {
			workers, chunk int
			format         kernel.Format
			set            kernel.Set
		}{
			{2, shard.DefaultChunk, format, fastest},
			{3, 1000, format, fastest},
			{3, 4096, fp32, fastest},
			{2, testElements, fp32, fastest},
		} {
			if got := trajectory(t, 1, test.workers, test.chunk, test.format, test.set, steps); got != want {
				t.Errorf("%d workers, chunks of %d, %v, %v kernels: %s, want %s",
					test.workers, test.chunk, test.format, test.set, got, want)
			}
		}
		// The reference takes its time: fewer steps.
		want = trajectory(t, 1, 2, shard.DefaultChunk, format, fastest, 3)
		for _, set := range available {
			if got := trajectory(t, 1, 1, 77, format, set, 3); got != want {
				t.Errorf("%v kernels: %s, want %s", set, got, want)
			}
		}
	}
}

// TestRanksShareOneNorm compares the clipped update of 3 ranks with that of 1 rank. The
// order of the sum depends on the shards' ends, and so does its rounding in fp32. So the
// gradient scale may differ in its last bits.
func TestRanksShareOneNorm(t *testing.T) {
	norms := map[int]float64{}
	for _, ranks := range []int{1, 3} {
		shards := newShards(t, testElements, ranks, 2, 0, split, kernel.Available()[0])
		setGradients(shards, 1)
		norms[ranks] = newEngine(t, shards, 1).Step(1).GradientNorm
	}
	if d := math.Abs(norms[1]-norms[3]) / norms[1]; d > 0x1p-21 {
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
		shards[1].gradient.Put(777, float32(bad))
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

// TestAFactorThatBinary32CannotHoldTouchesNothing tries a step with such a gradient
// scale, and then makes the step with another.
func TestAFactorThatBinary32CannotHoldTouchesNothing(t *testing.T) {
	shards := newShards(t, testElements, 2, 1, 0, split, kernel.Available()[len(kernel.Available())-1])
	e := newEngine(t, shards, 0)
	setGradients(shards, 0)
	before := fingerprint(shards, testElements)
	for _, scale := range []float64{1e-39, 1e39} {
		if r := e.Step(scale); r.Err == nil {
			t.Errorf("a step was made that divides gradients by %g", scale)
		}
	}
	if after := fingerprint(shards, testElements); e.Steps() != 0 || after != before {
		t.Errorf("a step that was refused changed the state, which is at step %d", e.Steps())
	}
	if r := e.Step(1); r.Err != nil || e.Steps() != 1 {
		t.Errorf("the step after: %+v, at step %d", r, e.Steps())
	}
}

// TestLossScaleIsDividedOut: gradients and loss scale both 1024 times as large
// change nothing, as both are powers of two.
func TestLossScaleIsDividedOut(t *testing.T) {
	var prints []string
	for _, scale := range []float32{1, 1024} {
		format := kernel.Format{State: kernel.FP32, Parameter: dtype.F16, Gradient: dtype.F16}
		shards := newShards(t, testElements, 1, 2, 0, format, kernel.Available()[len(kernel.Available())-1])
		shards[0].Each(func(at shard.Chunk, c kernel.Chunk) {
			for i := range c.Len() {
				c.Gradient.Put(i, scale*float32(1+(at.First+int64(i))%64)/64)
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
	const border = shard.DefaultChunk + 777
	run := func(sections []shard.Section, optimizers [][]optim.Optimizer) *Shard {
		s, err := NewShard(ShardConfig{Layout: layout(split, shard.DefaultChunk, sections),
			Kernel: kernel.Available()[0], CPUs: cpus(t, 2)})
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
	both := run([]shard.Section{{Elements: border}, {Elements: testElements - border, Group: 1}},
		[][]optim.Optimizer{{with(1e-3), with(1e-4)}, {with(2e-3), with(3e-4)}})
	for _, part := range []struct {
		rates      [2]float64
		first, end int
	}{{[2]float64{1e-3, 2e-3}, 0, border}, {[2]float64{1e-4, 3e-4}, border, testElements}} {
		one := run(shard.Uniform(split, testElements),
			[][]optim.Optimizer{{with(part.rates[0])}, {with(part.rates[1])}})
		for i := part.first; i < part.end; i++ {
			got, at := locate(both, i)
			want, place := locate(one, i)
			if master(got, at) != master(want, place) {
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

// TestGradientsThatArriveEarly: the norm is the same as of gradients that arrive at the
// step, whatever the ranges. A second step does not use old sums.
func TestGradientsThatArriveEarly(t *testing.T) {
	shards := newShards(t, testElements, 1, 2, 0, split, kernel.Available()[0])
	e := newEngine(t, shards, 1)
	var want [2]float64
	for step := range want {
		setGradients(shards, step)
		want[step] = e.Step(1).GradientNorm
	}
	for _, ranges := range [][]shard.Range{
		{shard.Between(0, testElements)},
		{shard.Between(0, 100), shard.Between(100, 100+normBlock), shard.Between(2*normBlock, testElements)},
		{shard.Between(testElements-5, testElements), shard.Between(1, testElements)},
	} {
		for step := range want {
			setGradients(shards, step)
			for _, r := range ranges {
				shards[0].GradientsArrived(r)
			}
			if got := e.Step(1).GradientNorm; got != want[step] {
				t.Errorf("ranges %v: norm %v, want %v", ranges, got, want[step])
			}
		}
	}
}

// TestGradientsThatArriveAgain has gradients change after they had arrived.
func TestGradientsThatArriveAgain(t *testing.T) {
	for _, again := range []shard.Range{shard.Between(0, testElements), shard.Between(normBlock+10, normBlock+30)} {
		s := newShards(t, testElements, 1, 2, 0, split, kernel.Available()[0])[0]
		setGradients([]*Shard{s}, 0)
		s.GradientsArrived(s.config.Range())
		for i := again.First; i < again.End(); i++ {
			s.gradient.Put(int(i), 3)
		}
		s.GradientsArrived(again)
		got := s.SumSquares()
		s.ForgetArrived()
		if want := s.SumSquares(); got != want {
			t.Errorf("elements %d to %d changed: %v, want %v", again.First, again.End(), got, want)
		}
	}
}

// TestAccumulatedGradients adds two bf16 gradients to fp32 sums, in ranges that cut
// chunks. The step is the same as with their sum.
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
			s.gradient.Put(5, 77) // from an earlier step
			s.ClearGradients()
			for range 2 {
				for from := 0; from < testElements; from += 100_001 {
					if err := s.Accumulate(int64(from),
						gradient.Slice(from, min(from+100_001, testElements))); err != nil {
						t.Fatal(err)
					}
				}
			}
		} else {
			for i := range testElements {
				s.gradient.Put(i, 2*gradient.At(i))
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
	const elements, tail = 1<<31 + 3*shard.DefaultChunk + 77, 2*shard.DefaultChunk + 77
	int8 := split
	int8.Moments = kernel.MomentsInt8
	for _, format := range []kernel.Format{split, {State: kernel.FP32, Parameter: dtype.BF16, Gradient: dtype.F32},
		int8} {
		set := kernel.Available()[len(kernel.Available())-1]
		large, err := NewShard(ShardConfig{Layout: uniform(format, elements), Kernel: set, CPUs: cpus(t, 2)})
		if errors.Is(err, unix.ENOMEM) {
			t.Skip("the kernel does not map so much: ", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer large.Close()
		small, err := NewShard(ShardConfig{Layout: uniform(format, tail), Kernel: set, CPUs: cpus(t, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer small.Close()
		for s, first := range map[*Shard]int{large: elements - tail, small: 0} {
			for i := range tail {
				s.gradient.Put(first+i, float32(i%1000-500)*1e-5)
			}
			s.begun.Store(1)
			optim.DefaultAdamW().Constants(&s.constants[0].Constants, 1, 1)
			s.constants[0].sum.Write(memoryOf(&s.constants[0].Constants))
			chunks := int64(s.config.Chunks)
			s.start(shard.Between(chunks-tail/shard.DefaultChunk-1, chunks), helping, s.updateChunk)
			s.wait()
			s.GradientsArrived(shard.Range{First: int64(first), Count: tail})
		}
		offset := elements - tail
		for i := range tail {
			a, at := locate(large, offset+i)
			b, _ := locate(small, i)
			// The dither of int8 moments depends on the place.
			same := format.Moments == kernel.MomentsInt8 ||
				a.Moment(0, at) == b.Moment(0, i) && a.Moment(1, at) == b.Moment(1, i)
			if master(a, at) != master(b, i) || !same {
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

// TestArenasAreTheList compares the list of arenas, which plans are made from, with the
// mapped and resident bytes that the kernel reports.
func TestArenasAreTheList(t *testing.T) {
	format := kernel.Format{State: kernel.FP32, Moments: kernel.MomentsInt8, Parameter: dtype.F16, Gradient: dtype.F32}
	shards := newShards(t, testElements, 1, 2, 0, format, kernel.Available()[0])
	mixed, err := NewShard(ShardConfig{Rank: 1, Part: "mixed", Layout: layout(format, 1000, mixedSections),
		CPUs: cpus(t, 1), Journal: true})
	if err != nil {
		t.Fatal(err)
	}
	defer mixed.Close()
	shards = append(shards, mixed)
	newEngine(t, shards, 1).gradientNorm()
	for _, s := range shards {
		s.Each(func(_ shard.Chunk, c kernel.Chunk) {
			clear(c.Parameter)
			clear(c.Moments[0].Data)
			clear(c.Moments[1].Data)
			clear(c.Headers)
			clear(c.Master)
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
	good := ShardConfig{Layout: uniform(split, 100), CPUs: cpus(t, 1)}
	for name, spoil := range map[string]func(*ShardConfig){
		"no layout":   func(c *ShardConfig) { c.Layout = nil },
		"no elements": func(c *ShardConfig) { c.Layout = uniform(split, 0) },
		"no CPUs":     func(c *ShardConfig) { c.CPUs = nil },
		"no such CPU": func(c *ShardConfig) { c.CPUs = []int{8000} },
		"too large":   func(c *ShardConfig) { c.Layout = uniform(split, shard.MaxElements) },
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

// mixedSections hold 1000 parameters in every way, with short blocks in between.
var mixedSections = []shard.Section{
	{Elements: 100, Moments: kernel.MomentsInt8}, {Elements: 50, Moments: kernel.MomentsFP32},
	{Elements: 0, Moments: kernel.MomentsInt8},
	{Elements: 700, Moments: kernel.MomentsInt8}, {Elements: 50, Moments: kernel.MomentsBF16},
	{Elements: 100, Moments: kernel.MomentsFP32},
}

// TestSectionsHoldTheirMomentsTheirWay compares a shard of many sections with one shard
// for each type of moments. fp32 sections are exact. All masters are the same after the
// first step, as all moments are zero before it.
func TestSectionsHoldTheirMomentsTheirWay(t *testing.T) {
	run := func(moments kernel.MomentType, sections []shard.Section, steps int) *Shard {
		format := split
		format.Moments = moments
		s, err := NewShard(ShardConfig{Layout: layout(format, 300, sections),
			Kernel: kernel.Available()[len(kernel.Available())-1], CPUs: cpus(t, 2)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		e := newEngine(t, []*Shard{s}, 1)
		for step := range steps {
			setGradients([]*Shard{s}, step)
			e.Step(1)
		}
		return s
	}
	for _, steps := range []int{1, 10} {
		mixed := run(kernel.MomentsInt8, mixedSections, steps)
		exact := run(kernel.MomentsFP32, shard.Uniform(split, 1000), steps)
		whole, _ := locate(exact, 0)
		for _, s := range mixed.sections {
			for i := range s.state.Len() {
				got, want := s.state.Moment(1, i), whole.Moment(1, int(s.first)+i)
				if s.format.Moments == kernel.MomentsFP32 && got != want || math.Abs(float64(got/want-1)) > 0.3 {
					t.Fatalf("%d steps: second moment %d, in %v, is %g; in fp32 %g",
						steps, int(s.first)+i, s.format.Moments, got, want)
				}
				if steps == 1 && master(s.state, i) != master(whole, int(s.first)+i) {
					t.Fatalf("master %d is %g and not %g", int(s.first)+i, master(s.state, i),
						master(whole, int(s.first)+i))
				}
			}
		}
	}
	// 100 and 700 parameters are 1 and 3 blocks.
	sizes := map[ledger.Component]int{}
	int8 := kernel.Format{Moments: kernel.MomentsInt8, Parameter: dtype.BF16, Gradient: dtype.BF16}
	for _, a := range (ShardConfig{Layout: layout(int8, shard.DefaultChunk, mixedSections)}).Arenas() {
		sizes[a.Component] = int(a.Size)
	}
	want := map[ledger.Component]int{
		"parameters": 2000, "master_weights_low": 2000, "exp_avg": 800, "exp_avg_sq": 800, "moment_headers": 8,
		"exp_avg_fp32": 600, "exp_avg_sq_fp32": 600, "exp_avg_bf16": 100, "exp_avg_sq_bf16": 100, "gradients": 2000,
		"gradient_norm_sums": 8,
	}
	if !maps.Equal(sizes, want) {
		t.Errorf("arenas of %v bytes, want %v", sizes, want)
	}
}

// TestInt8MomentsTrackFP32 runs some time constants of exp_avg_sq with gradients that
// shrink tenfold. The average of exp_avg_sq over elements must not be off, and updates
// must go where they go with exact moments.
func TestInt8MomentsTrackFP32(t *testing.T) {
	n, steps := 4000, 4000
	if testing.Short() {
		n = 512
	}
	states := map[kernel.MomentType]kernel.Chunk{}
	engines := map[kernel.MomentType]*Engine{}
	for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsInt8} {
		format := kernel.Format{Moments: moments, Parameter: dtype.BF16, Gradient: dtype.F32}
		s := newShards(t, int64(n), 1, 1, 0, format, kernel.Available()[len(kernel.Available())-1])[0]
		states[moments], _ = locate(s, 0)
		engines[moments] = newEngine(t, []*Shard{s}, 0)
	}
	first := make([]float32, n)
	for i := range first {
		first[i] = master(states[kernel.MomentsFP32], i)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for step := range steps {
		scale := 1e-2
		if step > steps/4 {
			scale = 1e-3
		}
		for i := range n {
			// Sizes over two decades in a block, and some drift.
			g := float32(scale * math.Pow(100, -float64(i%100)/100) * (r.NormFloat64() + 0.1))
			for _, c := range states {
				c.Gradient.Put(i, g)
			}
		}
		for _, e := range engines {
			e.Step(1)
		}
	}
	exact, held := states[kernel.MomentsFP32], states[kernel.MomentsInt8]
	ratio, product, square := 0.0, 0.0, 0.0
	for i := range n {
		ratio += float64(held.Moment(1, i)) / float64(exact.Moment(1, i)) / float64(n)
		moved, want := float64(master(held, i)-first[i]), float64(master(exact, i)-first[i])
		product += moved * want
		square += want * want
	}
	t.Logf("exp_avg_sq is %.3f times the exact one on the average; parameters moved %.3f times as far",
		ratio, product/square)
	if math.Abs(ratio-1) > 0.05 || math.Abs(product/square-1) > 0.03 {
		t.Errorf("exp_avg_sq is %.3f times the exact one on the average; parameters moved %.3f times as far",
			ratio, product/square)
	}
}

func TestCursorFillsACacheLine(t *testing.T) {
	if size := unsafe.Sizeof(cursor{}); size != 64 {
		t.Errorf("a cursor takes %d bytes", size)
	}
}
