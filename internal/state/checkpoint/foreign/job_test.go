//go:build linux

package foreign

import (
	"context"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// newJob maps the shards of a job. They are closed with the test. A chunk of 0 is one of the usual size.
func newJob(f shardtest.Failer, format kernel.Format, chunk int, ranks [][]shard.Piece) []checkpoint.Shard {
	var job []checkpoint.Shard
	for rank, pieces := range ranks {
		job = append(job, newShard(f, rank, len(ranks), format, chunk, pieces))
	}
	return job
}

func newShard(f shardtest.Failer, rank, world int, format kernel.Format, chunk int,
	pieces []shard.Piece) checkpoint.Shard {
	state := shardtest.New(f, rank, format, chunk, shard.Sections(pieces))
	return checkpoint.Shard{Rank: rank, World: world, Part: "bf16", Format: format, Pieces: pieces, State: state}
}

// train gives all shards weights and makes real steps.
func train(f shardtest.Failer, job []checkpoint.Shard, seed uint64, steps int) {
	f.Helper()
	for _, s := range job {
		shardtest.Train(f, s.State, seed, steps)
	}
}

func bytesOfState(s checkpoint.Shard) map[ledger.Component][]byte { return shardtest.Bytes(s.State) }

// save saves and commits all shards of a job.
func save(f shardtest.Failer, directory string, job []checkpoint.Shard, training string) string {
	f.Helper()
	for _, s := range job {
		saving, err := checkpoint.Save(directory, s, jsontext.Value(training))
		if err != nil {
			f.Fatalf("%v", err)
		}
		if err := saving.Wait(); err != nil {
			f.Fatalf("%v", err)
		}
	}
	path, err := checkpoint.Commit(directory, job[0].State.Steps(), "")
	if err != nil {
		f.Fatalf("%v", err)
	}
	return path
}

// load fills all shards of a job.
func load(f shardtest.Failer, path string, job []checkpoint.Shard) *checkpoint.Checkpoint {
	f.Helper()
	c, err := checkpoint.Open(path)
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

// pieces returns the pieces of all ranks of a checkpoint, if each has an equal part.
func pieces(c *checkpoint.Checkpoint) [][]shard.Piece {
	var elements int64
	for _, p := range c.Pieces() {
		elements += p.Count
	}
	var ranks [][]shard.Piece
	for rank := range c.World() {
		ranks = append(ranks, shard.Cut(c.Pieces(), shard.Range{Count: elements}.Share(rank, c.World())))
	}
	return ranks
}
