//go:build linux

package view

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"plimsoll/internal/base/samples"
)

// growthPeriod is how often a recording is looked at for more.
const growthPeriod = 200 * time.Millisecond

// Replay passes the records of a recording to add, and waits for more until the recording has its end, or the context
// is done. Errors are those of [samples.Read].
func Replay(ctx context.Context, name string, file *os.File, add func(*samples.Record)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	_, err := samples.Read(name, &growing{ctx, file}, func(r *samples.Record) error {
		add(r)
		if r.End != nil {
			stop()
		}
		return nil
	})
	return err
}

// growing is a file that ends only when the context does.
type growing struct {
	ctx  context.Context
	file *os.File
}

// Read waits for the file to grow.
func (g *growing) Read(buffer []byte) (int, error) {
	for {
		n, err := g.file.Read(buffer)
		if n > 0 || !errors.Is(err, io.EOF) || g.ctx.Err() != nil {
			return n, err
		}
		select {
		case <-g.ctx.Done():
		case <-time.After(growthPeriod):
		}
	}
}
