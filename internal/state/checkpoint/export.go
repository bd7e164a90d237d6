package checkpoint

import (
	"context"
	"io"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Pieces returns the parameters, each of them whole, in the order in which shards have them.
func (c *Checkpoint) Pieces() []shard.Piece {
	var all []shard.Piece
	for _, name := range c.names {
		all = append(all, c.parameters[name].Piece)
	}
	return all
}

// Names returns the names of the parameters, in the same order.
func (c *Checkpoint) Names() []string { return slices.Clone(c.names) }

// Piece returns the parameter that has a name.
func (c *Checkpoint) Piece(name string) (shard.Piece, bool) {
	p := c.parameters[name]
	if p == nil {
		return shard.Piece{}, false
	}
	return p.Piece, true
}

// ExportFormat returns the format that parameters are exported in: everything in fp32.
func (c *Checkpoint) ExportFormat() kernel.Format {
	return kernel.Format{Algorithm: c.Algorithm(), State: kernel.FP32, Parameter: dtype.F32, Gradient: dtype.F32}
}

// Export writes a stream of a range of a parameter in fp32.
func (c *Checkpoint) Export(
	ctx context.Context, p shard.Piece, role kernel.Role, w io.Writer, progress func(bytes int64),
) error {
	p.Moments = kernel.MomentsFP32
	l, err := layoutOfPieces(c.ExportFormat(), []shard.Piece{p})
	if err != nil {
		return err
	}
	loader, err := c.newLoader(l, 0)
	if err != nil {
		return err
	}
	return loader.each(ctx, 1, []kernel.Role{role}, func(_ shard.Chunk, chunk kernel.Chunk) error {
		n, err := w.Write(chunk.Bytes(role))
		if progress != nil {
			progress(int64(n))
		}
		return err
	})
}
