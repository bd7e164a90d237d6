package checkpoint

import (
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// TestMemoryStaysSmall: every operation on a checkpoint of 96 MiB takes a few buffers of a
// chunk each.
func TestMemoryStaysSmall(t *testing.T) {
	model := []tensorOf{{"mlp.weight", []int64{8 << 10, 1 << 10}, 0}}
	job := newJob(t, splitFormat, 0, cutModel(model, alike(kernel.MomentsFP32)))
	train(t, job, 1, 0)
	directory := t.TempDir()
	var c *Checkpoint
	bf16, folder := kernel.MomentsBF16, filepath.Join(t.TempDir(), "dcp")
	for _, test := range []struct {
		name string
		do   func() error
	}{
		{"save", func() error {
			saving, err := Save(directory, job[0], nil)
			if err == nil {
				err = saving.Wait()
			}
			if err == nil {
				_, err = Commit(directory, 0, "")
			}
			return err
		}},
		{"open", func() (err error) {
			c, err = Open(directory)
			return err
		}},
		{"verify", func() error {
			var told atomic.Int64
			err := c.Verify(t.Context(), func(bytes int64) { told.Add(bytes) })
			if told.Load() != c.Bytes() || c.Bytes() != 12<<23 {
				t.Errorf("progress was told of %d bytes of %d", told.Load(), c.Bytes())
			}
			return err
		}},
		{"load", func() error {
			_, _, err := c.Load(t.Context(), job[0])
			return err
		}},
		{"convert", func() error {
			_, err := c.Convert(t.Context(), t.TempDir(), Conversion{Moments: &bf16}, nil)
			return err
		}},
		{"write for others", func() error { return c.WriteDistributed(t.Context(), folder, nil) }},
		{"open that", func() (err error) {
			c, err = OpenDistributed(t.Context(), folder, nil)
			return err
		}},
		{"convert that", func() error {
			_, err := c.Convert(t.Context(), t.TempDir(), Conversion{}, nil)
			return err
		}},
		{"export", func() error { return c.WriteTorch(t.Context(), t.TempDir()+"/optimizer.pt", nil) }},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := test.do(); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		runtime.ReadMemStats(&after)
		// All memory that was ever allocated, freed or not.
		if took := ledger.Bytes(after.TotalAlloc - before.TotalAlloc); took > 6*ledger.MiB {
			t.Errorf("%s took %v", test.name, took)
		} else {
			t.Logf("%s took %v", test.name, took)
		}
	}
}
