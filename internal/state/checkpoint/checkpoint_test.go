//go:build linux

package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/go-json-experiment/json/jsontext"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// tensorOf is a parameter of a model that tests make up.
type tensorOf struct {
	name  string
	shape []int64
	group int
}

func (p tensorOf) elements() int64 {
	n, err := shard.Piece{Shape: p.shape}.Elements()
	if err != nil {
		panic(err)
	}
	return n
}

var smallModel = []tensorOf{
	{"model.embed_tokens.weight", []int64{300, 32}, 0},
	{"model.layers.0.q_proj.weight", []int64{64, 32}, 0},
	{"model.layers.0.q_proj.bias", []int64{64}, 1},
	{"model.norm.weight", []int64{33}, 1},
	{"scale", []int64{}, 1},
	{"lm_head.weight", []int64{32, 123}, 0},
}

// cutModel gives each rank its range of the concatenated parameters, from one cut to the
// next.
func cutModel(model []tensorOf, moments func(tensorOf) kernel.MomentType, cuts ...int64) [][]shard.Piece {
	ranks := make([][]shard.Piece, len(cuts)+1)
	at := int64(0)
	for _, p := range model {
		end := at + p.elements()
		for rank := range ranks {
			from, to := at, end
			if rank > 0 {
				from = max(from, cuts[rank-1])
			}
			if rank < len(cuts) {
				to = min(to, cuts[rank])
			}
			if from < to {
				ranks[rank] = append(ranks[rank], shard.Piece{Name: p.name, Shape: p.shape, Group: p.group,
					Moments: moments(p), Range: shard.Between(from-at, to-at)})
			}
		}
		at = end
	}
	return ranks
}

func alike(m kernel.MomentType) func(tensorOf) kernel.MomentType {
	return func(tensorOf) kernel.MomentType { return m }
}

// mixed holds the moments of small parameters in fp32.
func mixed(m kernel.MomentType) func(tensorOf) kernel.MomentType {
	return func(p tensorOf) kernel.MomentType {
		if p.elements() < 100 {
			return kernel.MomentsFP32
		}
		return m
	}
}

func format(algorithm kernel.Algorithm, state kernel.State, moments kernel.MomentType,
	parameter dtype.Type) kernel.Format {
	return kernel.Format{Algorithm: algorithm, State: state, Moments: moments, Parameter: parameter,
		Gradient: dtype.F32}
}

var splitFormat = format(kernel.Adam, kernel.Split, kernel.MomentsFP32, dtype.BF16)

