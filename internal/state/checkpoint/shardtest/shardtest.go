//go:build linux

// Package shardtest makes shards and trains them, for tests of checkpoints.
package shardtest

import (
	"bytes"
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Tensor is a parameter of a model that tests make up.
type Tensor = struct {
	Name  string
	Shape []int64
	Group int
}

func Elements(p Tensor) int64 {
	n, err := shard.Piece{Shape: p.Shape}.Elements()
	if err != nil {
		panic(err)
	}
	return n
}

var SmallModel = []Tensor{
	{"model.embed_tokens.weight", []int64{300, 32}, 0},
	{"model.layers.0.q_proj.weight", []int64{64, 32}, 0},
	{"model.layers.0.q_proj.bias", []int64{64}, 1},
	{"model.norm.weight", []int64{33}, 1},
	{"scale", []int64{}, 1},
	{"lm_head.weight", []int64{32, 123}, 0},
}

// CutModel gives each rank its range of the concatenated parameters, from one cut to the
// next.
func CutModel(model []Tensor, moments func(Tensor) kernel.MomentType, cuts ...int64) [][]shard.Piece {
	ranks := make([][]shard.Piece, len(cuts)+1)
	at := int64(0)
	for _, p := range model {
		end := at + Elements(p)
		for rank := range ranks {
			from, to := at, end
			if rank > 0 {
				from = max(from, cuts[rank-1])
			}
			if rank < len(cuts) {
				to = min(to, cuts[rank])
			}
			if from < to {
				ranks[rank] = append(ranks[rank], shard.Piece{Name: p.Name, Shape: p.Shape, Group: p.Group,
					Moments: moments(p), Range: shard.Between(from-at, to-at)})
			}
		}
		at = end
	}
	return ranks
}

func Alike(m kernel.MomentType) func(Tensor) kernel.MomentType {
	return func(Tensor) kernel.MomentType { return m }
}

// Mixed holds the moments of small parameters in fp32.
func Mixed(m kernel.MomentType) func(Tensor) kernel.MomentType {
	return func(p Tensor) kernel.MomentType {
		if Elements(p) < 100 {
			return kernel.MomentsFP32
		}
		return m
	}
}

func Format(algorithm kernel.Algorithm, state kernel.State, moments kernel.MomentType,
	parameter dtype.Type) kernel.Format {
	return kernel.Format{Algorithm: algorithm, State: state, Moments: moments, Parameter: parameter,
		Gradient: dtype.F32}
}

var SplitFormat = Format(kernel.Adam, kernel.Split, kernel.MomentsFP32, dtype.BF16)

func cpu(t Failer) int {
	mask := unix.NewCPUSet(8192)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		t.Fatalf("%v", err)
	}
	for cpu := range 8192 {
		if mask.IsSet(cpu) {
			return cpu
		}
	}
	t.Fatalf("no CPU")
	return 0
}

// Failer is the interface that tests and checks of rapid share.
type Failer interface {
	Helper()
	Fatalf(format string, arguments ...any)
	Cleanup(func())
}

// New maps a shard, which is closed with the test. A chunk of 0 is one of the usual size.
func New(f Failer, rank int, format kernel.Format, chunk int, sections []shard.Section) *engine.Shard {
	l, err := shard.NewLayout(format, int64(cmp.Or(chunk, shard.DefaultChunk)), sections)
	if err != nil {
		f.Fatalf("%v", err)
	}
	state, err := engine.NewShard(engine.ShardConfig{Rank: rank, Layout: l, Kernel: kernel.Generic,
		CPUs: []int{cpu(f), cpu(f)}})
	if err != nil {
		f.Fatalf("%v", err)
	}
	f.Cleanup(func() { state.Close() })
	return state
}

// Train gives a shard weights and makes real steps, so that all state is the work of an optimizer.
func Train(f Failer, state *engine.Shard, seed uint64, steps int) {
	f.Helper()
	rank, format := uint64(state.Config().Rank), state.Config().Format
	state.Each(func(at shard.Chunk, c kernel.Chunk) {
		random := rand.New(rand.NewPCG(seed, rank<<40+uint64(at.First)))
		for i := range c.Len() {
			w := float32(random.NormFloat64())
			if format.State == kernel.FP32 {
				c.Master[i] = w
			} else {
				c.PutMasterWeight(format, i, w)
			}
		}
	})
	for range steps {
		Begin(f, state, seed)
		state.Wait()
	}
}

