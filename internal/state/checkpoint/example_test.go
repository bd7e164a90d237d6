//go:build linux

package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// TestExampleIsRead: the checkpoint in the repository was written once. Every later
// version has to read it. Its moments keep their bits where sections are cut as they
// were then: adjacent pieces that are alike made one.
func TestExampleIsRead(t *testing.T) {
	directory := filepath.Join("../../..", "examples", "checkpoints")
	f := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16)
	model := []shardtest.Tensor{
		{"model.embed_tokens.weight", []int64{96, 16}, 0},
		{"model.layers.0.mlp.weight", []int64{16, 40}, 0},
		{"model.norm.weight", []int64{16}, 1},
	}
	cuts := shardtest.CutModel(model, shardtest.Mixed(f.Moments), 1200)
	if *goldentest.Update {
		job := newJob(t, f, 512, cuts)
		train(t, job, 300, 3)
		if err := os.RemoveAll(directory); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(directory, 0o755); err != nil {
			t.Fatal(err)
		}
		save(t, directory, job, `{"epoch":1}`)
	}
	var others []Shard
	for rank, pieces := range cuts {
		others = append(others, newShardOf(t, rank, len(cuts), f, 512, pieces, joined(shard.Sections(pieces))))
	}
	c := load(t, directory, others)
	if err := c.Verify(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if got := fingerprint(others); got != exampleFingerprint {
		t.Errorf("the state is %s, expected %s", got, exampleFingerprint)
	}
}

// exampleFingerprint is the fingerprint of the state when the example was written.
const exampleFingerprint = "a3cb25312c1b78edf089f7d10c0c17dc9f1c75094ebd7a99eee28bc4c9dbd842"

// joined joins adjacent sections that are alike.
func joined(sections []shard.Section) (joined []shard.Section) {
	for _, s := range sections {
		last := len(joined) - 1
		if last >= 0 && joined[last].Group == s.Group && joined[last].Moments == s.Moments {
			joined[last].Elements += s.Elements
		} else {
			joined = append(joined, s)
		}
	}
	return joined
}
