//go:build linux

package powerloss

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/foreign"
)

// exports write a checkpoint for other programs, or in another form.
var exports = map[string]func(ctx context.Context, c *checkpoint.Checkpoint, folder string) error{
	"torch": func(ctx context.Context, c *checkpoint.Checkpoint, folder string) error {
		return foreign.WriteTorch(ctx, c, filepath.Join(folder, "optimizer.pt"), nil)
	},
	"torch.distributed.checkpoint": func(ctx context.Context, c *checkpoint.Checkpoint, folder string) error {
		return foreign.WriteDistributed(ctx, c, filepath.Join(folder, "dcp"), nil)
	},
	"DeepSpeed": func(ctx context.Context, c *checkpoint.Checkpoint, folder string) error {
		return foreign.WriteUniversal(ctx, c, folder, nil)
	},
	"another number of ranks": func(ctx context.Context, c *checkpoint.Checkpoint, folder string) error {
		_, err := c.Convert(ctx, folder, checkpoint.Conversion{Ranks: 3}, nil)
		return err
	},
}

// TestExports: after a loss of power what was written has its name and all of its bytes, or no name. Once it was
// written, it is there.
func TestExports(t *testing.T) {
	from := t.TempDir()
	trained(t, 1, 2).save(t, from)
	commit(t, from, 2)
	c, err := checkpoint.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	for name, write := range exports {
		t.Run(name, func(t *testing.T) {
			disk := &recorder{}
			folder := disk.mount(t)
			if err := write(t.Context(), c, folder); err != nil {
				t.Fatal(err)
			}
			whole := map[string]string{}
			for _, name := range entries(t, folder) {
				whole[name] = digestOf(t, filepath.Join(folder, name))
			}
			eachLoss(t, disk.log, 0, often(), func(t *testing.T, left string, operations int) {
				there := 0
				for _, name := range entries(t, left) {
					if strings.HasPrefix(name, ".") {
						continue
					}
					there++
					if got := digestOf(t, filepath.Join(left, name)); got != whole[name] {
						t.Errorf("%s has other bytes", name)
					}
				}
				if operations == len(disk.log) && there != len(whole) {
					t.Errorf("%d of %d names are there", there, len(whole))
				}
			})
		})
	}
}