func OptimizerOf(a kernel.Algorithm) optim.Optimizer {
	switch a {
	case kernel.Lion:
		return optim.Lion{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.99}
	case kernel.Adagrad:
		return optim.Adagrad{LearningRate: 1e-2, Epsilon: 1e-8}
	case kernel.SGD:
		return optim.SGD{LearningRate: 1e-2, Momentum: 0.9}
	}
	return optim.Adam{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 0.01}
}

// Begin starts a step with gradients that are a function of seed and step.
func Begin(f Failer, state *engine.Shard, seed uint64) {
	f.Helper()
	number, rank, groups := state.Steps()+1, uint64(state.Config().Rank), 1
	state.Each(func(at shard.Chunk, c kernel.Chunk) {
		random := rand.New(rand.NewPCG(seed+uint64(number), rank<<40+uint64(at.First)))
		for i := range c.Len() {
			c.Gradient.Put(i, float32(random.NormFloat64()*math.Exp2(-8*random.Float64())))
		}
	})
	for _, s := range state.Config().Sections() {
		groups = max(groups, s.Group+1)
	}
	optimizers := slices.Repeat([]optim.Optimizer{OptimizerOf(state.Config().Format.Algorithm)}, groups)
	if err := state.Begin(number, 1, optimizers); err != nil {
		f.Fatalf("step %d: %v", number, err)
	}
}

// Bytes returns the arenas of a shard that are its state.
func Bytes(s *engine.Shard) map[ledger.Component][]byte {
	state := map[ledger.Component][]byte{}
	for _, plan := range s.Config().Arenas() {
		if plan.Component != ledger.Gradients && plan.Component != ledger.GradientNormSums &&
			plan.Component != ledger.StepJournal {
			state[plan.Component] = bytes.Clone(s.Arena(plan.Component).Bytes())
		}
	}
	return state
}

// EqualState compares to the bit.
func EqualState(f Failer, got, want map[ledger.Component][]byte) {
	f.Helper()
	if len(got) != len(want) {
		f.Fatalf("%d arenas, want %d", len(got), len(want))
	}
	for name, bytes := range want {
		for i := range bytes {
			if got[name][i] != bytes[i] {
				f.Fatalf("%s differs at byte %d of %d", name, i, len(bytes))
			}
		}
	}
}

// MustSay requires an input error with certain texts.
func MustSay(t Failer, err error, says ...string) {
	t.Helper()
	var input *fault.Input
	if !errors.As(err, &input) {
		t.Fatalf("%v is no input error", err)
	}
	for _, text := range says {
		if !strings.Contains(err.Error(), text) {
			t.Fatalf("%q does not say %q", err, text)
		}
	}
}

// Poke changes a byte of a file.
func Poke(t Failer, path string, at int, b byte) {
	file, _, err := files.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = file.WriteAt([]byte{b}, int64(at))
	}
	if err = errors.Join(err, file.Close()); err != nil {
		t.Fatalf("%v", err)
	}
}

// AddValues adds the fp32 numbers that a shard holds of every parameter: the master weights and the moments, as an
// update would see them.
func AddValues(all map[string][3][]float32, pieces []shard.Piece, state *engine.Shard) {
	format, flat := state.Config().Format, [3][]float32{}
	for i := range flat {
		flat[i] = make([]float32, state.Config().Elements)
	}
	state.Each(func(at shard.Chunk, c kernel.Chunk) {
		for i := range c.Len() {
			flat[0][at.First+int64(i)] = c.MasterWeight(format, i)
			for m := range format.Algorithm.Moments() {
				flat[1+m][at.First+int64(i)] = c.Moment(m, i)
			}
		}
	})
	at := int64(0)
	for _, p := range pieces {
		own, ok := all[p.Name]
		if !ok {
			n, _ := p.Elements()
			own = [3][]float32{make([]float32, n), make([]float32, n), make([]float32, n)}
			all[p.Name] = own
		}
		for i := range own {
			copy(own[i][p.First:p.First+p.Count], flat[i][at:])
		}
		at += p.Count
	}
}
