//go:build linux

package checkpoint

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// newJob maps the shards of a job. They are closed with the test. A chunk of 0 is one of the usual size.
func newJob(f shardtest.Failer, format kernel.Format, chunk int, ranks [][]shard.Piece) []Shard {
	var job []Shard
	for rank, pieces := range ranks {
		job = append(job, newShard(f, rank, len(ranks), format, chunk, pieces))
	}
	return job
}

func newShard(f shardtest.Failer, rank, world int, format kernel.Format, chunk int, pieces []shard.Piece) Shard {
	state := shardtest.New(f, rank, format, chunk, shard.Sections(pieces))
	return Shard{Rank: rank, World: world, Part: "bf16", Format: format, Pieces: pieces, State: state}
}

// train gives all shards weights and makes real steps.
func train(f shardtest.Failer, job []Shard, seed uint64, steps int) {
	f.Helper()
	for _, s := range job {
		shardtest.Train(f, s.State, seed, steps)
	}
}

func bytesOfState(s Shard) map[ledger.Component][]byte { return shardtest.Bytes(s.State) }

// newShardOf is newShard for sections that are cut in another way.
func newShardOf(f shardtest.Failer, rank, world int, format kernel.Format, chunk int, pieces []shard.Piece,
	sections []shard.Section) Shard {
	state := shardtest.New(f, rank, format, chunk, sections)
	return Shard{Rank: rank, World: world, Part: "bf16", Format: format, Pieces: pieces, State: state}
}

func begin(f shardtest.Failer, s Shard, seed uint64) { shardtest.Begin(f, s.State, seed) }

func step(f shardtest.Failer, s Shard, seed uint64) {
	begin(f, s, seed)
	s.State.Wait()
}

// values are the fp32 numbers that a job holds of every parameter.
func values(job []Shard) map[string][3][]float32 {
	all := map[string][3][]float32{}
	for _, s := range job {
		shardtest.AddValues(all, s.Pieces, s.State)
	}
	return all
}

// save saves and commits all shards of a job.
func save(f shardtest.Failer, directory string, job []Shard, training string) string {
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
func load(f shardtest.Failer, path string, job []Shard) *Checkpoint {
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
			ranks := shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(f.Moments), 9000, 11700)
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
				shardtest.EqualState(t, bytesOfState(others[rank]), bytesOfState(job[rank]))
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
	ranks := shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(kernel.MomentsFP32))
	job := newJob(t, shardtest.SplitFormat, 0, ranks)
	train(t, job, 1, 1)
	directory := t.TempDir()
	save(t, directory, job, "{}")
	others := newJob(t, shardtest.SplitFormat, 0, ranks)
	load(t, directory, others)
	shardtest.EqualState(t, bytesOfState(others[0]), bytesOfState(job[0]))
}

// formats returns all formats that have kernels.
func formats() map[string]kernel.Format {
	all := map[string]kernel.Format{}
	for _, algorithm := range []kernel.Algorithm{kernel.Adam, kernel.Lion, kernel.Adagrad, kernel.SGD} {
		for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
			for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
				for _, parameter := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
					if f := shardtest.Format(algorithm, state, moments, parameter); f.Validate() == nil {
						all[fmt.Sprintf("%v/%v/%v/%v", algorithm, state, moments, parameter)] = f
					}
				}
			}
		}
	}
	return all
}
