//go:build linux

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// replicate returns copies of a trained job: the ranks of its replicas, one after the
// other.
func replicate(t *testing.T, f kernel.Format, cuts [][]shard.Piece, replicas int) []Shard {
	var ranks []Shard
	for replica := range replicas {
		job := newJob(t, f, 700, cuts)
		train(t, job, 1, 3)
		for _, s := range job {
			s.Rank, s.World = replica*len(job)+s.Rank, replicas*len(job)
			s.Replica, s.Replicas = replica, replicas
			ranks = append(ranks, s)
		}
	}
	return ranks
}

// saveDuringSteps saves all shards, and makes a step of each shard while it is written.
func saveDuringSteps(t *testing.T, directory string, job []Shard) string {
	var savings []*Saving
	for _, s := range job {
		saving, err := Save(directory, s, jsontext.Value(fmt.Sprintf(`{"rank": %d}`, s.Rank)))
		if err != nil {
			t.Fatal(err)
		}
		savings = append(savings, saving)
	}
	for i, s := range job {
		step(t, s, 1)
		if err := savings[i].Wait(); err != nil {
			t.Fatal(err)
		}
	}
	path, err := Commit(directory, savings[0].Step(), "")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestReplicasSaveOnce: one of the ranks that hold an element saves it, even if there are
// more replicas than chunks. Every rank keeps its document.
func TestReplicasSaveOnce(t *testing.T) {
	for name, f := range map[string]kernel.Format{
		"split": shardtest.SplitFormat,
		"fp32":  shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsBF16, dtype.F16),
		"int8":  shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16),
	} {
		t.Run(name, func(t *testing.T) {
			cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(f.Moments), 15000)
			for _, replicas := range []int{2, 15} {
				job := replicate(t, f, cuts, replicas)
				var want []map[ledger.Component][]byte
				for _, s := range job[:len(cuts)] {
					want = append(want, bytesOfState(s))
				}
				path := saveDuringSteps(t, t.TempDir(), job)
				others := newJob(t, f, 700, cuts)
				c := load(t, path, others)
				for rank := range others {
					shardtest.EqualState(t, bytesOfState(others[rank]), want[rank])
				}
				if err := c.Verify(t.Context(), nil); err != nil {
					t.Error(err)
				}
				elements, writers := int64(0), 0
				for _, file := range c.Files() {
					elements += file.Parameters
					if file.Parameters > 0 {
						writers++
					}
				}
				if total := elementsOf(cuts); elements != total || c.World() != 2*replicas || writers <= len(cuts) {
					t.Errorf("%d elements in files of %d of %d ranks, want %d", elements, writers, c.World(), total)
				}
				if _, err := c.Convert(t.Context(), t.TempDir(), Conversion{}, nil); err != nil {
					t.Error(err)
				}
				last := newShard(t, len(job)-1, len(job), f, 700, job[len(job)-1].Pieces)
				if _, document, err := c.LoadNew(t.Context(), last); err != nil ||
					string(document) != fmt.Sprintf(`{"rank":%d}`, last.Rank) {
					t.Errorf("rank %d has the document %s (%v)", last.Rank, document, err)
				}
				shardtest.EqualState(t, bytesOfState(last), want[1])
			}
		})
	}
}

func elementsOf(ranks [][]shard.Piece) int64 {
	total := int64(0)
	for _, p := range slices.Concat(ranks...) {
		total += p.Count
	}
	return total
}

// TestReplicasAreNeededAll: without the share of a replica there is no checkpoint.
func TestReplicasAreNeededAll(t *testing.T) {
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(kernel.MomentsFP32), 9000)
	for name, c := range map[string]struct {
		spoil func(job []Shard) []Shard
		want  string
	}{
		"a rank is missing": {func(job []Shard) []Shard { return job[:3] },
			"the files of rank 3 of 4 are missing"},
		"two save the same": {func(job []Shard) []Shard { job[3].Replica = 0; return job },
			"part bf16: 2 ranks hold the same shard, but only the shares of 1 of them are here"},
		"another number is said": {func(job []Shard) []Shard { job[1].Replicas = 3; return job },
			"ranks hold the same shard, but only the shares of 1 of them are here"},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			for _, s := range c.spoil(replicate(t, shardtest.SplitFormat, cuts, 2)) {
				saving, err := Save(directory, s, nil)
				if err != nil {
					t.Fatal(err)
				}
				if err := saving.Wait(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Commit(directory, 3, ""); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if found, _ := filepath.Glob(filepath.Join(directory, "step-*")); len(found) > 0 {
				t.Errorf("%v is there", found)
			}
		})
	}
}

func TestReplicaThatThereIsNot(t *testing.T) {
	job := replicate(t, shardtest.SplitFormat,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(kernel.MomentsFP32)), 1)
	for _, replica := range []int{-1, 1} {
		job[0].Replica = replica
		directory := t.TempDir()
		_, err := Save(directory, job[0], nil)
		if want := fmt.Sprintf("replica %d of 1, expected 0 to 0", replica); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if left, _ := os.ReadDir(directory); len(left) > 0 {
			t.Errorf("%v is left", left)
		}
	}
}