func cpu(t failer) int {
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

// failer is the interface that tests and checks of rapid share.
type failer interface {
	Helper()
	Fatalf(format string, arguments ...any)
	Cleanup(func())
}

// newShard maps a shard, which is closed with the test. A chunk of 0 is one of the usual size.
func newShard(f failer, rank, world int, format kernel.Format, chunk int, pieces []shard.Piece) Shard {
	return newShardOf(f, rank, world, format, chunk, pieces, shard.Sections(pieces))
}

// newShardOf is newShard for sections that are cut in another way.
func newShardOf(f failer, rank, world int, format kernel.Format, chunk int, pieces []shard.Piece,
	sections []shard.Section) Shard {
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
	return Shard{Rank: rank, World: world, Part: "bf16", Format: format, Pieces: pieces, State: state}
}

func newJob(f failer, format kernel.Format, chunk int, ranks [][]shard.Piece) []Shard {
	var job []Shard
	for rank, pieces := range ranks {
		job = append(job, newShard(f, rank, len(ranks), format, chunk, pieces))
	}
	return job
}

// train gives the shards weights and makes real steps, so that all state is the work of an
// optimizer.
func train(f failer, job []Shard, seed uint64, steps int) {
	f.Helper()
	for _, s := range job {
		s.State.Each(func(at shard.Chunk, c kernel.Chunk) {
			random := rand.New(rand.NewPCG(seed, uint64(s.Rank)<<40+uint64(at.First)))
			for i := range c.Len() {
				w := float32(random.NormFloat64())
				if s.Format.State == kernel.FP32 {
					c.Master[i] = w
				} else {
					c.PutMasterWeight(s.Format, i, w)
				}
			}
		})
		for range steps {
			step(f, s, seed)
		}
	}
}

func optimizerOf(a kernel.Algorithm) optim.Optimizer {
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

// begin starts a step with gradients that are a function of seed and step.
func begin(f failer, s Shard, seed uint64) {
	f.Helper()
	number := s.State.Steps() + 1
	s.State.Each(func(at shard.Chunk, c kernel.Chunk) {
		random := rand.New(rand.NewPCG(seed+uint64(number), uint64(s.Rank)<<40+uint64(at.First)))
		for i := range c.Len() {
			c.Gradient.Put(i, float32(random.NormFloat64()*math.Exp2(-8*random.Float64())))
		}
	})
	groups := 1
	for _, p := range s.Pieces {
		groups = max(groups, p.Group+1)
	}
	if err := s.State.Begin(number, 1,
		slices.Repeat([]optim.Optimizer{optimizerOf(s.Format.Algorithm)}, groups)); err != nil {
		f.Fatalf("step %d: %v", number, err)
	}
}

func step(f failer, s Shard, seed uint64) {
	begin(f, s, seed)
	s.State.Wait()
}

// bytesOfState returns the arenas of a shard that are its state.
func bytesOfState(s Shard) map[ledger.Component][]byte {
	state := map[ledger.Component][]byte{}
	for _, plan := range s.State.Config().Arenas() {
		if plan.Component != ledger.Gradients && plan.Component != ledger.GradientNormSums &&
			plan.Component != ledger.StepJournal {
			state[plan.Component] = bytes.Clone(s.State.Arena(plan.Component).Bytes())
		}
	}
	return state
}

// equalState compares to the bit.
func equalState(f failer, got, want map[ledger.Component][]byte) {
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

// save saves and commits all shards of a job.
func save(f failer, directory string, job []Shard, training string) string {
	f.Helper()
	for _, s := range job {
		saving, err := Save(directory, s, jsontext.Value(training))
		if err != nil {
			f.Fatalf("%v", err)
		}
		if err := saving.Wait(); err != nil {
			f.Fatalf("%v", err)
		}
	}
	path, err := Commit(directory, job[0].State.Steps(), "")
	if err != nil {
		f.Fatalf("%v", err)
	}
	return path
}

// load fills all shards of a job.
func load(f failer, path string, job []Shard) *Checkpoint {
	f.Helper()
	c, err := Open(path)
	if err != nil {
		f.Fatalf("%v", err)
	}
	for _, s := range job {
		step, _, err := c.Load(context.Background(), s)
		if err != nil {
			f.Fatalf("%v", err)
		}
		if step != s.State.Steps() || step != c.Step() {
			f.Fatalf("step %d was loaded, and the state is at %d", step, s.State.Steps())
		}
	}
	return c
}

func TestSaveAndLoad(t *testing.T) {
	for name, f := range formats() {
		t.Run(name, func(t *testing.T) {
			ranks := cutModel(smallModel, mixed(f.Moments), 9000, 11700)
			job := newJob(t, f, 700, ranks)
			train(t, job, 1, 3)
			directory := t.TempDir()
			path := save(t, directory, job, `{"epoch": 3}`)
			if want := filepath.Join(directory, "step-00000003"); path != want {
				t.Errorf("the checkpoint is %s, want %s", path, want)
			}
			others := newJob(t, f, 700, ranks)
			c := load(t, directory, others)
			for rank := range job {
				equalState(t, bytesOfState(others[rank]), bytesOfState(job[rank]))
			}
			if err := c.Verify(t.Context(), nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSaveWithoutChunks saves a shard whose configuration leaves the chunk size to the
// engine.
func TestSaveWithoutChunks(t *testing.T) {
	ranks := cutModel(smallModel, mixed(kernel.MomentsFP32))
	job := newJob(t, splitFormat, 0, ranks)
	train(t, job, 1, 1)
	directory := t.TempDir()
	save(t, directory, job, "{}")
	others := newJob(t, splitFormat, 0, ranks)
	load(t, directory, others)
	equalState(t, bytesOfState(others[0]), bytesOfState(job[0]))
}

// formats returns all formats that have kernels.
func formats() map[string]kernel.Format {
	all := map[string]kernel.Format{}
	for _, algorithm := range []kernel.Algorithm{kernel.Adam, kernel.Lion, kernel.Adagrad, kernel.SGD} {
		for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
			for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
				for _, parameter := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
					if f := format(algorithm, state, moments, parameter); f.Validate() == nil {
						all[fmt.Sprintf("%v/%v/%v/%v", algorithm, state, moments, parameter)] = f
					}
				}
			}
		}
	}
	return all
}
